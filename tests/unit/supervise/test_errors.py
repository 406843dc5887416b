"""The watcher's trouble is not the run's."""

import os
import shutil
import signal
import time

import msgspec
import pytest

from clusterkit import agent, api, backends
from clusterkit.errors import RunFolderError, SubmitFailed, Unavailable
from clusterkit.lifecycle import reconcile as machine
from clusterkit.lifecycle import supervise
from clusterkit.lifecycle.control import reconcile
from clusterkit.lifecycle.supervisor import Supervisor
from clusterkit.run.begun import Begun
from clusterkit.run.folder import RunFolder
from clusterkit.run.status import RunStatus, State
from tests.unit.supervise.supervising import BAD, OK, UP, Scripted, observed, said_of


class Troubled(Scripted):
    """Raises before it gives the state of the attempt."""

    errors = ()

    def status(self, handle, transport):
        if self.errors:
            raise self.errors.pop(0)
        return super().status(handle, transport)


def test_supervisor_retries_after_errors_without_cancelling_run(supervise_with, monkeypatch):
    """A KeyError, a proxy's HTML or an import of an upgraded package cancelled the run."""
    errors = [KeyError("exit.json"), KeyError("exit.json"), ImportError("no name"), OSError(5, "x")]
    monkeypatch.setattr(Troubled, "errors", errors)
    monkeypatch.setattr("clusterkit.lifecycle.supervisor.LONGEST_PAUSE", 0.01)
    backend, status, events = supervise_with([[observed(UP), observed(OK)]], kind=Troubled)
    assert (status.state, status.remark, backend.cancelled) == (State.SUCCEEDED, None, 0)
    assert [event.text for event in events] == [
        "supervisor error, retrying: KeyError: 'exit.json'",
        "supervisor error, retrying: ImportError: no name",
        "supervisor error, retrying: OSError: [Errno 5] x",
    ]


def test_status_remark_shows_supervisor_error_while_retrying(supervise_with, monkeypatch):
    shown = []

    class Told(Troubled):
        def status(self, handle, transport):
            shown.append(handle.folder.read_json("state.json", RunStatus).remark)
            return super().status(handle, transport)

    monkeypatch.setattr(Troubled, "errors", [KeyError("x")])
    monkeypatch.setattr("clusterkit.lifecycle.supervisor.LONGEST_PAUSE", 0.01)
    supervise_with([[observed(UP), observed(UP), observed(OK)]], kind=Told)
    assert shown[:3] == [None, "supervisor error, retrying: KeyError: 'x'", None]


@pytest.mark.parametrize("state", [OK, BAD])
def test_run_end_is_recorded_once_disk_has_room(supervise_with, monkeypatch, state):
    """It turned SUCCEEDED into FAILED."""
    full, real = [1, 2, 3], RunFolder.record_end

    def record_end(self, status):
        if full:
            full.pop()
            raise RunFolderError("No space left on device")
        real(self, status)

    monkeypatch.setattr(RunFolder, "record_end", record_end)
    monkeypatch.setattr("clusterkit.lifecycle.supervisor.LONGEST_PAUSE", 0.01)
    backend, status, _ = supervise_with([observed(state)])
    assert (status.state, status.remark, backend.cancelled) == (state, None, 0)
    assert status.exit_code == (0 if state is OK else 1)


@pytest.mark.parametrize(("half", "started"), [(False, [1, 2]), (True, [1, 2, 3])])
def test_attempt_begun_on_full_disk_is_known_to_next_supervisor(
    unstarted_run, monkeypatch, half, started
):
    """It was started once more beside itself."""
    full, real = [], RunFolder.write

    def write(self, name, data):
        if full:
            raise RunFolderError("No space left on device")
        real(self, name, data)

    class Killed(BaseException):
        pass

    class Dying(Scripted):
        def submit(self, plan, transport, *, attempt=1, secrets=None, record=None):
            super().submit(plan, transport, attempt=attempt)
            full[:] = [attempt] if attempt == 2 else []
            if full and half:
                raise Killed

        def status(self, handle, transport):
            if handle.attempt == 1:
                full[:] = [1]
            elif full:
                raise Killed
            return super().status(handle, transport)

    run = unstarted_run("launcher: forkserver\nnodes: 2\nrestarts: 1\n")
    # Its agents restart nothing, so that no plan has to be saved.
    plan = msgspec.structs.replace(run.plan, restarts=0)
    RunFolder(run.path).write("plan.json", plan.to_json())
    second = [observed(UP, State.PENDING)] if half else [observed(UP, UP), observed(OK, OK)]
    backend = Dying([observed(BAD, BAD), second, observed(OK, OK)])
    monkeypatch.setattr(backends, "backend", lambda name: backend)
    monkeypatch.setattr(RunFolder, "write", write)
    first = Supervisor(RunFolder(run.path))
    first.start()
    with pytest.raises(Killed):
        first.supervise()
    full.clear()
    folder = RunFolder(run.path)
    saved_then = folder.read_json("state.json", RunStatus)
    assert (saved_then.attempt, folder.saved_status().attempt) == (1, 2)
    assert reconcile(folder).attempt == 2
    Supervisor(folder).supervise(adopt=True)
    assert [attempt for attempt, _ in backend.submitted] == started
    status = folder.read_json("state.json", RunStatus)
    assert (status.state, status.attempt) == (State.SUCCEEDED, started[-1])


