"""What live tests of the local backend share."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterkit import agent, api

PROGRAMS = Path(__file__).parent / "programs"
Submit = Callable[..., api.Run]
SOON = 180.0
"""Seconds after which a test says that something hangs; deepspeed's imports alone take 30 of them
where four tests share two cores."""


def needs_mpirun() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun: not installed (apt-get install openmpi-bin)")


def all_ready(run: api.Run, ranks: int) -> None:
    """Return once every rank has joined the process group."""
    ready = set()
    for line in run.logs(follow=True):
        if line.text.startswith("ready"):
            ready.add(line.rank)
        if len(ready) == ranks:
            return
    pytest.fail(f"only ranks {ready} got ready: {run.status()}")


def rank_pid(run: api.Run, rank: int, attempt: int = 1) -> int:
    records = [
        json.loads(line)
        for path in run.path.glob(f"attempts/{attempt}/node-*/ranks.jsonl")
        for line in path.read_text().splitlines()
    ]
    return next(int(record["pid"]) for record in records if record["rank"] == rank)


def agent_pid(run: api.Run, node: int, attempt: int = 1) -> int:
    started = json.loads((run.path / f"attempts/{attempt}/node-{node}/started.json").read_text())
    return int(started["pid"])


def kill(pid: int) -> None:
    """SIGKILL, and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    agent.wait_gone([pid], SOON)
