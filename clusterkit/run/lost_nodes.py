"""Lost nodes: detects them, waits for them, and starts them again."""

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
from clusterkit.run.folder import RunFolder, StepRecord
from clusterkit.run.outcome import TOKEN
from clusterkit.run.status import NodeStatus, State
from clusterkit.shell import Secret
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

LOST_SECONDS = 600.0
"""How long to wait for lost nodes."""
SOON_SECONDS = 60.0
SOON_LOSSES = 3
"""How often in a row nodes may be lost within SOON_SECONDS of the start."""
AGAIN_SECONDS = 5.0
RETURN_SECONDS = 10.0
"""How long a node is missing from a run that goes on without it, beyond ``stop_grace``, before it
is started again. Doubles with each try."""


class Losses:
    """Decides what follows the loss of nodes in an attempt; see `JobSpec.on_node_loss`."""

    def __init__(self, job: JobSpec, plan: Plan) -> None:
        self.plan, self._ends = plan, job.on_node_loss == "fail"
        self._again = plan.restarts > 0 or job.spares > 0
        self._left = SOON_LOSSES

    def end(self, seen: Observation) -> bool:
        """Return whether nodes that this attempt lost end the run."""
        return self._ends and bool(_lost(seen))

    def of(self, seen: Observation, began: float | None) -> list[NodeStatus]:
        """Return the nodes to wait for: those that do not answer, and those whose agent ended
        without reporting an exit code.

        Args:
            seen: an attempt that has ended.
            began: when its nodes had started, Unix time.
        """
        if not self._again or self._ends or seen.final or seen.late:
            return []
        if lost := _lost(seen):
            now = time.time()
            self._left = SOON_LOSSES if now - (began or now) >= SOON_SECONDS else self._left - 1
        return lost if self._left >= 0 else []

    def waiting(self, seen: Observation, lost: Sequence[NodeStatus]) -> tuple[NodeStatus, ...]:
        """Return the nodes' status while the run waits."""
        why, until = f"waiting for {names(lost)}", time.time() + LOST_SECONDS
        return tuple(
            msgspec.structs.replace(node, state=State.RESTARTING, reason=why, until=until)
            for node in seen.nodes
        )

    def answer(
        self,
        lost: Sequence[NodeStatus],
        transport: Transport,
        ended: Callable[[], bool],
        seconds: float,
    ) -> bool:
        """Wait at most ``seconds`` until the hosts of these nodes answer. Return whether they do.

        Args:
            ended: whether to stop waiting.
        """
        until = time.time() + seconds
        while not ended():
            with contextlib.suppress(ClusterkitError):
                for node in lost:
                    host = self.plan.hosts[node.node]
                    transport.run(host, ["true"], timeout=AGAIN_SECONDS)
                return True
            if time.time() >= until:
                break
            time.sleep(AGAIN_SECONDS)
        return False

    def others(
        self, lost: Sequence[NodeStatus], job: JobSpec, facts: Facts
    ) -> tuple[Facts, int] | None:
        """Return facts without the hosts of these nodes, and how many of the others are spares.
        None if they are too few, or the job has neither spares nor a range of nodes."""
        gone = {self.plan.hosts[node.node] for node in lost}
        left = tuple(host for host in facts.hosts if host.host not in gone)
        least, most = job.node_range
        if not (job.spares or job.shrinks) or len(left) < least:
            return None
        spares = min(job.spares, max(0, len(left) - most))
        return msgspec.structs.replace(facts, hosts=left), spares


class Returns:
    """Decides which nodes that a running attempt lost are started again, to join the others."""

    def __init__(self, folder: RunFolder, job: JobSpec, plan: Plan) -> None:
        self._folder, self._wanted = folder, job.shrinks or job.spares > 0
        self._pause = plan.stop_grace + RETURN_SECONDS  # the lost node's own ranks have ended then
        self._since: dict[int, float] = {}
        self._tries: dict[int, int] = {}
        self._known_at = 0.0  # when the node that was started last has reported its state

    def begin(self) -> dict[str, Secret]:
        """Return the secret of a new attempt's nodes, which those that join it need; nothing where
        none can join."""
        if not self._wanted:
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
        done = self._folder.records("steps.jsonl", StepRecord)
        attempt = max((step.attempt for step in done), default=1)
        try:
            token = Secret(PEER_TOKEN, self._folder.read(TOKEN).decode())
            record = partial(self._folder.record, attempt)
            submit(attempt=attempt, secrets={**secrets, PEER_TOKEN: token}, record=record)
        except ClusterkitError as error:
            return f"node {node} could not be started again: {error.message}"
        finally:  # the submit may have taken long
            self._known_at = mirror.awake() + 2 * mirror.BACK_SECONDS
        return f"node {node} was started again, to join the others"

    def hidden(self, seen: Observation, now: float, followed: bool) -> bool:
        """Return whether an agent may run that has not reported yet: it follows the others once it
        has met node 0, and over SSH its files arrive late. For the arguments see `due`."""
        away = [node for node in seen.nodes if node.state is State.PENDING]
        started = [node for node in away if node.spare or node.node in self._tries or not followed]
        return bool(started) or now < self._known_at

    def due(self, seen: Observation, now: float, followed: bool) -> list[int]:
        """Return the nodes to start now.

        Args:
            now: seconds of a monotonic clock.
            followed: whether agents started the attempt. A node missing from it was lost before.
        """
        going_on = seen.nodes[0].state is State.RUNNING and not (seen.final or seen.late)
        states = {State.FAILED, State.CANCELLED, *([State.PENDING] if followed else [])}
        away = {node.node for node in seen.nodes[1:] if node.state in states}
        wanted = self._wanted and going_on
        self._since = {node: self._since.get(node, now) for node in away} if wanted else {}
        due = [
            node for node, since in self._since.items()
            if now - since >= self._pause * 2 ** self._tries.get(node, 0)
        ]  # fmt: skip
        for node in due:
            self._tries[node] = self._tries.get(node, 0) + 1
            del self._since[node]
        return due


def _lost(seen: Observation) -> list[NodeStatus]:
    states = (State.UNKNOWN, State.FAILED)
    return [node for node in seen.nodes if node.exit_code is None and node.state in states]


def names(nodes: Sequence[NodeStatus]) -> str:
    """``node 1 (h1), node 2 (h2)``."""
    return ", ".join(f"node {node.node} ({node.host})" for node in nodes)
