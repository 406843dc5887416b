"""Lost nodes: waiting for their hosts, doing without them, and starting them again."""

from __future__ import annotations

import contextlib
import secrets as tokens
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from clusterkit.agent import PEER_TOKEN
from clusterkit.backends.base import Observation
from clusterkit.cluster import Facts
from clusterkit.errors import ClusterkitError, RunFolderError
from clusterkit.files import write_atomic
from clusterkit.output import mirror
from clusterkit.plan import Plan
from clusterkit.run.folder import TOKEN, RunFolder
from clusterkit.run.status import NodeStatus, State
from clusterkit.shell import Secret
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

PING_SECONDS = 5.0
"""Pause between two attempts to reach a lost host, and how long one may take."""
REJOIN_SECONDS = 10.0
"""How long a node is missing from a run that continues without it, beyond ``stop_grace``, before
it is started again. Doubles with each try."""


def lost(seen: Observation) -> list[NodeStatus]:
    """Return the nodes that do not answer, or whose agent ended without reporting an exit code."""
    states = (State.UNKNOWN, State.FAILED)
    return [node for node in seen.nodes if node.exit_code is None and node.state in states]


def names(nodes: Sequence[NodeStatus]) -> str:
    """Return ``node 1 (h1), node 2 (h2)``."""
    return ", ".join(f"node {node.node} ({node.host})" for node in nodes)


def wait_for_hosts(
    hosts: Sequence[str], transport: Transport, stop: Callable[[], bool], seconds: float
) -> bool:
    """Wait at most ``seconds`` until all these hosts answer. Return whether they do.

    Args:
        stop: whether to stop waiting.
    """
    deadline = time.time() + seconds
    while not stop():
        with contextlib.suppress(ClusterkitError):
            for host in hosts:
                transport.run(host, ["true"], timeout=PING_SECONDS)
            return True
        if time.time() >= deadline:
            break
        time.sleep(PING_SECONDS)
    return False


def facts_without(hosts: Sequence[str], job: JobSpec, facts: Facts) -> tuple[Facts, int] | None:
    """Return facts without these hosts, and how many of the other hosts are spares. None if they
    are too few, or the job has neither spares nor a range of nodes."""
    left = tuple(host for host in facts.hosts if host.host not in hosts)
    least, most = job.node_range
    if not (job.spares or job.shrinks) or len(left) < least:
        return None
    spares = min(job.spares, max(0, len(left) - most))
    return msgspec.structs.replace(facts, hosts=left), spares


class Rejoin:
    """Starts nodes again that a running attempt lost, so that they join the others."""

    def __init__(self, folder: RunFolder, job: JobSpec, plan: Plan) -> None:
        self._folder, self._enabled = folder, job.shrinks or job.spares > 0
        # By then the lost node's own ranks have ended.
        self._pause = plan.stop_grace + REJOIN_SECONDS
        self._missing_since: dict[int, float] = {}
        self._tries: dict[int, int] = {}
        self._reported_at = 0.0  # when the node that was started last has reported its state

    def new_token(self) -> dict[str, Secret]:
        """Return the secret of a new attempt's nodes, which those that join it need; nothing where
        none can join."""
        if not self._enabled:
            return {}
        token = tokens.token_hex(16)
        with contextlib.suppress(RunFolderError):
            write_atomic(self._folder.file(TOKEN), token.encode(), 0o600)
        return {PEER_TOKEN: Secret(PEER_TOKEN, token)}

    def start(self, node: int, submit: Callable[..., None], secrets: Mapping[str, Secret]) -> str:
        """Start a node. Return the text of the event.

        Args:
            submit: `Backend.submit` with that node's plan.
        """
        # Its agent starts in the attempt in which the others started, and follows them from there.
        attempt = max(self._folder.steps_by_attempt(), default=1)
        try:
            token = Secret(PEER_TOKEN, self._folder.read(TOKEN).decode())
            record = partial(self._folder.record, attempt)
            submit(attempt=attempt, secrets={**secrets, PEER_TOKEN: token}, record=record)
        except ClusterkitError as error:
            return f"node {node} could not be started again: {error.message}"
        finally:  # the submit may have taken long
            self._reported_at = mirror.awake() + 2 * mirror.BACK_SECONDS
        return f"node {node} was started again, to join the others"

    def unreported(self, seen: Observation, now: float, followed: bool) -> bool:
        """Return whether an agent may run that has not reported yet: it follows the others once it
        has connected to node 0, and over SSH its files arrive late. For the arguments see `due`."""
        pending = [node for node in seen.nodes if node.state is State.PENDING]
        started = any(node.spare or node.node in self._tries or not followed for node in pending)
        return started or now < self._reported_at

    def due(self, seen: Observation, now: float, followed: bool) -> list[int]:
        """Return the nodes to start now.

        Args:
            now: seconds of a monotonic clock.
            followed: whether agents started the attempt. A node missing from it was lost before.
        """
        running = seen.nodes[0].state is State.RUNNING and not (seen.final or seen.late)
        states = {State.FAILED, State.CANCELLED, *([State.PENDING] if followed else [])}
        missing = [node.node for node in seen.nodes[1:] if node.state in states]
        if not (self._enabled and running):
            missing = []
        self._missing_since = {node: self._missing_since.get(node, now) for node in missing}
        due = []
        for node, since in list(self._missing_since.items()):
            tries = self._tries.get(node, 0)
            if now - since >= self._pause * 2**tries:
                due.append(node)
                self._tries[node] = tries + 1
                del self._missing_since[node]
        return due
