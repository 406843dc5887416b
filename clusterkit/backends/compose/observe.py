"""The status of nodes from their agents' files and the states of their containers."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping

import msgspec

from clusterkit.agent import STOPPED
from clusterkit.backends.base import Observation
from clusterkit.backends.compose.compose_file import LABEL
from clusterkit.backends.compose.containers import Container, docker_of, inspect, saved_containers
from clusterkit.backends.compose.engine import HOST
from clusterkit.backends.node_status import (
    NativeState,
    NodeFiles,
    folder_exists,
    judge_exit,
    judge_node,
    observed,
)
from clusterkit.errors import ClusterkitError, SubmitFailed
from clusterkit.plan import Plan
from clusterkit.run.folder import RunHandle
from clusterkit.run.status import NodeCause, NodeStatus, State
from clusterkit.transport import Stream, Transport

INSPECT_INTERVAL = 3.0
"""Seconds between two queries to an engine that reports no event."""
RETRY_SECONDS = 1.0
"""Pause before an engine that does not answer is queried again."""
STATES: Mapping[str, State] = {
    "created": State.PENDING,
    "running": State.RUNNING,
    "restarting": State.RUNNING,
    "paused": State.RUNNING,
    "removing": State.RUNNING,
    "exited": State.FAILED,
    "dead": State.FAILED,
}
"""State of a node that has no exit.json, by the state of its container."""


_UNREPORTED = (State.FAILED, State.UNKNOWN)


def status(handle: RunHandle, transport: Transport) -> Observation | None:
    """Implement `clusterkit.backends.base.Backend.status`."""
    if not folder_exists(handle):
        return None
    try:
        return observation(handle, inspect(handle, transport))
    except ClusterkitError as error:
        return observation(handle, {}, unreachable=error.message)


def native_state(
    files: NodeFiles,
    *,
    live: Container | None,
    saved: Container | None,
    unreachable: str | None = None,
    lost: bool = False,
) -> NativeState:
    """Return what the engine says of a node.

    Args:
        live: its container now, or when the engine answered last; None: it has none.
        saved: its container before clusterkit stopped it; None: clusterkit has not stopped it.
        unreachable: why the engine does not answer; None: it does.
        lost: whether its container has been paused or disconnected for `lost_after` seconds.
    """
    if files.exit is not None:
        # Without the engine the exit record is enough.
        container = saved or (live if unreachable is None else None)
        if container is not None and saved is None and container.state == "running":
            # Its agent has ended, its container is about to.
            return NativeState(state=State.RUNNING)
        return NativeState(state=State.FAILED, ended_by=_ended_by(files.exit, container))
    found = _container_state(files, live=live, saved=saved, lost=lost)
    if unreachable is None or (live is not None and live.ended):
        return found
    # Containers run on without their engine.
    state = found.state if live is not None and not found.state.final else State.UNKNOWN
    return NativeState(state=state, reason=unreachable)


def _container_state(
    files: NodeFiles, *, live: Container | None, saved: Container | None, lost: bool
) -> NativeState:
    """Return the state of a node whose agent has recorded no end."""
    if saved is not None and (live is None or live.ended):
        if saved.ended:
            return _failed(saved)
        if (reason := saved.interruption()) is not None:
            return NativeState(state=State.FAILED, reason=reason)
        return NativeState(
            state=State.CANCELLED, reason="SIGKILL: it did not stop within stop_grace"
        )
    if live is None:
        if files.begun:
            reason = "its container was removed from outside (docker rm)"
            return NativeState(state=State.FAILED, reason=reason)
        return NativeState(state=State.PENDING)
    state = STATES.get(live.state, State.UNKNOWN)
    if state is State.UNKNOWN:
        return NativeState(state=state, reason=f"docker reports its container as {live.state!r}")
    if state is State.FAILED:
        return _failed(live)
    interruption = live.interruption()
    if interruption is not None and lost:
        state = State.FAILED
    return NativeState(state=state, reason=interruption)


def _failed(container: Container) -> NativeState:
    return NativeState(
        state=State.FAILED, reason=container.failure(), exit_code=container.exit_code
    )


def _ended_by(exit_json: bytes, container: Container | None) -> str | None:
    """Return what from outside was why a node's agent was asked to end, if it was."""
    ended = judge_exit(0, "", exit_json)
    if ended.state is not State.CANCELLED or container is None:
        return None
    if (reason := container.interruption()) is None and container.ended and ended.reason == STOPPED:
        reason = "its container was stopped from outside (docker stop)"
    return reason


