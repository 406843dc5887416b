"""What the flags, the ranks and the model make of each other: mesh, batch and strategy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import gpt_data
import mesh as meshes
import speed
import torch
from mesh import Mesh, counted
from model import GPT, PRESETS
from ranks import BadInput, Ranks
from torch import nn

_GLOBAL_BATCH = 32
_AUTO = (("lr", "learning_rate"), *((name, name) for name in ("weight_decay", "steps", "warmup")))
_NATIVE = ("fsdp", "tp", "pp", "3d")


def choose_model(args: argparse.Namespace) -> tuple[dict[str, Any], Callable[[], nn.Module], Any]:
    """What describes the model, what builds it, and the text in its tokens."""
    if args.model in PRESETS:
        shape = PRESETS[args.model]
        shape = replace(shape, context=args.context or shape.context)
        facts = {"name": args.model, **asdict(shape)}
        return (
            facts,
            partial(GPT, shape),
            gpt_data.read(
                args.data, shape.context, shape.vocabulary, document_mask=args.document_mask
            ),
        )
    import hugging_face

    if not hugging_face.looks_like_a_name(args.model):
        raise BadInput(
            f"--model {args.model}: no such model",
            f"one of {', '.join(PRESETS)}, or the name or folder of a Hugging Face model",
        )
    facts, make_model, tokenize = hugging_face.choose(args.model, args.pretrained)
    tokens = gpt_data.read(
        args.data, args.context or 256, facts["vocabulary"], tokenize,
        document_mask=args.document_mask,
    )  # fmt: skip
    return facts, make_model, tokens


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
    if args.document_mask and mesh.pp > 1:
        raise BadInput(
            "--document-mask: stages of a pipeline send each other no positions",
            hint="a mesh without pp, or leave it out",
        )
    if args.compile:
        speed.check_compiler(device)
    if args.strategy == "deepspeed":
        if not args.deepspeed_config:
            raise BadInput("--strategy deepspeed needs a config", hint="--deepspeed-config FILE")
        from zero_config import load_config
        from zero_mesh import name, on_mesh, precision, universal

        config = load_config(
            args.deepspeed_config,
            batch=batch,
            dtype=args.dtype,
            clip=args.clip,
            # What `auto` stands for, where the program has these flags.
            schedule={key: getattr(args, flag) for key, flag in _AUTO if flag in args},
        )
        config = on_mesh(config, mesh, divided=args.zero_init)
        called = name(config, mesh)
        any_size = called == "deepspeed zero-0"
        return Chosen(called, precision(config), 0.0, any_size, universal(config), config)
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
