"""A run's containers as the docker engine shows them, and their removal."""

from __future__ import annotations

import contextlib
import math
import re

from msgspec import MsgspecError, Struct, field, json
from msgspec.structs import replace

from clusterkit.agent.report import node_state
from clusterkit.backends.compose.compose_file import ATTEMPT, LABEL, STOP_EXTRA, container_name
from clusterkit.backends.compose.engine import ENGINE_SECONDS, Docker
from clusterkit.backends.node_status import folder_exists
from clusterkit.errors import ClusterkitError, SubmitFailed, Unavailable
from clusterkit.plan import ComposeNative, Plan
from clusterkit.run.folder import RunHandle
from clusterkit.transport import Completed, Transport

INSPECT_SECONDS = 10.0
_FORMAT = (
    '{"state":{{json .State.Status}},"exit_code":{{.State.ExitCode}},"oom":{{.State.OOMKilled}},'
    '"error":{{json .State.Error}},"memory":{{.HostConfig.Memory}},'
    '"connected":{{if .NetworkSettings.Networks}}true{{else}}false{{end}},'
    f'"run_dir":{{{{json (index .Config.Labels "{LABEL}")}}}},'
    f'"attempt":{{{{json (index .Config.Labels "{ATTEMPT}")}}}},'
    '"node":{{json (index .Config.Labels "clusterkit.node")}}}'
)
"""Format of `docker inspect`: a `Container` as JSON."""
_GONE = re.compile(r"No such (container|object)|removal of container .* is already in progress")


class Container(Struct, frozen=True, kw_only=True):
    """A container's state in the engine, and the labels that assign it to a run."""

    state: str
    """Such as ``running`` or ``exited``."""
    exit_code: int = 0
    oom: bool = False
    """Whether the kernel killed a process in it for want of memory."""
    error: str = ""
    """Why the engine could not start it; empty: it could."""
    connected: bool = True
    """Whether it is in any network."""
    memory: int = 0
    """Memory limit in bytes; 0: none."""
    last_line: str = field(default="", name="said")
    """The last line of its log, if its agent never began."""
    run_dir: str = ""
    attempt: int = 0
    node: int = 0

    @property
    def ended(self) -> bool:
        return self.state in ("exited", "dead")

    def interruption(self) -> str | None:
        """Return how it was paused or disconnected from outside; None: it was not."""
        if self.state == "paused":
            return "its container was paused (docker pause)"
        if not self.connected:
            return "its container was cut off from the run's network (docker network disconnect)"
        return None

    def failure(self) -> str:
        """Return why it ended, where its agent has reported no reason."""
        if self.oom:
            return self.oom_reason()
        if self.error:
            return f"its container could not be started: {self.error}"
        last_line = f": {self.last_line}" if self.last_line else ""
        if self.exit_code == 137:
            return f"SIGKILL: its container was killed from outside (docker kill){last_line}"
        if self.exit_code == 143:
            return f"SIGTERM: its container was stopped from outside (docker stop){last_line}"
        return f"exit code {self.exit_code} of its container{last_line}"

    def oom_reason(self) -> str:
        if not self.memory:
            return "OOMKilled: this machine ran out of memory"
        unit, scale = ("GiB", 2**30) if self.memory >= 2**30 else ("MiB", 2**20)
        limit = f"{self.memory / scale:g} {unit}"
        return f"OOMKilled: its container used more than its memory limit of {limit}"


def docker_of(plan: Plan, transport: Transport) -> Docker:
    """Return the ``docker`` command for the engine that the run was planned for."""
    # Plans of older versions do not contain the socket.
    socket = plan.native.socket if isinstance(plan.native, ComposeNative) else None
    return Docker(socket, transport)


