"""How an attempt has ended, and why it did not succeed; the record of a run's end."""

from __future__ import annotations

import contextlib
from collections import deque
from itertools import chain

from msgspec.structs import replace

from clusterkit.backends.base import Observation
from clusterkit.plan import Plan
from clusterkit.runs import RunFolder, RunHandle
from clusterkit.spec import JobSpec
from clusterkit.status import Failure, RunStatus, State, overall

TAIL_LINES = 5000
"""Log lines per attempt that a diagnosis reads."""
RESERVE = ".reserve"
"""Of a run's folder: kept free for the last ``state.json``."""
TOKEN = "token"
"""Of a run's folder: by what its nodes know each other, where others may join."""


def settled(plan: Plan, seen: Observation) -> Observation:
    """An attempt by its nodes that have ranks: it goes on while one of them does, and then has
    succeeded if enough of them have. Spares decide nothing, whether they came or not."""
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
    """Write down how a run has ended; what is of use only until then goes."""
    for name in (RESERVE, TOKEN):
        with contextlib.suppress(OSError):
            folder.file(name).unlink()
    folder.write_json("state.json", status)


def over_time(job: JobSpec) -> Failure:
    """Why a run failed that was ended at its time limit."""
    from clusterkit.agent import LATE, LATE_EXIT  # as `diagnose` below

    return Failure(
        exit_code=LATE_EXIT,
        cause=f"{LATE} of {job.time_limit}",
        hint="raise time_limit; another run can resume from this one's checkpoint",
    )


def diagnosis(handle: RunHandle, seen: Observation) -> Failure:
    """Why an attempt that has ended did not succeed."""
    from clusterkit.diagnose import diagnose  # of no use to a run that succeeds

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
        # One launcher for all nodes (mpirun): its log does not tell them apart, the rank does.
        failure = replace(failure, node=failure.rank // nproc)
    return failure
