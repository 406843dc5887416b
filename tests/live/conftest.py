"""Real runs of the local backend: submitted, watched, broken on purpose, and gone afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterkit import agent, api
from clusterkit.spec import JobSpec
from tests.live.compose.image import base, engine, image

__all__ = ["base", "engine", "image"]
PROGRAMS = Path(__file__).parent / "programs"


IMAGE_SECONDS = 1500
"""For a test that may be the first to need the image, and then has it built."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "image" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(IMAGE_SECONDS), append=False)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CLUSTERKIT_HOME of the test's own."""
    home = tmp_path / "home"
    monkeypatch.setenv("CLUSTERKIT_HOME", str(home))
    return home


@pytest.fixture
def submit() -> Iterator[Callable[..., api.Run]]:
    """``submit("beat.py", 600, nodes=2, ...)``: a job of the programs here; ended with the test."""
    started: list[api.Run] = []

    def start(program: str, *args: object, **options: object) -> api.Run:
        fields = {
            key: options.pop(key)
            for key in ("launcher", "restarts", "env", "secrets", "batch", "checkpoint")
            if key in options
        }
        job = JobSpec(
            name=Path(program).stem,
            program=str(PROGRAMS / program),
            args=tuple(map(str, args)),
            **{"launcher": "python", **fields},
        )
        started.append(api.submit(job, **options))
        return started[-1]

    yield start
    for run in started:
        run.cancel()
        assert agent.processes_of(str(run.path)) == []


@pytest.fixture
def clusterkit() -> list[str]:
    """The command line, as argv."""
    return [sys.executable, "-m", "clusterkit"]
