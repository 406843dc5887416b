"""What is told of a run from its folder, and how a supervisor judges what it sees.

The folders are made by hand: no process is started here.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from clusterkit import agent, api, backends
from clusterkit.agent import processes
from clusterkit.backends.base import Observation, SupportsCleanup
from clusterkit.backends.local.backend import LocalBackend
from clusterkit.backends.node_status import observed as from_files
from clusterkit.backends.ports import move_port
from clusterkit.cluster import CLUSTER_TYPES
from clusterkit.errors import BadInput, ClusterkitError, RunFolderError, SubmitFailed, Unavailable
from clusterkit.lifecycle import control, outcome, supervise
from clusterkit.lifecycle import reconcile as machine
from clusterkit.lifecycle.control import cancel, current, reconcile
from clusterkit.lifecycle.evidence import Terms, Verdict
from clusterkit.lifecycle.reconcile import (
    EARLY_LOSSES,
    LOST_SECONDS,
    PORT_TRIES,
    Next,
    Reconciler,
    Start,
)
from clusterkit.lifecycle.supervisor import Supervisor
from clusterkit.output import mirror
from clusterkit.run import logs
from clusterkit.run.begun import Begun
from clusterkit.run.folder import Event, RunFolder
from clusterkit.run.logs import parse_lines
from clusterkit.run.status import AttemptStatus, Failure, NodeStatus, RunStatus, State, overall
from clusterkit.transport import LocalTransport
from tests.conftest import HELD

STAMP = "2026-11-21T20:11:58.123456Z"
TRACEBACK = (
    f"{STAMP} 0 Traceback (most recent call last):\n{STAMP} 0   File x\n{STAMP} 0 ValueError: bad\n"
)


@pytest.fixture
def run(unstarted_run):
    return unstarted_run()


@pytest.fixture
def hand(run, by_hand):
    return by_hand(run)


@pytest.fixture
def folder(run):
    return RunFolder(run.path)


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


# ---------------------------------------------------------------- damaged folders

FILES = [
    "run.json",
    "job.json",
    "cluster.json",
    "facts.json",
    "plan.json",
    "plan.txt",
    "state.json",
    "supervisor.json",
    "events.jsonl",
    "steps.jsonl",
    "files/node.sh",
    "files/agent.pyz",
    "attempts/1/node-0/log",
    "attempts/1/node-0/started.json",
    "attempts/1/node-0/exit.json",
    "attempts/1/node-0/ranks.jsonl",
    "attempts/1/node-0/pid",
    "attempts/1/node-0",
    "attempts",
    "files",
]
DAMAGE = {
    "missing": None,
    "empty": b"",
    "torn": "half",
    "garbage": b"\x00\xff\xfe{[",
    "an empty object": b"{}",
    "a list": b"[]",
    "null": b"null",
    "a number": b"3",
    "a folder": "folder",
}


def spoil(path, damage):
    content = path.read_bytes() if path.is_file() else b""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if damage == "folder":
        path.mkdir(parents=True)
    elif damage == "half":
        path.write_bytes(content[: len(content) // 2])
    elif damage is not None:
        path.write_bytes(damage)


@pytest.fixture
def complete(folder, hand, run):
    """A folder with every file that a run in its middle has."""
    hand.unwatched()
    folder.append("events.jsonl", Event(at=1.0, attempt=1, text="something"))
    folder.append("steps.jsonl", Event(at=1.0, attempt=1, text="something"))
    (folder.path / "files").mkdir()
    # Not the true agent: whatever `cancel` starts here must not look for processes.
    (folder.path / "files" / "agent.pyz").write_text("print('{}')\n")
    (folder.path / "files" / "node.sh").write_text("exit 0\n")
    node = hand.node(started=hand.dead(), exit_code=7, log=TRACEBACK)
    (node / "ranks.jsonl").write_text('{"rank": 0, "pid": 5}\n')
    (node / "pid").write_text("999999999\n")
    said = RunStatus(
        run=folder.run_id, job="demo", cluster="local", backend="local", state=State.RUNNING
    )
    folder.write_json("state.json", said)
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_reconcile_returns_status_for_damaged_run_folder(complete, name, damage):
    spoil(complete.path / name, DAMAGE[damage])
    status = reconcile(complete)
    assert status.run == complete.run_id
    assert isinstance(status.state, State)


@pytest.mark.parametrize("damage", ["missing", "torn", "a list"])
@pytest.mark.parametrize("name", ["run.json", "plan.json", "cluster.json"])
def test_status_with_damaged_record_is_unknown_and_names_file(complete, name, damage):
    spoil(complete.path / name, DAMAGE[damage])
    status = reconcile(complete)
    assert status.state is State.UNKNOWN
    assert name in status.remark


def test_failure_takes_rank_and_exit_code_from_exit_record(complete, hand):
    launcher = {"pid": 5, "rank": None, "exit_code": 1, "at": 3.0}
    rank = {"pid": None, "rank": 0, "exit_code": 9, "at": 4.0}
    hand.node(exit_code=1, log="", processes=[launcher, rank], oom_kills=1)
    failure = reconcile(complete).failure
    assert (failure.rank, failure.exit_code) == (0, 9)


@pytest.mark.parametrize(
    "processes", [3, [3], [{}], [{"rank": 0}], [{"rank": 0, "exit_code": 9}], {"rank": 0}]
)
def test_status_with_malformed_exit_record_is_unknown(complete, hand, processes):
    hand.node(exit_code=1, log="", processes=processes)
    status = reconcile(complete)
    assert (status.state, status.failure) == (State.UNKNOWN, None)
    assert "exit.json is damaged: it cannot be read" in status.remark


def test_cancel_without_plan_terminates_processes_of_run(complete):
    complete.file("plan.json").unlink()
    env = {"CLUSTERKIT_RUN_DIR": str(complete.path)}
    with subprocess.Popen(["sleep", "600"], env=env) as process:
        assert cancel(complete).state is State.UNKNOWN
        assert process.wait(60) == -signal.SIGTERM
    assert complete.is_cancelled()


# ---------------------------------------------------------------- cancelling by hand-made folders


def test_cancel_of_ended_run_changes_nothing(folder, hand):
    hand.unwatched()
    hand.node(started=hand.dead(), exit_code=0)
    assert cancel(folder).state is State.SUCCEEDED
    assert not folder.is_cancelled()


class Clock:
    """Stands in for the module `time`: nobody really waits, and each wait may do something."""

    def __init__(self, waited=lambda: None):
        self.now = 0.0
        self.waited = waited

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.waited()


def test_cancel_before_start_is_recorded_and_takes_effect(folder, hand, monkeypatch):
    monkeypatch.setattr(control, "time", Clock())
    assert cancel(folder).state is State.PENDING
    hand.unwatched()
    assert reconcile(folder).state is State.CANCELLED
    assert cancel(folder).state is State.CANCELLED


def test_cancel_waits_for_final_status_of_slow_supervisor(folder, monkeypatch):
    ended = []

    def record():
        if ended:
            said = RunStatus(
                run=folder.run_id, job="demo", cluster="local", backend="local",
                state=State.CANCELLED, exit_code=130,
            )  # fmt: skip
            folder.write_json("state.json", said)

    monkeypatch.setattr(control, "time", Clock(record))
    monkeypatch.setattr(LocalBackend, "cancel", lambda *args, **more: ended.append(args))
    assert cancel(folder).state is State.CANCELLED
    assert ended


# ---------------------------------------------------------------- the supervisor's judgement


class Scripted(LocalBackend):
    """A backend whose attempts end as the test says; nothing is started."""

    def __init__(self, attempts):
        self.attempts = [seen if isinstance(seen, list) else [seen] for seen in attempts]
        self.submitted = []
        self.given = []  # restarts, to the agents that are started
        self.cancelled = 0
        self.cancelled_attempts = []

    def submit(self, plan, transport, *, attempt=1, secrets=None, record=None):
        self.submitted.append((attempt, plan.port))
        self.given.append(plan.restarts)

    def status(self, handle, transport):
        seen = self.attempts[handle.attempt - 1]
        found = seen.pop(0) if len(seen) > 1 else seen[0]
        port = str(handle.plan.port)
        nodes = tuple(
            msgspec.structs.replace(node, reason=node.reason and node.reason.replace("PORT", port))
            for node in found.nodes
        )
        return msgspec.structs.replace(found, nodes=nodes)

    def cancel(self, handle, transport, reason="cancelled"):
        self.cancelled += 1
        self.cancelled_attempts.append(handle.attempt)


def observed(*states, code=None, reason=None):
    codes = {State.SUCCEEDED: 0, State.FAILED: 1, State.CANCELLED: 143}
    nodes = tuple(
        NodeStatus(
            node=number, host="h", state=state, reason=reason,
            exit_code=codes.get(state) if code is None else code,
        )
        for number, state in enumerate(states)
    )  # fmt: skip
    return Observation(state=overall(set(states)), nodes=nodes)


def vanished(*states):
    """A node whose agent ended without an exit record, beside others."""
    found = observed(State.FAILED, *states)
    first = msgspec.structs.replace(found.nodes[0], exit_code=None)
    return msgspec.structs.replace(found, nodes=(first, *found.nodes[1:]))


OK, BAD, UP = State.SUCCEEDED, State.FAILED, State.RUNNING


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


def went_on(attempt, *states, left=None):
    """An attempt that has ended so, and whose agents have begun that one."""
    return msgspec.structs.replace(observed(*states), next_attempt=attempt, restarts_left=left)


def saved(state, **fields):
    def adopt(supervisor):
        before = msgspec.structs.replace(supervisor.status, state=state, **fields)
        supervisor.folder.write_json("state.json", before)

    return adopt


class Kept(Scripted, SupportsCleanup):
    """One whose nodes stay with a service, which does not answer the first few times."""

    silent = 0

    def clean_up(self, handle, transport):
        self.cancelled += 1
        if self.cancelled <= self.silent:
            raise Unavailable("the engine does not answer")


def test_backend_cleanup_runs_after_each_attempt(supervise_with):
    job = "launcher: forkserver\nrestarts: 1\n"
    backend, status, _ = supervise_with([observed(BAD), observed(OK)], job, kind=Kept)
    assert backend.cancelled == 2
    assert (status.state, status.remark) == (State.SUCCEEDED, None)


def test_failed_cleanup_is_remarked_until_cleanup_succeeds(supervise_with, monkeypatch):
    monkeypatch.setattr(Kept, "silent", 1)
    _, status, events = supervise_with([observed(OK)], kind=Kept)
    assert [event.text for event in events] == [
        "not all nodes could be stopped: the engine does not answer"
    ]
    assert "the engine does not answer; `clusterkit cancel" in status.remark
    _, status, _ = supervise_with(
        [observed(BAD), observed(OK)], "launcher: forkserver\nrestarts: 1\n", kind=Kept
    )
    assert status.remark is None


@pytest.mark.parametrize(
    ("restarts", "attempts", "adopt", "started", "end"),
    [
        pytest.param(3, [observed(OK)], None, [1], (State.SUCCEEDED, 0, 1, 3, 0), id="success"),
        pytest.param(
            2, [observed(BAD), observed(BAD), observed(OK)], None,
            [1, 2, 3], (State.SUCCEEDED, 0, 3, 0, 2), id="as often as the job says"),
        pytest.param(
            0, [observed(BAD, code=7)], None, [1], (State.FAILED, 7, 1, 0, 0), id="no restarts"),
        pytest.param(
            2, [went_on(2, BAD, left=1), observed(BAD), observed(OK)], None,
            [1, 3], (State.SUCCEEDED, 0, 3, 0, 2), id="the agents restart once"),
        pytest.param(
            2, [went_on(2, BAD, left=1), went_on(3, BAD, left=0), observed(BAD, code=9)], None,
            [1], (State.FAILED, 9, 3, 0, 2), id="the agents use all restarts"),
        pytest.param(
            1, [went_on(2, State.UNKNOWN), observed(BAD), observed(OK)], None,
            [1, 3], (State.SUCCEEDED, 0, 3, 0, 2), id="a platform's restart is free"),
        pytest.param(
            2, [msgspec.structs.replace(observed(BAD, code=9), final=True)], None,
            [1], (State.FAILED, 9, 1, 2, 0), id="the agents have decided"),
        pytest.param(
            1, [observed(BAD), observed(OK)], saved(State.RUNNING),
            [2], (State.SUCCEEDED, 0, 2, 0, 1), id="failed without a supervisor"),
        pytest.param(
            1, [observed(BAD)] * 3 + [observed(OK)],
            saved(State.RUNNING, attempt=3, restarts_left=1),
            [4], (State.SUCCEEDED, 0, 4, 0, 1), id="attached after a free restart"),
        pytest.param(
            2, [went_on(2, BAD), went_on(3, BAD), observed(OK)], saved(State.RUNNING),
            [], (State.SUCCEEDED, 0, 3, 2, 2), id="attached while agents restart"),
    ],
)  # fmt: skip
def test_supervisor_starts_attempts_within_restart_budget(
    supervise_with, restarts, attempts, adopt, started, end
):
    job = f"launcher: forkserver\nrestarts: {restarts}\n"
    backend, status, _ = supervise_with(attempts, job, adopt)
    assert [attempt for attempt, _ in backend.submitted] == started
    earlier = len(status.attempts)
    assert (status.state, status.exit_code, status.attempt, status.restarts_left, earlier) == end
    assert status.finished_at is not None


def test_run_finished_at_is_end_of_last_node(supervise_with):
    """Its supervisor may have stood still since then."""
    seen = observed(OK, OK)
    nodes = (
        msgspec.structs.replace(seen.nodes[0], ended_at=1000.5),
        msgspec.structs.replace(seen.nodes[1], ended_at=999.0),
    )
    _, status, _ = supervise_with([msgspec.structs.replace(seen, nodes=nodes)])
    assert (status.state, status.finished_at) == (State.SUCCEEDED, 1000.5)


def test_events_name_each_failure_and_restarts_left(supervise_with):
    attempts = [observed(BAD), observed(BAD), observed(OK)]
    _, _, events = supervise_with(attempts, "launcher: forkserver\nrestarts: 2\n")
    assert events[0].text.startswith("attempt 1 failed: node 0: exit code 1 of the launcher;")
    assert [event.text.split("; ")[-1] for event in events] == [
        "starting again, 1 restart left",
        "starting again, 0 restarts left",
    ]
    _, _, events = supervise_with([observed(OK)], "launcher: forkserver\nrestarts: 3\n")
    assert events == []


def test_run_over_time_limit_fails_with_124_and_no_restart(supervise_with):
    late = observed(BAD, code=124, reason=agent.OVER_TIME_LIMIT)
    job = "launcher: forkserver\nrestarts: 3\ntime_limit: 90m\n"
    _, status, _ = supervise_with([went_on(2, BAD), late], job)
    assert (status.state, status.exit_code, status.attempt) == (State.FAILED, 124, 2)
    assert status.failure.cause == "time_limit of 90m: the run was stopped"


def test_pause_of_supervisor_does_not_fail_pending_node(supervise_with, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(mirror, "awake", mirror.PauseAwareClock(lambda: now[0]))
    status = Scripted.status

    def paused(self, handle, transport):
        now[0] += 3600
        return status(self, handle, transport)

    monkeypatch.setattr(Scripted, "status", paused)
    waiting = observed(State.PENDING)
    _, ended, _ = supervise_with([[waiting, waiting, observed(OK)]])
    assert ended.state is State.SUCCEEDED


def test_rank_exits_include_stopped_node_only_when_rank_failed_first():
    def document(at, code, **more):
        end = {"pid": 1, "rank": 1, "exit_code": code, "at": at}
        return json.dumps({"exit_code": 1, "processes": [end], **more}).encode()

    stopped = observed(BAD, State.CANCELLED).nodes
    for first, code, expected in ((1.0, 137, [0, 1]), (3.0, 137, [0]), (1.0, 143, [0])):
        ended = {0: document(2.0, 1), 1: document(first, code, reason="stopped: node 0 failed")}
        assert [end.node for end in from_files(stopped, ended).rank_exits] == expected


def test_supervisor_follows_attempts_begun_by_agents(supervise_with):
    job = "launcher: forkserver\nnodes: 2\nrestarts: 2\n"
    backend, status, events = supervise_with(
        [[observed(UP, UP), went_on(2, BAD, UP, left=1), went_on(2, BAD, OK, left=1)],
         went_on(3, BAD, BAD, left=0),
         [observed(State.PENDING, UP), observed(UP, UP), observed(OK, OK)]], job, kind=Kept,
    )  # fmt: skip
    assert [attempt for attempt, _ in backend.submitted] == [1]
    assert backend.cancelled == 1  # at the end
    assert (status.state, status.attempt) == (State.SUCCEEDED, 3)
    assert [each.failure.origin for each in status.attempts] == ["node 0", "node 0"]
    assert [event.text.split("; ")[-1] for event in events] == [
        "starting again, 1 restart left",
        "starting again, 0 restarts left",
    ]


def test_supervisor_and_agents_share_restart_budget(supervise_with):
    job = "launcher: forkserver\nrestarts: 3\n"
    backend, status, _ = supervise_with(
        [observed(BAD), went_on(3, BAD, left=1), observed(BAD), observed(BAD, code=9)], job
    )
    assert [attempt for attempt, _ in backend.submitted] == [1, 2, 4]
    assert backend.given == [3, 2, 0]
    assert (status.state, status.exit_code, status.restarts_left) == (State.FAILED, 9, 0)


def test_supervisor_does_not_wait_for_node_that_missed_agent_restart(supervise_with):
    job = "launcher: forkserver\nnodes: 2\nrestarts: 1\n"
    backend, status, _ = supervise_with(
        [went_on(2, BAD, BAD, left=0), observed(BAD, State.PENDING)], job
    )
    assert backend.cancelled >= 1
    assert (status.state, status.attempt, status.failure.node) == (State.FAILED, 2, 0)


def test_cancel_ends_attempt_begun_by_agents(supervise_with):
    def cancelled(supervisor):
        saved(State.RUNNING)(supervisor)
        supervisor.folder.file("cancelled").touch()

    job = "launcher: forkserver\nrestarts: 3\n"
    script = [went_on(2, BAD), [observed(UP), observed(UP), observed(State.CANCELLED)]]
    backend, status, _ = supervise_with(script, job, adopt=cancelled)
    assert backend.cancelled >= 1
    assert status.state is State.CANCELLED


def test_failed_node_cancels_other_nodes(supervise_with):
    script = [[observed(UP, UP), observed(BAD, UP), observed(BAD, UP), observed(BAD, BAD)]]
    backend, status, _ = supervise_with(script, "launcher: forkserver\nnodes: 2\n")
    assert backend.cancelled >= 1
    assert status.state is State.FAILED


def test_elastic_run_succeeds_without_failed_node(supervise_with):
    script = [[observed(UP, UP), observed(BAD, UP), observed(BAD, UP), observed(BAD, OK)]]
    backend, status, events = supervise_with(script, 'nodes: "1:2"\n')
    assert backend.cancelled == 0
    assert status.state is State.SUCCEEDED
    assert [event.text for event in events] == ["1 of 2 elastic nodes failed"]


class Awake:
    """A clock that goes on by 5 s at each look."""

    now = 0.0

    def __call__(self):
        assert self.now < 10_000, "it waits"
        self.now += 5.0
        return self.now


def test_single_launcher_success_counts_for_all_nodes(supervise_with):
    def adopt(supervisor):  # as mpirun's plans are
        shape = {"min_nodes": 2, "nodes": 2, "nproc_per_node": 1}
        supervisor.plan = msgspec.structs.replace(supervisor.plan, nodes=1, topology=shape)

    _, status, events = supervise_with([observed(OK)], adopt=adopt)
    assert status.state is State.SUCCEEDED
    assert events == []


@pytest.mark.parametrize(
    "job", ["nodes: 2\nspares: 1\n", "nodes: '1:2'\nspares: 1\non_node_loss: shrink\n"]
)
def test_supervisor_follows_restarted_nodes_with_spare_pending(supervise_with, monkeypatch, job):
    monkeypatch.setattr(mirror, "awake", Awake())
    first = went_on(2, BAD, State.UNKNOWN, State.PENDING, left=0)
    script = [[observed(UP, State.UNKNOWN, State.PENDING), first], observed(OK, OK, State.PENDING)]
    job = f"launcher: forkserver\nrestarts: 1\n{job}"
    _, status, _ = supervise_with(script, job)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)


def test_shrunk_run_succeeds_without_dropped_node(supervise_with):
    job = "launcher: forkserver\nnodes: '1:2'\non_node_loss: shrink\nrestarts: 1\n"
    first = went_on(2, BAD, State.UNKNOWN, left=0)
    _, status, events = supervise_with([first, observed(OK, State.PENDING)], job)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    assert events[-1].text == "1 of 2 elastic nodes failed"


def test_dropped_node_is_started_again_to_rejoin_shrunk_run(supervise_with, monkeypatch):
    job = "launcher: forkserver\nnodes: '1:3'\non_node_loss: shrink\n"
    given = []

    class Joined(Scripted):
        def submit(self, plan, transport, *, attempt=1, secrets=None, record=None):
            nodes = [step.node for step in plan.steps]
            given.append((nodes, attempt, secrets[agent.PEER_TOKEN].reveal()))
            for step in plan.steps:
                record(step, "started")

    monkeypatch.setattr(mirror, "awake", Awake())
    lost = observed(UP, State.UNKNOWN, UP)
    here = observed(UP, State.CANCELLED, UP)
    script = [[lost] * 10 + [here] * 9 + [observed(UP, UP, UP), observed(OK, OK, OK)]]
    _, status, events = supervise_with(script, job, kind=Joined)
    assert status.state is State.SUCCEEDED
    assert [(nodes, attempt) for nodes, attempt, _ in given] == [([0, 1, 2], 1), ([1], 1)]
    assert given[0][2] == given[1][2]  # they know each other by it
    assert events[-1].text == "node 1 was started again, to join the others"


def test_node_restarted_during_cancel_is_stopped(supervise_with, monkeypatch):
    job = "launcher: forkserver\nnodes: '1:2'\non_node_loss: shrink\n"
    clock, over = Awake(), observed(State.CANCELLED, State.CANCELLED)

    class Slow(Scripted):
        def submit(self, plan, transport, *, attempt=1, secrets=None, record=None):
            for step in plan.steps:
                record(step, "started")
            if len(plan.steps) < self.all:
                clock.now += 60.0
                self.attempts[0] = [over, over, observed(State.CANCELLED, UP), over]
                RunFolder(Path(plan.run_dir)).mark_cancelled()
            else:
                self.all = len(plan.steps)

        all = 0

    monkeypatch.setattr(mirror, "awake", clock)
    monkeypatch.setattr(machine, "AGAIN_SECONDS", 0.0)
    script = [[observed(UP, State.CANCELLED)]]
    backend, status, _ = supervise_with(script, job, kind=Slow)
    assert status.state is State.CANCELLED
    assert backend.cancelled >= 1


def test_adopting_supervisor_does_not_wait_for_node_lost_before(supervise_with, monkeypatch):
    job = "launcher: forkserver\nnodes: '1:2'\non_node_loss: shrink\nrestarts: 1\n"
    monkeypatch.setattr(Scripted, "start_seconds", 0.0)
    script = [observed(BAD, BAD), [observed(UP, State.PENDING)] * 3 + [observed(OK, State.PENDING)]]
    backend, status, _ = supervise_with(script, job, adopt=saved(State.RUNNING, attempt=2))
    assert (status.state, status.attempt, backend.cancelled) == (State.SUCCEEDED, 2, 0)


@pytest.fixture
def beside_a_spare(unstarted_run, by_hand, monkeypatch):
    """A run whose two nodes with ranks have ended so, and whose third node stands so; gives it, and
    for what it was ended since."""

    def make(code, spare, job="nodes: 2\nspares: 1\n"):
        run = unstarted_run(f"launcher: forkserver\n{job}")
        hand, ended = by_hand(run), []
        for node in (0, 1):
            hand.node(node, started=hand.dead(), exit_code=code)
        if spare is not None:
            hand.node(2, started=hand.alive() | {"spare": True} | spare)

        def cancel(self, handle, transport, reason="cancelled"):
            ended.append(reason)
            hand.node(2, started=hand.dead(), exit_code=0, reason=f"stopped: {reason}")

        monkeypatch.setattr(LocalBackend, "cancel", cancel)
        return run, hand, ended

    return make


@pytest.mark.parametrize(("code", "state"), [(0, State.SUCCEEDED), (7, State.FAILED)])
@pytest.mark.parametrize(
    "spare",
    [{}, {"waits": {"why": "node 0 was lost; waiting for it", "until": 1e10}}, None],
    ids=["seeks node 0", "waits for it", "has not come"],
)
@pytest.mark.parametrize("job", ["nodes: 2\nspares: 1\n", "nodes: '1:2'\nspares: 1\n"])
def test_nodes_with_ranks_decide_run_end_beside_spare(
    beside_a_spare, monkeypatch, code, state, spare, job
):
    if "1:2" in job:
        job += "on_node_loss: shrink\n"
    run, hand, ended = beside_a_spare(code, spare, job)

    monkeypatch.setattr(mirror, "awake", Awake())
    monkeypatch.setattr("clusterkit.lifecycle.supervisor.POLL_SECONDS", 0.0)
    Supervisor(hand.folder).supervise()
    status = hand.folder.read_json("state.json", RunStatus)
    assert (status.state, status.exit_code) == (state, code)
    assert ended == ["another node has ended"]
    assert run.events() == []


@pytest.mark.parametrize(("code", "state"), [(0, State.SUCCEEDED), (7, State.FAILED)])
@pytest.mark.parametrize("spare", [{}, None])
def test_spare_does_not_change_end_of_unwatched_run(beside_a_spare, code, state, spare):
    run, hand, _ = beside_a_spare(code, spare)
    hand.unwatched()
    assert (run.status().state, run.status().exit_code) == (state, code)
    why = "stopped: node 0 cannot be reached: Connection refused"
    hand.node(2, started=hand.dead(), exit_code=0, reason=why)
    assert (run.status().state, run.status().exit_code) == (state, code)


@pytest.mark.parametrize("attempt", [1, 2])
def test_unwatched_shrunk_run_counts_as_succeeded(unstarted_run, by_hand, attempt):
    run = unstarted_run("launcher: forkserver\nnodes: '1:2'\non_node_loss: shrink\n")
    hand = by_hand(run)
    hand.node(1, started=hand.dead())
    if attempt > 1:
        hand.node(0, started=hand.dead(), exit_code=1, next=2)
    hand.node(0, attempt, started=hand.dead(), exit_code=0)
    hand.unwatched()
    assert (run.status().state, run.status().attempt) == (State.SUCCEEDED, attempt)


def test_reconciler_restarts_lost_nodes_with_backoff():
    terms = Terms(nodes=3, places=3, least=1, rejoins=True, stop_grace=5.0)
    rejoin = Reconciler(terms, 0)

    def due(seen, now, followed):
        rejoin.started_by_agents = followed
        return rejoin.joining(seen, now)

    wait = 5.0 + machine.REJOIN_SECONDS
    gone, away = observed(UP, BAD, UP), observed(UP, State.UNKNOWN, UP)
    assert due(gone, 0.0, False) == []
    assert due(gone, wait - 1, False) == []
    assert due(gone, wait, False) == [1]
    assert due(gone, wait + 1, False) == []
    assert due(gone, 2 * wait + 1, False) == []
    assert due(gone, 3 * wait + 1, False) == [1]  # the next time it is given longer
    # Not while its host is away, while the others wait for it, or when all is decided.
    for other in (away, observed(State.RESTARTING, BAD, State.RESTARTING),
                  msgspec.structs.replace(gone, final=True)):  # fmt: skip
        assert due(other, 100 * wait, False) == due(gone, 101 * wait, False) == []
    assert due(observed(BAD, UP, UP), 300 * wait, False) == []
    assert due(observed(BAD, UP, UP), 400 * wait, False) == []  # node 0 cannot
    absent = observed(UP, State.PENDING, UP)
    assert due(absent, 500 * wait, False) == due(absent, 600 * wait, False) == []
    assert due(absent, 700 * wait, True) == []
    assert due(absent, 800 * wait, True) == [1]


def test_elastic_run_below_minimum_nodes_fails(supervise_with):
    script = [[observed(BAD, BAD, UP), observed(BAD, BAD, BAD)]]
    backend, status, _ = supervise_with(script, 'nodes: "2:3"\n')
    assert backend.cancelled >= 1
    assert status.state is State.FAILED


def test_port_taken_at_start_moves_port_without_using_restart(supervise_with):
    taken = observed(BAD, reason="port: PORT (errno: 98 - Address already in use).")
    backend, status, events = supervise_with([taken, observed(OK)])
    assert status.state is State.SUCCEEDED
    (_, first), (_, second) = backend.submitted
    assert first != second
    assert f"{second} chosen instead" in events[-1].text


@pytest.mark.parametrize("wrong", ["disk", "host"])
def test_failed_replan_does_not_start_same_attempt_twice(supervise_with, monkeypatch, wrong):
    """The error left the old number: attempt 1 was started in its own folder a second time."""
    refused, real, ask = [1], RunFolder.write, LocalTransport.free_port
    taken = observed(BAD, reason="port: PORT (errno: 98 - Address already in use).")

    def write(self, name, data):
        begun = self.file("state.json").exists()
        if wrong == "disk" and begun and name in ("facts.json", "plan.json", "plan.txt"):
            raise RunFolderError("No space left on device")
        real(self, name, data)

    def free_port(self, host, wanted=None):
        if wrong == "host" and wanted is None and refused:
            refused.pop()
            raise Unavailable(f"{host}: connection refused")
        return ask(self, host, wanted)

    monkeypatch.setattr(RunFolder, "write", write)
    monkeypatch.setattr(LocalTransport, "free_port", free_port)
    monkeypatch.setattr("clusterkit.lifecycle.supervisor.LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(machine, "_pause", lambda times: 0.0)
    script = [taken, observed(State.CANCELLED) if wrong == "host" else observed(OK), observed(OK)]
    backend, status, _ = supervise_with(script)
    (first, before), (second, after) = backend.submitted
    assert (first, second) == ((1, 2) if wrong == "disk" else (1, 3))
    assert before != after
    assert (status.state, status.attempt) == (State.SUCCEEDED, second)


def test_replacement_attempt_starts_only_after_new_plan_is_saved(unstarted_run, monkeypatch):
    """The next supervisor would look for it, and end it, on those of the last plan."""
    full, real, started = [1], RunFolder.write, []

    def write(self, name, data):
        if full:
            raise RunFolderError("No space left on device")
        real(self, name, data)

    run = unstarted_run("launcher: forkserver\nnodes: '1:2'\nrestarts: 1\non_node_loss: shrink\n")
    supervisor = Supervisor(RunFolder(run.path))
    (host,) = supervisor.facts.hosts
    hosts = tuple(msgspec.structs.replace(host, host=name) for name in ("h0", "h1"))
    supervisor.facts = msgspec.structs.replace(supervisor.facts, hosts=hosts)
    before = supervisor.plan = msgspec.structs.replace(supervisor.plan, hosts=("h0", "h1"))
    after = msgspec.structs.replace(before, hosts=("h1",), nodes=1)
    backend = Scripted([])
    monkeypatch.setattr(backend, "plan", lambda *_: after)
    monkeypatch.setattr(backend, "before_attempt", lambda *_, **__: None)
    monkeypatch.setattr(backend, "submit", lambda plan, *_, **__: started.append(plan.hosts))
    monkeypatch.setattr(RunFolder, "write", write)
    supervisor.backend, supervisor.machine.attempt = backend, 2
    supervisor._perform(Next(2, Verdict.REPLACE, (0,)))
    for _ in range(2):
        with pytest.raises(RunFolderError, match="No space left"):
            supervisor._perform(Start())
        assert (supervisor.plan, started) == (before, [])
    full.clear()
    supervisor._perform(Start())
    assert (supervisor.status.attempt, started) == (2, [("h1",)])
    assert RunFolder(run.path).plan().hosts == ("h1",)
    assert supervisor.machine.terms.nodes == 1


def test_port_always_taken_fails_after_port_tries(supervise_with):
    taken = observed(BAD, reason="port: PORT (errno: 98 - Address already in use).")
    backend, status, _ = supervise_with([taken] * 9)
    assert status.state is State.FAILED
    assert len(backend.submitted) == 1 + PORT_TRIES


def test_taken_port_of_program_fails_without_new_attempt(supervise_with):
    taken = observed(BAD, reason="OSError: [Errno 98] Address already in use: 6006")
    backend, status, events = supervise_with([taken] * 9)
    assert status.state is State.FAILED
    assert len(backend.submitted) == 1
    assert events == []


def test_run_cancelled_before_supervision_ends_without_start(unstarted_run, monkeypatch):
    run = unstarted_run()
    backend = Scripted([])
    monkeypatch.setattr(backends, "backend", lambda name: backend)
    folder = RunFolder(run.path)
    folder.mark_cancelled()
    Supervisor(folder).supervise()
    assert (backend.submitted, backend.cancelled) == ([], 1)
    status = folder.read_json("state.json", RunStatus)
    assert (status.state, status.exit_code) == (State.CANCELLED, 130)


def test_replan_with_moved_port_updates_saved_plan_and_facts(unstarted_run, monkeypatch):
    run = unstarted_run()
    folder = RunFolder(run.path)
    before = folder.plan()
    supervisor = Supervisor(folder)
    moved = move_port(supervisor.cluster, supervisor.facts, 30123, "port was taken")
    supervisor._replan(*moved)
    after = folder.plan()
    assert (before.port, after.port) == (29501, 30123)
    assert "30123" in folder.read("plan.txt").decode()
    assert json.loads(folder.read("facts.json"))["port"] == 30123


def test_taken_watch_port_is_replaced_and_reported(unstarted_run):
    run = unstarted_run()
    folder = RunFolder(run.path)
    supervisor = Supervisor(folder)
    port = supervisor.transport.free_port("localhost")
    facts = msgspec.structs.replace(supervisor.facts, port=port, watch_port=port + 1)
    supervisor.facts = facts
    supervisor._check_again()
    assert supervisor.facts == facts
    with socket.create_server(("", port + 1)):
        supervisor._check_again()
    kept = json.loads(folder.read("facts.json"))
    assert kept["port"] == port
    assert kept["watch_port"] not in (port, port + 1)
    (event,) = folder.records("events.jsonl", Event)
    assert event.text.startswith(f"port {port + 1} was taken meanwhile; the nodes watch each other")


class Busy(LocalTransport):
    """Every port that is asked for has been taken."""

    def free_port(self, host, wanted=None):
        return (wanted or 30000) + 100


@pytest.mark.parametrize(
    ("name", "fresh", "port"),
    [
        ("local", True, 29601), ("local", False, 29601),
        ("ssh", True, None), ("ssh", False, 29601),
        ("compose", False, None), ("kubernetes", False, None),
    ],
)  # fmt: skip
def test_before_attempt_moves_taken_port_of_local_and_ssh_clusters(name, fresh, port, facts):
    cluster = CLUSTER_TYPES[name]()
    backend = backends.backend(name)
    found = backend.before_attempt(cluster, facts, Busy(), fresh=fresh)
    assert (found and found[0].port) == port
    if found:
        assert found[1] == "port 29501 was taken meanwhile; 29601 chosen instead"
        fixed = msgspec.structs.replace(cluster, port=29501)
        with pytest.raises(ClusterkitError, match="the cluster entry asks for that one"):
            backend.before_attempt(fixed, facts, Busy(), fresh=fresh)


def test_process_identity_survives_json_round_trip(folder):
    folder.write_json("supervisor.json", agent.identity(os.getpid()))
    assert msgspec.json.decode(folder.read("supervisor.json")) == agent.identity(os.getpid())


def test_cancel_after_success_does_not_rewrite_status(unstarted_run, monkeypatch):
    run = unstarted_run()
    folder = RunFolder(run.path)
    supervisor = Supervisor(folder)
    ended = NodeStatus(node=0, host="localhost", state=State.SUCCEEDED, exit_code=0)

    def status(handle, transport):
        folder.mark_cancelled()
        return Observation(state=State.SUCCEEDED, nodes=(ended,))

    monkeypatch.setattr(supervisor.backend, "submit", lambda *_, **__: None)
    monkeypatch.setattr(supervisor.backend, "status", status)
    supervisor.supervise()
    assert run.status().state is State.SUCCEEDED


# ---------------------------------------------------------------- one supervisor, from its start on


@pytest.fixture
def made(run):
    """A run's folder whose lock nobody has."""
    HELD.pop(run.path).close()
    return RunFolder(run.path)


