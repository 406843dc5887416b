"""Real runs of the local backend: submitted, watched, broken on purpose, and gone afterwards."""

from __future__ import annotations

import contextlib
import os
import posixpath
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import NodeManager

from clusterkit import agent, api
from clusterkit.spec import JobSpec
from tests.live.compose import engine as engines
from tests.live.compose.image import base, engine, image

__all__ = ["base", "engine", "image"]
LIVE = Path(__file__).parent
PROGRAMS = LIVE / "programs"
JOB_KEYS = (
    "launcher", "restarts", "on_node_loss", "spares", "hang_timeout", "env", "secrets", "batch",
    "checkpoint",
)  # fmt: skip
IMAGE_SECONDS = 1500
"""For a test that may be the first to need the image, and then has it built."""
SHARED = pytest.StashKey[contextlib.ExitStack]()
"""What all workers of pytest-xdist use, and the process that starts them ends."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """With several workers, one docker engine for all of them: a second one would wait for the
    first one's end."""
    config = session.config
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        return
    config.stash[SHARED] = contextlib.ExitStack()
    # When the session is interrupted, workers have this long to end their labs and clusters.
    NodeManager.EXIT_TIMEOUT = 120
    with contextlib.suppress(engines.NoEngine):  # the tests that need it say so
        found = config.stash[SHARED].enter_context(engines.engine())
        os.environ.update(found.env)


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash.get(SHARED, contextlib.ExitStack()).close()


class ByFolder(LoadScopeScheduling):
    """One worker has this machine's ports, one the SSH hosts, one the engine, one the cluster.

    Their tests wait more than they compute, so they do it beside each other.
    """

    def _split_scope(self, nodeid: str) -> str:
        return posixpath.dirname(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFolder | None:
    return ByFolder(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"image", "running"}.intersection(getattr(item, "fixturenames", ())):
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
        fields = {key: options.pop(key) for key in JOB_KEYS if key in options}
        job = JobSpec(
            name=Path(program).stem,
            program=str(PROGRAMS / program),
            args=tuple(map(str, args)),
            **{"launcher": "forkserver", **fields},
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
