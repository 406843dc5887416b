"""``python -m tests.bench.hangs``: how soon, and whether rightly, a rank that hangs is named.

Rank 1 of `tests/live/programs/hang.py` hangs in one of four ways. Right is a line of node 0 that
names rank 1 and the collective that rank 0 waits in; seconds are from the moment at which it begins
to hang. Exits with 1 if one line was not right.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clusterkit import api
from clusterkit.agent import HANG_NOTE
from clusterkit.cli.common import table

PROGRAM = Path(__file__).parents[1] / "live" / "programs" / "hang.py"
WAYS = {
    "skip": ("skips a collective", 1, 2),
    "python": ("endless loop in Python", 2, 1),
    "stop": ("is stopped (SIGSTOP)", 1, 2),
    "native": ("native code that holds the interpreter's lock", 2, 1),
}
"""What it does, on how many nodes of how many ranks."""
RIGHT = re.compile(
    rf"{HANG_NOTE}rank 1(?: on node 1)? has not entered all_reduce #\d+, "
    r"which rank 0(?: on node 0)? waits in; rank 1(?: on node 1)? is "
)


def once(how: str) -> tuple[bool, float]:
    """Whether what was said is right, and after how many seconds."""
    _, nodes, ranks = WAYS[how]
    words = ["python", str(PROGRAM), how]
    run = api.submit(
        words, cluster="here", clusters_file=Path(os.environ["CLUSTERKIT_HOME"], "clusters.yaml"),
        nodes=nodes, gpus=ranks, settings=["device=cpu"],
    )  # fmt: skip
    began, said, right = 0.0, math.nan, False
    for line in run.logs(follow=True):
        if line.text == "hangs":
            began = line.time
        if line.rank is None and line.text.startswith(HANG_NOTE):
            said, right = line.time, RIGHT.match(line.text) is not None
            if not right:
                print(f"{how}: {line.text}", file=sys.stderr)
            break
    run.cancel()
    return right, said - began


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hangs", description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=2)
    options = parser.parse_args()
    ways = [list(WAYS)[number % len(WAYS)] for number in range(options.runs)]
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(options.at_once) as pool:
        os.environ["CLUSTERKIT_HOME"] = home
        Path(home, "clusters.yaml").write_text("here: {backend: local, stop_grace: 1}\n")
        found = list(zip(ways, pool.map(once, ways), strict=True))
    print(f"{options.runs} runs, {options.at_once} at once, load {os.getloadavg()[1]:.1f}\n")
    rows = []
    for how, (what, nodes, ranks) in WAYS.items():
        seen = [each for way, each in found if way == how]
        times = [seconds for _, seconds in seen]
        right = f"{sum(good for good, _ in seen)} of {len(seen)}"
        shown = ", ".join(f"{pick(times):.1f}" for pick in (min, statistics.median, max))
        rows.append([what, f"{nodes} x {ranks}", right, shown])
    header = ["what rank 1 does", "nodes x ranks", "right", "seconds: least, median, most"]
    print(table(rows, header))
    return int(not all(good for _, (good, _) in found))


if __name__ == "__main__":
    sys.exit(main())
