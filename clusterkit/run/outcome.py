"""The verdict on an attempt: whether it succeeded, and if not, why. Records how a run ends."""

from __future__ import annotations

import contextlib
from collections import deque
from itertools import chain

from msgspec.structs import replace

from clusterkit.backends.base import Observation
from clusterkit.plan import Plan
from clusterkit.run.folder import RunFolder, RunHandle
from clusterkit.run.status import Failure, RunStatus, State, overall
from clusterkit.spec import JobSpec

TAIL_LINES = 5000
"""How many log lines of an attempt a diagnosis reads."""
RESERVE = ".reserve"
"""File in a run's folder that reserves the disk space of the last ``state.json``."""
TOKEN = "token"
"""File in a run's folder: the secret that a node needs to join a running attempt."""


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
    ends = [node.state for node in nodes if not node.spare]
    busy = {State.RUNNING, State.RESTARTING, *([State.UNKNOWN] if seen.queued else [])} & {*ends}
    enough = ends.count(State.SUCCEEDED) >= plan.least and not (busy or seen.goes_on)
    state = State.SUCCEEDED if enough else overall({*ends})
    return replace(seen, nodes=nodes, state=state)


def record(folder: RunFolder, status: RunStatus) -> None:
    """Write the final ``state.json``, and remove the files that only a running run needs."""
    for name in (RESERVE, TOKEN):
        with contextlib.suppress(OSError):
            folder.file(name).unlink()
    folder.write_json("state.json", status)


def over_time(job: JobSpec) -> Failure:
    """Return the failure of a run that reached its time limit."""
    from clusterkit.agent import LATE, LATE_EXIT  # deferred like `diagnose` below

    return Failure(
        exit_code=LATE_EXIT,
        cause=f"{LATE} of {job.time_limit}",
        hint="raise time_limit; another run can resume from this one's checkpoint",
    )


def diagnosis(handle: RunHandle, seen: Observation) -> Failure:
    """Return why an attempt that has ended did not succeed."""
    from clusterkit.output.diagnose import diagnose  # a run that succeeds does without this import

    if seen.late:
        return over_time(handle.folder.read_json("job.json", JobSpec))
    plan = handle.plan
    lines = chain.from_iterable(handle.folder.log(handle.attempt, range(plan.nodes)))
    tail = deque(lines, maxlen=TAIL_LINES)
    nproc = plan.topology.get("nproc_per_node", 1)
    failure = diagnose(
        seen.nodes, tail, rank_exits=seen.rank_exits, nproc_per_node=nproc,
        oom_kills=seen.oom_kills, causes=seen.causes,
    )  # fmt: skip
    if plan.nodes < plan.topology.get("nodes", plan.nodes) and failure.rank is not None:
        # One launcher for all nodes (mpirun): only the rank says which node it was.
        failure = replace(failure, node=failure.rank // nproc)
    return failure