def test_supervisor_lock_is_held_by_one_holder(folder, hand):
    assert folder.has_supervisor()
    assert folder.acquire_supervisor_lock() is None
    hand.unwatched()
    assert not folder.has_supervisor()
    with folder.acquire_supervisor_lock():
        assert folder.acquire_supervisor_lock() is None


def test_spawned_supervisor_holds_lock_until_end(made):
    made.mark_cancelled()  # it has something to do, and nothing to start
    with made.acquire_supervisor_lock() as lock:
        supervise.spawn(made, lock)
    agent.wait_gone([made.read_json("supervisor.json", dict)["pid"]], 60)
    assert not made.has_supervisor()
    assert reconcile(made).state is State.CANCELLED
    assert made.read("supervisor.log") == b""


def test_spawn_fails_naming_damaged_file(made):
    spoil(made.path / "facts.json", b"[]")
    words = r"did not start: run .*: facts.json is damaged"
    with pytest.raises(SubmitFailed, match=words) as error, made.acquire_supervisor_lock() as lock:
        supervise.spawn(made, lock)
    assert error.value.hint == f"inspect {made.path} by hand"


def test_supervisor_main_reports_exception_at_start(made, monkeypatch):
    def breaks(self):
        raise KeyError("lost")

    monkeypatch.setattr(Supervisor, "begin", breaks)
    read, write = os.pipe()
    with open(read, "rb") as answer:
        with open(os.devnull) as lock, pytest.raises(KeyError):
            supervise.main([str(made.path), str(lock.fileno()), str(write)])
        assert answer.read() == b"KeyError: 'lost'\nsupervisor.log has more"