def test_attempt_does_not_start_before_begin_is_recorded(supervise_with, monkeypatch):
    """The file system is read-only: only evidence could tell the next supervisor."""
    errors, real, begun = [1, 2, 3], Begun.record, []

    def record(self, folder):
        begun.append((self.attempt, self.whole))
        if self.attempt == 2 and errors:
            errors.pop()
            raise RunFolderError("Read-only file system")
        real(self, folder)

    class Looking(Scripted):
        def submit(self, plan, transport, *, attempt=1, secrets=None, record=None):
            assert begun[-1] == (attempt, False)
            assert attempt == 1 or not errors
            super().submit(plan, transport, attempt=attempt)

    monkeypatch.setattr(Begun, "record", record)
    monkeypatch.setattr("clusterkit.lifecycle.supervisor.LONGEST_PAUSE", 0.01)
    job = "launcher: forkserver\nrestarts: 1\n"
    _, status, events = supervise_with([observed(BAD), observed(OK)], job, kind=Looking)
    assert begun == [(1, False), (1, True), *[(2, False)] * 4, (2, True)]
    assert (status.state, status.attempt, status.remark) == (State.SUCCEEDED, 2, None)
    assert events[-1].text == "supervisor error, retrying: RunFolderError: Read-only file system"


def test_supervisor_ends_when_run_folder_is_removed(supervise_with, monkeypatch):
    def record(self, folder):
        if self.attempt == 2:
            shutil.rmtree(folder)
            raise RunFolderError("No such file or directory")

    monkeypatch.setattr(Begun, "record", record)
    with pytest.raises(RunFolderError, match="state"):
        supervise_with([observed(BAD), observed(OK)], "launcher: forkserver\nrestarts: 1\n")


def test_succeeded_restart_with_failed_start_is_not_rerun(supervise_with, monkeypatch):
    class Refusing(Scripted):
        def submit(self, plan, transport, *, attempt=1, secrets=None, record=None):
            super().submit(plan, transport, attempt=attempt)
            if attempt == 2:
                raise Unavailable("h2: connection refused")

    job, ok = "launcher: forkserver\nrestarts: 1\n", observed(OK)
    backend, status, _ = supervise_with([observed(BAD), ok], job, kind=Refusing)
    assert [attempt for attempt, _ in backend.submitted] == [1, 2]
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)


@pytest.mark.parametrize(("late", "state"), [(True, State.SUCCEEDED), (False, State.FAILED)])
def test_partly_started_attempt_succeeds_only_after_probe_window(
    supervise_with, monkeypatch, late, state
):
    """An elastic run goes on with the nodes that started, while this process stands still."""

    class Standing(Scripted):
        def submit(self, plan, transport, *, attempt=1, secrets=None, record=None):
            if late:
                monkeypatch.setattr("clusterkit.lifecycle.supervisor.PROBED_SECONDS", -1.0)
            raise Unavailable("h2: connection refused")

    _, status, _ = supervise_with([observed(OK)], kind=Standing)
    assert status.state is state


@pytest.mark.parametrize("error", [Unavailable("h: connection refused"), SubmitFailed("h: 127")])
def test_failed_start_of_restart_is_retried_but_first_attempt_fails(
    supervise_with, monkeypatch, error
):
    """One refused connection at a restart was FAILED, with restarts left."""
    refused = [2]

    class Refusing(Scripted):
        def submit(self, plan, transport, *, attempt=1, secrets=None, record=None):
            if attempt in refused:
                raise error
            super().submit(plan, transport, attempt=attempt)

    monkeypatch.setattr(machine, "_pause", lambda times: 0.0)
    job, ok = "launcher: forkserver\nrestarts: 1\n", observed(OK)
    stopped = observed(State.CANCELLED)
    backend, status, events = supervise_with([observed(BAD), stopped, ok], job, kind=Refusing)
    assert [attempt for attempt, _ in backend.submitted] == [1, 3]
    told = f"attempt 2 could not be started: {error.message}; starting again, which uses no"
    assert events[1].text.startswith(told)
    assert backend.cancelled_attempts == [2]  # some nodes may have started
    assert (status.state, status.attempt, status.restarts_left) == (State.SUCCEEDED, 3, 0)
    assert status.attempts[1].failure.cause == error.message

    refused[:] = [1]
    backend, status, _ = supervise_with([ok], job, kind=Refusing)
    assert (status.state, status.failure.cause) == (State.FAILED, error.message)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_to_supervisor_does_not_cancel_run(made, hand, signum):
    """A shutdown of the submitter's machine cancelled runs on other machines."""
    node = hand.node(started=hand.alive())
    made.write_json("state.json", said_of(api.Run(made), State.RUNNING))
    with made.acquire_supervisor_lock() as lock:
        supervise.spawn(made, lock, adopt=True)
    pid = made.read_json("supervisor.json", dict)["pid"]
    deadline = time.monotonic() + 60
    while not (found := made.saved_status()) or not found.nodes:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(pid, signum)
    if signum == signal.SIGTERM:
        agent.wait_gone([pid], 60)
        assert not made.has_supervisor()
    hand.node(started=hand.dead(), exit_code=0)
    if signum != signal.SIGTERM:
        agent.wait_gone([pid], 60)
        assert made.saved_status().state is State.SUCCEEDED
    status = reconcile(made)
    assert (status.state, status.exit_code) == (State.SUCCEEDED, 0)
    assert not made.is_cancelled()
    assert made.read("supervisor.log") == b""
    assert node.exists()
