"""The flags, and what they, the ranks and the model make of each other: mesh, batch and strategy.

A flag on the command line wins, then what clusterkit says in the environment, then the default.
Whatever can be wrong with them is found here, by each rank alone, before the ranks meet.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import gpt_data
import torch
from gpt_model import GPT, PRESETS
from gpt_ranks import BadInput, Ranks, Unavailable
from torch import nn

_TAKES = {
    "ddp": ("dp",),
    "deepspeed": ("pp", "dp", "tp"),
    "fsdp": ("replicate", "shard", "dp"),
    "tp": ("dp", "tp"),
    "pp": ("pp", "dp"),
    "3d": ("pp", "dp", "tp"),
}
STRATEGIES = tuple(_TAKES)
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
        switch("--stop-at-nan", help="end when the loss is NaN or infinite")
        text = "samples that begin anywhere, or each once an epoch, shuffled (default: random)"
        add("--sampling", choices=gpt_data.SAMPLINGS, default="random", help=text)
        text = "attend within a document alone, and count positions from its start"
        switch("--document-mask", help=text)
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

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        if _env("ACCUMULATION") == "1" and any(
            word.partition("=")[0] == "--global-batch" for word in words
        ):
            # What the job says is no more than its own global batch, divided by the ranks.
            self.set_defaults(micro_batch=None)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise BadInput(message, hint=f"{self.prog} --help")


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


def choose_model(args: argparse.Namespace) -> tuple[dict[str, Any], Callable[[], nn.Module], Any]:
    """What describes the model, what builds it, and the text in its tokens."""
    read = partial(gpt_data.read, document_mask=args.document_mask)
    if args.model in PRESETS:
        shape = PRESETS[args.model]
        shape = replace(shape, context=args.context or shape.context)
        facts = {"name": args.model, **shape.facts()}
        make_model = partial(GPT, shape, chunked_loss=args.chunked_loss)
        return facts, make_model, read(args.data, shape.context, shape.vocabulary)
    if args.chunked_loss:
        raise BadInput(f"--chunked-loss is for {', '.join(PRESETS)}, not for --model {args.model}")
    import gpt_hugging_face

    if not gpt_hugging_face.looks_like_a_name(args.model):
        raise BadInput(
            f"--model {args.model}: no such model",
            f"one of {', '.join(PRESETS)}, or the name or folder of a Hugging Face model",
        )
    facts, make_model, tokenize = gpt_hugging_face.choose_hugging_face(args.model, args.pretrained)
    context = args.context or 256
    return facts, make_model, read(args.data, context, facts["vocabulary"], tokenize)


@dataclass(frozen=True)
class Mesh:
    """How many ranks along each dimension."""

    pp: int = 1  # pipeline stages, each with a run of the layers
    replicate: int = 1  # groups of ranks that each hold a whole copy of the (sharded) state
    shard: int = 1  # ranks that share one copy between them
    tp: int = 1  # ranks that each compute a slice of every layer, on the same samples

    @property
    def dp(self) -> int:
        """Ranks that train on different samples."""
        return self.replicate * self.shard

    @property
    def size(self) -> int:
        """All ranks."""
        return self.pp * self.dp * self.tp

    def replica(self, rank: int) -> int:
        """Which of the ``dp`` shares of the global batch a rank trains on."""
        return rank // self.tp % self.dp

    def stage(self, rank: int) -> int:
        """Which pipeline stage a rank holds."""
        return rank // (self.tp * self.dp)

    def facts(self, strategy: str, schedule: str, micro_batches: int) -> dict[str, Any]:
        """What a start line tells of it."""
        if self.pp > 1:
            schedule = "1f1b" if strategy == "deepspeed" else schedule
            return {"mesh": str(self), "schedule": schedule, "micro_batches": micro_batches,
                    "bubble": bubble(self.pp, micro_batches)}  # fmt: skip
        plain = strategy == "ddp" or (strategy == "deepspeed" and self.tp == 1)
        return {} if plain else {"mesh": str(self)}

    def __str__(self) -> str:
        shape = {"pp": self.pp, "replicate": self.replicate, "shard": self.shard, "tp": self.tp}
        if self.replicate == 1:
            shape = {"pp": self.pp, "dp": self.dp, "tp": self.tp}
        return ",".join(f"{name}={size}" for name, size in shape.items() if size > 1) or "dp=1"


def bubble(stages: int, micro_batches: int) -> float:
    """The part of a step in which a rank of a pipeline waits: (p - 1) / (m + p - 1).

    Huang et al. 2019 (GPipe), https://arxiv.org/abs/1811.06965, section 2.3. It takes all stages
    to be equally long and sending to be free.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def make_mesh(strategy: str, text: str | None, *, ranks: int, local_ranks: int) -> Mesh:
    """The mesh that ``--mesh`` describes; what it leaves out follows from the number of ranks.

    Without ``text``, tensor parallel takes the ranks of a node, pipeline parallel all ranks.
    """
    sizes = _parse(strategy, text or "")
    if not sizes and strategy == "3d":
        raise BadInput("--strategy 3d needs a mesh", hint="on 8 ranks: --mesh pp=2,dp=2,tp=2")
    if not sizes and strategy == "tp":
        sizes = {"tp": local_ranks}
    if not sizes and strategy == "pp":
        sizes = {"pp": ranks}
    given = math.prod(sizes.values())
    rest = "shard" if strategy == "fsdp" and "dp" not in sizes else "dp"
    if rest not in sizes and ranks % given == 0:
        sizes[rest] = ranks // given
    if math.prod(sizes.values()) != ranks:
        words = text or ",".join(f"{name}={size}" for name, size in sizes.items())
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        there = f"there {'is' if ranks == 1 else 'are'} {counted(ranks, 'rank')}"
        raise BadInput(
            f"--mesh {words}: {product} is {math.prod(sizes.values())} ranks, and {there}",
            hint=f"sizes whose product is {ranks}, or leave one out and it is worked out",
        )
    sizes["shard"] = sizes.get("shard", 1) * sizes.pop("dp", 1)
    mesh = Mesh(**sizes)
    # A strategy named after a dimension of 1 would only do another's work under its name.
    if {"tp": mesh.tp, "pp": mesh.pp, "3d": mesh.pp * mesh.tp}.get(strategy) == 1:
        what = "pp=1,tp=1" if strategy == "3d" else f"{strategy}=1"
        raise BadInput(
            f"--strategy {strategy} with {what} divides nothing",
            hint="more ranks, or --strategy ddp or fsdp",
        )
    return mesh


