"""Fixtures of the tests beside this file."""

import pytest

from clusterkit import backends
from clusterkit.lifecycle import reconcile as machine
from clusterkit.lifecycle.supervisor import Supervisor
from clusterkit.run.folder import RunFolder
from clusterkit.run.status import RunStatus
from tests.conftest import HELD
from tests.unit.supervise.supervising import Scripted


@pytest.fixture
def run(unstarted_run):
    return unstarted_run()


@pytest.fixture
def hand(run, by_hand):
    return by_hand(run)


@pytest.fixture
def folder(run):
    return RunFolder(run.path)


@pytest.fixture
def supervise_with(unstarted_run, monkeypatch):
    """Run a supervisor in this process over scripted attempts; gives what it left."""

    def go(attempts, text="launcher: forkserver\n", adopt=None, kind=Scripted, **options):
        run = unstarted_run(text, **options)
        backend = kind(attempts)
        monkeypatch.setattr(backends, "backend", lambda name: backend)
        monkeypatch.setattr("clusterkit.lifecycle.supervisor.POLL_SECONDS", 0.0)
        monkeypatch.setattr(machine, "PEERS_SECONDS", 0.0)
        monkeypatch.setattr(machine, "AGAIN_SECONDS", 0.0)
        supervisor = Supervisor(RunFolder(run.path))
        if adopt is not None:
            adopt(supervisor)
        elif not supervisor.start():
            return backend, supervisor.folder.read_json("state.json", RunStatus), run.events()
        supervisor.supervise(adopt is not None)
        return backend, supervisor.folder.read_json("state.json", RunStatus), run.events()

    return go


@pytest.fixture
def made(run):
    """A run's folder whose lock nobody has."""
    HELD.pop(run.path).close()
    return RunFolder(run.path)