def test_spawn_notices_supervisor_killed_at_start(made, monkeypatch, tmp_path):
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(supervise.sys, "executable", str(killed))
    with (
        pytest.raises(SubmitFailed, match="did not start: no output"),
        made.acquire_supervisor_lock() as lock,
    ):
        supervise.spawn(made, lock)


@pytest.fixture
def fill(tmp_path, monkeypatch):
    """CLUSTERKIT_HOME on a disk of 512 KiB; ``fill(8)`` leaves 8 KiB of it."""
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    monkeypatch.setenv("CLUSTERKIT_HOME", str(disk))

    def fill(left):
        free = shutil.disk_usage(disk).free
        (disk / "filler").write_bytes(bytes(free - left * 1024))

    yield fill
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("start", ["launch", "spawn"])
def test_nearly_full_disk_refuses_supervisor_start(fill, unstarted_run, make_facts, start):
    facts = make_facts(home=os.environ["CLUSTERKIT_HOME"])
    made = RunFolder(unstarted_run(facts=facts).path)
    HELD.pop(made.path).close()
    fill(40)
    words = rf"cannot write {made.path}/.reserve: No space left on device"
    with (
        pytest.raises(ClusterkitError, match=words) as error,
        made.acquire_supervisor_lock() as lock,
    ):
        getattr(supervise, start)(made, lock, *([LocalTransport()] if start == "launch" else []))
    assert not made.file("supervisor.log").exists()
    assert error.value.hint == (
        f"make room on the disk that holds {made.path}, or set CLUSTERKIT_HOME"
    )


