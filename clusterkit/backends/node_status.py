"""The status of nodes, and of an attempt, from the files that their agents write."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from clusterkit.agent import STOPPED, STOPPED_BY_PEERS, archive, next_attempt
from clusterkit.agent.report import node_state, read_from
from clusterkit.backends.base import Observation
from clusterkit.plan import Plan
from clusterkit.run.folder import RunHandle
from clusterkit.run.status import IdleRank, NodeCause, NodeStatus, RankExit, State, overall
from clusterkit.transport import Completed, Transport

_HINTS = {
    "SIGSTOP": "kill -CONT resumes a stopped process",
    "hang: ": "if it was only slow, raise hang_timeout in the job file or the timeout of "
    "init_process_group",
}
"""Hints for the causes that agents report, by a part of the cause."""
_OOM_KILLED = "OOMKilled: the agent was killed (SIGKILL); the kernel counted an out-of-memory kill"
_KILLED = (
    "SIGKILL: the agent was killed from outside (kill -9); the kernel counted no out-of-memory kill"
)
_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)


class _Waits(Struct):
    why: str
    until: float


class _Started(Struct):
    """What is read of ``started.json``."""

    host: str = ""
    spare: bool = False
    waits: _Waits | None = None
    hang: str | None = None
    slow: str | None = None
    ended: tuple[int, ...] = ()
    idle: tuple[IdleRank, ...] = ()
    killed: int | None = None
    """Its guard saw its agent killed: how many processes the kernel had killed meanwhile because
    memory ran out."""
    remarks: tuple[str, ...] = ()


class _End(Struct):
    """How one process of a node ended."""

    exit_code: int
    at: float
    rank: int | None = None
    asked: bool = True


class _Ended(Struct):
    """What is read of ``exit.json``."""

    exit_code: int
    reason: str | None = None
    at: float | None = None
    next: int | None = None
    processes: tuple[_End, ...] = ()
    oom_kills: int | None = None
    causes: tuple[str, ...] = ()
    final: bool | None = None
    restarts_left: int | None = None
    remarks: tuple[str, ...] = ()


_Record = TypeVar("_Record", _Started, _Ended)


def _read(data: bytes | None, kind: type[_Record]) -> _Record | None:
    """Return a record of a node; None: there is none, or it cannot be read.

    Other machines wrote it, on disks that may be full: no field is used before all were checked.
    """
    try:
        return msgspec.json.decode(data, type=kind) if data is not None else None
    except (msgspec.MsgspecError, ValueError):
        return None


def folder_exists(handle: RunHandle) -> bool:
    """Return whether this machine has the run's folder."""
    return handle.folder.file("run.json").exists()


class NodeFiles(Struct, frozen=True, kw_only=True):
    """The files of a node's agent, and whether its process runs."""

    begun: bool = False
    """Whether the agent has recorded its process."""
    alive: bool = False
    """Whether that process runs."""
    started: bytes | None = None
    """Contents of ``started.json``; None: no such file."""
    exit: bytes | None = None
    """Contents of ``exit.json``; None: no such file."""
    log: bytes = b""
    """The end of ``agent.log``."""

    @property
    def host(self) -> str:
        """The host name that the agent has recorded; empty: none yet."""
        started = _read(self.started, _Started)
        return started.host if started else ""

    @classmethod
    def read(cls, folder: Path) -> NodeFiles:
        """Read a node's folder on this machine."""
        state, ended = node_state(folder)
        log = read_from(folder / "agent.log") or b""
        started = read_from(folder / "started.json")
        return cls(begun=state["begun"], alive=state["alive"], started=started, exit=ended, log=log)


class NativeState(Struct, frozen=True, kw_only=True):
    """What the platform says of a node: of its host's process, its container, pod or job.

    A backend delivers this and the agent's files; `judge_node` makes the node's status of them.
    """

    state: State
    """PENDING: it has not begun, or another one takes its place. RUNNING: something of it runs. The
    final ones: it has ended; by itself it is FAILED. UNKNOWN: the platform does not answer, or what
    it answers is not understood."""
    reason: str | None = None
    """Why, as the platform says it; None: there is no more to say than the state."""
    exit_code: int | None = None
    ended_at: float | None = None
    ended_by: str | None = None
    """By what a node was ended from outside that its agent's ``exit.json`` cannot know of."""

    @classmethod
    def of_process(cls, files: NodeFiles) -> NativeState:
        """Return the state of a node that is a process of its host."""
        if files.alive:
            return cls(state=State.RUNNING)
        return cls(state=State.FAILED if files.begun else State.PENDING)


def judge_node(node: int, host: str, files: NodeFiles, native: NativeState) -> NodeStatus:
    """Return a node's status from its agent's files and what the platform says.

    How a node ended is what its agent recorded, unless the platform still runs it, has put another
    one in its place, or has ended it itself.
    """
    state = native.state
    if files.exit is not None:
        began_next = next_attempt(files.exit) is not None  # and runs on, with another attempt
        if began_next or state not in (State.PENDING, State.RUNNING):
            ended = judge_exit(node, host, files.exit)
            if native.ended_by is None or began_next:
                return ended
            return replace(ended, state=state, reason=native.ended_by)
    if state is State.RUNNING and files.begun:
        found = judge_running(node, host, files.started)
        if native.reason is None:
            return found
        return replace(found, state=state, reason=native.reason, until=None)
    reason, code = native.reason, native.exit_code
    if state is State.RUNNING:
        state = State.PENDING
    elif state.final and files.begun and reason is None and code is None:
        reason, code = _agent_died(files)
    return NodeStatus(
        node=node,
        host=host,
        state=state,
        reason=reason,
        exit_code=code,
        ended_at=native.ended_at,
        remarks=remarks(files.started),
    )


