"""The status of nodes, and of an attempt, from the files that their agents write."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from clusterkit.agent import STOPPED, STOPPED_BY_PEERS, archive, next_attempt
from clusterkit.agent.report import node_state, read_from
from clusterkit.backends.base import Observation
from clusterkit.plan import Plan
from clusterkit.run.folder import RunHandle
from clusterkit.run.status import NodeCause, NodeStatus, RankExit, State, overall
from clusterkit.transport import Completed, Transport

_HINTS = {
    "SIGSTOP": "kill -CONT lets a stopped process go on",
    "hang: ": "where it was only slow, hang_timeout in the job file gives it longer",
}
"""Hints for the causes that agents report, by a part of the cause."""
_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)


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
        return str(_document(self.started or b"").get("host") or "")

    @classmethod
    def read(cls, folder: Path) -> NodeFiles:
        """Read a node's folder on this machine."""
        state, ended = node_state(folder)
        log = read_from(folder / "agent.log") or b""
        started = read_from(folder / "started.json")
        return cls(begun=state["begun"], alive=state["alive"], started=started, exit=ended, log=log)


def judge_node(node: int, host: str, files: NodeFiles) -> NodeStatus:
    """Return a node's status from its agent's files."""
    if files.alive and next_attempt(files.exit) is None:
        return judge_running(node, host, files.started)
    if files.exit is not None:
        return judge_exit(node, host, files.exit)
    if not files.begun:
        return NodeStatus(node=node, host=host, state=State.PENDING)
    last = files.log.decode(errors="replace").strip().rpartition("\n")[2]
    reason = f"its agent ended without reporting an exit code{f': {last}' if last else ''}"
    return NodeStatus(
        node=node, host=host, state=State.FAILED, reason=reason, remarks=remarks(files.started)
    )


def judge_running(node: int, host: str, started: bytes | None) -> NodeStatus:
    """Return the status of a node whose agent runs, from its ``started.json``.

    Its ranks may run, or it may wait: for a restart, or as a spare.
    """
    document = _document(started or b"")
    waits, spare = document.get("waits") or {}, bool(document.get("spare"))
    return NodeStatus(
        node=node,
        host=host,
        state=State.RESTARTING if waits else State.RUNNING,
        reason=waits.get("why", "a spare" if spare else None),
        until=waits.get("until"),
        remarks=remarks(started),
        hang=document.get("hang"),
        slow=document.get("slow"),
        spare=spare,
    )


def judge_exit(node: int, host: str, data: bytes) -> NodeStatus:
    """Return the status of a node that has ended, from its ``exit.json``; UNKNOWN if damaged."""
    ended = _document(data)
    if not isinstance(ended.get("exit_code"), int):
        return NodeStatus(node=node, host=host, state=State.UNKNOWN, reason="exit.json is damaged")
    code, reason, at = ended["exit_code"], ended.get("reason"), ended.get("at")
    # A node that was stopped has not finished its work, even if its exit code is 0.
    stopped = reason == STOPPED or str(reason).startswith(STOPPED_BY_PEERS)
    ended_as = State.SUCCEEDED if code == 0 else State.FAILED
    return NodeStatus(
        node=node,
        host=host,
        state=State.CANCELLED if stopped else ended_as,
        exit_code=code,
        reason=reason,
        ended_at=at if isinstance(at, float) else None,
        remarks=remarks(data),
    )


def remarks(data: bytes | None) -> tuple[str, ...]:
    """Return the agent's remarks from its ``started.json`` or ``exit.json``."""
    found = _document(data or b"").get("remarks")
    return tuple(map(str, found)) if isinstance(found, list) else ()


def stop_run(plan: Plan, transport: Transport, host: str, python: str, reason: str) -> Completed:
    """Run the agent's ``stop`` command on a host: it ends everything of the run there.

    Raises:
        ClusterkitError: the command cannot be run, or does not end in time.
    """
    # The agent is sent: the run folder's own copy may be gone while its processes are not.
    stop = ["stop", plan.run_dir, "--grace", f"{plan.stop_grace:g}", "--reason", reason]
    argv = [python, "-I", "-S", "-", *stop]
    return transport.run(host, argv, stdin=archive.as_text(), timeout=plan.stop_grace + 60)


def _rank_exits(node: int, ended: Mapping[str, Any]) -> list[RankExit]:
    try:
        return [
            RankExit(node, end["rank"], end["exit_code"], end["at"], bool(end.get("asked", True)))
            for end in ended.get("processes", [])
            if isinstance(end["rank"], int)
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def observed(nodes: Sequence[NodeStatus], exit_json: Mapping[int, bytes]) -> Observation:
    """Return an attempt's observation from the status and ``exit.json`` of its nodes.

    Args:
        exit_json: by node; only of nodes that have one.
    """
    documents = {node: _document(data) for node, data in exit_json.items()}
    failed = [node.node for node in nodes if node.state is State.FAILED]
    exits = [end for node in failed for end in _rank_exits(node, documents.get(node, {}))]
    kills = [documents[node].get("oom_kills") for node in failed if node in documents]
    lefts = [document.get("restarts_left") for document in documents.values()]
    # A rank may also have failed on a node that another node's launcher then stopped: such an exit
    # counts if the agent had not asked for it, if it came before any other, or if a signal to
    # stop cannot explain its exit code.
    first = min((end.at for end in exits if end.exit_code), default=0.0)
    for node in exit_json.keys() - set(failed):
        exits += [
            end
            for end in _rank_exits(node, documents[node])
            if (end.exit_code and not end.asked)
            or (end.at < first and end.exit_code not in (0, *_TERMINATED))
            or (first and 0 < end.exit_code < 128)
        ]
    return Observation(
        state=overall({node.state for node in nodes}),
        nodes=tuple(nodes),
        rank_exits=tuple(exits),
        oom_kills=max((number for number in kills if isinstance(number, int)), default=0),
        causes=tuple(cause for node, ended in documents.items() for cause in _causes(node, ended)),
        final=any(document.get("final") is True for document in documents.values()),
        next_attempt=next(filter(None, map(next_attempt, exit_json.values())), None),
        restarts_left=min((left for left in lefts if isinstance(left, int)), default=None),
    )


def _causes(node: int, ended: Mapping[str, Any]) -> list[NodeCause]:
    causes, code = ended.get("causes"), ended.get("exit_code")
    return [
        NodeCause(
            node=node,
            words=str(cause),
            hint=next((hint for part, hint in _HINTS.items() if part in str(cause)), None),
            exit_code=code if isinstance(code, int) and code else 1,
        )
        for cause in (causes if isinstance(causes, list) else ())
    ]


def _document(data: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
