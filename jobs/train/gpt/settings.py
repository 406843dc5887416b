"""The flags that say how to train, whatever the model, and what they choose.

A flag on the command line wins, then what clusterkit says in the environment, then the default.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import data_parallel
import mesh as meshes
import torch
from batch import Batch, solve
from checkpoint import Checkpoints
from mesh import STRATEGIES, Mesh
from ranks import BadInput, Ranks
from strategy import Recipe

_GLOBAL_BATCH = 32
_AUTO = (("lr", "learning_rate"), *((name, name) for name in ("weight_decay", "steps", "warmup")))


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
        text = "fsdp, tp, pp, 3d: go on training while a checkpoint is being written"
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


def choose_strategy(
    args: argparse.Namespace, batch: Batch, device: torch.device, mesh: Mesh
) -> Recipe:
    """The strategy, with its settings checked. Its modules are imported only now."""
    _refuse_unused(args)
    if args.strategy == "deepspeed":
        if not args.deepspeed_config:
            raise BadInput("--strategy deepspeed needs a config", hint="--deepspeed-config FILE")
        import zero
        from zero_config import load_config

        config = load_config(
            args.deepspeed_config,
            batch=batch,
            dtype=args.dtype,
            clip=args.clip,
            # What `auto` stands for, where the program has these flags.
            schedule={key: getattr(args, flag) for key, flag in _AUTO if flag in args},
        )
        return zero.recipe(config, mesh, divided=args.zero_init)
    dtype = args.dtype or ("bf16" if device.type == "cuda" else "fp32")
    clip = 1.0 if args.clip is None else args.clip
    if args.strategy == "ddp":
        return data_parallel.recipe(dtype=dtype, clip=clip)
    import sharded

    reshard = args.reshard_after_forward
    settings = sharded.Settings(
        name=args.strategy,
        mesh=mesh,
        dtype=dtype,
        clip=clip,
        reshard=mesh.pp == 1 if reshard is None else reshard,
        offload=args.offload,
        sequence=args.sequence_parallel,
        asynchronous=args.checkpoint_async,
        schedule=args.schedule,
        micro_batches=batch.accumulation,
    )
    return sharded.recipe(settings)


def _refuse_unused(args: argparse.Namespace) -> None:
    """A flag that would have no effect is a misunderstanding: say so."""
    native = ("fsdp", "tp", "pp", "3d")
    for flag, given, takers in (
        ("--offload", args.offload, ("fsdp",)),
        ("--reshard-after-forward", args.reshard_after_forward is not None, native),
        ("--sequence-parallel", args.sequence_parallel, ("tp", "3d")),
        ("--checkpoint-async", args.checkpoint_async, native),
        ("--zero-init", args.zero_init, ("deepspeed",)),
    ):
        if given and args.strategy not in takers:
            hint = f"it is for {', '.join(takers)}"
            if flag == "--offload" and args.strategy == "deepspeed":
                hint = "zero_optimization.offload_optimizer in the DeepSpeed config"
            raise BadInput(f"{flag} does nothing with --strategy {args.strategy}", hint=hint)


def choose_checkpoints(args: argparse.Namespace, model: Mapping[str, Any]) -> Checkpoints:
    """The run's checkpoints; ``model`` is what describes the model they hold."""
    every, keep, resume = args.checkpoint_every, args.checkpoint_keep, args.checkpoint_resume
    return Checkpoints(args.checkpoint_dir, every=every, keep=keep, resume=resume, model=model)


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
