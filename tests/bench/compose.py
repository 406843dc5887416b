"""``python -m tests.bench.compose``: a submit to containers, against `docker compose up` by hand.

Both sides run the same compose file; the peer's is there before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from clusterkit import api, execute
from clusterkit.cli.common import table
from clusterkit.errors import ClusterkitError
from clusterkit.run import folder as run_folder
from clusterkit.run.folder import RunFolder
from clusterkit.transport import LocalTransport
from tests.bench.__main__ import BIN, SECONDS, Program, Row, compare


def first_step(rounds: int, program: Program) -> Row:
    """Submit to the log line of the first step, on 2 nodes."""
    settings = ["threads_per_rank=1", "checkpoint=", f"args={json.dumps(program.args)}"]
    job = f"jobs/{program.job}.yaml"

    def ours() -> float:
        argv = [str(BIN / "clusterkit"), "submit", job, "--cluster", "compose", "--nodes", "2"]
        for setting in settings:
            argv += ["--set", setting]
        begun = time.time()
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            raise RuntimeError(done.stderr)
        run = api.get(done.stdout.strip())
        lines = (line for line in run.logs(rank=0) if (line.event or {}).get("event") == "metrics")
        first = next(lines).time
        run.delete()
        return first - begun

    def by_hand() -> float:
        plan = api.plan(
            job,
            cluster="compose",
            nodes=2,
            settings=settings,
            run_id=run_folder.new_run_id("by-hand"),
        )
        transport = LocalTransport()
        execute.write_files(plan, transport)
        file = next(file.path for file in plan.files if file.path.endswith("compose.yaml"))
        compose = ["docker", "compose", "--file", file]
        begun = time.time()
        up = [*compose, "up", "--detach"]
        subprocess.run(up, check=True, capture_output=True, timeout=SECONDS)
        try:
            deadline = begun + SECONDS
            folder = RunFolder(Path(plan.run_dir))
            batches = folder.log(1, [0], lambda: time.time() < deadline)
            return next(
                line.time
                for batch in batches
                for line in batch
                if line.rank == 0 and (line.event or {}).get("event") == "metrics"
            ) - begun  # fmt: skip
        finally:
            subprocess.run([*compose, "down"], check=True, capture_output=True, timeout=SECONDS)

    what = f"submit to first step, {program.job}, 2 containers / docker compose up by hand"
    return compare(what, ours, by_hand, rounds)


def main() -> int:
    # As Ctrl-C: what was set up is taken down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m tests.bench.compose", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each comparison")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-home-") as home:
        os.environ["CLUSTERKIT_HOME"] = home
        clusters = Path(home, "clusters.yaml")
        clusters.write_text("compose: {backend: compose}\n")
        os.environ["CLUSTERKIT_CLUSTERS"] = str(clusters)
        try:
            api.plan(["true"], cluster="compose")
        except ClusterkitError as problem:
            print(f"no containers: {problem.message}; {problem.hint}", file=sys.stderr)
            return 3
        rows = [first_step(options.rounds, Program(job, 3)) for job in ("ddp", "zero3")]
    print(table([row.cells() for row in rows], ("WHAT", "OURS s", "PEER s", "RATIO", "SPREAD")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
