"""Faults at random times against real runs: ``python -m tests.chaos`` (``make chaos``).

Every row is decided by the seed and its own name, so a wrong one can be had again by itself:
``make chaos SEED=1 ONLY=local/rank-kill/0``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clusterkit.cli.common import table
from clusterkit.errors import ClusterkitError
from tests.chaos.case import Case, Row
from tests.chaos.faults import FAULTS
from tests.chaos.places import NAMES, Local, place
from tests.live.compose.engine import NoEngine

AT_ONCE = 4
"""Runs beside each other, where they do not hurt each other."""


def chosen(seed: int, count: int, names: list[str]) -> list[str]:
    """Ids of so many rows: every fault once before one comes twice."""
    kinds = [
        f"{name}/{fault.name}" for fault in FAULTS for name in names if name in fault.on.split()
    ]
    random.Random(seed).shuffle(kinds)
    return [f"{kinds[i % len(kinds)]}/{i // len(kinds)}" for i in range(count)]


def carry_out(ids: list[str], seed: int, there: Local, keep: bool = False) -> Iterator[Row]:
    """Do them all in one place; rows as they come. The first run is left alone: its loss counts."""
    kinds = {fault.name: fault for fault in FAULTS}
    scratch = Path(tempfile.mkdtemp(prefix="chaos-"))
    losses: dict[int, float] = {}

    def one(id: str) -> Row:
        folder = scratch / id.partition("/")[2].replace("/", "-")
        folder.mkdir()
        row = Case(kinds[id.split("/")[1]], there, id, seed, folder).carry_out(losses)
        if not row.wrong and not keep:
            shutil.rmtree(folder, ignore_errors=True)
        return row

    try:
        undisturbed = Case(kinds["none"], there, f"{there.name}/none", seed, scratch / "first")
        undisturbed.folder.mkdir()
        first = undisturbed.carry_out(losses)
        if first.wrong:
            keep = True
            yield first
            return
        losses = {each["step"]: each["loss"] for each in undisturbed.run.metrics()}
        with ThreadPoolExecutor(AT_ONCE if there.parallel else 1) as pool:
            for row in pool.map(one, ids):
                if row.wrong:
                    keep = True
                yield row
    finally:
        if not keep:
            shutil.rmtree(scratch, ignore_errors=True)


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main() -> int:
    # As Ctrl-C: what was set up is taken down. A shell's background job is deaf to Ctrl-C itself,
    # and so were the submits that it is sent to.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--on", default="local", help=f"some of {','.join(NAMES)}")
    parser.add_argument("--only", help="ids of rows, or what they begin with, with commas")
    parser.add_argument("--json", action="store_true", help="one document instead of a table")
    options = parser.parse_args()
    ids = chosen(options.seed, options.faults, options.on.split(","))
    if options.only:
        ids = options.only.split(",")
    rows = []
    for name in dict.fromkeys(id.split("/")[0] for id in ids):
        try:
            with place(name) as there:
                for row in carry_out(
                    [id for id in ids if id.startswith(name)], options.seed, there
                ):
                    rows.append(row)
                    print(f"{row.id}: {'; '.join(row.wrong) or 'right'}", file=sys.stderr)
        except (ClusterkitError, NoEngine, pytest.skip.Exception) as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
    wrong = [row for row in rows if row.wrong]
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
    else:
        cells = [
            [row.id, seconds(row.detected), seconds(row.again), str(row.lost or 0), row.state,
             row.cause, "WRONG" if row.wrong else "right"] for row in rows
        ]  # fmt: skip
        header = ["fault", "detected s", "again s", "steps lost", "end", "diagnosis", "all"]
        print(table(cells, header))
    for row in wrong:
        again = f"make chaos SEED={options.seed} ONLY={row.id}"
        print(f"WRONG {row.id}: {'; '.join(row.wrong)}\n  again: {again}", file=sys.stderr)
    print(f"{len(rows)} faults, {len(wrong)} wrong; load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
