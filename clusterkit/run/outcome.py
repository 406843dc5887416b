"""The outcome of an attempt: whether it has ended, whether it succeeded, and if not, why."""

from __future__ import annotations

import heapq
from collections import deque
from enum import Enum
from operator import attrgetter

from msgspec.structs import replace

from clusterkit.backends.base import Observation
from clusterkit.output.logs import tail
from clusterkit.plan import Plan
from clusterkit.run.folder import RunHandle
from clusterkit.run.status import Failure, State, overall
from clusterkit.spec import JobSpec

TAIL_LINES = 5000
"""How many log lines of an attempt a diagnosis looks at."""
TAIL_BYTES = 16 << 20
"""How many bytes of an attempt's logs it reads, from their ends."""
NODE_TAIL_BYTES = 1 << 16
"""The least that it reads of each node's log."""


class Phase(Enum):
    """How far an attempt has come."""

    RUNNING = 1
    """Enough nodes run, or are about to."""
    ENDING = 2
    """The outcome is certain, but nodes may still run."""
    ENDED = 3
    """No node runs, or the nodes' agents have begun the next attempt."""


def _running(seen: Observation) -> set[State]:
    """Return the states of nodes that run, or that the platform will still run."""
    return {State.RUNNING, State.RESTARTING} | ({State.UNKNOWN} if seen.queued else set())


def without_spares(plan: Plan, seen: Observation) -> Observation:
    """Return the observation with the state of the nodes that have ranks, and spares marked.

    The attempt runs while one of these nodes does; it succeeds if ``plan.least`` of them do.
    """
    nodes = tuple(
        replace(node, spare=True)
        if node.state is State.PENDING and node.node >= plan.places
        else node
        for node in seen.nodes
    )
    states = [node.state for node in nodes if not node.spare]
    enough = states.count(State.SUCCEEDED) >= plan.least and seen.next_attempt is None
    succeeded = enough and not _running(seen) & set(states)
    return replace(seen, nodes=nodes, state=State.SUCCEEDED if succeeded else overall({*states}))


def phase(plan: Plan, seen: Observation, *, pending: bool, unreported: bool) -> Phase:
    """Return how far an attempt has come.

    Args:
        seen: the result of `without_spares`.
        pending: whether a node with ranks has yet to start.
        unreported: whether an agent may run that has not reported yet.
    """
    states = [node.state for node in seen.nodes]
    running = _running(seen)
    active = pending or any(state in running for state in states)
    finished = seen.state is State.SUCCEEDED or all(
        node.spare or node.state.final for node in seen.nodes
    )
    if seen.next_attempt is not None:
        return Phase.ENDED if finished or not (active or unreported) else Phase.RUNNING
    if not (active or unreported):
        return Phase.ENDED
    lost = {State.FAILED, State.CANCELLED, State.UNKNOWN} - running
    too_few = sum(state not in lost for state in states) < plan.least
    return Phase.ENDING if finished or too_few or not active else Phase.RUNNING


def diagnosis(handle: RunHandle, seen: Observation) -> Failure:
    """Return why an attempt that has ended did not succeed."""
    if seen.late:
        from clusterkit.agent import OVER_TIME_LIMIT, TIME_LIMIT_EXIT

        limit = handle.folder.read_json("job.json", JobSpec).time_limit
        hint = "raise time_limit; another run can resume from this one's checkpoint"
        return Failure(exit_code=TIME_LIMIT_EXIT, cause=f"{OVER_TIME_LIMIT} of {limit}", hint=hint)
    from clusterkit.output.diagnose import diagnose  # a run that succeeds does without this import

    plan = handle.plan
    most = max(NODE_TAIL_BYTES, TAIL_BYTES // max(1, plan.nodes))
    logs = [handle.folder.node_dir(handle.attempt, node) / "log" for node in range(plan.nodes)]
    ends = [tail(path, node, handle.attempt, most) for node, path in enumerate(logs)]
    lines = heapq.merge(*ends, key=attrgetter("time"))
    nproc = plan.topology.get("nproc_per_node", 1)
    failure = diagnose(
        seen.nodes,
        deque(lines, maxlen=TAIL_LINES),
        rank_exits=seen.rank_exits,
        nproc_per_node=nproc,
        oom_kills=seen.oom_kills,
        causes=seen.causes,
    )
    if plan.nodes < plan.topology.get("nodes", plan.nodes) and failure.rank is not None:
        # One launcher for all nodes (mpirun): only the rank says which node it was.
        failure = replace(failure, node=failure.rank // nproc)
    return failure
