"""What tests of runs in containers share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterkit import api
from clusterkit.backends.compose.compose_file import container_name
from clusterkit.run.status import RunStatus
from clusterkit.spec import JobSpec

ROOT = Path(__file__).parents[4]
SOON = 180.0
"""Seconds after which a test says that something hangs."""
WAIT = "import signal; print('ready', flush=True); signal.pause()"
"""A rank that waits to be ended."""
Start = Callable[..., api.Run]


def left_over(engine: Any) -> list[str]:
    """Containers and networks of any run."""
    found = []
    for kind in ("container", "network"):
        words = ["ls", *(["--all"] if kind == "container" else [])]
        words += ["--filter", "label=clusterkit.run", "--format", "{{.ID}}"]
        found += engine.run(kind, *words).stdout.split()
    return found


def words(code: str, **fields: Any) -> JobSpec:
    """A rank that runs a line of Python; torch is not imported."""
    command = ("python3", "-c", code)
    return JobSpec(name="words", command=command, **{"launcher": "forkserver", **fields})


def ready(run: api.Run, ranks: int = 2) -> None:
    """Return once every rank has said so."""
    seen = set()
    for line in run.logs(follow=True):
        if line.text.startswith("ready"):
            seen.add(line.rank)
        if len(seen) == ranks:
            return
    pytest.fail(f"only ranks {seen} got ready: {run.status()}")


def ended(run: api.Run, *, within: float = SOON) -> RunStatus:
    begun = time.monotonic()
    status = run.wait(SOON)
    assert time.monotonic() - begun < within, status
    return status


def node(run: api.Run, number: int) -> str:
    return container_name(run.id, number)
