"""What is told of a run from its folder."""

import os

import pytest
from msgspec.structs import replace

from clusterkit.agent import processes
from clusterkit.backends.base import Observation
from clusterkit.backends.local.backend import LocalBackend
from clusterkit.errors import RunFolderError
from clusterkit.lifecycle import control, outcome
from clusterkit.lifecycle.control import current, reconcile
from clusterkit.run import logs
from clusterkit.run.begun import Begun
from clusterkit.run.folder import RunFolder
from clusterkit.run.logs import parse_lines
from clusterkit.run.status import AttemptStatus, Failure, NodeStatus, RunStatus, State
from tests.conftest import HELD
from tests.unit.supervise.supervising import BAD, OK, STAMP, TRACEBACK, observed, saved

# ---------------------------------------------------------------- how a run stands


def test_status_of_just_submitted_run_is_pending(folder):
    assert reconcile(folder).state is State.PENDING


def test_status_of_killed_submit_is_failed_with_resubmit_hint(folder, hand):
    hand.unwatched()
    status = reconcile(folder)
    assert status.state is State.FAILED
    assert status.exit_code == 125
    assert "killed before the run started" in status.failure.cause
    assert status.failure.hint == "submit it again"


def test_status_of_submit_killed_at_start_hints_attach_not_resubmit(folder, hand):
    """`attach` starts it; who submitted it again would have two of it."""
    hand.unwatched()
    Begun(1, whole=False).record(folder.path)
    status = reconcile(folder)
    assert (status.state, status.failure.cause) == (State.FAILED, control.UNSTARTED)
    assert status.failure.hint == f"`clusterkit attach {folder.run_id}` starts it"
    assert control.needs_supervisor(folder)


def test_status_names_attempt_dead_supervisor_did_not_start(folder, hand):
    hand.unwatched()
    Begun(2, whole=False).record(folder.path)
    assert reconcile(folder).failure.cause == "clusterkit was killed before attempt 2 started"


@pytest.mark.parametrize("written", [[], ["job.json"], ["job.json", "plan.json", "plan.txt"]])
def test_status_of_submit_killed_while_recording_becomes_failed(folder, written):
    for path in folder.path.iterdir():
        if path.name not in written:
            path.unlink()
    assert reconcile(folder).state is State.UNKNOWN  # it may be about to take the lock
    with folder.acquire_supervisor_lock():
        assert reconcile(folder).state is State.UNKNOWN
    status = reconcile(folder)
    assert (status.state, status.failure.cause) == (State.FAILED, control.UNSTARTED)
    folder.file("attempts").mkdir()  # then it was recorded once
    assert reconcile(folder).state is State.UNKNOWN


def test_status_of_run_still_being_recorded_is_pending(folder, monkeypatch):
    """Else its end was recorded, and its objects removed, while it started."""
    told, read = [RunFolderError("run.json is missing")], RunFolder.read_json

    def early(self, name, kind):
        if name == "run.json" and told:
            raise told.pop()
        return read(self, name, kind)

    monkeypatch.setattr(RunFolder, "read_json", early)
    with control.Connections() as connections:  # as who polls
        assert reconcile(folder, connections).state is State.PENDING
    assert not told
    assert not folder.file("state.json").exists()


def test_status_stays_pending_when_attach_takes_lock_meanwhile(folder, hand, monkeypatch):
    hand.unwatched()
    hand.node(started=hand.dead(), exit_code=7)
    told = LocalBackend.status

    def late(*a):
        HELD[folder.path] = folder.acquire_supervisor_lock()
        return told(*a)

    monkeypatch.setattr(LocalBackend, "status", late)
    assert reconcile(folder).state is State.PENDING


@pytest.mark.parametrize("hosts", [0, 1])
def test_status_of_submit_killed_while_sending_files_is_failed(
    folder, hand, run, monkeypatch, hosts
):
    """Some hosts, or all, have nothing of it. Who attaches would start it without its project."""
    hand.unwatched()
    lost = NodeStatus(node=0, host="h0", state=State.UNKNOWN, reason="nothing is left of the run")
    seen = Observation(state=State.UNKNOWN, nodes=(lost,)) if hosts else None
    monkeypatch.setattr(LocalBackend, "status", lambda *_: seen)
    status = reconcile(folder)
    assert status.state is State.FAILED
    assert "killed before the run started" in status.failure.cause
    assert not run.attach()


