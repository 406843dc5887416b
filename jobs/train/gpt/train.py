"""Train a GPT on text, on one rank or thousands, divided by the strategy of your choice.

    clusterkit submit jobs/ddp.yaml                                       # what you want
    python jobs/train/gpt/train.py --steps 20                             # one rank, no launcher
    torchrun --nproc-per-node 2 jobs/train/gpt/train.py --model small     # or any launcher
    torchrun --nproc-per-node 8 jobs/train/gpt/train.py --strategy 3d --mesh pp=2,dp=2,tp=2

The same seed and the same global batch give the same losses on any number of ranks and with any
strategy. This folder needs torch alone (deepspeed, transformers for those who ask for them): copy
it and make it yours. The model is in gpt_model.py, how it is cut in gpt_parallelize.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import gpt_data
import gpt_settings
import torch
import torch.distributed as dist
from gpt_checkpoint import Checkpoints
from gpt_metrics import Meter, Progress, Reporter, profiler, report
from gpt_model import GPT, PRESETS
from gpt_optimizer import adamw, clip_gradients, optimizer_parameters, scheduled
from gpt_parallelize import (
    autocast,
    buffers,
    count_parameters,
    device_mesh,
    named_parameters,
    parallelize,
    reshard,
    send_gradients,
)
from gpt_ranks import EXIT_STOPPED, World, choose_device, distributed, read_ranks, run
from gpt_ranks import stop_requested as asked_to_stop
from gpt_settings import Batch, Chosen, Mesh, count, positive
from gpt_store import State, load_shards, save_shards
from torch import Tensor, nn


def parse_args() -> argparse.Namespace:
    parser = gpt_settings.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="tiny", help=f"{', '.join(PRESETS)}, or a Hugging Face name or folder")
    add("--pretrained", action="store_true", help="start from the Hugging Face model's weights")
    add("--data", metavar="PATH", help=gpt_data.HELP)
    add("--context", type=positive, help="tokens in a sample (default: the model's own)")
    add("--steps", type=positive, default=200, help="how long to train (default: 200)")
    add("--learning-rate", type=float, default=1e-3, metavar="RATE", help="at its peak")
    add("--warmup", type=count, default=20, metavar="STEPS", help="until the peak (default: 20)")
    add("--weight-decay", type=float, default=0.1, help="of matrices alone (default: 0.1)")
    text = "compute the loss of 512 tokens at a time: less memory, the output layer twice"
    add("--chunked-loss", action="store_true", help=text)
    add("--seed", type=int, default=0, help="of weights and samples (default: 0)")
    add("--log-every", type=positive, default=1, metavar="STEPS", help="metrics (default: 1)")
    add("--eval-every", type=count, default=0, metavar="STEPS", help="0: never")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    return train(args, gpt_settings.choose_model, partial(scheduled, args=args))


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
    mesh = gpt_settings.choose_mesh(args, ranks, facts)
    batch = gpt_settings.choose_batch(args, mesh)
    chosen = gpt_settings.choose_strategy(args, batch, device, mesh)
    checkpoints = Checkpoints(
        args.checkpoint_dir, facts, chosen.name, chosen.any_world_size, chosen.converts,
        args.checkpoint_every, args.checkpoint_keep, args.checkpoint_resume,
    )  # fmt: skip
    resumed = checkpoints.find(ranks)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, where float32 is multiplied at all

    reporter.phase("rendezvous")
    with distributed(ranks, device) as world:
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
        meter = Meter(facts, training.total, text.context, chosen.dtype, world)
        first = resumed.step + 1 if resumed else 1
        if describe is not None:
            print(describe(world.rank, chosen.name, training.model, training.total), flush=True)
        reporter.event(
            "start", steps=args.steps, first_step=first - 1,
            tokens_per_step=batches.tokens_per_step, parameters=training.total,
            device=device.type, dtype=chosen.dtype, world_size=world.size, strategy=chosen.name,
            **mesh.facts(args.strategy, args.schedule, batch.accumulation),
        )  # fmt: skip
        notes = resumed.notes if resumed else {}
        progress = Progress(reporter, meter, args, batches.tokens_per_step, first, notes)
        reporter.phase("first_step")
        loop(args, range(first, args.steps + 1), training, batches, rate_of, checkpoints, progress,
             world)  # fmt: skip
        reporter.phase("ending")
        checkpoints.finish(world)
        training.finish()
        world.barrier()
        if not progress.stop:
            reporter.event("end", steps=args.steps, **progress.notes)
            reporter.phase(None)
        return EXIT_STOPPED if progress.stop else 0


def loop(
    args: argparse.Namespace, steps: range, training: Any, batches: gpt_data.Batches,
    rate_of: Callable[[int], float], checkpoints: Checkpoints, progress: Progress, world: World,
) -> None:  # fmt: skip
    """All steps, until the last or until any rank was asked to stop."""
    with profiler(args.profile, world.rank) as trace:
        for step in steps:
            progress.begin(step)
            loss, norm, rate = training.step(batches.of_step(step), rate_of(step))
            # One collective tells the loss, whether anyone must stop, and whether all have
            # written. Its numbers are read one step later: the GPUs have their next step by then.
            numbers = world.mean_later(loss, norm, asked_to_stop(), checkpoints.written())
            trace.step()
            progress.report()  # the step before
            last = step == args.steps or progress.stop
            evaluates = args.eval_every and (last or step % args.eval_every == 0)
            saves = checkpoints.due(step, last=last)
            # Now, if something else waits for this step.
            now = last or evaluates or saves or step == steps[0]
            progress.end(rate, numbers, now=now)
            if step == steps[0]:
                held = optimizer_parameters(training.optimizer)
                report("optimizer", rank=world.rank, parameters=held, total=training.total)
                progress.reporter.phase("training")
            if evaluates:
                loss = training.evaluate(batches.held_out())
                progress.report(eval_loss=world.mean(loss)[0])
            elif now:
                progress.report()
            if progress.written:
                checkpoints.finish(world)
            if saves:
                checkpoints.save(step, training.save, world, progress.notes, batches.state(step))
            if last:
                break


def build(
    make_model: Callable[[], nn.Module],
    args: argparse.Namespace,
    chosen: Chosen,
    batch: Batch,
    mesh: Mesh,
    world: World,
) -> Any:
    """The model on its ranks and all that trains it: a Training, or DeepSpeed's Engine, which has
    the same methods. Collective."""
    torch.manual_seed(args.seed)  # every rank builds the same weights
    if chosen.config is None:
        return Training(make_model, args, chosen, batch, mesh, world)
    from gpt_deepspeed import Engine

    return Engine(make_model, args, chosen.config, mesh, world)


class Training:
    """What one rank holds of it, by torch's own tools."""

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        args: argparse.Namespace,
        chosen: Chosen,
        batch: Batch,
        mesh: Mesh,
        world: World,
    ) -> None:
        # Our GPT is cut before it has any memory: a rank never holds what it gives away. Others
        # draw their weights in ways of their own.
        ours = getattr(make_model, "func", None) is GPT
        with torch.device("meta") if ours else nullcontext():
            whole: Any = make_model()
        self.total = count_parameters(whole)  # of the whole model
        self.model = whole.stage(mesh.stage(world.rank), mesh.pp) if mesh.pp > 1 else whole
        grid = None if args.strategy == "ddp" else device_mesh(mesh, world.device)
        # What is called: the model, or what is around it.
        self.module = parallelize(self.model, args, mesh, grid, chosen.dtype, world.device, whole)
        self.parameters, self.optimizer = named_parameters(self.model), adamw(self.model, args)
        self._pipe = None
        if mesh.pp > 1:
            from gpt_pipeline import Pipeline

            self._pipe = Pipeline(self.model, args.schedule, batch.accumulation, mesh, grid, world)
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=chosen.dtype == "fp16")
        self._clip, self._mesh = chosen.clip, mesh
        self._computing = partial(autocast, args, mesh, world.device, chosen.dtype)
        # Collectives of a checkpoint that is written in the background need their own group.
        group = dist.new_group(backend="gloo") if args.checkpoint_async else None
        state = State(self.parameters, self.optimizer, buffers(self.model), self._scaler)
        self.save, self.load = partial(save_shards, state, group), partial(load_shards, state)

    def step(self, micro_batches: Sequence[Any], rate: float) -> tuple[Tensor, Tensor, float]:
        """Train on this rank's micro batches: its mean loss, the norm of the whole gradient, and
        the learning rate. Both numbers stay on the GPU, which reading them would wait for."""
        loss = self._backward(micro_batches)
        self._scaler.unscale_(self.optimizer)
        norm = clip_gradients(self.parameters, self._clip, self._mesh)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()
        return loss, norm, rate

    def _backward(self, micro_batches: Sequence[Any]) -> Tensor:
        """Gradients of the mean loss of all micro batches; returns it."""
        if self._pipe is not None:
            with self._computing():
                return self._pipe.backward(micro_batches, self.parameters)
        losses = []
        for number, micro_batch in enumerate(micro_batches, 1):
            # The gradients travel once per step, with the last micro batch.
            send_gradients(self.module, number == len(micro_batches))
            with self._computing():
                loss = self.module(*micro_batch)
            self._scaler.scale(loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        return mean(losses)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Any]) -> Tensor:
        """This rank's mean loss, without a gradient."""
        self.model.eval()
        with self._computing():
            if self._pipe is not None:
                loss = self._pipe.evaluate(micro_batches)
            else:
                loss = mean([self.model(*micro_batch) for micro_batch in micro_batches])
        self.model.train()
        reshard(self.model)
        return loss

    def finish(self) -> None:
        """After the last step: nothing, here."""


def mean(losses: Sequence[Tensor]) -> Tensor:
    """In float64: the same whatever way the micro batches lie over the ranks."""
    return torch.stack([loss.double() for loss in losses]).mean()


if __name__ == "__main__":
    run(main)
