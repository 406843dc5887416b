"""Real runs of the local backend: submitted, watched, broken on purpose, and gone afterwards."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import NodeManager

from clusterkit import agent, api
from clusterkit.errors import RunNotFound
from clusterkit.spec import JobSpec
from tests.live.compose import engine as engines
from tests.live.compose.image import base, engine, image

__all__ = ["base", "engine", "image"]
LIVE = Path(__file__).parent
PROGRAMS = LIVE / "programs"
JOB_KEYS = (
    "launcher", "restarts", "on_node_loss", "spares", "hang_timeout", "env", "secrets", "batch",
    "checkpoint", "retry_on",
)  # fmt: skip
IMAGE_SECONDS = 1500
"""For a test that may be the first to need the image, and then has it built."""
SHARED = pytest.StashKey[contextlib.ExitStack]()
"""What all workers of pytest-xdist use, and the process that starts them ends."""
BEGAN = pytest.StashKey[list[int]]()
"""`processor_times` when the session began."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """With several workers, one docker engine for all of them: a second one would wait for the
    first one's end."""
    config = session.config
    config.stash[BEGAN] = processor_times()
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


def processor_times() -> list[int]:
    """Of all processors since the machine started: user, nice, system, idle, disks, ..."""
    return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """When the tests that one worker does began and ended: the last decide how long all took."""
    phases = [
        phase
        for each in terminalreporter.stats.values()
        for phase in each
        if isinstance(phase, pytest.TestReport)
    ]
    began = min((phase.start for phase in phases), default=0.0)
    for scope in sorted({scope_of(phase.nodeid) for phase in phases}):
        own = [phase for phase in phases if scope_of(phase.nodeid) == scope]
        first, last = min(phase.start for phase in own), max(phase.stop for phase in own)
        setup = sum(phase.duration for phase in own if phase.when != "call")
        terminalreporter.write_line(
            f"{scope:29} from {first - began:5.0f} to {last - began:5.0f} s, {setup:4.0f} s of it "
            "set-up and teardown"
        )
    if BEGAN not in config.stash:  # without tests/live among its arguments
        return
    spent = [now - then for now, then in zip(processor_times(), config.stash[BEGAN], strict=True)]
    idle, disks = (100 * part / sum(spent) for part in spent[3:5])
    terminalreporter.write_line(f"processors: {idle:.0f} % idle, {disks:.0f} % waiting for disks")


class ByPlace(LoadScopeScheduling):
    """One worker has the SSH hosts, one the engine, one the cluster, one Slurm's daemons.

    Their tests wait more than they compute, so they do it beside each other. The modules of this
    machine alone share nothing: they go to whoever has time.
    """

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


LONGEST_FIRST = (
    "tests/live/kubernetes", "tests/live/ssh", "tests/live/compose", "tests/live/test_parity",
    "tests/live/test_local", "tests/live/test_as_torchrun", "tests/live/slurm",
    "tests/live/test_chaos", "tests/live/test_programs", "",
)  # fmt: skip
"""What scopes begin with: of the last ones to start all should be short, so that no worker is left
with a long one while the others have nothing to do."""


def scope_of(nodeid: str) -> str:
    """A module of this folder, or a folder in it with all below."""
    module = nodeid.partition("::")[0]
    parts = module.split("/")
    return module if len(parts) == 3 else "/".join(parts[:3])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByPlace | None:
    if config.getvalue("dist") != "loadscope":
        return None
    config.option.loadscopereorder = False  # which has the most tests first
    return ByPlace(config, log)


@pytest.hookimpl(trylast=True)  # after pytest-random-order
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: next(
            n for n, start in enumerate(LONGEST_FIRST) if scope_of(item.nodeid).startswith(start)
        ))  # fmt: skip
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
        with contextlib.suppress(RunNotFound):  # its test has removed it
            run.cancel()
        assert agent.processes_of(str(run.path)) == []


@pytest.fixture
def clusterkit() -> list[str]:
    """The command line, as argv."""
    return [sys.executable, "-m", "clusterkit"]
