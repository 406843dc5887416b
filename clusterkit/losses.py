"""Nodes that a run lost, not for a rank that failed: which, whether to wait, and waiting."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec

from clusterkit.backends.base import Observation
from clusterkit.cluster import Facts
from clusterkit.errors import ClusterkitError
from clusterkit.plan import Plan
from clusterkit.spec import JobSpec
from clusterkit.status import NodeStatus, State
from clusterkit.transport import Transport

LOST_SECONDS = 600.0
"""How long lost nodes are waited for."""
SOON_SECONDS = 60.0
SOON_LOSSES = 3
"""So many times in a row nodes may be lost within SOON_SECONDS of the start."""
AGAIN_SECONDS = 5.0


class Losses:
    """What a run's supervisor does about lost nodes: see `JobSpec.on_node_loss`."""

    def __init__(self, job: JobSpec, plan: Plan) -> None:
        self.plan, self._ends = plan, job.on_node_loss == "fail"
        self._again = plan.restarts > 0 or job.spares > 0
        self._left = SOON_LOSSES

    def end(self, seen: Observation) -> bool:
        """Whether the run ends because of those of an attempt that has ended."""
        return self._ends and bool(_lost(seen))

    def of(self, seen: Observation, began: float | None) -> list[NodeStatus]:
        """The nodes that are waited for: those that do not answer, and those whose agent is gone
        without a word.

        Args:
            seen: an attempt that has ended.
            began: when its nodes had started.
        """
        if not self._again or self._ends or seen.final or seen.late:
            return []
        if lost := _lost(seen):
            now = time.time()
            self._left = SOON_LOSSES if now - (began or now) >= SOON_SECONDS else self._left - 1
        return lost if self._left >= 0 else []

    def waiting(self, seen: Observation, lost: Sequence[NodeStatus]) -> tuple[NodeStatus, ...]:
        """The nodes' status meanwhile."""
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
        """Wait so long until the hosts of these nodes answer; whether they do.

        Args:
            ended: whether there is nothing more to wait for.
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
        """Facts of the hosts that can go on without those of these nodes, and how many of them are
        spares; None: they are too few, or the job does not ask for it."""
        gone = {self.plan.hosts[node.node] for node in lost}
        left = tuple(host for host in facts.hosts if host.host not in gone)
        least, most = job.node_range
        if not (job.spares or job.shrinks) or len(left) < least:
            return None
        spares = min(job.spares, max(0, len(left) - most))
        return msgspec.structs.replace(facts, hosts=left), spares


def _lost(seen: Observation) -> list[NodeStatus]:
    states = (State.UNKNOWN, State.FAILED)
    return [node for node in seen.nodes if node.exit_code is None and node.state in states]


def names(nodes: Sequence[NodeStatus]) -> str:
    """``node 1 (h1), node 2 (h2)``."""
    return ", ".join(f"node {node.node} ({node.host})" for node in nodes)
