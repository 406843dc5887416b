"""What a docker engine says of a run's containers, and what that means for its nodes."""

from __future__ import annotations

import contextlib
import json
import math
import posixpath
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from clusterkit.agent import STOPPED, goes_on
from clusterkit.backends.base import Observation
from clusterkit.backends.compose.compose_file import ATTEMPT, LABEL, STOP_EXTRA, container_name
from clusterkit.backends.compose.engine import ENGINE_SECONDS, HOST, Docker
from clusterkit.backends.nodes import judge_exit, judge_running, node_file, observed, remarks
from clusterkit.errors import ClusterkitError, SubmitFailed, Unavailable
from clusterkit.plan import ComposeNative, Plan
from clusterkit.runs import RunHandle
from clusterkit.status import NodeCause, NodeStatus, State
from clusterkit.transport import Completed, Put, Stream, Transport

INSPECT_SECONDS = 10.0
LOOK_SECONDS = 3.0
"""How often containers are looked at although the engine reports no event."""
AGAIN_SECONDS = 1.0
"""Pause before an engine that does not answer is asked again."""
STATES: Mapping[str, State] = {
    "created": State.PENDING,
    "running": State.RUNNING,
    "restarting": State.RUNNING,
    "paused": State.RUNNING,
    "removing": State.RUNNING,
    "exited": State.FAILED,
    "dead": State.FAILED,
}
"""The engine's words for a container, for a node that has left no exit.json."""
_INSPECT = (
    '{"name":{{json .Name}},"labels":{{json .Config.Labels}},"state":{{json .State}},'
    '"networks":{{json .NetworkSettings.Networks}},"memory":{{json .HostConfig.Memory}}}'
)
_GONE = re.compile(r"No such (container|object)|removal of container .* is already in progress")


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine says of one container, as far as it matters here."""

    state: str
    exit_code: int = 0
    oom: bool = False
    error: str = ""
    connected: bool = True
    memory: int = 0
    """Its limit in bytes; 0: none."""
    said: str = ""
    """Its own last words, where its node wrote none."""

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state in ("exited", "dead")

    def trouble(self) -> str | None:
        """What was done to it from outside, in words; None: nothing that can be seen."""
        if self.state == "paused":
            return "its container was paused (docker pause)"
        if not self.connected:
            return "its container was cut off from the run's network (docker network disconnect)"
        return None

    def ending(self) -> str:
        """Why it ended without a word of its node's."""
        if self.oom:
            return self.starved()
        if self.error:
            return f"its container could not be started: {self.error}"
        said = f": {self.said}" if self.said else ""
        if self.exit_code == 137:
            return f"its container was killed from outside (docker kill, exit code 137){said}"
        if self.exit_code == 143:
            return f"its container was stopped from outside (docker stop, exit code 143){said}"
        return f"its container ended with exit code {self.exit_code}{said}"

    def starved(self) -> str:
        limit = f"over its container's memory limit of {_words(self.memory)}"
        return f"killed by the kernel: {limit if self.memory else 'this machine was out of memory'}"


def _words(size: int) -> str:
    unit, scale = ("GiB", 2**30) if size >= 2**30 else ("MiB", 2**20)
    return f"{size / scale:g} {unit}"


def docker_of(plan: Plan, transport: Transport) -> Docker:
    """The engine that the run was planned for."""
    # Plans of older versions do not hold it.
    socket = plan.native.socket if isinstance(plan.native, ComposeNative) else None
    return Docker(socket, transport)


def _begun(handle: RunHandle, node: int, transport: Transport) -> bool:
    # The first is node.sh's; an attempt that its agent began has none.
    files = (node_file(handle, node, name) for name in ("pid", "started.json"))
    return any(transport.get(HOST, file, 0, 1) is not None for file in files)


def known(plan: Plan, transport: Transport) -> bool:
    return transport.get(HOST, posixpath.join(plan.run_dir, "run.json"), 0, 1) is not None


