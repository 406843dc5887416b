"""``python -m tests.bench.goodput``: what of the time is training while ranks or nodes are lost.

The same program with the same checkpoints under clusterkit and under torchrun, with torchrun's
defaults and with its intervals tuned, at the same time on the same machine. A rank of each, or one
of each one's two nodes, is killed as often; the sides take turns, so that none starts again beside
another. Lost nodes are replaced by spares (more agents than `--nnodes` under torchrun). Goodput is
what of the time went into steps that were not done again: steps reached x a step's median seconds
/ seconds. A step waits more than it computes, so that the sides do not slow each other down.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from clusterkit import api
from clusterkit.agent import processes
from clusterkit.cli.common import table
from clusterkit.run.folder import RunFolder
from tests.bench.__main__ import BIN

RANKS = 2
RESTARTS = 1000
"""torchrun needs some more than there are kills: gloo of torch 2.13 often meets the addresses of
the round before ("connectFullMesh failed ... Connection refused")."""
TUNED = {
    "rank": ["--monitor-interval", "0.05", "--shutdown-timeout", "2"],
    "node": ["--monitor-interval", "0.05", "--shutdown-timeout", "2",
             "--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=2"],
}  # fmt: skip
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
    """One launcher, in a folder of its own."""

    name: str
    folder: Path
    commands: list[list[str]]
    env: dict[str, str]
    above: int
    """How many processes are above a rank's on its node: launcher, agent."""
    began: float = 0.0
    kills: list[float] = field(default_factory=list)

    def start(self) -> None:
        self.folder.mkdir()
        self.began = time.time()
        with (self.folder / "said").open("ab") as said:
            self.processes = [
                subprocess.Popen(words, env={**os.environ, **self.env}, cwd=self.folder,
                                 stdin=subprocess.DEVNULL, stdout=said, stderr=said)
                for words in self.commands
            ]  # fmt: skip

    def steps(self) -> list[tuple[int, float, str]]:
        """Number, time, and the process of rank 0."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(step), float(at), pid) for step, at, pid in map(str.split, lines)]

    def kill(self, rank: int, *, node: bool) -> None:
        """SIGKILL to a rank, or to all of a node; a side that is starting again is left alone."""
        steps, kill = self.steps(), self.kills[-1] if self.kills else 0.0
        if not steps or steps[-1][1] <= kill:
            return
        with contextlib.suppress(OSError):
            doomed = [self._pid(rank)]
            if node:
                agents = [self._agent(each) for each in reversed(range(RANKS))]
                # The first torchrun holds the store, without which no other one goes on.
                agent = next(pid for pid in agents if pid != self.processes[0].pid)
                doomed = [agent, *processes.descendants(agent)]
            processes.send(doomed, signal.SIGKILL)
            self.kills.append(time.time())

    def _pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def _agent(self, rank: int) -> int:
        pid = self._pid(rank)
        for _ in range(self.above):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return pid

    def end(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGINT)
        for process in self.processes:
            process.wait(60)

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
    parser.add_argument("--lost", choices=("rank", "node"), default="rank")
    options = parser.parse_args()
    rng, kills = random.Random(options.seed), int(options.minutes * 60 / options.every) - 1
    node = options.lost == "node"
    with tempfile.TemporaryDirectory() as place:
        program = Path(place, "train.py")
        program.write_text(PROGRAM)
        home = Path(place, "home")

        def words(name: str) -> list[str]:
            return [
                str(program),
                str(Path(place, name)),
                str(options.step),
                str(options.checkpoint),
            ]

        def torchrun(name: str, *tuned: str) -> Side:
            start = [str(BIN / "torchrun"), *tuned]
            if node:
                with socket.create_server(("127.0.0.1", 0)) as free:
                    endpoint = f"localhost:{free.getsockname()[1]}"
                start += ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
                start += ["--rdzv-endpoint", endpoint, "--rdzv-id", "1"]
            else:
                start += ["--standalone", "--nproc-per-node", str(RANKS)]
            start += ["--max-restarts", str(RESTARTS), *words(name)]
            agents = [start] * (2 + kills if node else 1)
            return Side(name, Path(place, name), agents, {"OMP_NUM_THREADS": "1"}, above=1)

        submit = [str(BIN / "clusterkit"), "submit", "--set", "device=cpu"]
        submit += ["--set", "threads_per_rank=1"]
        if node:
            submit += ["--nodes", "2", "--gpus", "1", "--set", f"spares={kills}"]
        else:
            submit += ["--gpus", str(RANKS), "--set", f"restarts={RESTARTS}"]
        submit += ["--", "python", *words("clusterkit")]
        sides = [
            Side("clusterkit", Path(place, "clusterkit"), [submit],
                 {"CLUSTERKIT_HOME": str(home)}, above=2),
            torchrun("torchrun"),
            torchrun("torchrun, tuned", *TUNED[options.lost]),
        ]  # fmt: skip
        try:
            for side in sides:
                side.start()
            began = time.time()
            for number in range(1, kills + 1):
                rank = rng.randrange(RANKS)
                for turn, side in enumerate(sides):
                    at = began + (number + turn / len(sides) / 2) * options.every
                    time.sleep(max(0.0, at - time.time()))
                    side.kill(rank, node=node)
            time.sleep(max(0.0, began + options.minutes * 60 - time.time()))
            until = time.time()
        finally:
            for side in sides:
                side.end()
            for path in (home / "runs").glob("[a-z]*"):
                api.Run(RunFolder(path)).cancel()
        rows = [side.row(until) for side in sides]
    print(f"{platform.platform()}, {os.cpu_count()} cores, {options.minutes:g} min, a "
          f"{options.lost} of {RANKS} killed every {options.every:g} s; load "
          f"{os.getloadavg()[1]:.1f}\n")  # fmt: skip
    header = ["side", "killed", "steps", "done again", "first step s", "back in s", "goodput",
              "since its first step"]  # fmt: skip
    print(table(rows, header))
    for side in sides[1:]:
        print(f"\ngoodput of clusterkit / {side.name}: {sides[0].goodput / side.goodput:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
