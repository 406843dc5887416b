"""The status of nodes from Slurm's job and their agents' files.

The agents write to the run folder, which the login node sees as well (or `login` copies it): how
nodes run and ended is read there. Slurm adds why they have not started, or were killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import Struct

from clusterkit.agent import STOPPED
from clusterkit.agent.report import read_from
from clusterkit.backends.base import Observation
from clusterkit.backends.node_status import (
    NativeState,
    NodeFiles,
    folder_exists,
    judge_exit,
    judge_node,
    observed,
)
from clusterkit.backends.slurm import login
from clusterkit.backends.slurm.queue import NODE_0_LOST, WARNED, Job, ended_job, jobs_of
from clusterkit.errors import Unavailable
from clusterkit.output import mirror
from clusterkit.run.folder import RunHandle
from clusterkit.run.status import NodeCause, NodeStatus, State
from clusterkit.transport import Transport

READ_SECONDS = 0.5
"""Between two readings of the agents' files, each of which makes requests to a file server."""
CHANGED_SECONDS, WAITING_SECONDS, RUNNING_SECONDS = 1.0, 5.0, 30.0
"""Least time between two queries to Slurm, which serves a whole cluster: when the files have
changed, while the job waits, and while it runs."""
_SIGNALLED = (143, -15, 137, -9)
"""Exit codes of processes ended by SIGTERM or SIGKILL."""
REQUEUED = "Slurm requeued its job"
"""Reason for the failure of a node whose agent was killed because the job is requeued."""
LATE_SECONDS = 15.0
"""How late a file server may show the files that a node wrote before its job ended."""


class Snapshot(Struct, frozen=True):
    """The files of an attempt in the run folder."""

    nodes: tuple[NodeFiles, ...]
    submitted: bytes | None
    """The job's id; None: not submitted yet."""
    next: bytes | None
    """Number of the attempt that Slurm began after this one; None: it has not."""

    @property
    def begun(self) -> bool:
        return any(node.started is not None for node in self.nodes)

    @property
    def ended(self) -> bool:
        return all(node.exit is not None for node in self.nodes)

    @property
    def ended_by_slurm(self) -> bool:
        """Whether a node has recorded that Slurm ended it, or announced to.

        Whether the job is requeued is then not known before Slurm has ended it.
        """
        reasons = (b"slurmstepd", WARNED.encode(), NODE_0_LOST.encode())
        return any(reason in (node.exit or b"") for node in self.nodes for reason in reasons)


def read(handle: RunHandle) -> Snapshot | None:
    """Read an attempt's files in the run folder; None: there is no folder."""
    if not folder_exists(handle):
        return None
    attempt, folder, nodes = handle.attempt, handle.folder, []
    for node in range(handle.plan.nodes):
        node_folder = folder.node_dir(attempt, node)
        ended = read_from(node_folder / "exit.json")
        log = b"" if ended else read_from(node_folder / "agent.log") or b""
        started = read_from(node_folder / "started.json")
        begun = started is not None
        nodes.append(NodeFiles(begun=begun, started=started, exit=ended, log=log[-4096:]))
    after = read_from(folder.file(f"attempts/{attempt}/next"))
    return Snapshot(tuple(nodes), read_from(folder.file(f"job-{attempt}")), after)


def stop_file(job: Job) -> str:
    """Return the name of the file that shows that clusterkit ends the job, and why."""
    return f"stop-{job.id}"


def status(handle: RunHandle, transport: Transport) -> Observation | None:
    """Implement `clusterkit.backends.base.Backend.status`."""
    job, silent = None, login.copy_once(handle, transport)
    files = read(handle)
    if files is None:
        return None
    try:
        job = newest(handle, transport) if silent is None else None
    except Unavailable as error:
        silent = error.message
    if silent is None and not files.ended and (job is None or job.state.final):
        silent = login.copy_once(handle, transport)  # the nodes may have ended since
        files = read(handle) or files
    return observation(handle, files, job, silent=silent)