def check_model(strategy: str, mesh: Mesh, model: Mapping[str, Any], *, sequence: bool) -> None:
    """Refuse a model that cannot be divided like this; our own is described by ``Shape``."""
    if mesh.pp == 1 and mesh.tp == 1:
        return
    name = model.get("name", "this model")
    if strategy == "deepspeed" and mesh.pp == 1 and "heads" not in model:
        return  # AutoTP looks for itself
    if "layers" not in model or "heads" not in model:
        raise BadInput(
            f"--strategy {strategy} cannot cut {name}: it does not know its layers",
            hint="--strategy fsdp or deepspeed divide any model",
        )
    layers, heads = int(model["layers"]), int(model.get("kv_heads") or model["heads"])
    kind = "key-value" if model.get("kv_heads") else "attention"
    if mesh.pp > layers:
        raise BadInput(
            f"--mesh pp={mesh.pp}: {name} has {counted(layers, 'layer')}, and a stage needs one "
            "at least",
            hint=f"--mesh pp={layers} at most",
        )
    if heads % mesh.tp:
        fits = [n for n in range(2, heads + 1) if heads % n == 0]
        raise BadInput(
            f"--mesh tp={mesh.tp}: the {heads} {kind} heads of {name} do not divide by it",
            hint=f"tp can be {', '.join(map(str, fits)) or 'nothing but 1'}",
        )
    if sequence and int(model["context"]) % mesh.tp:
        raise BadInput(
            f"--sequence-parallel: {model['context']} tokens do not divide by tp={mesh.tp}",
            hint="a --context that does",
        )


