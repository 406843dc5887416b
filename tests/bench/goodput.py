"""``python -m tests.bench.goodput``: how much of the time is training while ranks are killed.

The same program with the same checkpoints under clusterkit and under `torchrun --max-restarts`, at
the same time on the same machine; at the same moments the same rank of both is killed. Goodput is
what of the time went into steps that were not done again: steps reached x a step's median seconds
/ seconds. A step waits more than it computes, so that the two do not slow each other down.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from clusterkit import api
from clusterkit.cli.common import table
from clusterkit.runs import RunFolder
from tests.bench.__main__ import BIN

RANKS = 2
PROGRAM = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
folder, seconds, every = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
(folder / f"pid-{rank}").write_text(str(os.getpid()))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
newest, step = folder / "newest.pt", 0
if newest.exists():
    saved = torch.load(newest)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while True:
    step += 1
    optimizer.zero_grad()
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
    time.sleep(seconds)
    if rank == 0:
        with (folder / "steps").open("a") as file:
            file.write(f"{step} {time.time()} {os.getpid()}\\n")
        if step % every == 0:
            draft = folder / "draft.pt"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "step": step}, draft)
            draft.replace(newest)
"""


@dataclass
class Side:
    """One of the two, in a folder of its own."""

    name: str
    folder: Path
    words: list[str]
    env: dict[str, str]
    began: float = 0.0
    kills: list[float] = field(default_factory=list)

    def start(self) -> None:
        self.folder.mkdir()
        self.began = time.time()
        with (self.folder / "said").open("wb") as said:
            self.process = subprocess.Popen(
                self.words, env={**os.environ, **self.env}, cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            )  # fmt: skip

    def steps(self) -> list[tuple[int, float, str]]:
        """Number, time, and the process of rank 0."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(step), float(at), pid) for step, at, pid in map(str.split, lines)]

    def kill(self, rank: int) -> None:
        """SIGKILL to it, where it trains; a side that is just starting again is left alone."""
        steps, kill = self.steps(), self.kills[-1] if self.kills else 0.0
        if steps and steps[-1][1] > kill:
            with contextlib.suppress(OSError):
                os.kill(int((self.folder / f"pid-{rank}").read_text()), signal.SIGKILL)
                self.kills.append(time.time())

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)

    def row(self, until: float) -> list[str]:
        steps = [each for each in self.steps() if each[1] <= until]
        apart = statistics.median(b[1] - a[1] for a, b in itertools.pairwise(steps))
        back = []
        for kill in self.kills:
            old = [pid for _, at, pid in steps if at < kill][-1]
            back.append(
                next((at for _, at, pid in steps if at > kill and pid != old), until) - kill
            )
        reached, first = max(step for step, _, _ in steps), steps[0][1]
        self.goodput = reached * apart / (until - self.began)
        return [
            self.name, str(len(self.kills)), str(reached), str(len(steps) - reached),
            f"{first - self.began:.1f}", f"{statistics.median(back or [0.0]):.2f}",
            f"{self.goodput:.1%}", f"{reached * apart / (until - first):.1%}",
        ]  # fmt: skip


def main() -> int:
    # A shell's background job, and what it starts, ignores the SIGINT that ends the sides.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m tests.bench.goodput", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--step", type=float, default=0.1, help="seconds that a step waits")
    parser.add_argument("--checkpoint", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng, kills = random.Random(options.seed), int(options.minutes * 60 / options.every) - 1
    with tempfile.TemporaryDirectory() as place:
        program = Path(place, "train.py")
        program.write_text(PROGRAM)

        def words(name: str) -> list[str]:
            return [
                str(program),
                str(Path(place, name)),
                str(options.step),
                str(options.checkpoint),
            ]

        submit = [str(BIN / "clusterkit"), "submit", "--gpus", str(RANKS), "--set", "device=cpu"]
        for setting in (f"restarts={kills}", "threads_per_rank=1"):
            submit += ["--set", setting]
        torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(RANKS)]
        torchrun += ["--max-restarts", str(kills)]
        home = Path(place, "home")
        sides = [
            Side("clusterkit", Path(place, "clusterkit"),
                 [*submit, "--", "python", *words("clusterkit")], {"CLUSTERKIT_HOME": str(home)}),
            Side("torchrun", Path(place, "torchrun"), [*torchrun, *words("torchrun")],
                 {"OMP_NUM_THREADS": "1"}),
        ]  # fmt: skip
        try:
            for side in sides:
                side.start()
            began = time.time()
            for number in range(1, kills + 1):
                time.sleep(max(0.0, began + number * options.every - time.time()))
                rank = rng.randrange(RANKS)
                for side in sides:
                    side.kill(rank)
            time.sleep(max(0.0, began + options.minutes * 60 - time.time()))
            until = time.time()
        finally:
            for side in sides:
                side.end()
            for path in (home / "runs").glob("[a-z]*"):
                api.Run(RunFolder(path)).cancel()
        rows = [side.row(until) for side in sides]
    print(f"{platform.platform()}, {os.cpu_count()} cores, {options.minutes:g} min, a rank of "
          f"{RANKS} killed every {options.every:g} s; load {os.getloadavg()[1]:.1f}\n")  # fmt: skip
    header = ["side", "killed", "steps", "done again", "first step s", "back in s", "goodput",
              "since its first step"]  # fmt: skip
    print(table(rows, header))
    print(f"\ngoodput of clusterkit / torchrun: {sides[0].goodput / sides[1].goodput:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
