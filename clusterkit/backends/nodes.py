"""What backends share while a run goes on: what the agents' files mean, ports that are taken."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from clusterkit.agent import STOPPED, STOPPED_BY_PEERS, goes_on
from clusterkit.agent.report import node_state, read_from
from clusterkit.backends.base import Observation
from clusterkit.plan import Plan
from clusterkit.run.folder import RunHandle
from clusterkit.run.status import NodeCause, NodeStatus, RankExit, State, overall

_HINTS = {
    "SIGSTOP": "kill -CONT lets a stopped process go on",
    "hang: ": "where it was only slow, hang_timeout in the job file gives it longer",
}  # by what a cause's words hold
_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)


def known(handle: RunHandle) -> bool:
    """Whether the run's folder on this machine is there."""
    return handle.folder.file("run.json").exists()


class Left(Struct, frozen=True, kw_only=True):
    """What a node's agent has left behind."""

    begun: bool = False
    """Whether it has recorded its process."""
    alive: bool = False
    """Whether that process runs."""
    started: bytes | None = None
    """Contents of ``started.json``; None: there is none."""
    exit: bytes | None = None
    """Contents of ``exit.json``; None: there is none."""
    log: bytes = b""
    """The end of ``agent.log``."""

    @property
    def host(self) -> str:
        """What its machine calls itself; empty: it has not said."""
        return str(_document(self.started or b"").get("host") or "")

    @classmethod
    def there(cls, folder: Path) -> Left:
        """In a node's folder on this machine."""
        state, ended = node_state(folder)
        log = read_from(folder / "agent.log") or b""
        started = read_from(folder / "started.json")
        return cls(begun=state["begun"], alive=state["alive"], started=started, exit=ended, log=log)


def judge_node(node: int, host: str, left: Left) -> NodeStatus:
    """A node's state from what its agent left behind."""
    if left.alive and goes_on(left.exit) is None:
        return judge_running(node, host, left.started)
    if left.exit is not None:
        return judge_exit(node, host, left.exit)
    if not left.begun:
        return NodeStatus(node=node, host=host, state=State.PENDING)
    last = left.log.decode(errors="replace").strip().rpartition("\n")[2]
    reason = f"its agent ended without reporting an exit code{f': {last}' if last else ''}"
    return NodeStatus(
        node=node, host=host, state=State.FAILED, reason=reason, remarks=remarks(left.started)
    )


def judge_running(node: int, host: str, started: bytes | None) -> NodeStatus:
    """The state of a node whose agent runs, from its ``started.json``: it may wait."""
    document = _document(started or b"")
    waits, spare = document.get("waits") or {}, "a spare" if document.get("spare") else None
    return NodeStatus(
        node=node, host=host, state=State.RESTARTING if waits else State.RUNNING,
        reason=waits.get("why", spare), until=waits.get("until"), remarks=remarks(started),
        hang=document.get("hang"), slow=document.get("slow"), spare=spare is not None,
    )  # fmt: skip


def judge_exit(node: int, host: str, data: bytes) -> NodeStatus:
    """A node's state from its ``exit.json``; what cannot be read is UNKNOWN."""
    ended = _document(data)
    if not isinstance(ended.get("exit_code"), int):
        return NodeStatus(node=node, host=host, state=State.UNKNOWN, reason="exit.json is damaged")
    code, reason, at = ended["exit_code"], ended.get("reason"), ended.get("at")
    # One that was asked to stop and left with 0 has not done its work either.
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
    """What a node's agent remarks in its ``started.json`` or ``exit.json``."""
    found = _document(data or b"").get("remarks")
    return tuple(map(str, found)) if isinstance(found, list) else ()


def stop_arguments(plan: Plan, reason: str) -> list[str]:
    """For the node agent's program: end everything of a run on a host."""
    return ["stop", plan.run_dir, "--grace", f"{plan.stop_grace:g}", "--reason", reason]


def _endings(node: int, ended: Mapping[str, Any]) -> list[RankExit]:
    """How the ranks ended of which the node agent knows it."""
    try:
        return [
            RankExit(node, end["rank"], end["exit_code"], end["at"], bool(end.get("asked", True)))
            for end in ended.get("processes", [])
            if isinstance(end["rank"], int)
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def observed(nodes: Sequence[NodeStatus], exit_json: Mapping[int, bytes]) -> Observation:
    """An attempt, from its nodes' states and the ``exit.json`` of those that left one."""
    documents = {node: _document(data) for node, data in exit_json.items()}
    failed = [node.node for node in nodes if node.state is State.FAILED]
    exits = [end for node in failed for end in _endings(node, documents.get(node, {}))]
    kills = [documents[node].get("oom_kills") for node in failed if node in documents]
    lefts = [document.get("restarts_left") for document in documents.values()]
    # Another node's launcher may be the first to notice that a rank failed here.
    first = min((end.at for end in exits if end.exit_code), default=0.0)
    for node in exit_json.keys() - set(failed):
        exits += [
            end for end in _endings(node, documents[node]) if (end.exit_code and not end.asked)
            or (end.at < first and end.exit_code not in (0, *_TERMINATED))
            # It may have ended so before it was asked to; that was seen only later.
            or (first and 0 < end.exit_code < 128)
        ]  # fmt: skip
    return Observation(
        state=overall({node.state for node in nodes}),
        nodes=tuple(nodes),
        rank_exits=tuple(exits),
        oom_kills=max((number for number in kills if isinstance(number, int)), default=0),
        causes=tuple(cause for node, ended in documents.items() for cause in _causes(node, ended)),
        final=any(document.get("final") is True for document in documents.values()),
        goes_on=next(filter(None, map(goes_on, exit_json.values())), None),
        restarts_left=min((left for left in lefts if isinstance(left, int)), default=None),
    )


def _causes(node: int, ended: Mapping[str, Any]) -> list[NodeCause]:
    """What was done to a node or its ranks, as its agent saw it."""
    found, code = ended.get("causes"), ended.get("exit_code")
    return [
        NodeCause(
            node=node,
            words=str(words),
            hint=next((hint for word, hint in _HINTS.items() if word in str(words)), None),
            exit_code=code if isinstance(code, int) and code else 1,
        )
        for words in (found if isinstance(found, list) else ())
    ]


def _document(data: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
