"""``make bench-gpu``: tokens/s, MFU and peak memory of jobs/train/gpt on one GPU, in 10 minutes.

Every row is one run of train.py, bf16, on one GPU; quoted are the median of the steps after the
fifth, the most memory that torch had allocated, and what `clusterkit estimate` says of the job.
What no longer fits into the ten minutes is named and left out, what fails says why in its row.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterkit import api
from clusterkit.cli.common import table
from clusterkit.errors import ClusterkitError
from clusterkit.run.logs import parse_mark
from clusterkit.spec import JobSpec

ROOT = Path(__file__).parents[2]
PROGRAM = "jobs/train/gpt/train.py"
SECONDS = 570.0
STEPS, LEFT_OUT = 15, 5
COMPILE, RECOMPUTE = "--compile", "--activation-checkpointing"


@dataclass(frozen=True)
class Case:
    """One row: a model, its micro batch, and how it is trained."""

    model: str
    micro: int
    words: tuple[str, ...] = ()
    stage: int | None = None  # of ZeRO

    @property
    def name(self) -> str:
        plain = "ddp" if self.stage is None else f"zero-{self.stage}"
        words = [word.removeprefix("--") for word in self.words if word != "--strategy"]
        return " ".join(words if "fsdp" in words else [plain, *words])

    def job(self) -> JobSpec:
        strategy = ("--strategy", "deepspeed") if self.stage is not None else ()
        config = {
            "zero_optimization": {"stage": self.stage}, "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
        }  # fmt: skip
        args = ("--model", self.model, "--steps", STEPS, "--global-batch", 4 * self.micro,
                "--micro-batch", self.micro, *strategy, *self.words)  # fmt: skip
        return JobSpec(
            name="bench-gpu", program=PROGRAM, estimate="gpt", args=tuple(map(str, args)),
            workdir=str(ROOT), deepspeed=None if self.stage is None else config,
        )  # fmt: skip


FSDP = ("--strategy", "fsdp")
CASES = (
    *(Case("124m", 16, words) for words in ((), (COMPILE,), FSDP, (*FSDP, COMPILE))),
    *(Case("355m", 8, words) for words in ((), (COMPILE,), (COMPILE, RECOMPUTE), FSDP)),
    *(Case("355m", 8, stage=stage) for stage in (1, 2, 3)),
    *(Case("1.5b", 4, words) for words in ((RECOMPUTE,), (*FSDP, COMPILE, RECOMPUTE))),
    *(Case("774m", 8, words) for words in ((), (*FSDP, COMPILE), (*FSDP, COMPILE, RECOMPUTE))),
    Case("124m", 16, (COMPILE, RECOMPUTE)),
)


def measure(case: Case, folder: Path, seconds: float) -> list[str]:
    """The cells of a row."""
    job = case.job()
    env = {key: value for key, value in os.environ.items() if not key.startswith("CLUSTERKIT_")}
    if job.deepspeed is not None:
        config = folder / "deepspeed.json"
        config.write_text(json.dumps(job.deepspeed))
        env["CLUSTERKIT_DEEPSPEED_CONFIG"] = str(config)
    try:
        done = subprocess.run(
            [sys.executable, PROGRAM, *job.args], cwd=ROOT, env=env, capture_output=True,
            text=True, timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [case.model, case.name, "out of time"]
    rows = [e for line in done.stdout.splitlines() if (e := parse_mark(line))]
    rows = [event for event in rows if event["event"] == "metrics"]
    if done.returncode or len(rows) <= LEFT_OUT:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        told = [line for line in lines if "rror" in line] or lines
        return [case.model, case.name, told[-1][:60]]
    return [case.model, case.name, *_cells(rows[LEFT_OUT:]), predicted(job)]


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    speed = statistics.median(row["tokens_per_second"] for row in rows)
    mfu = [row["mfu"] for row in rows if "mfu" in row]
    peak = max(row.get("peak_memory", 0) for row in rows)
    return [f"{speed:,.0f}", f"{statistics.median(mfu):.1%}" if mfu else "-", f"{peak / 1e9:.1f}"]


def predicted(job: JobSpec) -> str:
    """The peak in GB that ``estimate`` expects, without its allowance for CUDA itself."""
    try:
        row = api.estimate(job, gpus=1, gpu_memory="80GB", dtype="bf16").rows[0]
    except ClusterkitError as error:
        return str(error)[:30]
    return f"{(row.total - row.overhead) / 1e9:.1f}"


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print("bench-gpu: skipped: torch sees no GPU here", file=sys.stderr)
        return 3
    begun, rows, left = time.monotonic(), [], []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            rest = SECONDS - (time.monotonic() - begun)
            if rest < 30:
                left.append(f"{case.model} {case.name}")
                continue
            rows.append(measure(case, Path(folder), rest))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {platform.platform()}\n")
    width = ["model", "how", "tokens/s", "MFU", "peak GB", "estimate GB"]
    print(table([[*row, *[""] * (len(width) - len(row))] for row in rows], width))
    if left:
        print(f"\nnot tested: {', '.join(left)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
