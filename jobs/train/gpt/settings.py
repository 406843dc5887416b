"""The flags that say how to train, whatever the model, and what they choose.

A flag on the command line wins, then what clusterkit says in the environment, then the default.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import mesh as meshes
import speed
import torch
from mesh import STRATEGIES, Mesh, counted
from world import BadInput, Ranks

_GLOBAL_BATCH = 32
_AUTO = (("lr", "learning_rate"), *((name, name) for name in ("weight_decay", "steps", "warmup")))
_NATIVE = ("fsdp", "tp", "pp", "3d")


def _env(name: str) -> str | None:
    return os.environ.get(f"CLUSTERKIT_{name}") or None


class Parser(argparse.ArgumentParser):
    """A parser with the common flags, to which a program adds its own.

    ``parse_args`` raises ``BadInput`` where argparse would print its usage and leave.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add, switch = self.add_argument, partial(self.add_argument, action="store_true")
        text = "how the work is divided (default: ddp)"
        add("--strategy", choices=STRATEGIES, default="ddp", help=text)
        text = "ranks along each dimension, such as pp=2,dp=2,tp=2; fsdp: replicate=2,shard=4"
        add("--mesh", metavar="DIM=N,...", help=text)
        text = "with tp: divide the activations between the sliced layers as well"
        switch("--sequence-parallel", help=text)
        text = "order of a pipeline's passes (default: 1f1b)"
        add("--schedule", choices=["gpipe", "1f1b"], default="1f1b", help=text)
        text = "keep only the inputs of the layers and compute the rest again: less memory"
        switch("--activation-checkpointing", help=text)
        switch("--compile", help="torch.compile; slow to start, and then faster, above all on GPUs")
        text = "trace three steps of every rank into this folder, for ui.perfetto.dev"
        add("--profile", metavar="FOLDER", help=text)
        text = "deepspeed stage 3: build the model divided, for one that no rank can hold whole"
        switch("--zero-init", help=text)
        text = (
            "fsdp: whether to free gathered parameters until the backward pass (default: yes; "
            "in a pipeline no)"
        )
        add("--reshard-after-forward", action=argparse.BooleanOptionalAction, help=text)
        switch("--offload", help="fsdp: parameters and optimizer in the memory of the host")
        text = "JSON, for --strategy deepspeed (default: the job's deepspeed section)"
        add("--deepspeed-config", default=_env("DEEPSPEED_CONFIG"), metavar="FILE", help=text)
        text = "default: bf16 on GPUs, fp32 on CPUs; with DeepSpeed, what its config says"
        add("--dtype", choices=["fp32", "bf16", "fp16"], help=text)
        text = "largest gradient norm; 0: no clipping (default: 1.0)"
        add("--clip", type=float, metavar="NORM", help=text)
        samples = partial(add, type=positive, metavar="SAMPLES")
        text = "of one step, over all ranks (default: 32)"
        samples("--global-batch", default=_env("GLOBAL_BATCH"), help=text)
        text = "of one forward pass of one rank (default: no accumulation)"
        samples("--micro-batch", default=_env("MICRO_BATCH"), help=text)
        text = "where checkpoints lie (default: none are written)"
        add("--checkpoint-dir", default=_env("CHECKPOINT_DIR"), metavar="FOLDER", help=text)
        every, keep = _env("CHECKPOINT_EVERY") or "0", _env("CHECKPOINT_KEEP") or "2"
        text = "0: only at the end"
        add("--checkpoint-every", type=count, default=every, metavar="STEPS", help=text)
        add("--checkpoint-keep", type=count, default=keep, metavar="N", help="0: all")
        add(
            "--checkpoint-resume",
            default=_env("CHECKPOINT_RESUME") or "auto",
            metavar="auto|never|FOLDER",
            help="the newest, none, or this one (default: auto)",
        )
        text = "not deepspeed: go on training while a checkpoint is being written"
        switch("--checkpoint-async", help=text)

    def error(self, message: str) -> NoReturn:
        raise BadInput(message, hint=f"{self.prog} --help")


def choose_mesh(args: argparse.Namespace, ranks: Ranks, model: Mapping[str, Any]) -> Mesh:
    """The ranks as the strategy arranges them; what looks like a mistake is said on stderr."""
    chosen = meshes.choose(args.strategy, args.mesh, ranks=ranks.size, local_ranks=ranks.local_size)
    meshes.check_model(args.strategy, chosen, model, sequence=args.sequence_parallel)
    if ranks.is_first:
        for warning in meshes.warnings(args.strategy, chosen, local_ranks=ranks.local_size):
            print(f"warning: {warning}", file=sys.stderr)
    return chosen


@dataclass(frozen=True)
class Batch:
    """Sizes in samples: global = micro x accumulation x ranks that see different samples."""

    global_size: int  # of one optimizer step, over all ranks
    micro: int  # of one forward pass of one rank
    accumulation: int  # forward passes of one rank in a step
    data_parallel: int


