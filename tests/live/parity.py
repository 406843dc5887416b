"""The proof that the numbers agree: every strategy against one rank, stopped and resumed too.

``make parity`` runs all of it with one global batch, in fp32 on the CPU, one thread a rank, prints
two tables and writes them to docs/parity.md. `tests/live/test_parity.py` runs the same cases and
resumes fewer of them.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from clusterkit import api
from clusterkit.cli.common import table
from clusterkit.jobfile import loader
from clusterkit.run.status import State
from clusterkit.spec import BatchSpec, CheckpointSpec

STEPS, HALF = 20, 10
TOLERANCE = 2e-6
GLOBAL_BATCH, MICRO_BATCH = 8, 4
SECONDS = 600.0
PAGE = Path(__file__).parents[2] / "docs" / "parity.md"


@dataclass(frozen=True)
class Case:
    """One run: a job file, where it runs, and on what else its checkpoint is resumed.

    Attributes:
        job: name of the job file.
        nodes: how many.
        ranks: of each node.
        args: further arguments; of a flag given twice the last counts.
        elsewhere: other numbers of ranks to resume on, with the arguments that need changing.
        launcher: what starts the ranks.
    """

    job: str
    nodes: int
    ranks: int
    args: tuple[str, ...] = ()
    elsewhere: Mapping[int, tuple[str, ...]] = field(default_factory=dict, hash=False)
    launcher: str = "auto"

    @property
    def name(self) -> str:
        extra = "".join(f" {word}" for word in self.args if word.startswith("--"))
        extra += f" {self.launcher}" if self.launcher != "auto" else ""
        return f"{self.job} {self.nodes}x{self.ranks}{extra}"


MICRO_2 = ("--micro-batch", "2")
OTHER_LAUNCHERS = ("torchrun", "deepspeed", "mpirun")
"""Than the default, which starts the ranks of all cases that name none."""
REFERENCE = Case("ddp", 1, 1)
CASES = (
    REFERENCE,
    Case("ddp", 1, 2, elsewhere={1: ()}),
    Case("ddp", 2, 1),
    *(Case("ddp", 1, 2, launcher=each) for each in OTHER_LAUNCHERS),
    Case("zero0", 2, 1, elsewhere={1: ()}),
    Case("zero1", 2, 1),
    Case("zero2", 2, 1),
    Case("zero2-offload", 2, 1),
    Case("zero2-universal", 1, 2, elsewhere={1: (), 4: MICRO_2}),
    Case("zero3", 2, 1),
    Case("zero3", 1, 2),
    *(Case("zero3", 1, 2, launcher=each) for each in OTHER_LAUNCHERS),
    Case("zero3", 1, 2, ("--zero-init",)),
    Case("zero3-offload", 2, 1),
    Case("fsdp", 1, 2, elsewhere={1: (), 4: MICRO_2}),
    Case("fsdp", 1, 2, ("--no-reshard-after-forward",)),
    Case("fsdp", 1, 2, ("--activation-checkpointing",)),
    Case("fsdp-offload", 1, 2),
    Case("hsdp", 1, 4, MICRO_2, elsewhere={2: ("--mesh", "replicate=1,shard=2")}),
    Case("tp", 1, 2, elsewhere={4: ("--mesh", "tp=4")}),
    Case("tp", 1, 4, MICRO_2),
    Case("tp-sequence", 1, 2),
    Case("tp-autotp", 1, 2),
    Case("pp", 1, 2, MICRO_2, elsewhere={4: MICRO_2}),
    Case("pp-gpipe", 1, 2, MICRO_2),
    Case("pp-deepspeed", 1, 4, MICRO_2),
    Case("3d", 1, 8, MICRO_2, elsewhere={4: (*MICRO_2, "--mesh", "pp=2,tp=2")}),
)


@dataclass(frozen=True)
class Result:
    """Loss of every step, and how many parameters each rank's optimizer holds of how many."""

    losses: list[float]
    held: dict[int, int]
    total: int


@dataclass(frozen=True)
class Resumed:
    """A run stopped at HALF and resumed on ``ranks``, against the one that went on."""

    case: Case
    ranks: int
    difference: float
    """Largest of any loss; 0.0 if all are equal to the bit."""

    @property
    def agrees(self) -> bool:
        """To the bit where nothing has changed; elsewhere sums have another order."""
        same = self.ranks == self.case.nodes * self.case.ranks
        return self.difference == 0.0 if same else self.difference <= TOLERANCE