def observation(
    handle: RunHandle,
    files: Snapshot,
    job: Job | None,
    *,
    silent: str | None = None,
    files_delayed: bool = False,
) -> Observation:
    """Return the state of an attempt from its files, and its job as queried after these were read.

    A run whose job somebody has cancelled with Slurm's own commands is marked as cancelled.

    Args:
        job: the run's newest; None: Slurm lists none.
        silent: why Slurm does not answer; None: it does.
        files_delayed: whether the file server may not show all files yet.
    """
    removed_by_clusterkit = job is None or handle.folder.file(stop_file(job)).exists()
    look = AttemptView(files, job, removed_by_clusterkit, silent, files_delayed)
    nodes = tuple(look.node(node) for node in range(len(files.nodes)))
    seen = observed(nodes, {node: each.exit or b"" for node, each in enumerate(files.nodes)})
    by_slurm = [node for node in nodes if job is not None and node.reason in (job.ending, REQUEUED)]
    states = {node.state for node in by_slurm}
    if State.CANCELLED in states and not any(node.state is State.RUNNING for node in nodes):
        handle.folder.mark_cancelled()
    causes = [
        NodeCause(node=node.node, words=node.reason or "", exit_code=node.exit_code or 1)
        for node in by_slurm
        if node.state is State.FAILED
    ]
    return msgspec.structs.replace(
        seen,
        next_attempt=seen.next_attempt or (handle.attempt + 1 if look.requeued else None),
        causes=(*causes, *seen.causes),
        queued=silent is not None
        or (job is not None and not job.state.final and not (job.completing and files.ended)),
    )


@dataclass(frozen=True)
class AttemptView:
    """The arguments of `observation`, and whether clusterkit has ended the job, if anybody has."""

    files: Snapshot
    job: Job | None
    removed_by_clusterkit: bool
    silent: str | None
    files_delayed: bool

    @property
    def requeued(self) -> bool:
        """Whether the job is back in Slurm's queue, or has begun another attempt since."""
        waits = self.job is not None and self.job.state is State.PENDING
        return self.files.next is not None or (waits and self.files.begun)

    @property
    def over(self) -> bool:
        """Whether no agent of the attempt runs any more."""
        gone = self.job is None or self.job.state.final
        return self.requeued or (gone and self.silent is None and not self.files_delayed)

    def node(self, number: int) -> NodeStatus:
        files = self.files.nodes[number]
        return judge_node(number, files.host, files, self._native(files))

    def _native(self, files: NodeFiles) -> NativeState:
        """Return what Slurm's job says of a node."""
        job, begun = self.job, files.begun
        cancelled = (
            job is not None and job.state is State.CANCELLED and not self.removed_by_clusterkit
        )
        ended = State.CANCELLED if cancelled else State.FAILED
        if files.exit is not None:
            return self._with_exit(files.exit, ended)
        if self.silent is not None:
            return NativeState(state=State.RUNNING, reason=self.silent or None)
        if job is None:
            if not begun and self.files.submitted and not self.files_delayed:
                id_ = self.files.submitted.decode(errors="replace").strip()
                reason = f"job {id_} left Slurm's queue before it started"
                return NativeState(state=State.FAILED, reason=reason)
        elif job.state is State.UNKNOWN:
            reason = f"Slurm reports job {job.id} as {job.slurm_state}"
            return NativeState(state=State.UNKNOWN, reason=reason)
        elif self.requeued:
            return NativeState(state=State.FAILED, reason=REQUEUED)
        elif job.state is State.PENDING:
            return NativeState(state=State.PENDING, reason=job.waiting)
        # If the job ended by itself, the loss of an agent is the better reason.
        elif self.over and (job.ended_by_slurm or not begun):
            return NativeState(state=ended, reason=job.ending)
        if not self.over:
            return NativeState(state=State.RUNNING)
        return NativeState(state=State.FAILED if begun else State.PENDING)

    def _with_exit(self, exit_json: bytes, ended: State) -> NativeState:
        """Return what Slurm's job says of a node whose agent has ended."""
        job, node = self.job, judge_exit(0, "", exit_json)
        by = None
        if node.reason == STOPPED and WARNED.encode() in exit_json:
            by = str(json.loads(exit_json)["stopped_by"])
        # Slurm signals ranks and agents alike: what they record is a consequence.
        killed = node.state in (State.CANCELLED, State.FAILED) and node.exit_code in _SIGNALLED
        by_slurm = (
            job is not None
            and job.ended_by_slurm
            and not (self.removed_by_clusterkit or self.requeued)
        )
        if job is not None and killed and by_slurm:
            return NativeState(state=ended, ended_by=job.ending)
        ending = not (self.over or self.removed_by_clusterkit) and self.files.ended_by_slurm
        if ending and node.state is not State.SUCCEEDED:
            return NativeState(state=State.RUNNING, reason="Slurm is stopping its job")
        return NativeState(state=node.state, ended_by=by)


