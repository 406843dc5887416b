"""What a run's job and the files of its agents mean for its nodes.

The agents write to the run's folder, which the login node sees as well (or `login` copies it):
how they stand, and how they ended, is read there. Slurm tells what they cannot: why nothing has
started, and why they were ended without a word.
"""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
from msgspec import Struct

from clusterkit import mirror
from clusterkit.backends.base import Observation
from clusterkit.backends.nodes import judge_node, observed
from clusterkit.backends.slurm import login
from clusterkit.backends.slurm.queue import WARNED, Job, jobs_of
from clusterkit.errors import Unavailable
from clusterkit.runs import RunHandle
from clusterkit.status import NodeCause, NodeStatus, State
from clusterkit.transport import Transport

LOOK_SECONDS = 0.5
"""Between two looks at the agents' files: each is a request to a file server."""
ASK_SECONDS = (1.0, 5.0, 30.0)
"""At least, between two questions to Slurm, which serves a whole cluster: where files have changed;
while the job waits; while it runs."""
_SIGNALLED = (143, -15, 137, -9)
"""Exit codes of what was ended by SIGTERM, or SIGKILL."""
LATE_SECONDS = 15.0
"""That a file server may take to show what a node wrote before its job ended."""


class Files(Struct, frozen=True):
    """What one node has written."""

    started: bytes | None
    exit: bytes | None
    log: bytes


class Snapshot(Struct, frozen=True):
    """What the run's folder holds of an attempt."""

    nodes: tuple[Files, ...]
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
        """Whether a node says that it was Slurm who ended it: whether its job goes on as another
        attempt is not known before Slurm is through with that."""
        by = (b"slurmstepd", WARNED.encode())
        return any(word in (node.exit or b"") for node in self.nodes for word in by)


