"""The proof that the numbers agree: ddp on 1 rank, 2 ranks and 2 nodes, and ZeRO 0 to 3 on 2 nodes.

``make parity`` runs them with one global batch, in fp32 on the CPU, one thread a rank, and
prints the losses step by step; `tests/live/test_parity.py` holds the largest difference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from clusterkit import api, loader
from clusterkit.cli.common import table
from clusterkit.status import State

STEPS = 20
TOLERANCE = 2e-6
GLOBAL_BATCH, MICRO_BATCH = 8, 4
SECONDS = 300.0

RUNS = {
    "ddp 1x1": ("ddp", 1, 1),
    "ddp 1x2": ("ddp", 1, 2),
    "ddp 2x1": ("ddp", 2, 1),
    "zero0 2x1": ("zero0", 2, 1),
    "zero1 2x1": ("zero1", 2, 1),
    "zero2 2x1": ("zero2", 2, 1),
    "zero3 2x1": ("zero3", 2, 1),
}
"""Name to job, nodes and ranks per node. The first is what the others are held against."""


@dataclass(frozen=True)
class Result:
    """Loss of every step, and how many parameters each rank's optimizer holds of how many."""

    losses: list[float]
    held: dict[int, int]
    total: int


def measure(job: str, nodes: int, ranks: int, steps: int = STEPS) -> Result:
    """Run one job file with the parity settings.

    Raises:
        RuntimeError: the run did not succeed.
    """
    spec = loader.load_job(f"jobs/{job}.yaml")
    args = list(spec.args)
    args[args.index("--steps") + 1] = str(steps)
    args[args.index("--eval-every") + 1] = "0"
    run = api.submit(
        msgspec.structs.replace(spec, args=tuple(args), checkpoint=None),
        nodes=nodes,
        gpus=ranks,
        settings=[
            f"batch={{global: {GLOBAL_BATCH}, micro: {MICRO_BATCH}}}",
            "device=cpu",
            "threads_per_rank=1",
        ],
    )
    try:
        status = run.wait(SECONDS)
    except BaseException:
        run.cancel()
        raise
    if status.state is not State.SUCCEEDED:
        raise RuntimeError(f"{job} on {nodes} x {ranks}: {status}")
    optimizers = [mark for mark in run.marks() if mark["event"] == "optimizer"]
    return Result(
        [row["loss"] for row in run.metrics()],
        {mark["rank"]: mark["parameters"] for mark in optimizers},
        optimizers[0]["total"],
    )


def measure_all(
    runs: Mapping[str, tuple[str, int, int]] = RUNS,
    told: Callable[[str], None] = lambda name: None,
) -> dict[str, Result]:
    """Every run of the table, one after the other."""
    results = {}
    for name, (job, nodes, ranks) in runs.items():
        told(name)
        results[name] = measure(job, nodes, ranks)
    return results


def largest_difference(results: Mapping[str, Result]) -> float:
    """Of any loss of any run from the first run's loss at the same step."""
    reference, *others = (result.losses for result in results.values())
    return max(
        abs(loss - expected)
        for losses in others
        for loss, expected in zip(losses, reference, strict=True)
    )


def main() -> int:
    results = measure_all(told=lambda name: print(f"running {name}", file=sys.stderr))
    rows = [
        [str(step + 1), *(f"{result.losses[step]:.8f}" for result in results.values())]
        for step in range(STEPS)
    ]
    print(table(rows, ["step", *results]))
    print()
    rows = [
        [name, ", ".join(f"{held:,}" for _, held in sorted(result.held.items())),
         f"{result.total:,}"]
        for name, result in results.items()
    ]  # fmt: skip
    print(table(rows, ["run", "parameters in each rank's optimizer", "of"]))
    difference = largest_difference(results)
    agreed = difference <= TOLERANCE
    verdict = "within" if agreed else "NOT within"
    print(f"\nlargest difference {difference:.2e}, {verdict} {TOLERANCE:.0e}")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