def inspect(handle: RunHandle, transport: Transport) -> dict[int, Container]:
    """The containers in which an attempt began, or one before it, that there are; by node.

    Raises:
        Unavailable: the engine does not answer.
    """
    plan = handle.plan
    names = [container_name(plan.run_id, node) for node in range(len(plan.hosts))]
    if not names:  # the run's plan is damaged
        return {}
    words = ["inspect", "--type", "container", "--format", _INSPECT, *names]
    done = docker_of(plan, transport).run(*words, seconds=INSPECT_SECONDS)
    complaints = [line for line in done.stderr.splitlines() if line and not _GONE.search(line)]
    if done.exit_code and complaints and not done.stdout.strip():
        raise Unavailable(f"the docker engine does not answer: {complaints[-1]}")
    found = {}
    for line in done.stdout.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            entry = json.loads(line)
            labels = entry["labels"]
            if labels[LABEL] == plan.run_dir and int(labels[ATTEMPT]) <= handle.attempt:
                found[int(labels["clusterkit.node"])] = _container(entry)
    return found


def _container(entry: Mapping[str, Any]) -> Container:
    state = entry["state"]
    return Container(
        state=str(state["Status"]),
        exit_code=int(state.get("ExitCode") or 0),
        oom=bool(state.get("OOMKilled")),
        error=str(state.get("Error") or ""),
        connected=bool(entry.get("networks")),
        memory=int(entry.get("memory") or 0),
    )


def _snapshot_path(handle: RunHandle) -> str:
    return posixpath.join(handle.plan.run_dir, "attempts", str(handle.attempt), "containers.json")


def _snapshot(handle: RunHandle, transport: Transport) -> dict[int, Container]:
    """How the containers were before clusterkit ended and removed them."""
    data = transport.get(HOST, _snapshot_path(handle))
    try:
        return msgspec.json.decode(data or b"{}", type=dict[int, Container])
    except msgspec.MsgspecError:
        return {}


def _keep(handle: RunHandle, transport: Transport) -> None:
    """Write down how the containers are: nothing else shows their ends once they are gone."""
    if transport.get(HOST, _snapshot_path(handle), 0, 1) or not known(handle.plan, transport):
        return
    # What cannot be kept is no reason to leave containers behind.
    with contextlib.suppress(ClusterkitError):
        found = inspect(handle, transport)
        for node, container in found.items():
            if container.over and not _begun(handle, node, transport):
                said = _said(handle.plan, node, transport)
                found[node] = msgspec.structs.replace(container, said=said)
        if found:
            data = msgspec.json.format(msgspec.json.encode(found), indent=1)
            transport.put_all(HOST, [Put(_snapshot_path(handle), data)])


def _said(plan: Plan, node: int, transport: Transport) -> str:
    words = ["logs", "--tail", "3", container_name(plan.run_id, node)]
    done = docker_of(plan, transport).run(*words)
    return "" if done.exit_code else (done.stderr + done.stdout).strip().rpartition("\n")[2]


def judge(
    node: int,
    *,
    begun: bool,
    exit_json: bytes | None,
    live: Container | None,
    kept: Container | None,
    silent: str | None = None,
    patient: bool = True,
) -> NodeStatus:
    """A node's state from what its agent left and what the engine says.

    Args:
        begun: its agent has recorded its process.
        exit_json: contents of ``exit.json``; None: there is none.
        live: its container, as it is; None: there is none.
        kept: its container as it was before clusterkit stopped it; None: it has not.
        silent: why the engine does not answer; None: it does.
        patient: whether what was done to its container may still be undone.
    """
    host = f"node-{node}"

    def status(state: State, reason: str | None = None, code: int | None = None) -> NodeStatus:
        return NodeStatus(node=node, host=host, state=state, reason=reason, exit_code=code)

    if exit_json is not None:
        over = goes_on(exit_json) is not None
        if live is not None and live.state == "running" and kept is None and not over:
            return status(State.RUNNING)  # its agent has ended, its container is about to
        ended = judge_exit(node, host, exit_json)
        before = kept or live
        if ended.state is State.CANCELLED and before is not None:
            # It was asked to end; by whom, and because of what?
            reason = before.trouble()
            if reason is None and before.over and ended.reason == STOPPED:
                reason = "its container was stopped from outside (docker stop)"
            if reason is not None:
                return msgspec.structs.replace(ended, state=State.FAILED, reason=reason)
        return ended
    if silent is not None:
        return status(State.UNKNOWN, silent)
    if kept is not None and (live is None or live.over):
        if kept.over:
            return status(State.FAILED, kept.ending(), kept.exit_code)
        if (reason := kept.trouble()) is not None:
            return status(State.FAILED, reason)
        return status(State.CANCELLED, "killed: it did not stop when asked to")
    if live is None:
        if begun:
            return status(State.FAILED, "its container is gone: it was removed from outside")
        return status(State.PENDING)
    state = STATES.get(live.state, State.UNKNOWN)
    if state is State.UNKNOWN:
        return status(state, f"docker reports its container as {live.state!r}")
    if state is State.FAILED:
        return status(state, live.ending(), live.exit_code)
    if live.trouble() is not None and not patient:
        return status(State.FAILED, live.trouble())
    if state is State.RUNNING and not begun:
        state = State.PENDING
    return status(state, live.trouble())


