"""States of containers, and their diagnosis."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import clusterkit
from clusterkit.backends.compose import observe
from clusterkit.backends.compose.containers import Container, inspect
from clusterkit.backends.compose.observe import STATES, ContainerMonitor, native_state
from clusterkit.backends.node_status import NodeFiles, judge_node
from clusterkit.errors import SubmitFailed, Unavailable
from clusterkit.output.diagnose import diagnose
from clusterkit.run.folder import RunFolder, RunHandle, node_dir
from clusterkit.run.logs import LogLine
from clusterkit.run.status import NodeCause, NodeStatus, RankExit, State
from clusterkit.transport import Completed, LocalTransport
from tests.unit.compose.containers import BACKEND

# ---------------------------------------------------------------- states


def exited(code: int, reason: str | None = None) -> bytes:
    return json.dumps({"exit_code": code, "at": 1.0, "reason": reason}).encode()


UP, GONE = Container(state="running"), None
STOPPED = "stopped on request"


def judge(node: int, files: NodeFiles, **native: Any) -> NodeStatus:
    return judge_node(node, f"node-{node}", files, native_state(files, **native))


@pytest.mark.parametrize(
    ("begun", "exit_json", "live", "saved", "state", "reason"),
    [
        # Without faults.
        (False, None, GONE, GONE, "PENDING", None),
        (False, None, Container(state="created"), GONE, "PENDING", None),
        (False, None, UP, GONE, "PENDING", None),
        (True, None, UP, GONE, "RUNNING", None),
        (True, exited(0), UP, GONE, "RUNNING", None),
        (True, exited(0), Container(state="exited"), GONE, "SUCCEEDED", None),
        (True, exited(0), GONE, Container(state="exited"), "SUCCEEDED", None),
        (True, exited(0), GONE, GONE, "SUCCEEDED", None),
        (True, exited(7), Container(state="exited", exit_code=7), GONE, "FAILED", None),
        (True, b"{", Container(state="exited"), GONE, "UNKNOWN", "damaged"),
        # Ended by clusterkit itself.
        (True, exited(143, STOPPED), GONE, UP, "CANCELLED", STOPPED),
        (True, None, GONE, UP, "CANCELLED", "did not stop"),
        (True, None, Container(state="exited", exit_code=137), UP, "CANCELLED", "did not stop"),
        # Ended or interrupted from outside.
        (True, None, Container(state="exited", exit_code=137), GONE, "FAILED", "killed from out"),
        (True, None, GONE, Container(state="exited", exit_code=137), "FAILED", "killed from out"),
        (True, None, Container(state="exited", exit_code=137, oom=True, memory=512 << 20), GONE,
         "FAILED", "OOMKilled: its container used more than its memory limit of 512 MiB"),
        (True, None, Container(state="exited", exit_code=137, oom=True), GONE, "FAILED",
         "OOMKilled: this machine ran out of memory"),
        (False, None, Container(state="exited", exit_code=73, last_line="mkdir: denied"), GONE,
         "FAILED", "exit code 73 of its container: mkdir: denied"),
        (False, None, Container(state="created", error="no such device"), GONE, "PENDING", None),
        (False, None, Container(state="exited", exit_code=127, error="not found"), GONE, "FAILED",
         "could not be started: not found"),
        (True, None, GONE, GONE, "FAILED", "removed from outside"),
        (True, exited(143, STOPPED), Container(state="exited", exit_code=143), GONE, "FAILED",
         "stopped from outside (docker stop)"),
        (True, None, Container(state="paused"), GONE, "RUNNING", "paused"),
        (True, None, Container(state="running", connected=False), GONE, "RUNNING", "cut off"),
        (True, exited(143, STOPPED), GONE, Container(state="paused"), "FAILED", "paused"),
        (True, None, GONE, Container(state="paused"), "FAILED", "paused"),
        (True, exited(143, "stopped: node 0 has not answered for 4 s"), GONE,
         Container(state="exited", connected=False), "FAILED", "cut off"),
        # Stopped by the other nodes.
        (True, exited(143, "stopped: node 1 failed"), Container(state="exited", exit_code=143),
         GONE, "CANCELLED", "node 1 failed"),
        # States that only a newer engine has.
        (True, None, Container(state="hibernating"), GONE, "UNKNOWN", "'hibernating'"),
        (True, None, Container(state=""), GONE, "UNKNOWN", "''"),
    ],
)  # fmt: skip
def test_judge_node_derives_state_from_exit_file_and_container(
    begun: bool, exit_json: bytes | None, live: Container | None, saved: Container | None,
    state: str, reason: str | None,
) -> None:  # fmt: skip
    found = judge(3, NodeFiles(begun=begun, exit=exit_json), live=live, saved=saved)
    assert found.state is State[state], found
    assert (found.node, found.host) == (3, "node-3")
    assert (found.reason is None) if reason is None else reason in (found.reason or "")


def test_every_container_state_maps_to_node_state() -> None:
    for word, state in STATES.items():
        found = judge(0, NodeFiles(begun=True), live=Container(state=word), saved=None)
        assert found.state is state


def test_unreachable_engine_leaves_state_to_exit_file() -> None:
    engine = {"live": None, "saved": None, "unreachable": "it does not answer"}
    assert judge(0, NodeFiles(begun=True), **engine).state is State.UNKNOWN
    assert judge(0, NodeFiles(begun=True, exit=exited(0)), **engine).state is State.SUCCEEDED


def test_unreachable_engine_keeps_last_known_container_state() -> None:
    silent = "the docker engine does not answer"
    for live in (UP, Container(state="paused")):
        found = judge(0, NodeFiles(begun=True), live=live, saved=None, unreachable=silent)
        assert (found.state, found.reason) == (State.RUNNING, silent)
    over = Container(state="exited", exit_code=9)
    found = judge(0, NodeFiles(begun=True), live=over, saved=None, unreachable=silent)
    assert (found.state, found.exit_code) == (State.FAILED, 9)


def test_paused_or_disconnected_node_fails_once_lost() -> None:
    for live in (Container(state="paused"), Container(state="running", connected=False)):
        found = judge(0, NodeFiles(begun=True), live=live, saved=None, lost=True)
        assert found.state is State.FAILED


# ---------------------------------------------------------------- the engine's answers


class FakeEngine(LocalTransport):
    """An engine whose inspect answers are set by the test, and whose events never come."""

    def __init__(self) -> None:
        self.answer: Completed | Exception = Completed((), 0, "", "")
        self.queries = 0

    def run(self, host: str, argv: Any, **options: Any) -> Completed:
        assert "inspect" in argv
        self.queries += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def open(self, host: str, argv: Any, **options: Any) -> Any:
        raise SubmitFailed("no events here")

    def containers(self, handle: RunHandle, **states: Any) -> None:
        lines = []
        for name, state in states.items():
            entry = {
                "run_dir": handle.plan.run_dir, "attempt": str(handle.attempt), "node": name[-1],
                "connected": True, "memory": 0, "state": "running", "exit_code": 0, "oom": False,
                "error": "",
            }  # fmt: skip
            lines.append(json.dumps(entry | state))
        self.answer = Completed((), 0, "\n".join(lines), "")


@pytest.fixture
def handle(planned: Callable[..., Any], tmp_path: Path) -> RunHandle:
    """A run of two nodes whose agents have begun."""
    plan, _ = planned({"lost_after": 0.2}, nodes=2)
    plan = msgspec.structs.replace(plan, run_dir=str(tmp_path / "run"))
    for node in (0, 1):
        folder = Path(node_dir(plan.run_dir, 1, node))
        folder.mkdir(parents=True)
        (folder / "pid").write_text("7\n")
    Path(plan.run_dir, "run.json").write_text("{}")
    return RunHandle(RunFolder(Path(plan.run_dir)), plan)


def test_inspect_ignores_containers_of_later_attempt(handle: RunHandle) -> None:
    engine = FakeEngine()
    engine.containers(replace(handle, attempt=2), node0={}, node1={})
    assert inspect(handle, engine) == {}
    for attempt in (2, 3):  # which their agents may have begun
        assert set(inspect(replace(handle, attempt=attempt), engine)) == {0, 1}


@pytest.mark.parametrize(
    "text",
    ["", "not json", "[]", "null", "{}", '{"state": "running", "node": ""}', '{"state": 3}'],
)
def test_inspect_refuses_malformed_answer(handle: RunHandle, text: str) -> None:
    engine = FakeEngine()
    engine.answer = Completed((), 0, text, "")
    with pytest.raises(Unavailable, match="docker inspect"):
        inspect(handle, engine)


def test_inspect_accepts_missing_containers_and_refuses_dead_engine(handle: RunHandle) -> None:
    engine = FakeEngine()
    for words in ("Error: No such object: x", "Error response from daemon: No such container: x"):
        engine.answer = Completed((), 1, "", words)
        assert inspect(handle, engine) == {}
    engine.answer = Completed((), 1, "", "Cannot connect to the Docker daemon at unix:///x.")
    with pytest.raises(Unavailable, match="does not answer: Cannot connect"):
        inspect(handle, engine)


def test_monitor_queries_engine_rarely(handle: RunHandle) -> None:
    engine = FakeEngine()
    engine.containers(handle, node0={}, node1={})
    monitor = ContainerMonitor(handle, engine)
    for _ in range(50):
        assert monitor.status().state is State.RUNNING
    assert engine.queries <= 3
    monitor.close()


def test_monitor_keeps_run_running_while_engine_is_silent(
    handle: RunHandle, monkeypatch: Any
) -> None:
    monkeypatch.setattr(observe, "INSPECT_INTERVAL", 0.0)
    monkeypatch.setattr(observe, "RETRY_SECONDS", 0.0)
    engine = FakeEngine()
    engine.containers(handle, node0={}, node1={})
    monitor = ContainerMonitor(handle, engine)
    assert monitor.status().state is State.RUNNING
    engine.answer = SubmitFailed("docker on localhost did not end within 10 s")
    deadline = time.monotonic() + 30
    while (seen := monitor.status()).nodes[0].reason is None:
        assert time.monotonic() < deadline
    # Containers run on without their engine.
    assert seen.state is State.RUNNING
    assert re.search(r"did not end within 10 s \(since \d\d:\d\d:\d\d\)", seen.nodes[0].reason)
    # What is only read once the engine answers is in the run's folder as well.
    Path(node_dir(handle.plan.run_dir, 1, 0), "exit.json").write_bytes(exited(0))
    assert monitor.status().nodes[0].state is State.SUCCEEDED
    assert monitor.status().state is State.RUNNING
    Path(node_dir(handle.plan.run_dir, 1, 0), "exit.json").unlink()
    engine.containers(handle, node0={}, node1={"state": "exited", "exit_code": 137})
    while (seen := monitor.status()).nodes[1].state is not State.FAILED:
        assert time.monotonic() < deadline
    assert seen.nodes[1].exit_code == 137


def test_monitor_fails_node_that_stays_paused(handle: RunHandle, monkeypatch: Any) -> None:
    monkeypatch.setattr(observe, "INSPECT_INTERVAL", 0.0)
    engine = FakeEngine()
    engine.containers(handle, node0={}, node1={"state": "paused"})
    monitor = ContainerMonitor(handle, engine)
    first = monitor.status()
    assert (first.state, first.nodes[1].reason) == (
        State.RUNNING, "its container was paused (docker pause)",
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while (seen := monitor.status()).nodes[1].state is State.RUNNING:
        assert time.monotonic() < deadline
    assert seen.nodes[1].state is State.FAILED
    assert [cause.node for cause in seen.causes] == [1]


def test_run_without_folder_has_no_status(handle: RunHandle) -> None:
    engine = FakeEngine()
    Path(handle.plan.run_dir, "run.json").unlink()
    assert BACKEND.status(handle, engine) is None
    assert ContainerMonitor(handle, engine).status() is None
    assert engine.queries == 0


# ---------------------------------------------------------------- diagnosis


CAUSE = NodeCause(node=1, words="killed by the kernel: over the limit", hint="more memory")


def line(node: int, text: str, rank: int | None = None, at: float = 1.0) -> LogLine:
    return LogLine(at, node, rank, text, 1)


def nodes(*states: str) -> list[NodeStatus]:
    return [
        NodeStatus(node=n, host=f"node-{n}", state=State[state]) for n, state in enumerate(states)
    ]


def test_diagnose_gives_killed_rank_backend_cause() -> None:
    failure = diagnose(
        nodes("CANCELLED", "FAILED"), [], rank_exits=[RankExit(1, 1, -9, 1.0)], causes=[CAUSE]
    )
    assert (failure.node, failure.rank, failure.cause) == (1, 1, CAUSE.words)
    assert (failure.exit_code, failure.hint) == (137, "more memory")


def test_diagnose_prefers_backend_cause_over_peer_errors() -> None:
    lines = [
        line(0, "Traceback (most recent call last):", 0),
        line(0, "RuntimeError: Connection closed by peer", 0),
    ]
    failure = diagnose(nodes("FAILED", "FAILED"), lines, causes=[CAUSE])
    assert (failure.node, failure.rank, failure.cause) == (1, None, CAUSE.words)


def test_diagnose_prefers_program_failure_over_backend_cause() -> None:
    lines = [line(0, "Traceback (most recent call last):", 0), line(0, "ValueError: boom", 0)]
    failure = diagnose(nodes("FAILED", "FAILED"), lines, causes=[CAUSE])
    assert (failure.node, failure.cause) == (0, "ValueError: boom")
    # A rank killed on a node without a known cause keeps its signal as the cause.
    failure = diagnose(
        nodes("FAILED", "FAILED"), [], rank_exits=[RankExit(0, 0, -9, 1.0)], causes=[CAUSE]
    )
    assert failure.node == 0
    assert "SIGKILL" in failure.cause


def test_diagnose_maps_mpirun_rank_to_its_node_and_cause() -> None:
    failure = diagnose(
        nodes("FAILED"), [], rank_exits=[RankExit(0, 3, -9, 1.0)], nproc_per_node=2, causes=[CAUSE]
    )
    assert (failure.node, failure.rank, failure.cause) == (1, 3, CAUSE.words)


def test_host_probe_does_not_depend_on_clusterkit() -> None:
    """Standard library only: an image need not hold clusterkit."""
    text = (Path(clusterkit.__file__).parent / "hosts" / "host_probe.py").read_text()
    assert "clusterkit" not in re.sub(r'""".*?"""', "", text, count=1, flags=re.S)
