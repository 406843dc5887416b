"""What a run's job and the files of its agents mean for its nodes.

The agents write to the run's folder, which the login node sees as well (or `login` copies it):
how they stand, and how they ended, is read there. Slurm tells what they cannot: why nothing has
started, and why they were ended without a word.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from clusterkit.agent.report import read_from
from clusterkit.backends.base import Observation
from clusterkit.backends.node_status import NodeFiles, folder_exists, judge_node, observed
from clusterkit.backends.slurm import login
from clusterkit.backends.slurm.queue import NODE_0_LOST, WARNED, Job, jobs_of
from clusterkit.errors import Unavailable
from clusterkit.output import mirror
from clusterkit.run.folder import RunHandle
from clusterkit.run.status import NodeCause, NodeStatus, State
from clusterkit.transport import Transport

LOOK_SECONDS = 0.5
"""Between two looks at the agents' files: each is a request to a file server."""
ASK_SECONDS = (1.0, 5.0, 30.0)
"""At least, between two questions to Slurm, which serves a whole cluster: where files have changed;
while the job waits; while it runs."""
_SIGNALLED = (143, -15, 137, -9)
"""Exit codes of what was ended by SIGTERM, or SIGKILL."""
AGAIN = "Slurm ended its job, and starts it again"
"""Why a node has no more to say: it was lost, or its agent killed."""
LATE_SECONDS = 15.0
"""That a file server may take to show what a node wrote before its job ended."""


class Snapshot(Struct, frozen=True):
    """What the run's folder holds of an attempt."""

    nodes: tuple[NodeFiles, ...]
    submitted: bytes | None
    """Id of the job, once there is one."""
    next: bytes | None
    """The attempt that Slurm began after it."""

    @property
    def begun(self) -> bool:
        return any(node.started is not None for node in self.nodes)

    @property
    def ended(self) -> bool:
        return all(node.exit is not None for node in self.nodes)

    @property
    def ended_by_slurm(self) -> bool:
        """Whether a node says that it was Slurm who ended it, or is to: whether its job goes on as
        another attempt is not known before Slurm is through with that."""
        by = (b"slurmstepd", WARNED.encode(), NODE_0_LOST.encode())
        return any(word in (node.exit or b"") for node in self.nodes for word in by)


def read(handle: RunHandle) -> Snapshot | None:
    """What the run's folder holds; None: there is none."""
    if not folder_exists(handle):
        return None
    attempt, folder, nodes = handle.attempt, handle.folder, []
    for node in range(handle.plan.nodes):
        ours = folder.node_dir(attempt, node)
        ended = read_from(ours / "exit.json")
        log = b"" if ended else read_from(ours / "agent.log") or b""
        started = read_from(ours / "started.json")
        begun = started is not None
        nodes.append(NodeFiles(begun=begun, started=started, exit=ended, log=log[-4096:]))
    after = read_from(folder.file(f"attempts/{attempt}/next"))
    return Snapshot(tuple(nodes), read_from(folder.file(f"job-{attempt}")), after)


def stop_file(job: Job) -> str:
    """Says why we end a job, to its batch script; and to us, that it was us."""
    return f"stop-{job.id}"


def status(handle: RunHandle, transport: Transport) -> Observation | None:
    """As `clusterkit.backends.base.Backend.status`."""
    job, silent = None, login.bring(handle, transport)
    files = read(handle)
    if files is None:
        return None
    try:
        job = newest(handle, transport) if silent is None else None
    except Unavailable as error:
        silent = error.message
    if silent is None and not files.ended and (job is None or job.means.final):
        silent = login.bring(handle, transport)  # it may have ended since they were read
        files = read(handle) or files
    return observation(handle, files, job, silent=silent)


def observation(
    handle: RunHandle,
    files: Snapshot,
    job: Job | None,
    *,
    silent: str | None = None,
    patient: bool = False,
) -> Observation:
    """An attempt, from its files and its job as it was asked for after those were read. A run whose
    job somebody has ended by Slurm's own means is marked as cancelled.

    Args:
        job: the run's newest; None: Slurm knows of none.
        silent: why Slurm does not answer; None: it does.
        patient: whether files may still come to light.
    """
    ours = job is None or handle.folder.file(stop_file(job)).exists()
    look = _Look(files, job, ours, silent, patient)
    nodes = tuple(look.node(node) for node in range(len(files.nodes)))
    found = observed(nodes, {node: each.exit or b"" for node, each in enumerate(files.nodes)})
    by_slurm = [node for node in nodes if job is not None and node.reason in (job.ending, AGAIN)]
    states = {node.state for node in by_slurm}
    if State.CANCELLED in states and not any(node.state is State.RUNNING for node in nodes):
        handle.folder.mark_cancelled()
    causes = [
        NodeCause(node=node.node, words=node.reason or "", exit_code=node.exit_code or 1)
        for node in by_slurm
        if node.state is State.FAILED
    ]
    return msgspec.structs.replace(
        found,
        next_attempt=found.next_attempt or (handle.attempt + 1 if look.again else None),
        causes=(*causes, *found.causes),
        queued=silent is not None or (job is not None and not job.means.final),
    )


