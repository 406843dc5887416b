"""``python -m tests.bench.slurm``: from Enter to a program's first line.

Against `sbatch` by hand of the same script, on daemons of this machine's own
(`tests.live.slurm.daemons`)."""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from clusterkit import api
from clusterkit.cli.common import table
from clusterkit.run.folder import StepRecord
from tests.bench.__main__ import BIN, SECONDS, compare
from tests.live.slurm import daemons
from tests.live.slurm.daemons import Slurm

PROGRAM = [sys.executable, "-c", "import time; print('began', time.time(), flush=True)"]
WHERE = ["--cluster", "hpc", "--nodes", "2"]
phases: dict[str, list[float]] = {}


def note(what: str, seconds: float) -> None:
    phases.setdefault(what, []).append(seconds)


def first_line(folder: Path) -> float:
    """When the first rank began."""
    logs = [path.read_text() for path in folder.glob("attempts/1/node-*/log")]
    return min(float(found) for log in logs for found in re.findall(r"began ([0-9.]+)", log))


def submitted() -> float:
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    argv = [str(BIN / "clusterkit"), "submit", *WHERE, "--", *PROGRAM]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(done.stderr)
    run = api.get(done.stdout.strip())
    began = first_line(run.path)
    (step,) = run._folder.records("steps.jsonl", StepRecord)
    note("submit: Enter to the end of sbatch", step.at - begun)
    note("submit: from there to the first line", began - step.at)
    note("submit: processor time of the command", used.ru_utime + used.ru_stime - before.ru_utime
         - before.ru_stime)  # fmt: skip
    run.delete()
    return began - begun


def by_hand(slurm: Slurm) -> float:
    name = f"by-hand-{time.time_ns()}"
    folder = Path(os.environ["CLUSTERKIT_HOME"], "runs", name)
    argv = [str(BIN / "clusterkit"), "plan", *WHERE, "--run-id", name, "--output", str(folder)]
    subprocess.run([*argv, "--", *PROGRAM], check=True, capture_output=True)
    begun = time.time()
    subprocess.run(["sbatch", str(folder / "files/slurm.sh")], check=True, capture_output=True)
    ended = time.time()
    slurm.wait(lambda: slurm.jobs() == [], "the job's end")
    note("by hand: Enter to the end of sbatch", ended - begun)
    note("by hand: from there to the first line", first_line(folder) - ended)
    return first_line(folder) - begun


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.slurm", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    rounds = max(1, parser.parse_args().rounds)
    if why := daemons.missing():
        print(f"error: {why}", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as home, daemons.slurm() as slurm:
        clusters = Path(home, "clusters.yaml")
        clusters.write_text(json.dumps({"hpc": {"backend": "slurm", "cpus": 2}}))
        os.environ.update(slurm.env, CLUSTERKIT_HOME=home, CLUSTERKIT_CLUSTERS=str(clusters))
        row = compare("Enter to the first line / sbatch by hand", submitted,
                      lambda: by_hand(slurm), rounds)  # fmt: skip
    print(table([row.cells()], ["what", "ours s", "peer s", "ratio", "spread"]))
    rows = [[what, f"{statistics.median(each[1:]):.3f}"] for what, each in phases.items()]
    print(table(rows, ["part", "median s"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