def measure(
    case: Case,
    *,
    steps: int = STEPS,
    cluster: str = "local",
    checkpoints: Path | None = None,
    resume: Path | None = None,
    python: str | None = None,
) -> Result:
    """Run one case with the parity settings.

    Args:
        cluster: where to run it.
        checkpoints: save at HALF and at the end into this folder.
        resume: go on from this checkpoint.
        python: the interpreter of the ranks.

    Raises:
        RuntimeError: the run did not succeed.
    """
    spec = loader.load_job(f"jobs/{case.job}.yaml")
    shared = [] if spec.batch else ["--global-batch", GLOBAL_BATCH, "--micro-batch", MICRO_BATCH]
    args = [*spec.args, "--steps", steps, "--eval-every", "0", *shared, *case.args]
    micro = _last(args, "--micro-batch", MICRO_BATCH)
    folder = checkpoints or (resume.parent if resume else None)
    spec = msgspec.structs.replace(
        spec,
        args=tuple(map(str, args)),
        batch=BatchSpec(global_size=GLOBAL_BATCH, micro=micro) if spec.batch else None,
        checkpoint=None
        if folder is None
        else CheckpointSpec(
            dir=str(folder), every=HALF, keep=2, resume=str(resume) if resume else "never"
        ),
    )
    run = api.submit(
        spec, cluster=cluster, nodes=case.nodes, gpus=case.ranks,
        settings=[
            "device=cpu", "threads_per_rank=1", f"launcher={case.launcher}",
            *([f"python={python}"] if python else []),
        ],
    )  # fmt: skip
    try:
        status = run.wait(SECONDS)
    except BaseException:
        run.cancel()
        raise
    if status.state is not State.SUCCEEDED:
        raise RuntimeError(f"{case.name}: {status}")
    optimizers = [mark for mark in run.reported_events() if mark["event"] == "optimizer"]
    return Result(
        [row["loss"] for row in run.metrics()],
        {mark["rank"]: mark["parameters"] for mark in optimizers},
        optimizers[0]["total"],
    )


def measure_and_resume(
    case: Case, on: Collection[int] | None = None
) -> tuple[Result, list[Resumed]]:
    """A case, whole, and then resumed from its middle.

    Args:
        on: the numbers of ranks to resume on; by default as many as before, and all others that
            the case names.
    """
    again = {case.nodes * case.ranks: (case.nodes, case.ranks, ())}
    again |= {ranks: (1, ranks, args) for ranks, args in case.elsewhere.items()}
    if on is not None:
        again = {count: again[count] for count in on}
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        whole = measure(case, checkpoints=Path(folder) if again else None)
        half = Path(folder, f"step-{HALF:08d}")
        resumed = []
        for count, (nodes, ranks, args) in again.items():
            other = replace(case, nodes=nodes, ranks=ranks, args=(*case.args, *args))
            rest = measure(other, resume=half)
            difference = largest_difference(rest.losses, whole.losses[HALF:])
            resumed.append(Resumed(case, count, difference))
    return whole, resumed


def largest_difference(losses: list[float], expected: list[float]) -> float:
    """Of two losses at the same step."""
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


def main() -> int:
    results: dict[str, Result] = {}
    resumed: list[Resumed] = []
    for case in CASES:
        print(f"running {case.name}", file=sys.stderr)
        results[case.name], again = measure_and_resume(case)
        resumed += again
    text = report(results, resumed)
    print(text)
    PAGE.write_text(text)
    reference = results[REFERENCE.name].losses
    worst = max(largest_difference(result.losses, reference) for result in results.values())
    return 0 if worst <= TOLERANCE and all(row.agrees for row in resumed) else 1


def report(results: Mapping[str, Result], resumed: list[Resumed]) -> str:
    """The page docs/parity.md."""
    reference = results[REFERENCE.name]
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "deepspeed")
    )
    rows = []
    for name, result in results.items():
        difference = largest_difference(result.losses, reference.losses)
        sizes = sorted(set(result.held.values()))
        held = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        verdict = "yes" if difference <= TOLERANCE else "NO"
        rows.append([name, f"{result.losses[-1]:.8f}", f"{difference:.1e}", verdict, held])
    again = [
        [row.case.name, str(row.ranks), "to the bit" if row.difference == 0 else
         f"{row.difference:.1e}", "yes" if row.agrees else "NO"]
        for row in resumed
    ]  # fmt: skip
    losses = [[str(n), f"{loss:.8f}"] for n, loss in enumerate(reference.losses, 1)]
    return f"""# Parity

Written by `make parity`; do not edit. Every strategy trains the same model (`tiny`,
{reference.total:,} parameters) on the same data with the same global batch of {GLOBAL_BATCH}, in
fp32 on the CPU, one thread a rank, for {STEPS} steps. `NxM` is N nodes of M ranks on one machine,
started by forkserver unless another launcher is named.
"agrees": no loss of any step is further than {TOLERANCE:.0e} from that of `{REFERENCE.name}`.

Python {platform.python_version()}, {versions}, {platform.system()} {platform.machine()}.

```text
{table(rows, ["run", "last loss", "largest difference", "agrees", "optimizer holds, per rank"])}
```

## Stopped and resumed

Stopped at step {HALF} and resumed, against the run that was never stopped. On as many ranks as
before all losses must be equal to the bit; on others within {TOLERANCE:.0e}, for sums have another
order there. ZeRO 1 to 3 without `load_universal`, and DeepSpeed's own tensor and pipeline parallel,
are refused on another number of ranks, by name.

```text
{table(again, ["run", "resumed on ranks", "largest difference", "agrees"])}
```

## The losses of {REFERENCE.name}

```text
{table(losses, ["step", "loss"])}
```
"""


def _last(args: list[object], flag: str, default: int) -> int:
    """The value of a flag that may be given more than once."""
    values = [args[n + 1] for n, word in enumerate(args[:-1]) if word == flag]
    return int(str(values[-1])) if values else default


if __name__ == "__main__":
    sys.exit(main())