def observation(
    handle: RunHandle,
    live: Mapping[int, Container],
    transport: Transport,
    *,
    silent: str | None = None,
    lost: Collection[int] = (),
) -> Observation:
    """An attempt's nodes from their files and their containers.

    Args:
        silent: why the engine does not answer; None: it does.
        lost: nodes whose containers have been paused or cut off for too long.
    """
    kept = _snapshot(handle, transport)
    nodes, ended, causes = [], {}, []
    for node in range(handle.plan.nodes):
        exit_json = transport.get(HOST, node_file(handle, node, "exit.json"))
        found = judge(
            node,
            begun=_begun(handle, node, transport),
            exit_json=exit_json,
            live=live.get(node),
            kept=kept.get(node),
            silent=silent,
            patient=node not in lost,
        )
        if not found.remarks:
            began = transport.get(HOST, node_file(handle, node, "started.json"))
            found = msgspec.structs.replace(found, remarks=remarks(exit_json or began))
            if exit_json is None and found.state is State.RUNNING and found.reason is None:
                found = judge_running(node, found.host, began)
        nodes.append(found)
        own = None if exit_json is None else judge_exit(node, found.host, exit_json)
        if found.state is State.FAILED and found.reason and found != own:
            # Its own word for it, if there is one, is only that it was asked to end.
            causes.append(NodeCause(node=node, words=found.reason, exit_code=found.exit_code or 1))
        ended[node] = exit_json or b""
    seen = observed(nodes, ended)
    done_to_containers = _causes(handle.plan, kept, live)
    return msgspec.structs.replace(seen, causes=(*done_to_containers, *causes, *seen.causes))


def _causes(
    plan: Plan, kept: Mapping[int, Container], live: Mapping[int, Container]
) -> tuple[NodeCause, ...]:
    """What was done to containers, where their nodes could not know or write it."""
    causes = []
    for node in range(len(plan.hosts)):
        found = kept.get(node) or live.get(node)
        if found is not None and found.oom:
            causes.append(
                NodeCause(
                    node=node,
                    words=found.starved(),
                    hint="a larger `memory` in the cluster entry, or a smaller batch.micro",
                )
            )
        elif node >= plan.nodes and found is not None:
            # mpirun's other nodes have no agent.
            words = found.trouble()
            if words is None and found.over and found.exit_code in (137, 143):
                words = found.ending()
            if words is not None:
                causes.append(NodeCause(node=node, words=words))
    return tuple(causes)


