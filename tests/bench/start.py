"""``python -m tests.bench.start``: from Enter to the first step, and everything that reads a run.

The program is ten lines of DDP; its peers are bare torchrun and bare `deepspeed`, as a person types
them. Sides take turns, as in `tests.bench.__main__`; the phases are of the same runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from clusterkit import api
from clusterkit.cli.common import table
from clusterkit.run.status import State
from tests.bench.__main__ import BIN, SECONDS, Row, compare

PROGRAM = """
import time; began = time.time()
import os, torch, torch.distributed as dist
imported = time.time()
dist.init_process_group("gloo")
met = time.time()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    print("first step", began, imported, met, time.time(), flush=True)
if os.environ.get("ONCE") and not os.path.exists(os.environ["ONCE"]):
    dist.barrier()
    if dist.get_rank() == 0:
        open(os.environ["ONCE"], "w").write(repr(time.time()))
        os._exit(1)
dist.barrier()
dist.destroy_process_group()
"""
_STEP = re.compile(r"first step ([0-9. ]+)")
MANY = 200
"""Runs that `ls` lists."""
phases: dict[str, list[dict[str, float]]] = {}


def said(text: str) -> list[list[float]]:
    """The times that a program printed, a list for each start of it."""
    return [[float(word) for word in found[1].split()] for found in _STEP.finditer(text)]


def submitted(program: Path, ranks: int, launcher: str, **env: str) -> tuple[float, str, api.Run]:
    """When Enter was pressed, what was printed, and the run, which has succeeded."""
    argv = [str(BIN / "clusterkit"), "submit", "--gpus", str(ranks), "--set", "device=cpu"]
    for setting in (f"launcher={launcher}", "threads_per_rank=1"):
        argv += ["--set", setting]
    if env:
        argv += ["--set", "restarts=1"]
        argv += [word for name, value in env.items() for word in ("--set", f"env.{name}={value}")]
    begun = time.time()
    done = subprocess.run(
        [*argv, "--", "python", str(program)], capture_output=True, text=True, timeout=SECONDS
    )
    ended = time.time()
    if done.returncode:
        raise RuntimeError(done.stderr)
    run = api.get(done.stdout.strip())
    if not env:
        note_phases(f"{launcher}, {ranks} ranks", run, begun, said(done.stderr)[0], ended)
    return begun, done.stderr, run


def note_phases(what: str, run: api.Run, begun: float, step: list[float], ended: float) -> None:
    node = run.path / "attempts" / "1" / "node-0"
    began, imported, met, first = step
    start = (node / "pid").stat().st_mtime
    agent = (node / "started.json").stat().st_mtime
    over = json.loads((node / "exit.json").read_bytes())["at"]
    phases.setdefault(what, []).append({
        "Enter to the node's script": start - begun,
        "to the agent": agent - start,
        "to the program's first line": began - agent,
        "its imports": imported - began,
        "rendezvous": met - imported,
        "to the end of the first step": first - met,
        "to the agent's end": over - first,
        "to submit's exit": ended - over,
    })  # fmt: skip


def ours(program: Path, ranks: int, launcher: str) -> float:
    begun, text, run = submitted(program, ranks, launcher)
    run.delete()
    return said(text)[0][-1] - begun


def bare(program: Path, launcher: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        env = {key: value for key, value in os.environ.items() if "CLUSTERKIT" not in key}
        env |= {"OMP_NUM_THREADS": "1", "TMPDIR": folder, "DS_ACCELERATOR": "cpu"}
        begun = time.time()
        done = subprocess.run(
            [*launcher, str(program)], env=env, capture_output=True, text=True, timeout=SECONDS
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return said(done.stdout)[0][-1] - begun


def torchrun(ranks: int) -> list[str]:
    return [str(BIN / "torchrun"), "--nproc-per-node", str(ranks)]


def deepspeed(ranks: int) -> list[str]:
    return [str(BIN / "deepspeed"), "--num_accelerators", str(ranks), "--no_local_rank"]


def second_round(program: Path, ranks: int) -> float:
    """From the end of a rank to the first step of the ranks that are started in its place."""
    mark = program.with_name("failed-once")
    _, text, run = submitted(program, ranks, "forkserver", ONCE=str(mark))
    lost = float(mark.read_text())
    mark.unlink()
    run.delete()
    return said(text)[-1][-1] - lost


def command_seconds(argv: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(argv, capture_output=True, check=True)
    return time.perf_counter() - begun


def readers(rounds: int, home: Path) -> list[Row]:
    """Commands that read small files, over Python that does nothing."""
    run = api.submit([sys.executable, "-c", "pass"])
    assert run.wait(SECONDS).state is State.SUCCEEDED
    nothing = [sys.executable, "-c", "pass"]
    verbs = [["--help"], ["status", "last"], ["logs", "last"], ["ls"], ["ls"]]
    rows = []
    for number, verb in enumerate(verbs):
        name = f"clusterkit {' '.join(verb)}"
        if number == len(verbs) - 1:
            for copy in range(MANY - 1):
                shutil.copytree(run.path, home / "runs" / f"copy-{copy}")
            name += f" with {MANY} runs"
        argv = [str(BIN / "clusterkit"), *verb]
        rows.append(
            compare(
                f"{name} / python -c pass",
                lambda argv=argv: command_seconds(argv),
                lambda: command_seconds(nothing),
                2 * rounds,
            )
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    rounds = max(1, parser.parse_args().rounds)
    with tempfile.TemporaryDirectory() as place:
        home, program = Path(place, "home"), Path(place, "tiny.py")
        os.environ["CLUSTERKIT_HOME"] = str(home)
        program.write_text(PROGRAM)
        rows = []
        for ranks in (2, 8):
            pairs = [
                ("forkserver", "torchrun", torchrun(ranks)),
                ("torchrun", "torchrun", torchrun(ranks)),
                ("forkserver", "deepspeed", deepspeed(ranks)),
            ]
            for launcher, name, peer in pairs:
                rows.append(
                    compare(
                        f"submit to first step, {ranks} ranks, {launcher} / bare {name}",
                        lambda ranks=ranks, launcher=launcher: ours(program, ranks, launcher),
                        lambda peer=peer: bare(program, peer),
                        rounds,
                    )
                )
            rows.append(
                compare(
                    f"rank lost to first step again, {ranks} ranks / bare torchrun from cold",
                    lambda ranks=ranks: second_round(program, ranks),
                    lambda ranks=ranks: bare(program, torchrun(ranks)),
                    rounds,
                )
            )
        rows += readers(rounds, home)
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"medians of {rounds} rounds; load {os.getloadavg()[0]:.1f}\n")  # fmt: skip
    print(table([row.cells() for row in rows], ["what", "ours s", "peer s", "ratio", "spread"]))
    print("\nwhere the time goes, medians in seconds:")
    names = list(next(iter(phases.values()))[0])
    medians = [
        [name, *(f"{statistics.median(run[name] for run in runs):.3f}" for runs in phases.values())]
        for name in names
    ]
    print(table(medians, ["phase", *phases]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