def test_attach_to_supervised_run_starts_no_second_supervisor(run, monkeypatch):
    monkeypatch.setattr(supervise, "spawn", lambda *_, **__: pytest.fail("it was started"))
    RunFolder(run.path).write_json("state.json", said_of(run, State.RUNNING))
    assert run.supervised
    assert not run.attach()


# ---------------------------------------------------------------- attach


def said_of(run, state, **fields):
    return RunStatus(
        run=run.id, job="demo", cluster="local", backend="local", state=state, **fields
    )


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


# ---------------------------------------------------------------- lost nodes


LOSES = "launcher: forkserver\nrestarts: 1\n"


def test_lost_node_uses_no_restart(supervise_with, monkeypatch):
    monkeypatch.setattr(machine, "EARLY_SECONDS", 0.0)
    backend, status, events = supervise_with(
        [vanished()] * 3 + [observed(BAD), observed(OK)], LOSES
    )
    assert [attempt for attempt, _ in backend.submitted] == [1, 2, 3, 4, 5]
    assert (status.state, status.attempt) == (State.SUCCEEDED, 5)
    assert events[0].text.startswith("attempt 1 has lost nodes: ")
    assert events[0].text.endswith("starting again, which uses no restart")


def test_leftovers_of_killed_agent_are_stopped_before_next_attempt(supervise_with):
    """Its rank ignored SIGTERM: two attempts wrote at once."""
    order = []

    class Ordered(Scripted):
        def submit(self, plan, transport, *, attempt=1, secrets=None, record=None):
            order.append(f"start {attempt}")

        def cancel(self, handle, transport, reason="cancelled"):
            order.append(f"stop {handle.attempt}")
            if len(order) < 4:
                raise Unavailable("no answer")

    _, status, _ = supervise_with([vanished(), observed(OK)], LOSES, kind=Ordered)
    assert order == ["start 1", "stop 1", "stop 1", "stop 1", "start 2"]
    assert status.state is State.SUCCEEDED


