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
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import choices
import gpt_data
import settings
import speed
import torch
from build import build, mean
from checkpoint import Checkpoints
from model import PRESETS
from parameters import clip_gradients, optimizer_parameters, send_gradients
from ranks import Explained, choose_device, read_ranks
from report import Reporter, report
from settings import count, positive
from world import EXIT_STOPPED, distributed, run
from world import stop_requested as asked_to_stop


def main() -> int:
    args = parse_args()
    return train(args, choices.choose_model, partial(scheduled, args=args))


def train(
    args: argparse.Namespace,
    choose_model: Callable[..., Any],
    rate_of: Callable[[int], float],
    describe: Callable[..., str] | None = None,
) -> int:
    """Train to the last step, or until the ranks are asked to stop. Returns the exit code."""
    ranks = read_ranks()
    reporter = Reporter(speaks=ranks.is_first)
    # Whatever can be wrong with the input, each rank finds alone, before they meet.
    device = choose_device(ranks)
    facts, make_model, text = choose_model(args)
    mesh = choices.choose_mesh(args, ranks, facts)
    batch = choices.choose_batch(args, mesh)
    chosen = choices.choose_strategy(args, batch, device, mesh)
    checkpoints = Checkpoints(
        args.checkpoint_dir, facts, chosen.name, chosen.any_world_size, chosen.converts,
        args.checkpoint_every, args.checkpoint_keep, args.checkpoint_resume,
    )  # fmt: skip
    resumed = checkpoints.find(ranks)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, where float32 is multiplied at all

    reporter.phase("rendezvous")
    profiler = speed.profiler(args.profile, ranks.rank)
    with distributed(ranks, device) as world, profiler as trace:
        reporter.phase("build")
        gpt_data.check_same(text, world)
        batches = gpt_data.Batches(
            text, args.seed, batch, device, mesh.replica(world.rank),
            args.sampling, args.document_mask,
        )  # fmt: skip
        training = build(make_model, args, chosen, batch, mesh, world)
        if resumed is not None:
            checkpoints.load(resumed, training.load, world)
            warning = batches.resume(resumed.step, resumed.data)
            if warning and world.is_first:
                print(f"warning: resuming with {warning}", file=sys.stderr)
        meter = speed.Meter(facts, training.total, text.context, chosen.dtype, world)
        first = resumed.step + 1 if resumed else 1
        if describe is not None:
            print(describe(world.rank, chosen.name, training.model, training.total), flush=True)
        reporter.event(
            "start", steps=args.steps, first_step=first - 1,
            tokens_per_step=batches.tokens_per_step, parameters=training.total,
            device=device.type, dtype=chosen.dtype, world_size=world.size, strategy=chosen.name,
            **mesh.facts(args.strategy, args.schedule, batch.accumulation),
        )  # fmt: skip

        def report_step(
            step: int, rate: float, seconds: float, read_numbers: Any, **more: float
        ) -> float:
            """Report a step's numbers once they are there; returns whether anybody must stop."""
            loss, norm, stop, written = read_numbers()
            if written == 1.0:
                checkpoints.finish(world)
            notes.update(loss=loss, first_loss=notes.get("first_loss", loss))
            if more or stop or step in (first, args.steps) or step % args.log_every == 0:
                pace = batches.tokens_per_step / seconds
                reporter.event(
                    "metrics", step=step, loss=loss, tokens_per_second=pace, step_seconds=seconds,
                    learning_rate=rate, gradient_norm=norm, **meter.measured(pace), **more,
                )  # fmt: skip
            if args.stop_at_nan and not math.isfinite(loss):
                hint = "lower --learning-rate, or resume from a checkpoint before that step"
                raise Explained(f"the loss is {loss} at step {step}", hint)
            return stop

        notes: dict[str, Any] = dict(resumed.notes) if resumed else {}
        stop, unreported = 0.0, None  # the step whose numbers are still on their way
        reporter.phase("first_step")
        for step in range(first, args.steps + 1):
            started = time.perf_counter()
            micro_batches, rate = batches.of_step(step), rate_of(step)
            if training.engine is not None:
                loss, norm, rate = training.engine.step(micro_batches, rate)
            else:
                if training.pipe is not None:
                    with training.computing():
                        loss = training.pipe.backward(micro_batches, training.parameters)
                else:
                    losses = []
                    for number, micro_batch in enumerate(micro_batches, 1):
                        # The gradients travel once per step, with the last micro batch.
                        send_gradients(training.module, number == len(micro_batches))
                        with training.computing():
                            loss = training.module(*micro_batch)
                        training.scaler.scale(loss / len(micro_batches)).backward()
                        losses.append(loss.detach())
                    loss = mean(losses)
                training.scaler.unscale_(training.optimizer)
                norm = clip_gradients(training.parameters, chosen.clip, mesh)
                for param_group in training.optimizer.param_groups:
                    param_group["lr"] = rate
                training.scaler.step(training.optimizer)
                training.scaler.update()
                training.optimizer.zero_grad()
            # One collective tells the loss, whether anyone must stop, and whether all have
            # written. Its numbers are read one step later: the GPUs have their next step by then.
            norm = math.nan if norm is None else norm
            read_numbers = world.mean_later(loss, norm, asked_to_stop(), checkpoints.written())
            if trace is not None:
                trace.step()
            if unreported is not None:
                stop, unreported = report_step(*unreported), None
            last = step == args.steps or stop > 0
            evaluates = args.eval_every and (last or step % args.eval_every == 0)
            saves = checkpoints.due(step, last=last)
            if not (last or evaluates or saves or step == first):
                unreported = step, rate, time.perf_counter() - started, read_numbers
                continue
            read_numbers()  # now, because something else waits for this step
            seconds = time.perf_counter() - started
            if step == first:
                held = optimizer_parameters(training.optimizer)
                report("optimizer", rank=world.rank, parameters=held, total=training.total)
                reporter.phase("training")
            evaluated = {}
            if evaluates:
                evaluated["eval_loss"] = world.mean(training.evaluate(batches.held_out()))[0]
            stop = max(stop, report_step(step, rate, seconds, read_numbers, **evaluated))
            if saves:
                checkpoints.save(step, training.save, world, notes, batches.state(step))
            if last:
                break

        reporter.phase("ending")
        checkpoints.finish(world)
        if training.engine is not None:
            training.engine.finish()
        world.barrier()
        if stop == 0:
            reporter.event("end", steps=args.steps, **notes)
            reporter.phase(None)
        return EXIT_STOPPED if stop > 0 else 0


def scheduled(step: int, args: argparse.Namespace) -> float:
    """The learning rate of a step: linear warm-up, then half a cosine down to a tenth."""
    peak, warmup, steps = float(args.learning_rate), int(args.warmup), int(args.steps)
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / (steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * done))


def parse_args() -> argparse.Namespace:
    parser = settings.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="tiny", help=f"{', '.join(PRESETS)}, or a Hugging Face name or folder")
    add("--pretrained", action="store_true", help="start from the Hugging Face model's weights")
    add("--data", metavar="PATH", help=gpt_data.HELP)
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
