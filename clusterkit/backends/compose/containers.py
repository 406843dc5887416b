"""What a docker engine says of a run's containers, and what that means for its nodes."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from clusterkit.agent import STOPPED, goes_on
from clusterkit.agent.report import node_state
from clusterkit.backends.base import Observation
from clusterkit.backends.compose.compose_file import ATTEMPT, LABEL, STOP_EXTRA, container_name
from clusterkit.backends.compose.engine import ENGINE_SECONDS, HOST, Docker
from clusterkit.backends.node_status import (
    NodeFiles,
    folder_exists,
    judge_exit,
    judge_running,
    observed,
    remarks,
)
from clusterkit.errors import ClusterkitError, SubmitFailed, Unavailable
from clusterkit.plan import ComposeNative, Plan
from clusterkit.run.folder import RunHandle
from clusterkit.run.status import NodeCause, NodeStatus, State
from clusterkit.transport import Completed, Stream, Transport

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
    '{"state":{{json .State.Status}},"exit_code":{{.State.ExitCode}},"oom":{{.State.OOMKilled}},'
    '"error":{{json .State.Error}},"memory":{{.HostConfig.Memory}},'
    '"connected":{{if .NetworkSettings.Networks}}true{{else}}false{{end}},'
    f'"run_dir":{{{{json (index .Config.Labels "{LABEL}")}}}},'
    f'"attempt":{{{{json (index .Config.Labels "{ATTEMPT}")}}}},'
    '"node":{{json (index .Config.Labels "clusterkit.node")}}}'
)
"""An `_Inspected`, as JSON."""
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


class _Inspected(Container, frozen=True, kw_only=True):
    """A container as the engine shows it, with its labels."""

    run_dir: str
    attempt: int
    node: int


def _words(size: int) -> str:
    unit, scale = ("GiB", 2**30) if size >= 2**30 else ("MiB", 2**20)
    return f"{size / scale:g} {unit}"


def docker_of(plan: Plan, transport: Transport) -> Docker:
    """The engine that the run was planned for."""
    # Plans of older versions do not hold it.
    socket = plan.native.socket if isinstance(plan.native, ComposeNative) else None
    return Docker(socket, transport)


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
    complaints = _complaints(done)
    if done.exit_code and complaints and not done.stdout.strip():
        raise Unavailable(f"the docker engine does not answer: {complaints[-1]}")
    found: dict[int, Container] = {}
    for line in done.stdout.splitlines():
        with contextlib.suppress(msgspec.MsgspecError):
            each = msgspec.json.decode(line, type=_Inspected, strict=False)  # labels are text
            if each.run_dir == plan.run_dir and each.attempt <= handle.attempt:
                found[each.node] = each
    return found


def _complaints(done: Completed) -> list[str]:
    return [line for line in done.stderr.splitlines() if line and not _GONE.search(line)]


def _snapshot(handle: RunHandle) -> str:
    """The file that says how the containers were before clusterkit ended and removed them."""
    return f"attempts/{handle.attempt}/containers.json"


def _keep(handle: RunHandle, transport: Transport) -> None:
    """Write down how the containers are: nothing else shows their ends once they are gone."""
    if handle.folder.file(_snapshot(handle)).exists() or not folder_exists(handle):
        return
    # What cannot be kept is no reason to leave containers behind.
    with contextlib.suppress(ClusterkitError):
        found = inspect(handle, transport)
        for node, container in found.items():
            state, _ = node_state(handle.folder.node_dir(handle.attempt, node))
            if container.over and not state["begun"]:
                said = _said(handle.plan, node, transport)
                found[node] = msgspec.structs.replace(container, said=said)
        if found:
            handle.folder.write_json(_snapshot(handle), found)


def _said(plan: Plan, node: int, transport: Transport) -> str:
    words = ["logs", "--tail", "3", container_name(plan.run_id, node)]
    done = docker_of(plan, transport).run(*words)
    return "" if done.exit_code else (done.stderr + done.stdout).strip().rpartition("\n")[2]


def judge(
    node: int,
    left: NodeFiles,
    *,
    live: Container | None,
    kept: Container | None,
    silent: str | None = None,
    patient: bool = True,
) -> NodeStatus:
    """A node's state from what its agent left and what the engine says.

    Args:
        live: its container, as it is; None: there is none.
        kept: its container as it was before clusterkit stopped it; None: it has not.
        silent: why the engine does not answer; None: it does.
        patient: whether what was done to its container may still be undone.
    """
    host = f"node-{node}"

    def status(state: State, reason: str | None = None, code: int | None = None) -> NodeStatus:
        return NodeStatus(
            node=node, host=host, state=state, reason=reason, exit_code=code,
            remarks=remarks(left.exit or left.started),
        )  # fmt: skip

    if left.exit is not None:
        over = goes_on(left.exit) is not None
        if live is not None and live.state == "running" and kept is None and not over:
            return status(State.RUNNING)  # its agent has ended, its container is about to
        ended = judge_exit(node, host, left.exit)
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
        if left.begun:
            return status(State.FAILED, "its container is gone: it was removed from outside")
        return status(State.PENDING)
    state = STATES.get(live.state, State.UNKNOWN)
    if state is State.UNKNOWN:
        return status(state, f"docker reports its container as {live.state!r}")
    if state is State.FAILED:
        return status(state, live.ending(), live.exit_code)
    if (trouble := live.trouble()) is not None and not patient:
        return status(State.FAILED, trouble)
    if state is State.RUNNING and left.begun and trouble is None:
        return judge_running(node, host, left.started)
    return status(state if left.begun else State.PENDING, trouble)


def observation(
    handle: RunHandle,
    live: Mapping[int, Container],
    *,
    silent: str | None = None,
    lost: Collection[int] = (),
) -> Observation:
    """An attempt's nodes from their files and their containers.

    Args:
        silent: why the engine does not answer; None: it does.
        lost: nodes whose containers have been paused or cut off for too long.
    """
    kept = handle.folder.maybe_json(_snapshot(handle), dict[int, Container]) or {}
    nodes, ended, causes = [], {}, []
    for node in range(handle.plan.nodes):
        left = NodeFiles.read(handle.folder.node_dir(handle.attempt, node))
        found = judge(
            node, left, live=live.get(node), kept=kept.get(node), silent=silent,
            patient=node not in lost,
        )  # fmt: skip
        nodes.append(found)
        own = None if left.exit is None else judge_exit(node, found.host, left.exit)
        if found.state is State.FAILED and found.reason and found != own:
            # Its own word for it, if there is one, is only that it was asked to end.
            causes.append(NodeCause(node=node, words=found.reason, exit_code=found.exit_code or 1))
        ended[node] = left.exit or b""
    seen = observed(nodes, ended)
    done_to_containers = _causes(handle.plan, {**live, **kept})
    return msgspec.structs.replace(seen, causes=(*done_to_containers, *causes, *seen.causes))


def _causes(plan: Plan, containers: Mapping[int, Container]) -> Iterator[NodeCause]:
    """What was done to containers, where their nodes could not know or write it."""
    for node, found in sorted(containers.items()):
        if found.oom:
            hint = "a larger `memory` in the cluster entry, or a smaller batch.micro"
            yield NodeCause(node=node, words=found.starved(), hint=hint)
        elif node >= plan.nodes:  # mpirun's other nodes have no agent
            ended = found.ending() if found.over and found.exit_code in (137, 143) else None
            if (words := found.trouble() or ended) is not None:
                yield NodeCause(node=node, words=words)


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
        if not folder_exists(self._handle):
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
        silent, patience = None, self._handle.plan.lost_after
        if self._silent_since is not None and (seconds := now - self._silent_since) >= patience:
            silent = f"{self._complaint} (for {seconds:.0f} s)"
        lost = [node for node, since in self._troubled.items() if now - since >= patience]
        return observation(self._handle, self._live, silent=silent, lost=lost)

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
    ours = ("--filter", f"label={LABEL}={plan.run_dir}")
    for _ in range(5):
        found = _ended(plan, ["ps", "--all", "--quiet", "--no-trunc", *ours], transport)
        if not (names := found.stdout.split()):
            break
        _keep(handle, transport)
        words = ["stop", "--time", str(grace), *names]
        _ended(plan, words, transport, seconds=grace + ENGINE_SECONDS)
        # With the volumes that an image declares: nobody could find them later.
        _ended(plan, ["rm", "--force", "--volumes", *names], transport)
    networks = _ended(plan, ["network", "ls", "--quiet", *ours], transport).stdout.split()
    if networks:
        _ended(plan, ["network", "rm", *networks], transport)


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
    complaints = _complaints(done)
    if done.exit_code and (complaints or not done.stderr.strip()):
        raise Unavailable(
            f"could not end run {plan.run_id}: {(complaints or ['docker failed'])[-1]}",
            hint=f"clusterkit cancel {plan.run_id} again, once the docker engine answers",
        )
    return done
