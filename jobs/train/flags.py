"""Flags as several of these programs have them."""

from __future__ import annotations

import argparse
import os
from typing import NoReturn

from clusterkit.errors import BadInput
from clusterkit.runtime.arguments import positive


class Flags(argparse.ArgumentParser):
    """A parser that raises ``BadInput`` where argparse would print its usage and leave."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def add_batch(self, default: int, *, accumulates: bool = False) -> None:
        """Add ``--batch`` and, for a program that can, ``--accumulation``, as the job has them.

        Raises:
            BadInput: the job accumulates gradients, and the program cannot.
        """
        accumulation = os.environ.get("CLUSTERKIT_ACCUMULATION") or "1"
        self.add_argument(
            "--batch",
            type=positive,
            default=os.environ.get("CLUSTERKIT_MICRO_BATCH") or default,
            metavar="SAMPLES",
            help=f"of one rank in one forward pass (default: the job's micro batch, or {default})",
        )
        if accumulates:
            self.add_argument(
                "--accumulation",
                type=positive,
                default=accumulation,
                metavar="PASSES",
                help="forward passes in one step (default: the job's, or 1)",
            )
        elif accumulation != "1":
            raise BadInput(
                "batch: this program does not accumulate gradients",
                hint="give batch.global or batch.micro alone",
            )

    def error(self, message: str) -> NoReturn:
        raise BadInput(message, hint=f"{self.prog} --help")
