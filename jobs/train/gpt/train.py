"""Train a GPT on text, on one rank or thousands, divided by the strategy of your choice.

    clusterkit submit jobs/ddp.yaml                                       # what you want
    python jobs/train/gpt/train.py --steps 20                             # one rank, no launcher
    torchrun --nproc-per-node 2 jobs/train/gpt/train.py --model small     # or any launcher
    torchrun --nproc-per-node 8 jobs/train/gpt/train.py --strategy 3d --mesh pp=2,dp=2,tp=2

The same seed and the same global batch give the same losses on any number of ranks and with any
strategy. This folder needs torch alone (deepspeed, transformers for those who ask for them): copy
it and make it yours. The model is in model.py, how it is cut in parallelize.py.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import data
import settings
import torch
from checkpoint import Checkpoints
from checkpoint_files import Checkpoint
from model import GPT, PRESETS
from ranks import BadInput, choose_device, read_ranks
from report import Reporter, report
from settings import count, positive
from strategy import Strategy, decayed_groups, recompute
from world import EXIT_STOPPED, World, distributed, run, stop_requested


def main() -> int:
    args = parse_args()
    ranks = read_ranks()
    reporter = Reporter(speaks=ranks.is_first)
    # Whatever can be wrong with the input, each rank finds alone, before they meet.
    device = choose_device(ranks)
    facts, make_model, text = choose_model(args)
    mesh = settings.choose_mesh(args, ranks, facts)
    batch = settings.choose_batch(args, mesh)
    recipe = settings.choose_strategy(args, batch, device, mesh)
    checkpoints = settings.choose_checkpoints(args, facts)
    checkpoint = checkpoints.find(ranks, strategy=recipe.name, converts=recipe.converts)

    reporter.phase("rendezvous")
    with distributed(ranks, device) as world:
        reporter.phase("build")
        data.check_same(text, world)
        torch.manual_seed(args.seed)  # every rank builds the same weights
        with recipe.building(world):
            model = make_model()
        if args.activation_checkpointing:
            recompute(model)
        groups = decayed_groups(model, args.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))
        strategy = recipe.build(model, optimizer, world)
        batches = data.Batches(text, args.seed, batch, world, strategy.replica)
        if checkpoint is not None:
            checkpoints.load(checkpoint, strategy, world)
        reporter.event(
            "start",
            steps=args.steps,
            first_step=checkpoint.step if checkpoint else 0,
            tokens_per_step=batches.tokens_per_step,
            parameters=strategy.parameters,
            device=device.type,
            dtype=recipe.dtype,
            world_size=world.size,
            strategy=recipe.name,
            **strategy.describe(),
        )
        pace = Pace(args.steps, args.log_every, args.eval_every, partial(scheduled, args=args))
        return train(pace, world, reporter, strategy, batches, checkpoints, checkpoint)


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
    batches: data.Batches,
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
    if stop == 0:
        reporter.event("end", steps=pace.steps, **notes)
        reporter.phase(None)
    return EXIT_STOPPED if stop > 0 else 0


def scheduled(step: int, args: argparse.Namespace) -> float:
    """The learning rate of a step: linear warm-up, then half a cosine down to a tenth."""
    peak, warmup, steps = float(args.learning_rate), int(args.warmup), int(args.steps)
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / (steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * done))


def choose_model(args: argparse.Namespace) -> tuple[Any, ...]:
    """What describes the model, what builds it, and the text in its tokens."""
    text = data.read_text(args.data)
    if args.model in PRESETS:
        shape = PRESETS[args.model]
        shape = replace(shape, context=args.context or shape.context)
        facts, context = {"name": args.model, **asdict(shape)}, shape.context
        make_model, tokens = partial(GPT, shape), data.as_tokens(text)
    else:
        import hugging_face

        if not hugging_face.looks_like_a_name(args.model):
            raise BadInput(
                f"--model {args.model}: no such model",
                f"one of {', '.join(PRESETS)}, or the name or folder of a Hugging Face model",
            )
        facts, make_model, tokens = hugging_face.choose(args.model, text, args.pretrained)
        context = args.context or 256
    return facts, make_model, data.split(tokens, context, args.data or "the standard library")


def parse_args() -> argparse.Namespace:
    parser = settings.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="tiny", help=f"{', '.join(PRESETS)}, or a Hugging Face name or folder")
    add("--pretrained", action="store_true", help="start from the Hugging Face model's weights")
    add("--data", metavar="PATH", help="file or folder (default: Python's standard library)")
    add("--context", type=positive, help="tokens in a sample (default: the model's own)")
    add("--steps", type=positive, default=200, help="how long to train (default: 200)")
    add("--learning-rate", type=float, default=1e-3, metavar="RATE", help="at its peak")
    add("--warmup", type=count, default=20, metavar="STEPS", help="until the peak (default: 20)")
    add("--weight-decay", type=float, default=0.1, help="of matrices alone (default: 0.1)")
    add("--seed", type=int, default=0, help="of weights and samples (default: 0)")
    add("--log-every", type=positive, default=1, metavar="STEPS", help="metrics (default: 1)")
    add("--eval-every", type=count, default=0, metavar="STEPS", help="0: never")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
