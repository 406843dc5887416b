"""Fixtures of the tests beside this file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterkit import api
from tests.lab import Lab
from tests.live.ssh.runs.running import Submit, describe, processes

TICK = """
import os, sys, time
print("hello from", os.environ["RANK"], os.uname().nodename, flush=True)
for number in range(int(sys.argv[1])):
    time.sleep(0.1)
print("done", flush=True)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of its own, the current folder; a home and a cluster file besides."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "tick.py").write_text(TICK)
    monkeypatch.setenv("CLUSTERKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CLUSTERKIT_CLUSTERS", str(tmp_path / "clusters.yaml"))
    monkeypatch.chdir(project)
    return project


@pytest.fixture
def submit(lab: Lab) -> Iterator[Submit]:
    """``submit(600, nodes=2)``: ranks that tick for so long; ended and removed with the test."""
    started: list[api.Run] = []

    def start(ticks: int = 600, *, settings: tuple[str, ...] = (), **options: object) -> api.Run:
        if not Path(os.environ["CLUSTERKIT_CLUSTERS"]).exists():
            describe(lab)
        Path("job.yaml").write_text(
            f"program: tick.py\nargs: ['{ticks}']\nlauncher: forkserver\nnodes: 2\n"
        )
        run = api.submit(
            "job.yaml", cluster="lab", settings=settings, **{"doctor": False, **options}
        )
        started.append(run)
        return run

    yield start
    lab.repair()
    for run in (run for run in started if run.path.exists()):
        run.cancel()
        for host in lab.hosts:
            assert processes(lab, host.name, run) == []
