"""What an observation of an attempt proves. Pure."""

from __future__ import annotations

from enum import Enum

import msgspec
from msgspec import Struct

from clusterkit.backends.base import Observation
from clusterkit.cluster import Facts
from clusterkit.plan import Plan
from clusterkit.run.status import NodeStatus, State
from clusterkit.spec import JobSpec

LEASE_MARGIN = 5.0
"""Added to the time after which ranks that have lost node 0 have ended: they notice it late."""


class Terms(Struct, frozen=True, kw_only=True):
    """What a run's job and plan fix."""

    nodes: int
    places: int
    """Nodes that have ranks at the start; the others are spares."""
    least: int
    """With how many nodes the run continues."""
    replaces_lost: bool = False
    """Whether a lost node costs no restart."""
    ends_with_loss: bool = False
    """Whether a lost node ends the run."""
    ends_with_rank: bool = False
    """Whether the other nodes may go on although a rank has failed by itself, which ends the
    attempt: torchrun's elastic agents take its node for a lost one."""
    dispensable: int = 0
    """How many of its hosts the next attempt can do without."""
    rejoins: bool = False
    """Whether a node can join a running attempt."""
    start_seconds: float = 60.0
    stop_grace: float = 10.0
    lease: float | None = None
    """After so many seconds without node 0, nothing lives on a node; None: nothing ends it."""
    time_limit: float | None = None

    @classmethod
    def of(cls, job: JobSpec, plan: Plan, facts: Facts, start_seconds: float) -> Terms:
        changes = job.shrinks or job.spares > 0
        watched = facts.watch_port is not None and plan.nodes > 1 and plan.lost_after > 0
        # mpirun and torchrun's elastic agents watch the nodes by themselves.
        elastic = job.elastic and not job.shrinks
        ours = job.started_by != "mpirun" and not elastic
        lease = plan.lost_after + plan.stop_grace + LEASE_MARGIN if watched and ours else None
        return cls(
            nodes=plan.nodes,
            places=plan.nodes_with_ranks,
            least=plan.min_nodes,
            replaces_lost=job.on_node_loss != "fail" and (plan.restarts > 0 or job.spares > 0),
            ends_with_loss=job.on_node_loss == "fail",
            ends_with_rank=elastic,
            dispensable=max(0, len(facts.hosts) - job.node_range[0]) if changes else 0,
            rejoins=changes,
            start_seconds=start_seconds,
            stop_grace=plan.stop_grace,
            lease=lease,
            time_limit=job.limit_seconds,
        )


class Phase(Enum):
    """How far an attempt has come."""

    RUNNING = 1
    """Enough nodes run, or are about to, or it is not known."""
    ENDING = 2
    """The outcome is certain, but nodes may still run."""
    ENDED = 3
    """No node runs, or the nodes' agents have begun the next attempt."""


ACTIVE = frozenset({State.RUNNING, State.RESTARTING, State.UNKNOWN})
"""States of nodes that may run."""


def phase(
    terms: Terms, seen: Observation, *, pending: bool, unreported: bool, lease_over: bool = False
) -> Phase:
    """Return how far an attempt has come.

    Args:
        seen: the result of `outcome.without_spares`.
        pending: whether a node with ranks has yet to start.
        unreported: whether an agent may run that has not reported yet.
        lease_over: whether nothing lives any more on the nodes in an unknown state.
    """
    states = [node.state for node in seen.nodes]
    # Agents begin another attempt when nothing of this one can live on the nodes they have lost.
    lease_over |= seen.next_attempt is not None
    running = ACTIVE - {State.UNKNOWN} if lease_over else ACTIVE
    active = pending or any(state in running for state in states)
    over = lease_over and not any(state in running for state in states)
    finished = seen.state is State.SUCCEEDED or all(
        node.spare or node.state.final or (over and node.state is State.UNKNOWN)
        for node in seen.nodes
    )
    if seen.next_attempt is not None:
        return Phase.ENDED if finished or not (active or unreported) else Phase.RUNNING
    if not (active or unreported):
        return Phase.ENDED
    lost = {State.FAILED, State.CANCELLED, State.UNKNOWN} - running
    too_few = sum(state not in lost for state in states) < terms.least
    failed = terms.ends_with_rank and any(e.exit_code and not e.asked for e in seen.rank_exits)
    return Phase.ENDING if finished or too_few or failed or not active else Phase.RUNNING


def lost(seen: Observation) -> list[NodeStatus]:
    """Return the nodes that do not answer, or whose agent ended without an exit record."""
    states = (State.UNKNOWN, State.FAILED)
    return [node for node in seen.nodes if node.exit_code is None and node.state in states]


def may_live(seen: Observation, *, started: bool = True) -> bool:
    """Return whether ranks of an attempt may live, whose agents have all ended or do not answer.

    An agent that was killed leaves no exit record; its ranks may ignore SIGTERM.

    Args:
        started: whether each node was started for this attempt: one that is pending may begin yet.
    """
    ended = {State.SUCCEEDED, State.CANCELLED} | (set() if started else {State.PENDING})
    return any(
        node.exit_code is None and node.state not in ended for node in seen.nodes if not node.spare
    )


class Verdict(Enum):
    """What follows an attempt that has ended."""

    SUCCEEDED = 1
    CANCELLED = 2
    FAILED = 3
    RESTART = 4
    """The next attempt, with a restart less."""
    REPLACE = 5
    """The next attempt, which uses no restart: nodes were lost."""
    MOVE = 6
    """The same: the port was taken."""


def verdict(
    terms: Terms,
    seen: Observation,
    *,
    restarts_left: int,
    cancelled: bool,
    losses_allowed: bool = True,
    port_taken: bool = False,
) -> Verdict:
    """Return what follows an attempt that has ended."""
    if seen.state is State.SUCCEEDED:
        return Verdict.SUCCEEDED
    if cancelled or seen.removed is not None:
        return Verdict.CANCELLED
    decided, losses = seen.final or seen.over_time_limit, lost(seen)
    if port_taken:
        return Verdict.MOVE
    if losses and terms.replaces_lost and not decided and losses_allowed:
        return Verdict.REPLACE
    if not restarts_left or decided or (losses and terms.ends_with_loss):
        return Verdict.FAILED
    return Verdict.RESTART


def facts_without(hosts: list[str], job: JobSpec, facts: Facts) -> tuple[Facts, int] | None:
    """Return facts without these hosts, and how many of the other hosts are spares. None if they
    are too few, or the job has neither spares nor a range of nodes."""
    left = tuple(host for host in facts.hosts if host.host not in hosts)
    least, most = job.node_range
    if not (job.spares or job.shrinks) or len(left) < least:
        return None
    spares = min(job.spares, max(0, len(left) - most))
    return msgspec.structs.replace(facts, hosts=left), spares
