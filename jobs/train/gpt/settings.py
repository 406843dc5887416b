"""The flags that say how to train, whatever the model.

A flag on the command line wins, then what clusterkit says in the environment, then the default.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import NoReturn

from gpt_data import SAMPLINGS
from mesh import STRATEGIES
from ranks import BadInput


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
        add("--sampling", choices=SAMPLINGS, default="random", help=text)
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