def test_unreachable_node_is_followed_until_answer_without_restart(supervise_with):
    """A run that had finished while its submitter was offline ran a second time."""
    away = observed(State.UNKNOWN)
    backend, status, events = supervise_with([[away] * 5 + [observed(OK)]], LOSES)
    assert (len(backend.submitted), backend.cancelled, events) == (1, 0, [])
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)


def test_node_lost_early_repeatedly_fails_run(supervise_with):
    backend, status, _ = supervise_with([vanished()] * 6, LOSES)
    assert len(backend.submitted) == EARLY_LOSSES + 2  # and the restart that there is
    assert status.state is State.FAILED


@pytest.mark.parametrize("job", [f"{LOSES}on_node_loss: fail\n", "launcher: forkserver\n"])
def test_lost_node_fails_run_when_job_allows_no_replacement(supervise_with, job):
    backend, status, _ = supervise_with([vanished()] * 3, job)
    assert (len(backend.submitted), status.state) == (1, State.FAILED)


def test_status_shows_wait_for_unreachable_host_of_lost_node(supervise_with):
    said = []

    class Silent(Scripted):
        def cancel(self, handle, transport, reason="cancelled"):
            said.append(handle.folder.read_json("state.json", RunStatus))
            if len(said) < 3:
                raise Unavailable("h does not answer")

    _, status, events = supervise_with([vanished(), observed(OK)], LOSES, kind=Silent)
    assert status.state is State.SUCCEEDED
    waiting = said[-1]
    assert (waiting.state, waiting.nodes[0].reason) == (State.RESTARTING, "waiting for node 0 (h)")
    assert abs(waiting.nodes[0].until - time.time() - LOST_SECONDS) < 60
    assert "attempt 1: waiting for node 0 (h)" in [event.text for event in events]


