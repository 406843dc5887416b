"""Why an attempt that has ended did not succeed."""

from __future__ import annotations

from collections import deque
from itertools import chain

import msgspec

from clusterkit.backends.base import Observation
from clusterkit.runs import RunHandle
from clusterkit.spec import JobSpec
from clusterkit.status import Failure

TAIL_LINES = 5000
"""Log lines per attempt that a diagnosis reads."""


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
        failure = msgspec.structs.replace(failure, node=failure.rank // nproc)
    return failure
