"""How a supervisor starts, which is alone, and what it does about taken ports."""

import json
import os
import shutil
import socket
import subprocess

import msgspec
import pytest

from clusterkit import agent, backends
from clusterkit.backends.ports import move_port
from clusterkit.cluster import CLUSTER_TYPES
from clusterkit.errors import ClusterkitError, RunFolderError, SubmitFailed, Unavailable
from clusterkit.lifecycle import reconcile as machine
from clusterkit.lifecycle import supervise
from clusterkit.lifecycle.control import reconcile
from clusterkit.lifecycle.evidence import Verdict
from clusterkit.lifecycle.reconcile import (
    PORT_TRIES,
    Next,
    Start,
)
from clusterkit.lifecycle.supervisor import Supervisor
from clusterkit.run.folder import Event, RunFolder
from clusterkit.run.status import State
from clusterkit.transport import LocalTransport
from tests.conftest import HELD
from tests.unit.supervise.supervising import BAD, OK, Scripted, observed, said_of, spoil

# ---------------------------------------------------------------- the supervisor's judgement


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


# ---------------------------------------------------------------- one supervisor, from its start on


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
