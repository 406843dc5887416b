"""Damaged folders, cancelled runs and what killed agents left."""

import json
import os
import signal
import subprocess

import pytest

from clusterkit import api
from clusterkit.agent import processes
from clusterkit.backends.local.backend import LocalBackend
from clusterkit.errors import BadInput, Unavailable
from clusterkit.lifecycle import control
from clusterkit.lifecycle.control import cancel, reconcile
from clusterkit.run.folder import Event
from clusterkit.run.status import RunStatus, State
from tests.unit.supervise.supervising import TRACEBACK, spoil

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