def inspect(handle: RunHandle, transport: Transport) -> dict[int, Container]:
    """Return the existing containers of this attempt or an earlier one, by node.

    Raises:
        Unavailable: the engine does not answer.
    """
    plan = handle.plan
    names = [container_name(plan.run_id, node) for node in range(len(plan.hosts))]
    if not names:  # the run's plan is damaged
        return {}
    arguments = ["inspect", "--type", "container", "--format", _FORMAT, *names]
    done = docker_of(plan, transport).run(*arguments, seconds=INSPECT_SECONDS)
    errors = _errors(done)
    if done.exit_code and errors and not done.stdout.strip():
        raise Unavailable(f"the docker engine does not answer: {errors[-1]}")
    containers: dict[int, Container] = {}
    lines = done.stdout.splitlines()
    try:
        found = [json.decode(line, type=Container, strict=False) for line in lines]  # labels: text
    except MsgspecError as error:
        raise Unavailable(f"docker inspect gave invalid output: {error}") from None
    if done.exit_code == 0 and len(found) < len(names):
        raise Unavailable(
            "docker inspect left out containers and did not say that they are missing"
        )
    for container in found:
        if container.run_dir == plan.run_dir and container.attempt <= handle.attempt:
            containers[container.node] = container
    return containers


def _errors(done: Completed) -> list[str]:
    """Return the errors of a docker command, without those for objects that no longer exist."""
    return [line for line in done.stderr.splitlines() if line and not _GONE.search(line)]


# ---------------------------------------------------------------- saved states


def saved_containers(handle: RunHandle) -> dict[int, Container]:
    """Return the containers as they were before clusterkit stopped them; empty: it has not."""
    return handle.folder.maybe_json(_saved_file(handle), dict[int, Container]) or {}


def _saved_file(handle: RunHandle) -> str:
    return f"attempts/{handle.attempt}/containers.json"


def _save(handle: RunHandle, transport: Transport) -> None:
    """Write the containers' states into the run folder: removed containers have none."""
    if handle.folder.file(_saved_file(handle)).exists() or not folder_exists(handle):
        return
    # Containers have to be removed even if their states cannot be saved.
    with contextlib.suppress(ClusterkitError):
        containers = inspect(handle, transport)
        for node, container in containers.items():
            state, _ = node_state(handle.folder.node_dir(handle.attempt, node))
            if container.ended and not state["begun"]:
                line = _last_log_line(handle.plan, node, transport)
                containers[node] = replace(container, last_line=line)
        if containers:
            handle.folder.write_json(_saved_file(handle), containers)


def _last_log_line(plan: Plan, node: int, transport: Transport) -> str:
    name = container_name(plan.run_id, node)
    done = docker_of(plan, transport).run("logs", "--tail", "3", name)
    return "" if done.exit_code else (done.stderr + done.stdout).strip().rpartition("\n")[2]


# ---------------------------------------------------------------- removal


def remove(handle: RunHandle, transport: Transport) -> None:
    """Stop and remove the run's containers and its network; their states are saved before.

    Raises:
        Unavailable: the engine does not answer, or refuses.
    """
    plan = handle.plan
    grace = math.ceil(plan.stop_grace) + STOP_EXTRA
    label = ("--filter", f"label={LABEL}={plan.run_dir}")
    for _ in range(5):  # a `docker compose up` that still runs may create more
        listed = _run(plan, transport, "ps", "--all", "--quiet", "--no-trunc", *label)
        if not (ids := listed.stdout.split()):
            break
        _save(handle, transport)
        _run(plan, transport, "stop", "--time", str(grace), *ids, seconds=grace + ENGINE_SECONDS)
        # With the anonymous volumes that the image declares: nothing refers to them afterwards.
        _run(plan, transport, "rm", "--force", "--volumes", *ids)
    networks = _run(plan, transport, "network", "ls", "--quiet", *label).stdout.split()
    if networks:
        _run(plan, transport, "network", "rm", *networks)


def _run(
    plan: Plan, transport: Transport, *arguments: str, seconds: float = ENGINE_SECONDS
) -> Completed:
    """Run a docker command; objects that no longer exist are no error.

    Raises:
        Unavailable: it failed.
    """
    try:
        done = docker_of(plan, transport).run(*arguments, seconds=seconds)
    except SubmitFailed as error:
        raise Unavailable(f"could not end run {plan.run_id}: {error.message}") from error
    errors = _errors(done)
    if done.exit_code and (errors or not done.stderr.strip()):
        raise Unavailable(
            f"could not end run {plan.run_id}: {(errors or ['docker failed'])[-1]}",
            hint=f"clusterkit cancel {plan.run_id} again, once the docker engine answers",
        )
    return done