# ---------------------------------------------------------------- the watcher's own trouble


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


# ---------------------------------------------------------------- what a killed agent left


def test_cancel_stops_leftovers_and_remarks_unreachable_host(folder, hand, monkeypatch):
    stopped = []

    def cancel_nodes(self, handle, transport, reason="cancelled"):
        stopped.append(handle.attempt)
        if len(stopped) < 2:
            raise Unavailable("host h1 does not answer")

    monkeypatch.setattr(LocalBackend, "cancel", cancel_nodes)
    hand.unwatched()
    hand.node(started=hand.dead())
    assert "host h1 does not answer" in cancel(folder).remark
    assert folder.file("leftovers").exists()
    stopped.clear()
    with pytest.raises(Unavailable, match="host h1 does not answer"):
        api.Run(folder).delete()
    assert (cancel(folder).remark, stopped) == (None, [1, 1])
    assert not folder.file("leftovers").exists()


def test_run_of_other_machine_is_not_judged_by_local_processes(folder, hand, monkeypatch):
    """The home is shared (NFS): the run's processes are another machine's."""
    hand.unwatched()
    hand.node(started=hand.dead())
    submitted = json.loads(folder.read("run.json"))
    assert submitted["host"] == os.uname().nodename
    assert submitted["boot_id"] == processes.boot_id()
    stopped = []
    monkeypatch.setattr(LocalBackend, "cancel", lambda *_, **__: stopped.append(1))
    monkeypatch.setattr(control, "RECORD_SECONDS", 0.1)
    folder.write_json("run.json", {**submitted, "host": "login-2", "boot_id": "another"})
    status = reconcile(folder)
    assert status.state is State.UNKNOWN
    assert "its processes run on login-2" in status.remark
    assert cancel(folder).state is State.UNKNOWN  # the supervisor there reads the mark
    assert folder.is_cancelled()
    assert stopped == []
    for verb in (api.Run(folder).attach, api.Run(folder).delete):
        with pytest.raises(BadInput, match="its processes run on login-2"):
            verb()
    # This machine after a restart.
    folder.write_json("run.json", {**submitted, "boot_id": "another"})
    folder.file("cancelled").unlink()
    assert reconcile(folder).state is State.FAILED