def _agent_died(files: NodeFiles) -> tuple[str, int | None]:
    """Return the reason and the exit code of a node whose agent recorded no end."""
    last = files.log.decode(errors="replace").strip().rpartition("\n")[2]
    record = _read(files.started, _Started)
    if record is None or record.killed is None or last:  # a traceback would be its own failure
        return f"its agent ended without reporting an exit code{f': {last}' if last else ''}", None
    return _OOM_KILLED if record.killed else _KILLED, 128 + signal.SIGKILL


def judge_running(node: int, host: str, started: bytes | None) -> NodeStatus:
    """Return the status of a node whose agent runs, from its ``started.json``.

    Its ranks may run, or it may wait: for a restart, or as a spare.
    """
    record = _Started() if started is None else _read(started, _Started)
    if record is None:
        return _unreadable(node, host, "started.json")
    return NodeStatus(
        node=node,
        host=host,
        state=State.RESTARTING if record.waits else State.RUNNING,
        reason=record.waits.why if record.waits else ("a spare" if record.spare else None),
        until=record.waits.until if record.waits else None,
        remarks=record.remarks,
        hang=record.hang,
        slow=record.slow,
        ended=record.ended,
        idle=record.idle,
        spare=record.spare,
    )


def judge_exit(node: int, host: str, data: bytes) -> NodeStatus:
    """Return the status of a node that has ended, from its ``exit.json``; UNKNOWN if damaged."""
    ended = _read(data, _Ended)
    if ended is None:
        return _unreadable(node, host, "exit.json")
    # A node that was stopped has not finished its work, even if its exit code is 0.
    reason = ended.reason or ""
    stopped = reason == STOPPED or reason.startswith(STOPPED_BY_PEERS)
    ended_as = State.SUCCEEDED if ended.exit_code == 0 else State.FAILED
    return NodeStatus(
        node=node,
        host=host,
        state=State.CANCELLED if stopped else ended_as,
        exit_code=ended.exit_code,
        reason=ended.reason,
        ended_at=ended.at,
        remarks=ended.remarks,
    )


def _unreadable(node: int, host: str, name: str) -> NodeStatus:
    reason = f"{name} is damaged: it cannot be read"
    return NodeStatus(node=node, host=host, state=State.UNKNOWN, reason=reason)


def remarks(data: bytes | None) -> tuple[str, ...]:
    """Return the agent's remarks from its ``started.json`` or ``exit.json``."""
    found = _read(data, _Started)
    return found.remarks if found else ()


def stop_run(plan: Plan, transport: Transport, host: str, python: str, reason: str) -> Completed:
    """Run the agent's ``stop`` command on a host: it ends everything of the run there.

    Raises:
        ClusterkitError: the command cannot be run, or does not end in time.
    """
    # The agent is sent: the run folder's own copy may be gone while its processes are not.
    stop = ["stop", plan.run_dir, "--grace", f"{plan.stop_grace:g}", "--reason", reason]
    argv = [python, "-I", "-S", "-", *stop]
    return transport.run(host, argv, stdin=archive.as_text(), timeout=plan.stop_grace + 60)


def observed(nodes: Sequence[NodeStatus], exit_json: Mapping[int, bytes]) -> Observation:
    """Return an attempt's observation from the status and ``exit.json`` of its nodes.

    Args:
        exit_json: by node; only of nodes that have one.
    """
    records = {node: record for node, data in exit_json.items() if (record := _read(data, _Ended))}
    ranks = {
        node: [
            RankExit(node, end.rank, end.exit_code, end.at, end.asked)
            for end in record.processes
            if end.rank is not None
        ]
        for node, record in records.items()
    }
    failed = {node.node for node in nodes if node.state is State.FAILED} & records.keys()
    exits = [end for node in failed for end in ranks[node]]
    # A rank may also have failed on a node that another node's launcher then stopped: such an exit
    # counts if the agent had not asked for it, if it came before any other, or if a signal to
    # stop cannot explain its exit code.
    first = min((end.at for end in exits if end.exit_code), default=0.0)
    for node in records.keys() - failed:
        exits += [
            end
            for end in ranks[node]
            if not end.asked  # also with 0: its peers may have failed without it
            or (end.at < first and end.exit_code not in (0, *_TERMINATED))
            or (first and 0 < end.exit_code < 128)
        ]
    lefts = [record.restarts_left for record in records.values()]
    return Observation(
        state=overall({node.state for node in nodes}),
        nodes=tuple(nodes),
        rank_exits=tuple(exits),
        oom_kills=max((records[node].oom_kills or 0 for node in failed), default=0),
        causes=tuple(cause for node, ended in records.items() for cause in _causes(node, ended)),
        final=any(record.final for record in records.values()),
        next_attempt=next((record.next for record in records.values() if record.next), None),
        restarts_left=min((left for left in lefts if left is not None), default=None),
    )


def _causes(node: int, ended: _Ended) -> list[NodeCause]:
    return [
        NodeCause(
            node=node,
            words=cause,
            hint=next((hint for part, hint in _HINTS.items() if part in cause), None),
            exit_code=ended.exit_code or 1,
        )
        for cause in ended.causes
    ]
