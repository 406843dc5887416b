"""What `attach` takes up."""

from pathlib import Path

import pytest

from clusterkit import backends
from clusterkit.backends.base import SupportsCleanup
from clusterkit.backends.local.backend import LocalBackend
from clusterkit.lifecycle import supervise
from clusterkit.lifecycle.control import cancel, reconcile
from clusterkit.run.begun import Begun
from clusterkit.run.status import State
from tests.unit.supervise.supervising import OK, TRACEBACK, Kept, observed, said_of, saved


@pytest.fixture
def failed_alone(unstarted_run, by_hand, monkeypatch):
    """A run that may be started again once, and failed after its supervisor was killed; gives it
    and the arguments of the supervisors that are started for it."""
    run = unstarted_run("launcher: forkserver\nrestarts: 1\n")
    hand = by_hand(run)
    hand.folder.write_json("state.json", said_of(run, State.RUNNING))
    hand.unwatched()
    hand.node(started=hand.dead(), exit_code=7, log=TRACEBACK)
    started = []
    monkeypatch.setattr(supervise, "spawn", lambda *_, **options: started.append(options))
    return run, started


def test_status_of_run_failed_unwatched_hints_attach(failed_alone):
    run, _ = failed_alone
    status = run.status()
    assert (status.state, status.exit_code) == (State.FAILED, 7)
    assert status.remark == (
        f"not restarted (1 restart left): run `clusterkit attach {run.id}` to restart it"
    )


def test_attach_restarts_failed_run_with_restarts_left(failed_alone):
    run, started = failed_alone
    assert run.attach()
    assert started == [{"adopt": True}]


def test_attach_after_cancel_starts_nothing(failed_alone):
    run, started = failed_alone
    status = run.cancel()
    assert (status.state, status.remark) == (State.FAILED, None)
    assert run.status() == status
    assert not run.attach()
    assert started == []


def test_cancel_of_failed_run_removes_reserve_and_token(failed_alone):
    run, _ = failed_alone
    for name in (".reserve", "token"):
        (run.path / name).write_text("x")
    assert run.cancel().state is State.FAILED
    assert not [path.name for path in run.path.iterdir() if path.name in (".reserve", "token")]


def test_status_and_cancel_report_end_when_files_cannot_be_deleted(folder, hand, monkeypatch):
    def refuse(path, missing_ok=False):
        raise PermissionError(13, "Permission denied", str(path))

    hand.unwatched()
    hand.node(started=hand.dead(), exit_code=0)
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(backends, "backend", lambda name: Kept([observed(OK)]))
    assert reconcile(folder).state is State.SUCCEEDED
    assert cancel(folder).state is State.SUCCEEDED


def test_cancel_of_unwatched_run_removes_reserve_and_token(unstarted_run, by_hand, monkeypatch):
    run = unstarted_run()
    hand = by_hand(run)
    hand.node(started=hand.alive())
    hand.unwatched()
    for name in (".reserve", "token"):
        (run.path / name).write_text("x")

    def cancel(self, handle, transport, reason="cancelled"):
        hand.node(started=hand.dead(), exit_code=143, reason="stopped on request")

    monkeypatch.setattr(LocalBackend, "cancel", cancel)
    assert run.cancel().state is State.CANCELLED
    assert not [path.name for path in run.path.iterdir() if path.name in (".reserve", "token")]


def test_backend_cleanup_of_restartable_run_waits_for_cancel(failed_alone, monkeypatch):
    run, _ = failed_alone
    ended = []

    class Served(LocalBackend, SupportsCleanup):
        def clean_up(self, handle, transport):
            ended.append(1)

    monkeypatch.setattr(backends, "backend", lambda name: Served())
    assert run.status().state is State.FAILED
    assert ended == []
    run.cancel()
    assert ended == [1]


def test_attach_does_not_start_run_of_killed_submit(run, hand, monkeypatch):
    monkeypatch.setattr(supervise, "spawn", lambda *_, **__: pytest.fail("it was started"))
    hand.unwatched()
    assert not run.attach()


@pytest.mark.parametrize("attempt", [1, 2])
def test_adopted_half_started_attempt_is_cancelled_and_followed_by_next(supervise_with, attempt):
    script = [observed(State.PENDING)] * attempt + [observed(OK)]

    def killed(supervisor):
        saved(State.PENDING, attempt=attempt)(supervisor)
        Begun(attempt, whole=False).record(supervisor.folder.path)

    backend, status, _ = supervise_with(script, adopt=killed)
    assert [started for started, _ in backend.submitted] == [attempt + 1]
    assert backend.cancelled_attempts == [attempt]
    assert status.state is State.SUCCEEDED