def observation(
    handle: RunHandle,
    live: Mapping[int, Container],
    *,
    unreachable: str | None = None,
    lost: Collection[int] = (),
) -> Observation:
    """Return the state of an attempt from its files and its containers.

    Args:
        live: its containers now, by node.
        unreachable: why the engine does not answer; None: it does.
        lost: nodes whose containers have been paused or disconnected for `lost_after` seconds.
    """
    saved = saved_containers(handle)
    nodes, exits, causes = [], {}, []
    for node in range(handle.plan.nodes):
        files = NodeFiles.read(handle.folder.node_dir(handle.attempt, node))
        native = native_state(
            files, live=live.get(node), saved=saved.get(node), unreachable=unreachable,
            lost=node in lost,
        )  # fmt: skip
        status = judge_node(node, f"node-{node}", files, native)
        nodes.append(status)
        unreported = files.exit is None or native.ended_by is not None
        if status.state in _UNREPORTED and status.reason and unreported:
            # The agent has reported nothing, or only that it was asked to end.
            hint = (
                None
                if status.state is State.FAILED
                else "`docker info` says why; is the docker engine running?"
            )
            causes.append(
                NodeCause(
                    node=node, words=status.reason, hint=hint, exit_code=status.exit_code or 1
                )
            )
        exits[node] = files.exit or b""
    found = observed(nodes, exits)
    from_containers = _container_causes(handle.plan, {**live, **saved})
    return msgspec.structs.replace(found, causes=(*from_containers, *causes, *found.causes))


def _container_causes(plan: Plan, containers: Mapping[int, Container]) -> Iterator[NodeCause]:
    """Yield the causes that no agent can report."""
    for node, container in sorted(containers.items()):
        if container.oom:
            hint = "a larger `memory` in the cluster entry, or a smaller batch.micro"
            yield NodeCause(node=node, words=container.oom_reason(), hint=hint)


class ContainerEvents:
    """The output of ``docker events`` for a run's containers; started again when it ends."""

    def __init__(self, plan: Plan, transport: Transport) -> None:
        self._plan = plan
        self._transport = transport
        self._stream: Stream | None = None
        self._since = time.time()
        self._open_at = 0.0

    def received(self) -> bool:
        """Return whether an event, or the end of the stream, has come since the last call."""
        if self._stream is None and not self._open():
            return False
        assert self._stream is not None
        received = False
        try:
            while self._stream.read(0):
                received = True
        except SubmitFailed:
            return received  # no more for now
        # The stream has ended: the engine stops, or has stopped.
        self._since = time.time()
        self.close()
        return True

    def _open(self) -> bool:
        now = time.monotonic()
        if now < self._open_at:
            return False
        self._open_at = now + RETRY_SECONDS
        argv = [
            *docker_of(self._plan, self._transport).command,
            "events", "--since", f"{self._since:.3f}", "--format", "{{.Action}}",
            "--filter", f"label={LABEL}={self._plan.run_dir}",
        ]  # fmt: skip
        try:
            self._stream = self._transport.open(HOST, argv)
        except ClusterkitError:
            return False
        return True

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class ContainerMonitor:
    """Follows an attempt: inspects the containers when an event or an agent's file is new."""

    def __init__(self, handle: RunHandle, transport: Transport) -> None:
        self._handle = handle
        self._transport = transport
        self._events = ContainerEvents(handle.plan, transport)
        self._live: dict[int, Container] = {}
        self._inspect_at = 0.0
        self._unreachable_since: float | None = None
        self._error = self._since = ""
        self._last: tuple[NodeStatus, ...] = ()
        self._interrupted_since: dict[int, float] = {}
        """By node whose container is paused or disconnected."""

    def status(self) -> Observation | None:
        if not folder_exists(self._handle):
            return None
        now = time.monotonic()
        if self._events.received() or now >= self._inspect_at:
            self._inspect(now)
        found = self._observation(now)
        if found.nodes != self._last and self._unreachable_since is None:
            # The agents' files have changed, and the containers may have since.
            self._inspect(now)
            found = self._observation(now)
        self._last = found.nodes
        return found

    def close(self) -> None:
        self._events.close()

    def _observation(self, now: float) -> Observation:
        unreachable, lost_after = None, self._handle.plan.lost_after
        since = self._unreachable_since
        if since is not None and now - since >= lost_after:
            unreachable = f"{self._error} (since {self._since})"
        # What is known of interruptions is from when the engine answered last.
        lost = [] if self._unreachable_since is not None else [
            node for node, since in self._interrupted_since.items() if now - since >= lost_after
        ]  # fmt: skip
        return observation(self._handle, self._live, unreachable=unreachable, lost=lost)

    def _inspect(self, now: float) -> None:
        try:
            self._live = inspect(self._handle, self._transport)
        except ClusterkitError as error:
            if self._unreachable_since is None:
                self._unreachable_since, self._since = now, time.strftime("%H:%M:%S")
            self._error = error.message
            self._inspect_at = now + RETRY_SECONDS
        else:
            self._unreachable_since = None
            self._inspect_at = now + INSPECT_INTERVAL
            self._interrupted_since = {
                node: self._interrupted_since.get(node, now)
                for node, container in self._live.items()
                if container.interruption() is not None
            }