class ContainerMonitor:
    """Looks at the containers when the engine reports an event of one of them."""

    def __init__(self, handle: RunHandle, transport: Transport) -> None:
        self._handle = handle
        self._transport = transport
        self._events: Stream | None = None
        self._since = time.time()
        self._live: dict[int, Container] = {}
        self._look_at = 0.0
        self._open_at = 0.0
        self._silent_since: float | None = None
        self._complaint = ""
        self._last: tuple[NodeStatus, ...] = ()
        self._troubled: dict[int, float] = {}
        """Since when nodes are paused or cut off."""

    def status(self) -> Observation | None:
        if not known(self._handle.plan, self._transport):
            return None
        now = time.monotonic()
        if self._happened() or now >= self._look_at:
            self._look(now)
        seen = self._observed(now)
        if seen.nodes != self._last and self._silent_since is None:
            # The files have changed: what does the engine say by now?
            self._look(now)
            seen = self._observed(now)
        self._last = seen.nodes
        return seen

    def _observed(self, now: float) -> Observation:
        silent = None
        if self._silent_since is not None:
            seconds = now - self._silent_since
            if seconds >= self._handle.plan.lost_after:
                silent = f"{self._complaint} (for {seconds:.0f} s)"
        lost = [
            node
            for node, since in self._troubled.items()
            if now - since >= self._handle.plan.lost_after
        ]
        return observation(self._handle, self._live, self._transport, silent=silent, lost=lost)

    def _look(self, now: float) -> None:
        try:
            self._live = inspect(self._handle, self._transport)
        except ClusterkitError as error:
            self._silent_since = self._silent_since or now
            self._complaint = error.message
            self._look_at = now + AGAIN_SECONDS
        else:
            self._silent_since = None
            self._look_at = now + LOOK_SECONDS
            self._troubled = {
                node: self._troubled.get(node, now)
                for node, found in self._live.items()
                if found.trouble() is not None
            }

    def _happened(self) -> bool:
        """Whether the engine has reported an event since the last call."""
        now = time.monotonic()
        if self._events is None:
            if now < self._open_at:
                return False
            self._open_at = now + AGAIN_SECONDS
            plan = self._handle.plan
            words = [
                *docker_of(plan, self._transport).tool, "events", "--since", f"{self._since:.3f}",
                "--format", "{{.Action}}", "--filter", f"label={LABEL}={plan.run_dir}",
            ]  # fmt: skip
            try:
                self._events = self._transport.open(HOST, words)
            except ClusterkitError:
                return False
        happened = False
        try:
            while self._events.read(0):
                happened = True
        except SubmitFailed:
            return happened  # nothing more for now
        # The engine is gone, or going.
        self._since = time.time()
        self.close()
        return True

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None


# ---------------------------------------------------------------- ending


def remove(handle: RunHandle, transport: Transport) -> None:
    """End and remove the run's containers and its network; how they were is kept.

    Raises:
        Unavailable: the engine does not answer, or will not.
    """
    plan = handle.plan
    grace = math.ceil(plan.stop_grace) + STOP_EXTRA
    for _ in range(5):
        found = _belonging(plan, transport)
        if not found:
            break
        _keep(handle, transport)
        if running := [name for name, state in found if state not in ("exited", "created")]:
            words = ["stop", "--time", str(grace), *running]
            _ended(plan, words, transport, seconds=grace + ENGINE_SECONDS)
        names = [name for name, _ in found]
        # With the volumes that an image declares: nobody could find them later.
        _ended(plan, ["rm", "--force", "--volumes", *names], transport)
    named = _ended(
        plan,
        ["network", "ls", "--quiet", "--filter", f"label={LABEL}={plan.run_dir}"],
        transport,
    ).stdout.split()
    if named:
        _ended(plan, ["network", "rm", *named], transport)


def _belonging(plan: Plan, transport: Transport) -> list[tuple[str, str]]:
    """Containers of a run that there are: id and state."""
    words = ["ps", "--all", "--no-trunc", "--filter", f"label={LABEL}={plan.run_dir}"]
    done = _ended(plan, [*words, "--format", "{{.ID}} {{.State}}"], transport)
    return [(line.split()[0], line.split()[-1]) for line in done.stdout.splitlines() if line]


def _ended(
    plan: Plan, words: Sequence[str], transport: Transport, *, seconds: float = ENGINE_SECONDS
) -> Completed:
    """A command that ends something of the run; what is gone already is fine.

    Raises:
        Unavailable: it failed.
    """
    try:
        done = docker_of(plan, transport).run(*words, seconds=seconds)
    except SubmitFailed as error:
        raise Unavailable(f"could not end run {plan.run_id}: {error.message}") from error
    complaints = [line for line in done.stderr.splitlines() if line and not _GONE.search(line)]
    if done.exit_code and (complaints or not done.stderr.strip()):
        raise Unavailable(
            f"could not end run {plan.run_id}: {(complaints or ['docker failed'])[-1]}",
            hint=f"clusterkit cancel {plan.run_id} again, once the docker engine answers",
        )
    return done