def test_status_of_live_supervisor_is_authoritative(folder, hand):
    hand.node(started=hand.alive())
    assert reconcile(folder).state is State.PENDING
    node = NodeStatus(node=0, host="localhost", state=State.RUNNING)
    said = RunStatus(
        run=folder.run_id, job="demo", cluster="local", backend="local", state=State.RUNNING,
        nodes=(node,),
    )  # fmt: skip
    folder.write_json("state.json", said)
    assert reconcile(folder) == current(folder) == said


def test_current_status_is_none_without_supervisor(folder, hand):
    hand.unwatched()
    assert current(folder) is None


def test_status_without_supervisor_is_running_with_cancel_remark(folder, hand, run):
    hand.unwatched()
    hand.node(started=hand.alive())
    status = reconcile(folder)
    assert status.state is State.RUNNING
    assert f"clusterkit cancel {run.id}" in status.remark


def test_status_without_supervisor_reports_success_of_ended_run(folder, hand):
    hand.unwatched()
    hand.node(started=hand.dead(), exit_code=0, at=1234.5)
    status = reconcile(folder)
    assert (status.state, status.exit_code, status.finished_at) == (State.SUCCEEDED, 0, 1234.5)


def test_status_without_supervisor_reports_failure_cause(folder, hand):
    hand.unwatched()
    hand.node(started=hand.dead(), exit_code=7, log=TRACEBACK)
    status = reconcile(folder)
    assert (status.state, status.exit_code) == (State.FAILED, 7)
    assert status.failure.cause == "ValueError: bad"
    assert status.failure.rank == 0


def test_failure_diagnosis_reads_only_ends_of_long_logs(folder, hand, monkeypatch):
    """10 GB were parsed for 14 minutes before a restart."""
    monkeypatch.setattr(outcome, "TAIL_BYTES", 1 << 12)
    monkeypatch.setattr(outcome, "NODE_TAIL_BYTES", 1 << 12)
    read = []
    monkeypatch.setattr(
        logs,
        "parse_lines",
        lambda data, *more: (read.append(len(data)), parse_lines(data, *more))[1],
    )
    hand.unwatched()
    line = f"{STAMP} 0 step\n" * 10_000
    hand.node(started=hand.dead(), exit_code=7, log=line + TRACEBACK)
    status = reconcile(folder)
    assert status.failure.cause == "ValueError: bad"
    assert 0 < sum(read) <= 1 << 12


def test_status_without_supervisor_reports_cancelled_run(folder, hand):
    hand.unwatched()
    folder.mark_cancelled()
    hand.node(started=hand.dead(), exit_code=143, reason="stopped on request")
    status = reconcile(folder)
    assert (status.state, status.exit_code) == (State.CANCELLED, 130)


def test_agent_killed_without_exit_record_counts_as_failed(folder, hand):
    hand.unwatched()
    node = hand.node(started=hand.dead())
    (node / "agent.log").write_text("something\nsh: out of pipes\n")
    status = reconcile(folder)
    assert status.state is State.FAILED
    assert "ended without reporting an exit code: sh: out of pipes" in status.failure.cause


def test_node_script_before_agent_start_counts_as_running(folder, hand):
    hand.unwatched()
    (hand.node() / "pid").write_text(f"{os.getpid()} {processes.boot_id()}\n")
    assert reconcile(folder).state is State.RUNNING


def test_final_status_of_supervisor_is_kept(folder, hand):
    said = RunStatus(
        run=folder.run_id, job="demo", cluster="local", backend="local", state=State.FAILED,
        exit_code=3, failure=Failure(node=0, rank=1, exit_code=3, cause="because"),
    )  # fmt: skip
    folder.write_json("state.json", said)
    hand.node(started=hand.alive())
    assert reconcile(folder) == said


