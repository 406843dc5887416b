"""The training loop, the same for every strategy: steps, metrics, evaluation, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clusterkit.runtime.checkpoint import Checkpoint, Checkpoints
from clusterkit.runtime.data import Batches
from clusterkit.runtime.distributed import EXIT_STOPPED, World, stop_requested
from clusterkit.runtime.metrics import Reporter, report
from clusterkit.runtime.strategy import Strategy


@dataclass(frozen=True)
class Pace:
    """How long to train and how often to do what."""

    steps: int  # the last one
    log_every: int  # steps between two reports
    eval_every: int  # steps between two evaluations; 0 for none
    learning_rate: Callable[[int], float]  # of a step, counted from 1


def train(
    pace: Pace,
    world: World,
    reporter: Reporter,
    strategy: Strategy,
    batches: Batches,
    checkpoints: Checkpoints,
    resumed: Checkpoint | None,
) -> int:
    """Train to the last step, or until the ranks are asked to stop. Returns the exit code."""
    first = resumed.step + 1 if resumed else 1
    notes: dict[str, Any] = dict(resumed.notes) if resumed else {}
    stop = 0.0
    reporter.phase("first_step")
    for step in range(first, pace.steps + 1):
        started = time.perf_counter()
        learning_rate = pace.learning_rate(step)
        rank_loss, gradient_norm = strategy.step(batches.of_step(step), learning_rate)
        # One collective tells the loss, whether anyone must stop, and whether all have written.
        loss, stop, written = world.mean(rank_loss, stop_requested(), checkpoints.written())
        seconds = time.perf_counter() - started
        own_rate = strategy.own_rate()
        if written == 1.0:
            checkpoints.finish(world)
        if step == first:
            held = strategy.optimizer_parameters()
            report("optimizer", rank=world.rank, parameters=held, total=strategy.parameters)
            reporter.phase("training")

        notes = {"loss": loss, "first_loss": notes.get("first_loss", loss)}
        last = step == pace.steps or stop > 0
        evaluated = {}
        if pace.eval_every and (last or step % pace.eval_every == 0):
            (evaluated["eval_loss"],) = world.mean(strategy.evaluate(batches.held_out()))
        if last or evaluated or step == first or step % pace.log_every == 0:
            reporter.event(
                "metrics",
                step=step,
                loss=loss,
                tokens_per_second=batches.tokens_per_step / seconds,
                step_seconds=seconds,
                learning_rate=learning_rate if own_rate is None else own_rate,
                gradient_norm=gradient_norm,
                **evaluated,
            )
        if checkpoints.due(step, last=last):
            checkpoints.save(step, strategy, world, notes)
        if stop > 0:
            break

    reporter.phase("ending")
    checkpoints.finish(world)
    strategy.finish()
    world.barrier()
    if stop > 0:
        return EXIT_STOPPED
    reporter.event("end", steps=pace.steps, **notes)
    reporter.phase(None)
    return 0
