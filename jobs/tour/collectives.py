"""Every way that ranks can talk to each other: what each rank holds before and after, checked.

    clusterkit submit jobs/tour/collectives.yaml
    torchrun --nproc-per-node 2 jobs/tour/collectives.py

The operations themselves are in operations.py and operations_all.py. Rank 0 prints the table. One
that the backend is known to lack is tried all the same, and its refusal shown; any other failure,
or a result that is not what it must be, ends the program with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from typing import Any

import operations_all  # noqa: F401 (adds its part to OPERATIONS)
import torch
import torch.distributed as dist
from operations import OPERATIONS, Outcome, World
from torch import Tensor

LACKS = {
    "gloo": {"all_reduce PREMUL_SUM", "all_gather, uneven"},
    "nccl": {"all_reduce BAND", "all_reduce BOR", "all_reduce BXOR", "monitored_barrier"},
}
"""gloo's were seen with torch 2.13; NCCL's are what PyTorch's documentation says."""


def main() -> None:
    names = parse_args().only or list(OPERATIONS)
    on_gpu = torch.cuda.is_available() and os.environ.get("CLUSTERKIT_DEVICE") != "cpu"
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    world = World(dist.get_rank(), dist.get_world_size(), device)
    if world.rank == 0:  # a line that clusterkit reads
        record = {"event": "start", "steps": len(names), "first_step": 0}
        print("@clusterkit " + json.dumps(record), flush=True)
    results = {name: shown(name, world) for name in names}
    if world.rank == 0:
        count = Counter(results.values())
        print(f"{dist.get_backend()}, {world.size} ranks: {count[True]} operations right, "
              f"{count[None]} not there, {count[False]} wrong", flush=True)  # fmt: skip
    wrong = [name for name, right in results.items() if right is False]
    if wrong:
        raise RuntimeError(f"not what it must be: {', '.join(wrong)}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a process that used gloo sometimes aborts where the interpreter would end it


def shown(name: str, world: World) -> bool | None:
    """Run an operation and print its part of the table.

    Returns:
        Whether every rank got what it must; None if the backend has no such operation.
    """
    backend = dist.get_backend()
    lacking = name in LACKS.get(backend, ())
    try:
        outcome = OPERATIONS[name](world)
    except (RuntimeError, ValueError) as error:
        if not lacking:
            raise
        if world.rank == 0:
            reason = str(error).splitlines()[0]
            print(f"{name:26} {backend} has none of it: {reason}", flush=True)
        return None
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, (words(outcome[0]), words(outcome[1]), is_right(outcome)))
    if world.rank == 0:
        print_part(name, everyone)
    return all(right for _, _, right in everyone)


def print_part(name: str, everyone: list[tuple[str, str, bool]]) -> None:
    """Two lines: each rank before and after. Rows of many ranks are cut."""
    before, after, right = zip(*everyone, strict=True)
    widths = [max(len(b), len(a), 8) for b, a in zip(before, after, strict=True)][:8]
    more = "" if len(everyone) <= len(widths) else f" ... {len(everyone)} ranks"
    verdict = "right" if all(right) else f"WRONG on rank {right.index(False)}"
    for title, when, cells, end in (
        (name, "before", before, ""),
        ("", "after", after, verdict),
    ):
        row = " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
        print(f"{title:26} {when:6} | {row} |{more} {end}".rstrip(), flush=True)


def words(value: Any) -> str:
    """Numbers with spaces between them, the tensors of a list with semicolons; - for nothing."""
    if value is None:
        return "-"
    if isinstance(value, Tensor):
        return " ".join(f"{number:g}" for number in value.tolist())
    if isinstance(value, list):
        return "; ".join(map(words, value))
    return str(value)


def is_right(outcome: Outcome) -> bool:
    """Whether what a rank holds is what it must hold."""
    _, after, must = outcome
    if isinstance(after, Tensor):
        return torch.equal(after.double().cpu(), must.double().cpu())
    if isinstance(after, list) and after and isinstance(after[0], Tensor):
        return all(is_right((None, *pair)) for pair in zip(after, must, strict=True))
    return bool(after == must)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", metavar="OPERATION", help="only these, as in the table")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        parser.error("one rank has nobody to talk to: --nodes 2, or --gpus 2")
    if unknown := sorted(set(args.only) - OPERATIONS.keys()):
        parser.error(f"no operation {unknown[0]!r}; there are {'; '.join(OPERATIONS)}")
    return args


if __name__ == "__main__":
    main()
