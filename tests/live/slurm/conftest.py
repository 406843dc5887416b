"""A Slurm of this machine's own for the tests here, and what submits to it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterkit import agent, api
from tests.live.slurm import daemons
from tests.live.slurm.daemons import Slurm


@pytest.fixture(scope="session")
def daemons_here() -> Iterator[Slurm]:
    """The daemons; skipped where there can be none."""
    if why := daemons.missing():
        pytest.skip(why)
    with daemons.slurm() as made:
        yield made


@pytest.fixture
def slurm(
    daemons_here: Slurm, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Slurm]:
    """Daemons with no job, to which cluster ``hpc`` of the test's cluster file leads."""
    for name, value in daemons_here.env.items():
        monkeypatch.setenv(name, value)
    clusters = tmp_path / "clusters.yaml"
    entry = {"backend": "slurm", "cpus": 2, "stop_grace": 30}
    short = {**entry, "time": "2", "notice": 60}
    closed = {**entry, "partition": "down"}
    wide = {**entry, "partition": "wide", "stop_grace": 1}
    entries = {"hpc": entry, "short": short, "closed": closed, "wide": wide}
    clusters.write_text(json.dumps(entries))
    monkeypatch.setenv("CLUSTERKIT_CLUSTERS", str(clusters))
    yield daemons_here
    with contextlib.suppress(FileNotFoundError):
        for folder in (own_home / "runs").iterdir():
            assert agent.processes_of(str(folder)) == []
    assert daemons_here.jobs() == []


@pytest.fixture
def train(slurm: Slurm, submit: Callable[..., api.Run]) -> Callable[..., api.Run]:
    """``train("tick.py", 50, restarts=1)``: on two nodes of Slurm; ended with the test."""

    def start(program: str, *args: object, **options: Any) -> api.Run:
        return submit(program, *args, **{"nodes": 2, "cluster": "hpc", **options})

    return start