def read(handle: RunHandle) -> Snapshot | None:
    """What the run's folder holds; None: there is none."""
    attempt, folder = handle.attempt, handle.folder.path

    def of(name: str) -> bytes | None:
        try:
            return (folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    if not (folder / "run.json").exists():
        return None
    nodes = []
    for node in range(handle.plan.nodes):
        ours = f"attempts/{attempt}/node-{node}"
        ended, started = of(f"{ours}/exit.json"), of(f"{ours}/started.json")
        log = b"" if ended else of(f"{ours}/agent.log") or b""
        nodes.append(Files(started, ended, log[-4096:]))
    return Snapshot(tuple(nodes), of(f"job-{attempt}"), of(f"attempts/{attempt}/next"))


def stop_file(job: Job) -> str:
    """Says why we end a job, to its batch script; and to us, that it was us."""
    return f"stop-{job.id}"


def observation(
    handle: RunHandle,
    seen: Snapshot,
    job: Job | None,
    *,
    silent: str | None = None,
    patient: bool = False,
) -> Observation:
    """An attempt, from its files and its job as it was asked for after those were read.

    Args:
        job: the run's newest; None: Slurm knows of none.
        silent: why Slurm does not answer; None: it does.
        patient: whether files may still come to light.
    """
    again = _next(handle, seen, job)
    ours = job is None or handle.folder.file(stop_file(job)).exists()
    nodes = tuple(
        _judge(handle, node, files, seen, job, ours, silent, patient, again)
        for node, files in enumerate(seen.nodes)
    )
    found = observed(nodes, {node: files.exit or b"" for node, files in enumerate(seen.nodes)})
    causes = tuple(
        NodeCause(node=node.node, words=node.reason, exit_code=node.exit_code or 1)
        for node in nodes
        if job is not None and node.state is State.FAILED and node.reason == job.ending
    )
    return msgspec.structs.replace(
        found,
        goes_on=found.goes_on or again,
        causes=(*causes, *found.causes),
        queued=silent is not None or (job is not None and not job.means.final),
    )


def cancelled_by_hand(seen: Observation, job: Job | None) -> bool:
    """Whether somebody ended the job by Slurm's own means, and not for another of its attempts."""
    by_hand = any(
        node.state is State.CANCELLED and job is not None and node.reason == job.ending
        for node in seen.nodes
    )
    return by_hand and not any(node.state is State.RUNNING for node in seen.nodes)


def _next(handle: RunHandle, seen: Snapshot, job: Job | None) -> int | None:
    """The attempt with which the same job goes on, where Slurm has put it back into its queue."""
    if seen.next is not None:
        return handle.attempt + 1
    waits = job is not None and job.means is State.PENDING
    return handle.attempt + 1 if waits and seen.begun else None


def _judge(
    handle: RunHandle,
    node: int,
    files: Files,
    seen: Snapshot,
    job: Job | None,
    ours: bool,
    silent: str | None,
    patient: bool,
    again: int | None,
) -> NodeStatus:
    over = again is not None or (
        silent is None and (job is None or job.means.final) and not patient
    )
    found = judge_node(
        node,
        _host(files.started),
        begun=files.started is not None,
        alive=not over and files.exit is None,
        exit_json=files.exit,
        complaint=files.log,
        started=files.started,
    )

    def changed(state: State, reason: str | None) -> NodeStatus:
        return msgspec.structs.replace(found, state=state, reason=reason)

    if files.exit is not None:
        # Slurm's signals reach ranks and agents alike: what they say of their end is an echo.
        told = found.state in (State.CANCELLED, State.FAILED) and found.exit_code in _SIGNALLED
        if told and job is not None and job.ended_by_slurm and not ours and again is None:
            cancelled = job.means is State.CANCELLED
            return changed(State.CANCELLED if cancelled else State.FAILED, job.ending)
        ending = not (over or ours) and seen.ended_by_slurm and found.state is not State.SUCCEEDED
        return changed(State.RUNNING, "Slurm is ending its job") if ending else found
    if silent is not None:
        return changed(State.RUNNING if files.started else State.PENDING, silent or None)
    if files.started is None and found.state is State.RUNNING:
        found = changed(State.PENDING, None)
    if job is None:
        if files.started is None and seen.submitted is not None and not patient:
            number = seen.submitted.decode(errors="replace").strip()
            return changed(State.FAILED, f"job {number} left Slurm's queue before it started")
        return found
    if job.means is State.UNKNOWN:
        return changed(State.UNKNOWN, f"Slurm reports job {job.id} as {job.state}")
    if again is not None:
        return changed(State.FAILED, "Slurm ended its job, and starts it again")
    if job.means is State.PENDING:
        return changed(State.PENDING, job.waiting)
    if over:
        cancelled = job.means is State.CANCELLED and not ours
        return changed(State.CANCELLED if cancelled else State.FAILED, job.ending)
    return found


def _host(started: bytes | None) -> str:
    with contextlib.suppress(ValueError, AttributeError):
        return str(json.loads(started or b"{}").get("host") or "")
    return ""


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
        self._asking: Future[Job | None] | None = None
        self._read: Snapshot | None = None
        self._asked: Snapshot | None = None
        """The files as they were when Slurm was asked."""
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
        fresh = read(handle)
        if fresh is None:
            return None
        if fresh != self._read:
            self._ask_at = min(self._ask_at, now + ASK_SECONDS[0])
        self._read = fresh
        if self._asking is None and now >= self._ask_at:
            self._asked = fresh
            self._asking = self._pool.submit(newest, handle, transport)
        if self._asking is not None and (self._asking.done() or self._seen is None):
            self._take(now)
        if (behind := login.behind(self._copying)) is not None:
            self._over_since = None  # what comes to light comes later
            self._seen = observation(handle, fresh, self._job, silent=behind)
        elif self._asked == fresh and self._asking is None:
            self._judge(fresh, now)
        elif self._seen is None or self._silent is not None:
            self._seen = observation(handle, fresh, self._job, silent=self._silent or "")
        return self._seen

    def _take(self, now: float) -> None:
        """Slurm's answer."""
        assert self._asking is not None
        try:
            self._job, self._silent = self._asking.result(), None
        except Unavailable as error:
            self._silent = error.message
        self._asking = None
        runs = self._job is not None and self._job.means is State.RUNNING
        ending = self._asked is not None and self._asked.ended_by_slurm
        self._ask_at = now + ASK_SECONDS[2 if runs and self._silent is None and not ending else 1]

    def _judge(self, fresh: Snapshot, now: float) -> None:
        handle, job = self._about[0], self._job
        over = self._silent is None and (job is None or job.means.final)
        if not over:
            self._over_since = None
        elif self._over_since is None:
            self._over_since = now
        patient = not fresh.ended and now - (self._over_since or now) < LATE_SECONDS
        seen = observation(handle, fresh, job, silent=self._silent, patient=patient)
        if cancelled_by_hand(seen, job):
            handle.folder.mark_cancelled()
        self._seen = seen

    def close(self) -> None:
        if self._copying is not None:
            self._copying.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
