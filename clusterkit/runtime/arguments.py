"""The flags that every training program has, and what they choose.

A flag on the command line wins, then what clusterkit says in the environment, then the default.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from clusterkit.batch import Batch, solve
from clusterkit.errors import BadInput
from clusterkit.runtime import ddp, deepspeed
from clusterkit.runtime.checkpoint import Checkpoints
from clusterkit.runtime.distributed import Ranks
from clusterkit.runtime.strategy import Recipe

_GLOBAL_BATCH = 32


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
        env, add = os.environ.get, self.add_argument
        add(
            "--strategy",
            choices=["ddp", "deepspeed"],
            default="ddp",
            help="how the work is divided (default: ddp)",
        )
        add(
            "--deepspeed-config",
            default=env("CLUSTERKIT_DEEPSPEED_CONFIG"),
            metavar="FILE",
            help="JSON, for --strategy deepspeed (default: the job's deepspeed section)",
        )
        add(
            "--dtype",
            choices=["fp32", "bf16", "fp16"],
            help="default: bf16 on GPUs, fp32 on CPUs; with DeepSpeed, what its config says",
        )
        add(
            "--clip",
            type=float,
            metavar="NORM",
            help="largest gradient norm; 0: no clipping (default: 1.0)",
        )
        add(
            "--global-batch",
            type=positive,
            default=env("CLUSTERKIT_GLOBAL_BATCH") or None,
            metavar="SAMPLES",
            help="of one step, over all ranks (default: 32)",
        )
        add(
            "--micro-batch",
            type=positive,
            default=env("CLUSTERKIT_MICRO_BATCH") or None,
            metavar="SAMPLES",
            help="of one forward pass of one rank (default: no accumulation)",
        )
        add(
            "--checkpoint-dir",
            default=env("CLUSTERKIT_CHECKPOINT_DIR"),
            metavar="FOLDER",
            help="where checkpoints lie (default: none are written)",
        )
        add(
            "--checkpoint-every",
            type=count,
            default=env("CLUSTERKIT_CHECKPOINT_EVERY") or "0",
            metavar="STEPS",
            help="0: only at the end",
        )
        add(
            "--checkpoint-keep",
            type=count,
            default=env("CLUSTERKIT_CHECKPOINT_KEEP") or "2",
            metavar="N",
            help="0: all",
        )
        add(
            "--checkpoint-resume",
            default=env("CLUSTERKIT_CHECKPOINT_RESUME") or "auto",
            metavar="auto|never|FOLDER",
            help="the newest, none, or this one (default: auto)",
        )

    def error(self, message: str) -> NoReturn:
        raise BadInput(message, hint=f"{self.prog} --help")


def choose_batch(args: argparse.Namespace, ranks: Ranks) -> Batch:
    """The batch sizes for this number of ranks; 32 samples a step if nothing is said.

    Raises:
        BadInput: the sizes do not divide.
    """
    size = args.global_batch
    if size is None and args.micro_batch is None:
        size = _GLOBAL_BATCH
    return solve(data_parallel=ranks.size, global_size=size, micro=args.micro_batch)


def choose_strategy(args: argparse.Namespace, batch: Batch, device: torch.device) -> Recipe:
    """The strategy, with its settings checked.

    Raises:
        BadInput: no DeepSpeed config, or one that contradicts the flags.
    """
    if args.strategy == "ddp":
        dtype = args.dtype or ("bf16" if device.type == "cuda" else "fp32")
        return ddp.recipe(dtype=dtype, clip=1.0 if args.clip is None else args.clip)
    if not args.deepspeed_config:
        raise BadInput("--strategy deepspeed needs a config", hint="--deepspeed-config FILE")
    config = deepspeed.load_config(
        args.deepspeed_config, batch=batch, dtype=args.dtype, clip=args.clip
    )
    return deepspeed.recipe(config)


def choose_checkpoints(args: argparse.Namespace, model: Mapping[str, Any]) -> Checkpoints:
    """The run's checkpoints; ``model`` is what describes the model they hold."""
    return Checkpoints(
        args.checkpoint_dir,
        every=args.checkpoint_every,
        keep=args.checkpoint_keep,
        resume=args.checkpoint_resume,
        model=model,
    )


def positive(text: str) -> int:
    """A whole number above 0, for ``type=``."""
    return _whole_number(text, at_least=1)


def count(text: str) -> int:
    """A whole number, 0 or more, for ``type=``."""
    return _whole_number(text, at_least=0)


def _whole_number(text: str, *, at_least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < at_least:
        raise argparse.ArgumentTypeError(f"{number} is below {at_least}")
    return number