def test_status_between_attempts_is_restarting(folder, hand):
    hand.node(started=hand.dead(), exit_code=1)
    said = RunStatus(
        run=folder.run_id, job="demo", cluster="local", backend="local",
        state=State.RESTARTING, attempt=1,
    )  # fmt: skip
    folder.write_json("state.json", said)
    assert reconcile(folder).state is State.RESTARTING


def test_status_follows_newest_attempt(folder, hand):
    hand.unwatched()
    hand.node(attempt=1, started=hand.dead(), exit_code=1)
    hand.node(attempt=2, started=hand.dead(), exit_code=0)
    said = RunStatus(
        run=folder.run_id, job="demo", cluster="local", backend="local",
        state=State.RUNNING, attempt=2,
    )  # fmt: skip
    folder.write_json("state.json", said)
    status = reconcile(folder)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)


@pytest.mark.parametrize(("exit_code", "state"), [(0, State.SUCCEEDED), (7, State.FAILED)])
def test_exit_records_of_all_nodes_outrank_queued_platform_status(
    folder, hand, monkeypatch, exit_code, state
):
    hand.unwatched()
    hand.node(started=hand.dead(), exit_code=exit_code)
    told = LocalBackend.status
    monkeypatch.setattr(LocalBackend, "status", lambda *a: replace(told(*a), queued=True))
    status = reconcile(folder)
    assert (status.state, status.exit_code) == (state, exit_code)
    assert "supervisor is gone" not in (status.remark or "")


def test_node_still_queued_on_platform_keeps_run_running(unstarted_run, by_hand, monkeypatch):
    run = unstarted_run(nodes=2)
    hand, told = by_hand(run), LocalBackend.status
    hand.unwatched()
    hand.node(started=hand.dead(), exit_code=7)
    monkeypatch.setattr(LocalBackend, "status", lambda *a: replace(told(*a), queued=True))
    status = reconcile(RunFolder(run.path))
    assert [node.state for node in status.nodes] == [State.FAILED, State.PENDING]
    assert (status.state, status.exit_code) == (State.RUNNING, None)


@pytest.mark.parametrize(
    "started",
    [{}, {"pid": os.getpid()}, {"pid": os.getpid(), "start_ticks": None}, {"start_ticks": None}],
    ids=lambda started: "+".join(started) or "nothing",
)
def test_incomplete_process_identity_does_not_count_as_running(folder, hand, started):
    hand.unwatched()
    hand.node(started=started)
    assert reconcile(folder).state is not State.RUNNING


def test_process_identity_from_before_reboot_counts_as_failed(folder, hand):
    hand.unwatched()
    hand.node(started=hand.alive() | {"boot_id": "before"})
    assert reconcile(folder).state is State.FAILED


# ---------------------------------------------------------------- earlier attempts


def test_status_records_earlier_attempts(supervise_with, by_hand):
    job = "launcher: forkserver\nrestarts: 2\n"
    _, status, _ = supervise_with([observed(BAD, code=7), observed(BAD, code=9), observed(OK)], job)
    assert [(a.attempt, a.state, a.failure.exit_code) for a in status.attempts] == [
        (1, State.FAILED, 7),
        (2, State.FAILED, 9),
    ]
    first, second = status.attempts
    assert first.failure.origin == "node 0"
    assert status.started_at == first.started_at <= first.finished_at == second.started_at


def test_adopting_supervisor_keeps_earlier_attempts(supervise_with):
    earlier = AttemptStatus(
        attempt=1, state=State.FAILED, failure=None, started_at=1.0, finished_at=2.0
    )
    adopt = saved(State.RUNNING, attempt=2, attempts=(earlier,))
    job = "launcher: forkserver\nrestarts: 2\n"
    _, status, _ = supervise_with([observed(BAD), observed(BAD), observed(OK)], job, adopt=adopt)
    assert [attempt.attempt for attempt in status.attempts] == [1, 2]
    assert status.attempts[0] == earlier