def mesh_warnings(strategy: str, mesh: Mesh, *, local_ranks: int) -> list[str]:
    """What is allowed and probably a mistake, in a sentence each."""
    said = []
    if mesh.tp > 1 and local_ranks % mesh.tp:
        said.append(
            f"tp={mesh.tp} reaches over nodes of {counted(local_ranks, 'rank')}: tensor parallel "
            "waits for the network four times in every layer; keep it inside a node"
        )
    if strategy == "3d":
        idle = [name for name in ("pp", "dp", "tp") if getattr(mesh, name) == 1]
        if idle:
            same = {"pp": "; --strategy tp says the same", "tp": "; --strategy pp says the same"}
            said.append(
                f"{' and '.join(f'{name}=1' for name in idle)} in a 3d mesh divides nothing"
                f"{same.get(idle[0], '')}"
            )
    if strategy == "fsdp" and mesh.shard == 1:
        said.append(
            f"fsdp with shard=1 on {counted(mesh.size, 'rank')} shards nothing; "
            "--strategy ddp does the same with less work"
        )
    return said


def _parse(strategy: str, text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for word in filter(None, text.replace(" ", "").split(",")):
        name, _, number = word.partition("=")
        if name not in _TAKES[strategy]:
            raise BadInput(
                f"--mesh {text}: --strategy {strategy} has no dimension {name!r}",
                hint=f"it has {', '.join(_TAKES[strategy])}",
            )
        if name in sizes:
            raise BadInput(f"--mesh {text}: {name} is there twice")
        if not (number.isascii() and number.isdigit()) or int(number) < 1:
            raise BadInput(
                f"--mesh {text}: {name} is {number!r}; it must be a whole number above 0",
                hint=f"--mesh {name}=2",
            )
        sizes[name] = int(number)
    if "dp" in sizes and {"replicate", "shard"} & sizes.keys():
        raise BadInput(
            f"--mesh {text}: dp is replicate x shard, so give either it or them",
            hint="--mesh replicate=2,shard=4",
        )
    return sizes


def choose_mesh(args: argparse.Namespace, ranks: Ranks, model: Mapping[str, Any]) -> Mesh:
    """The ranks as the strategy arranges them; what looks like a mistake is said on stderr."""
    chosen = make_mesh(args.strategy, args.mesh, ranks=ranks.size, local_ranks=ranks.local_size)
    check_model(args.strategy, chosen, model, sequence=args.sequence_parallel)
    if ranks.is_first:
        for warning in mesh_warnings(args.strategy, chosen, local_ranks=ranks.local_size):
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
            from gpt_deepspeed import batch_numbers

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
    if mesh.pp > 1 and vars(args).get("chunked_loss"):
        raise BadInput(
            "--chunked-loss: a pipeline computes the loss from the logits of a micro batch",
            hint="a mesh without pp, or leave it out",
        )
    if args.compile:
        check_compiler(device)
    if args.strategy == "deepspeed":
        if not args.deepspeed_config:
            raise BadInput("--strategy deepspeed needs a config", hint="--deepspeed-config FILE")
        from gpt_deepspeed import load_config, on_mesh, precision, strategy_name, universal

        config = load_config(
            args.deepspeed_config,
            batch=batch,
            dtype=args.dtype,
            clip=args.clip,
            # What `auto` stands for, where the program has these flags.
            schedule={key: getattr(args, flag) for key, flag in _AUTO if flag in args},
        )
        config = on_mesh(config, mesh, divided=args.zero_init)
        called = strategy_name(config, mesh)
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


def check_compiler(device: torch.device) -> None:
    """torch.compile writes C++ on CPUs; on GPUs it is Triton that does, and needs a C compiler."""
    cpu = device.type == "cpu"
    names = (
        (os.environ.get("CXX"), "g++", "clang++") if cpu else (os.environ.get("CC"), "gcc", "cc")
    )
    if not any(name and shutil.which(name) for name in names):
        raise Unavailable(
            f"--compile needs a {'C++' if cpu else 'C'} compiler, and there is none on this node",
            hint=f"apt-get install {'g++' if cpu else 'gcc'}, or leave --compile out",
        )
    if not cpu and importlib.util.find_spec("triton") is None:
        raise Unavailable("--compile needs Triton on a GPU", hint="pip install triton")