def newest(handle: RunHandle, transport: Transport) -> Job | None:
    """Return the run's newest job, or the one that has not ended; None: Slurm knows of none.

    A job that finds another one of the same plan running ends at once, as the newer one.

    Raises:
        Unavailable: the controller does not answer.
    """
    if jobs := jobs_of(handle.plan, transport):
        return max(jobs, key=lambda job: (not job.state.final, job.id))
    recorded = (read_from(handle.folder.file(f"job-{handle.attempt}")) or b"").strip()
    if not recorded.isdigit():
        return None
    return ended_job(int(recorded), handle.plan.hosts[0], transport)


class JobPoller:
    """Queries Slurm for a run's job: when the agents' files have changed, and from time to time.

    In a thread, as Slurm's commands wait 10 s for a controller that does not answer.
    """

    def __init__(self, query: Callable[[], Job | None]) -> None:
        self._query = query
        self._pool = ThreadPoolExecutor(1)
        self._pending: tuple[Snapshot, Future[Job | None]] | None = None
        self._due = 0.0
        self._newest_files: Snapshot | None = None
        self.job: Job | None = None
        self.files: Snapshot | None = None
        """The files as they were when Slurm was queried for `job`."""
        self.error: str | None = None
        """Why Slurm did not answer the last query; None: it did."""

    def poll(self, files: Snapshot, now: float) -> None:
        """Start a query if one is due, and take the result of one that has ended.

        The first call waits for its result.
        """
        if files != self._newest_files:
            self._newest_files = files
            self._due = min(self._due, now + CHANGED_SECONDS)
        if self._pending is None and now >= self._due:
            self._pending = files, self._pool.submit(self._query)
        if self._pending is not None and (self.files is None or self._pending[1].done()):
            self._take(*self._pending, now)

    def _take(self, files: Snapshot, result: Future[Job | None], now: float) -> None:
        try:
            self.job, self.error = result.result(), None
        except Unavailable as error:
            self.error = error.message
        self._pending, self.files = None, files
        running = self.job is not None and self.job.state is State.RUNNING and self.error is None
        # Without node 0 the job is about to end, or to be requeued.
        steady = running and files.nodes[0].exit is None and not files.ended_by_slurm
        self._due = now + (RUNNING_SECONDS if steady else WAITING_SECONDS)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class SlurmMonitor:
    """Follows an attempt by its agents' files and its job."""

    def __init__(self, handle: RunHandle, transport: Transport) -> None:
        self._handle = handle
        self._copying = login.follow(handle, transport)
        self._poller = JobPoller(partial(newest, handle, transport))
        self._read_at = 0.0
        self._over_since: float | None = None
        self._last: Observation | None = None

    def status(self) -> Observation | None:
        now = mirror.awake()
        if now < self._read_at:
            return self._last
        self._read_at = now + READ_SECONDS
        files, poller = read(self._handle), self._poller
        if files is None:
            return None
        poller.poll(files, now)
        behind = login.behind(self._copying)
        silent = poller.error if behind is None else behind
        if silent is not None or files == poller.files:
            over = silent is None and (poller.job is None or poller.job.state.final)
            self._over_since = (self._over_since or now) if over else None
            waited = now - (self._over_since or now)
            self._last = observation(
                self._handle,
                files,
                poller.job,
                silent=silent,
                files_delayed=not files.ended and waited < LATE_SECONDS,
            )
        return self._last

    def close(self) -> None:
        if self._copying is not None:
            self._copying.close()
        self._poller.close()
