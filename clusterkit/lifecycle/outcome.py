"""The outcome of an attempt: whether it has ended, whether it succeeded, and if not, why."""

from __future__ import annotations

import heapq
import re
from collections import deque
from operator import attrgetter

from msgspec.structs import replace

from clusterkit.backends.base import Observation
from clusterkit.plan import Plan
from clusterkit.run.folder import RunHandle
from clusterkit.run.logs import tail
from clusterkit.run.status import Failure, State, overall
from clusterkit.spec import JobSpec

TAIL_LINES = 5000
"""How many log lines of an attempt a diagnosis looks at."""
TAIL_BYTES = 16 << 20
"""How many bytes of an attempt's logs it reads, from their ends."""
NODE_TAIL_BYTES = 1 << 16
"""The least that it reads of each node's log."""


def _running(seen: Observation) -> set[State]:
    """Return the states of nodes that run, or that the platform will still run."""
    return {State.RUNNING, State.RESTARTING} | ({State.UNKNOWN} if seen.queued else set())


def without_spares(plan: Plan, seen: Observation) -> Observation:
    """Return the observation with the state of the nodes that have ranks, and spares marked.

    The attempt runs while one of these nodes does; it succeeds if ``plan.least`` of them do.
    """
    nodes = tuple(
        replace(node, spare=True)
        if node.state is State.PENDING and node.node >= plan.nodes_with_ranks
        else node
        for node in seen.nodes
    )
    states = [node.state for node in nodes if not node.spare]
    enough = states.count(State.SUCCEEDED) >= plan.min_nodes and seen.next_attempt is None
    succeeded = enough and not _running(seen) & set(states)
    return replace(seen, nodes=nodes, state=State.SUCCEEDED if succeeded else overall({*states}))


def diagnosis(handle: RunHandle, seen: Observation, *, late: bool = False) -> Failure:
    """Return why an attempt that has ended did not succeed; ``late``: it was ended at its limit."""
    if late or seen.over_time_limit:
        from clusterkit.agent import TIME_LIMIT_EXIT

        limit = handle.folder.read_json("job.json", JobSpec).time_limit
        hint = "raise time_limit; another run can resume from this one's checkpoint"
        cause = f"time_limit of {limit}: the run was stopped"
        return Failure(exit_code=TIME_LIMIT_EXIT, cause=cause, hint=hint)
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
        run=plan.run_id,
    )
    if plan.nodes < plan.topology.get("nodes", plan.nodes) and failure.rank is not None:
        # One launcher for all nodes (mpirun): only the rank says which node it was.
        failure = replace(failure, node=failure.rank // nproc)
    return failure


def port_was_taken(failure: Failure | None, port: int) -> bool:
    """Return whether an attempt failed because something listens on this port."""
    if failure is None:
        return False
    from clusterkit.output.diagnose import PORT_TAKEN

    # Only our port: the program may listen on ports of its own.
    text = f"{failure.cause}\n{failure.traceback or ''}"
    return bool(re.search(rf"\b{port}\b", text) and PORT_TAKEN.search(text))