@dataclass(frozen=True)
class _Look:
    """What `observation` is given; ``ours``: whether we have ended the job, if anybody has."""

    files: Snapshot
    job: Job | None
    ours: bool
    silent: str | None
    patient: bool

    @property
    def again(self) -> bool:
        """Whether the same job goes on with another attempt: it is back in Slurm's queue."""
        waits = self.job is not None and self.job.means is State.PENDING
        return self.files.next is not None or (waits and self.files.begun)

    @property
    def over(self) -> bool:
        gone = self.job is None or self.job.means.final
        return self.again or (gone and self.silent is None and not self.patient)

    def node(self, number: int) -> NodeStatus:
        files, job = self.files.nodes[number], self.job
        alive = not self.over and files.exit is None
        found = judge_node(number, files.host, msgspec.structs.replace(files, alive=alive))

        def changed(state: State, reason: str | None) -> NodeStatus:
            return msgspec.structs.replace(found, state=state, reason=reason)

        cancelled = job is not None and job.means is State.CANCELLED and not self.ours
        ended = State.CANCELLED if cancelled else State.FAILED
        if files.exit is not None:
            # Slurm's signals reach ranks and agents alike: what they say of their end is an echo.
            told = found.state in (State.CANCELLED, State.FAILED) and found.exit_code in _SIGNALLED
            if told and job is not None and job.ended_by_slurm and not (self.ours or self.again):
                return changed(ended, job.ending)
            ending = not (self.over or self.ours) and self.files.ended_by_slurm
            if ending and found.state is not State.SUCCEEDED:
                return changed(State.RUNNING, "Slurm is ending its job")
            return found
        if self.silent is not None:
            return changed(State.RUNNING if files.started else State.PENDING, self.silent or None)
        if files.started is None and found.state is State.RUNNING:
            found = changed(State.PENDING, None)
        if job is None:
            if files.started is None and self.files.submitted and not self.patient:
                id_ = self.files.submitted.decode(errors="replace").strip()
                return changed(State.FAILED, f"job {id_} left Slurm's queue before it started")
            return found
        if job.means is State.UNKNOWN:
            return changed(State.UNKNOWN, f"Slurm reports job {job.id} as {job.state}")
        if self.again:
            return changed(State.FAILED, AGAIN)
        if job.means is State.PENDING:
            return changed(State.PENDING, job.waiting)
        # Of a job that ended by itself, an agent that was lost says more.
        if self.over and (job.ended_by_slurm or files.started is None):
            return changed(ended, job.ending)
        return found


def newest(handle: RunHandle, transport: Transport) -> Job | None:
    """The run's newest job.

    Raises:
        Unavailable: the controller does not answer.
    """
    found = jobs_of(handle.plan.run_id, handle.plan.hosts[0], transport)
    return found[-1] if found else None


class SlurmMonitor:
    """Looks at the agents' files; asks Slurm when they change, and now and then."""

    def __init__(self, handle: RunHandle, transport: Transport) -> None:
        self._about = (handle, transport)
        self._copying = login.follow(handle, transport)
        self._pool = ThreadPoolExecutor(1)  # a controller that is away takes 10 s to say nothing
        self._asking: tuple[Snapshot, Future[Job | None]] | None = None
        self._files: Snapshot | None = None
        self._asked: Snapshot | None = None
        """The files as they were when Slurm was asked for what is known of the job."""
        self._job: Job | None = None
        self._silent: str | None = None
        self._look_at = self._ask_at = 0.0
        self._over_since: float | None = None
        self._seen: Observation | None = None

    def status(self) -> Observation | None:
        handle, transport = self._about
        now = mirror.awake()
        if now < self._look_at:
            return self._seen
        self._look_at = now + LOOK_SECONDS
        files = read(handle)
        if files is None:
            return None
        if files != self._files:
            self._ask_at = min(self._ask_at, now + ASK_SECONDS[0])
        self._files = files
        if self._asking is None and now >= self._ask_at:
            self._asking = files, self._pool.submit(newest, handle, transport)
        if self._asking is not None and (self._asking[1].done() or self._seen is None):
            self._take(*self._asking, now)
        behind = login.behind(self._copying)
        silent = self._silent if behind is None else behind
        if silent is not None or files == self._asked:
            over = silent is None and (self._job is None or self._job.means.final)
            self._over_since = (self._over_since or now) if over else None
            patient = not files.ended and now - (self._over_since or now) < LATE_SECONDS
            self._seen = observation(handle, files, self._job, silent=silent, patient=patient)
        return self._seen

    def _take(self, asked: Snapshot, answer: Future[Job | None], now: float) -> None:
        try:
            self._job, self._silent = answer.result(), None
        except Unavailable as error:
            self._silent = error.message
        self._asking, self._asked = None, asked
        runs = self._job is not None and self._job.means is State.RUNNING
        # Without node 0 the job is about to end, or to wait again.
        steady = runs and self._silent is None and asked.nodes[0].exit is None
        steady = steady and not asked.ended_by_slurm
        self._ask_at = now + ASK_SECONDS[2 if steady else 1]

    def close(self) -> None:
        if self._copying is not None:
            self._copying.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