def solve(
    *,
    data_parallel: int,
    global_size: int | None = None,
    micro: int | None = None,
    accumulation: int | None = None,
) -> Batch:
    """Work out the sizes that are missing; ``global_size`` alone means no accumulation."""
    for size in (global_size, micro, accumulation):
        if size is not None and size < 1:
            raise BadInput(f"batch: a size is {size}; it must be at least 1")
    if global_size is None:
        steps = accumulation or 1
        if micro is None:
            raise BadInput("batch: give the global or the micro batch")
        return Batch(micro * steps * data_parallel, micro, steps, data_parallel)
    ranks = f"{data_parallel} rank{'s' * (data_parallel > 1)}"
    steps = accumulation or 1
    product = (steps if micro is None else micro) * data_parallel
    if global_size % product:
        factor = "" if micro is None and steps == 1 else f"{micro or steps} x "
        below, above = (global_size // product + n for n in (0, 1))
        near = f"{below * product} or {above * product}" if below else f"{above * product}"
        raise BadInput(f"batch: global {global_size} is not a multiple of {factor}{ranks}", near)
    if micro is None:
        return Batch(global_size, global_size // product, steps, data_parallel)
    if accumulation not in (None, global_size // product):
        raise BadInput(
            f"batch: global {global_size} = micro {micro} x accumulation {accumulation} x {ranks} "
            "does not hold",
            hint=f"leave accumulation out: it is {global_size // product} on {ranks}",
        )
    return Batch(global_size, micro, global_size // product, data_parallel)


def choose_batch(args: argparse.Namespace, mesh: Mesh) -> Batch:
    """The batch sizes for this mesh, whose ``dp`` shares them; if nothing is said, 32 samples a
    step, or the largest number below that a pipeline's stages and copies divide."""
    sizes: dict[str, int] = {}
    if args.global_batch is None and args.micro_batch is None:
        if args.strategy == "deepspeed" and args.deepspeed_config:
            from zero_config import batch_numbers

            sizes = batch_numbers(args.deepspeed_config)
        elif mesh.pp > 1 and args.schedule == "1f1b":
            # 1F1B takes no fewer micro batches than there are stages.
            micro = max(1, _GLOBAL_BATCH // (mesh.dp * mesh.pp))
            sizes = {"micro": micro, "accumulation": mesh.pp}
        return solve(data_parallel=mesh.dp, **(sizes or {"global_size": _GLOBAL_BATCH}))
    return solve(data_parallel=mesh.dp, global_size=args.global_batch, micro=args.micro_batch)


@dataclass(frozen=True)
class Chosen:
    """How the model is divided and computed, checked before the ranks meet."""

    name: str  # what is written into checkpoints and the start line, such as ddp
    dtype: str  # fp32, bf16 or fp16
    clip: float  # largest gradient norm; 0: no clipping
    any_world_size: bool = True  # whether checkpoints of N ranks can be loaded by M
    converts: bool = False  # whether they can, whatever has saved them
    config: dict[str, Any] | None = None  # DeepSpeed's, complete


def choose_strategy(
    args: argparse.Namespace, batch: Batch, device: torch.device, mesh: Mesh
) -> Chosen:
    """The strategy, with its settings checked."""
    _refuse_unused(args)
    if args.compile:
        speed.check_compiler(device)
    if args.strategy == "deepspeed":
        if not args.deepspeed_config:
            raise BadInput("--strategy deepspeed needs a config", hint="--deepspeed-config FILE")
        import zero_config

        config = zero_config.load_config(
            args.deepspeed_config,
            batch=batch,
            dtype=args.dtype,
            clip=args.clip,
            # What `auto` stands for, where the program has these flags.
            schedule={key: getattr(args, flag) for key, flag in _AUTO if flag in args},
        )
        config = zero_config.on_mesh(config, mesh, divided=args.zero_init)
        name, dtype = zero_config.name(config, mesh), zero_config.precision(config)
        any_size = name == "deepspeed zero-0"
        return Chosen(name, dtype, 0.0, any_size, zero_config.universal(config), config)
    dtype = args.dtype or ("bf16" if device.type == "cuda" else "fp32")
    if dtype == "fp16" and args.strategy != "ddp":
        raise BadInput(
            f"--dtype fp16: --strategy {args.strategy} does not scale the loss",
            hint="use bf16 or fp32; ddp and deepspeed can do fp16",
        )
    if args.schedule == "1f1b" and batch.accumulation < mesh.pp:
        raise BadInput(
            f"--schedule 1f1b: {counted(batch.accumulation, 'micro batch')} a step for "
            f"{mesh.pp} stages",
            hint=f"a global batch of {mesh.pp} micro batches or more, or --schedule gpipe",
        )
    return Chosen(args.strategy, dtype, 1.0 if args.clip is None else args.clip)


def _refuse_unused(args: argparse.Namespace) -> None:
    """A flag that would have no effect is a misunderstanding: say so."""
    for flag, given, takers in (
        ("--offload", args.offload, ("fsdp",)),
        ("--reshard-after-forward", args.reshard_after_forward is not None, _NATIVE),
        ("--sequence-parallel", args.sequence_parallel, ("tp", "3d")),
        ("--checkpoint-async", args.checkpoint_async, ("ddp", *_NATIVE)),
        ("--zero-init", args.zero_init, ("deepspeed",)),
    ):
        if given and args.strategy not in takers:
            hint = f"it is for {', '.join(takers)}"
            if flag == "--offload" and args.strategy == "deepspeed":
                hint = "zero_optimization.offload_optimizer in the DeepSpeed config"
            raise BadInput(f"{flag} does nothing with --strategy {args.strategy}", hint=hint)


def positive(text: str) -> int:
    """A whole number above 0."""
    return count(text, at_least=1)


def count(text: str, at_least: int = 0) -> int:
    """A whole number, 0 or more."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < at_least:
        raise argparse.ArgumentTypeError(f"{number} is below {at_least}")
    return number
