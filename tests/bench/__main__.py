"""``make bench``: ratios against torchrun and the deepspeed launcher, measured in turn in one run.

Every comparison alternates its two sides (A B A B ...) after one uncounted round, so that a
machine whose speed drifts treats both alike; quoted are the medians and the median of the
pairwise ratios. The machine's own noise is the spread of those ratios, printed beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterkit import api, backends
from clusterkit.cli.common import table
from clusterkit.cluster import Facts, HostFacts, LocalCluster
from clusterkit.jobfile import loader
from clusterkit.run.logs import parse_mark

BIN = Path(sys.executable).parent
# Our modules would be compiled anew in every command, as on no machine of a user.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
RANKS = 2
SECONDS = 300.0


@dataclass(frozen=True)
class Row:
    """One comparison: medians of both sides in seconds, and of their pairwise ratio."""

    what: str
    ours: float
    peer: float
    ratio: float
    low: float
    high: float

    def cells(self) -> list[str]:
        return [
            self.what, f"{self.ours:.3f}", f"{self.peer:.3f}", f"{self.ratio:.2f}",
            f"{self.low:.2f} to {self.high:.2f}",
        ]  # fmt: skip


def compare(what: str, ours: Callable[[], float], peer: Callable[[], float], rounds: int) -> Row:
    """Measure both sides in turn, one round more than counted."""
    print(f"measuring {what}", end="", file=sys.stderr, flush=True)
    pairs = [(ours(), peer()) for _ in range(rounds + 1)][1:]
    ratios = [a / b for a, b in pairs]
    row = Row(
        what,
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )
    print(f": {row.ours:.3f} s, {row.peer:.3f} s, ratio {row.ratio:.2f}", file=sys.stderr)
    return row


# ---------------------------------------------------------------- training


@dataclass(frozen=True)
class Program:
    """train.py with the settings of one job file, for both sides."""

    job: str
    steps: int

    @property
    def spec(self) -> Any:
        return loader.load_job(f"jobs/{self.job}.yaml")

    @property
    def args(self) -> list[str]:
        args = list(self.spec.args)
        args[args.index("--steps") + 1] = str(self.steps)
        args[args.index("--eval-every") + 1] = "0"
        return args


def under_clusterkit(program: Program, launcher: str) -> tuple[float, float]:
    """Seconds from submit to the first step's end, and the median step."""
    settings = [f"launcher={launcher}", "device=cpu", "threads_per_rank=1", "checkpoint="]
    settings.append(f"args={json.dumps(program.args)}")
    argv = [str(BIN / "clusterkit"), "submit", f"jobs/{program.job}.yaml", "--gpus", str(RANKS)]
    for setting in settings:
        argv += ["--set", setting]
    begun = time.time()
    done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise RuntimeError(done.stderr)
    run = api.get(done.stdout.strip())
    lines = [line for line in run.logs(rank=0) if (line.event or {}).get("event") == "metrics"]
    steps = [line.event["step_seconds"] for line in lines if line.event is not None]
    run.delete()
    return lines[0].time - begun, statistics.median(steps[1:] or steps)


def bare(program: Program, launcher: list[str]) -> tuple[float, float]:
    """The same of the launcher alone, as a person would type it."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("CLUSTERKIT_")}
    env |= {
        "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CLUSTERKIT_DEVICE": "cpu",
        "CLUSTERKIT_GLOBAL_BATCH": str(program.spec.batch.global_size),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        env["TMPDIR"] = folder  # bare torchrun leaves a folder behind for every run
        if program.spec.deepspeed is not None:
            config = Path(folder, "deepspeed.json")
            config.write_text(json.dumps(program.spec.deepspeed))
            env |= {"CLUSTERKIT_DEEPSPEED_CONFIG": str(config), "DS_ACCELERATOR": "cpu"}
        begun = time.time()
        process = subprocess.Popen(
            [*launcher, "jobs/train/gpt/train.py", *program.args], env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        first, steps = None, []
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                event = parse_mark(line)
                if event is not None and event["event"] == "metrics":
                    first = first or time.time()
                    steps.append(event["step_seconds"])
        if process.wait(SECONDS) or first is None:
            raise RuntimeError(f"{launcher} failed")
    return first - begun, statistics.median(steps[1:] or steps)


def torchrun() -> list[str]:
    return [str(BIN / "torchrun"), "--nproc-per-node", str(RANKS)]


def deepspeed() -> list[str]:
    return [str(BIN / "deepspeed"), "--num_accelerators", str(RANKS), "--no_local_rank"]


# ---------------------------------------------------------------- planning


def plan_seconds(nodes: int) -> float:
    """A plan for so many nodes, and its text, in this process."""
    host = HostFacts(
        host="localhost", address="127.0.0.1", cpus=8, memory_mib=1 << 16,
        python="/usr/bin/python3", versions={"torch": "2.13.0", "deepspeed": "0.19.8"},
    )  # fmt: skip
    facts = Facts(home="/tmp/h", hosts=(host,), port=29500, port_origin="bench", interface="lo")
    job = loader.load_job("jobs/zero3.yaml", ["batch={micro: 4}", f"nodes={nodes}"])
    backend = backends.backend("local")
    begun = time.perf_counter()
    backend.plan(job, LocalCluster(), facts, "bench").to_text()
    return time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    rounds = max(1, parser.parse_args().rounds)
    short, long, zero3 = Program("ddp", 3), Program("ddp", 100), Program("zero3", 3)
    with tempfile.TemporaryDirectory() as home:
        os.environ["CLUSTERKIT_HOME"] = home
        rows = [
            compare(
                "submit to first step, ddp, launcher torchrun / bare torchrun",
                lambda: under_clusterkit(short, "torchrun")[0],
                lambda: bare(short, torchrun())[0],
                rounds,
            ),
            compare(
                "submit to first step, ddp, launcher forkserver / bare torchrun",
                lambda: under_clusterkit(short, "forkserver")[0],
                lambda: bare(short, torchrun())[0],
                rounds,
            ),
            compare(
                "submit to first step, zero3, launcher forkserver / bare deepspeed",
                lambda: under_clusterkit(zero3, "forkserver")[0],
                lambda: bare(zero3, deepspeed())[0],
                rounds,
            ),
            compare(
                "submit to first step, zero3, launcher deepspeed / bare deepspeed",
                lambda: under_clusterkit(zero3, "deepspeed")[0],
                lambda: bare(zero3, deepspeed())[0],
                rounds,
            ),
            compare(
                "median step, ddp, under clusterkit / bare torchrun",
                lambda: under_clusterkit(long, "torchrun")[1],
                lambda: bare(long, torchrun())[1],
                rounds + 3,
            ),
            compare(
                "the same of bare torchrun / bare torchrun: the noise",
                lambda: bare(long, torchrun())[1],
                lambda: bare(long, torchrun())[1],
                rounds + 3,
            ),
        ]
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"medians of {rounds} rounds; load {os.getloadavg()[0]:.1f}\n")  # fmt: skip
    print(table([row.cells() for row in rows], ["what", "ours s", "peer s", "ratio", "spread"]))
    print("\nplan of jobs/zero3.yaml with its text:")
    for nodes in (10, 100, 1_000, 10_000):
        seconds = statistics.median(plan_seconds(nodes) for _ in range(rounds))
        print(f"  {nodes:6} nodes  {seconds:.4f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
