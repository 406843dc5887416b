"""The truth about a run, whether its supervisor lives or not; cancelling and forgetting it.

`current` only reads what is on record. Where nobody keeps that up to date, `reconcile` asks the
backend, brings what the nodes wrote, and clears up what a service keeps of a run that has ended.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import msgspec

from clusterkit import backends
from clusterkit.backends.base import (
    Backend,
    Observation,
    SupportsCleanup,
    SupportsForget,
    SupportsSync,
)
from clusterkit.cluster import ClusterSpec, Facts, LocalCluster
from clusterkit.errors import EXIT_INTERRUPTED, ClusterkitError, RunFolderError, counted
from clusterkit.plan import Plan
from clusterkit.run.folder import LEFTOVERS, POLL_SECONDS, RunFolder, RunHandle, Submission
from clusterkit.run.outcome import diagnosis, record, without_spares
from clusterkit.run.status import Failure, RunStatus, State
from clusterkit.spec import JobSpec

if TYPE_CHECKING:
    from clusterkit.transport import Transport

_replace = msgspec.structs.replace
_GOING_ON = (State.RUNNING, State.RESTARTING)
_UNSEEN = {State.PENDING, State.UNKNOWN}
LAST_WORD_SECONDS = 10.0
"""How long a supervisor has to record the end of a run whose nodes have ended."""


class Connections(contextlib.ExitStack):
    """What reaches a run's hosts: made when it is first needed, kept until this is closed.

    With it, whoever looks often at a run logs in to its hosts once.
    """

    _transport: Transport | None = None

    def to(self, cluster: ClusterSpec) -> Transport:
        """The run's cluster is one and the same each time."""
        if self._transport is None:
            made = contextlib.closing(backends.transport_for(cluster))
            self._transport = self.enter_context(made)
        return self._transport


def current(folder: RunFolder) -> RunStatus | None:
    """What is on record of a run that has ended, or whose supervisor lives. Only reads.

    Returns:
        None where the record cannot be relied on: ask `reconcile`.
    """
    watched = folder.is_held()
    # In this order: where nobody watches any more, this is the supervisor's last word.
    saved = folder.maybe_json("state.json", RunStatus)
    if saved is not None and (watched or saved.state.final):
        return saved
    with contextlib.suppress(RunFolderError):
        return _submitted(folder.read_json("run.json", Submission)) if watched else None
    return None


def _submitted(submission: Submission) -> RunStatus:
    """The status of a run of which nothing is known but that it was submitted."""
    return RunStatus(
        run=submission.run, job=submission.job, cluster=submission.cluster,
        backend=submission.backend, state=State.PENDING, started_at=submission.created_at,
    )  # fmt: skip


def reconcile(folder: RunFolder, connections: Connections | None = None) -> RunStatus:
    """How a run stands now; its end is recorded where what could tell of it is removed.

    Never raises for a damaged folder: what cannot be told is UNKNOWN, with a remark.

    Args:
        connections: of a caller that asks several times.
    """
    if (found := current(folder)) is not None:
        return found
    if connections is None:
        with Connections() as connections:
            return reconcile(folder, connections)
    saved = folder.maybe_json("state.json", RunStatus)
    try:
        submission = folder.read_json("run.json", Submission)
        handle = folder.handle(saved.attempt if saved else 1)
        transport = connections.to(folder.cluster())
        backend = backends.backend(submission.backend)
    except ClusterkitError as error:
        nothing = RunStatus(
            run=folder.run_id, job="?", cluster="?", backend="?", state=State.UNKNOWN
        )
        return _replace(saved or nothing, state=State.UNKNOWN, remark=error.message)
    base = saved or _submitted(submission)
    job = folder.maybe_json("job.json", JobSpec)
    if base.restarts_left is None and job is not None:
        base = _replace(base, restarts_left=job.restarts)
    while seen := backend.status(handle, transport):
        seen = without_spares(handle.plan, seen)
        if seen.goes_on is None or seen.goes_on <= handle.attempt:
            break
        base = _replace(base, restarts_left=seen.left_of(base.restarts_left or 0))
        handle = folder.handle(seen.goes_on, handle.plan)
        base = _replace(base, attempt=handle.attempt, running_since=None)
    if saved is None and (seen is None or {node.state for node in seen.nodes} <= _UNSEEN):
        # Nothing is started before that is written; a host may not even have the run's folder.
        seen = Observation(state=State.PENDING, nodes=())
    if seen is None:
        return _replace(base, state=State.UNKNOWN, remark="nothing of it was found")
    if seen.state not in _GOING_ON:
        _sync(backend, handle, transport)
    found, startable = _judged(_replace(base, nodes=seen.nodes), handle, seen)
    if found.state.final and not startable and isinstance(backend, SupportsCleanup):
        _record_end(found, backend, handle, transport)
    return found


def _sync(backend: Backend, handle: RunHandle, transport: Transport) -> None:
    if isinstance(backend, SupportsSync):
        with contextlib.suppress(ClusterkitError):
            backend.sync(handle, transport)


def _record_end(
    found: RunStatus, backend: Backend, handle: RunHandle, transport: Transport
) -> None:
    """Clear up, and write down how the run ended: nobody else is there to do it."""
    with contextlib.suppress(ClusterkitError):
        if isinstance(backend, SupportsCleanup):
            backend.clean_up(handle, transport)
        record(handle.folder, found)


def unfinished(folder: RunFolder, connections: Connections | None = None) -> bool:
    """Whether there is anything left to do for a supervisor."""
    saved = folder.maybe_json("state.json", RunStatus)
    return not (saved or reconcile(folder, connections)).state.final


def _judged(base: RunStatus, handle: RunHandle, seen: Observation) -> tuple[RunStatus, bool]:
    """The status of a run whose supervisor is gone, and whether `attach` would start it again."""
    folder = handle.folder
    restarts = seen.left_of(base.restarts_left or 0)
    base = _replace(base, restarts_left=restarts)
    begun = any(node.state is not State.PENDING for node in seen.nodes)
    attach = f"`clusterkit attach {folder.run_id}`"
    finished = max((node.ended_at or 0.0 for node in seen.nodes), default=0.0) or None
    if seen.state is State.SUCCEEDED:
        return _replace(base, state=State.SUCCEEDED, exit_code=0, finished_at=finished), False
    if seen.state in _GOING_ON or seen.queued:
        remark = (
            f"its supervisor is gone: {_alone(handle, restarts)}; {attach} watches over "
            f"it again, `clusterkit cancel {folder.run_id}` ends it"
        )
        return _replace(base, state=seen.state, remark=remark), False
    if folder.is_cancelled():
        return _replace(base, state=State.CANCELLED, exit_code=EXIT_INTERRUPTED), False
    again = restarts > 0 and not (seen.final or seen.late)
    left = counted(restarts, "restart")
    remark = f"it was not restarted ({left} left): {attach} does"
    if not begun:
        again = folder.file("state.json").exists()
        remark = f"it was not started: {attach} does"
        failure = Failure(
            exit_code=1,
            cause="clusterkit was killed before the run started",
            hint=f"{attach} starts it" if again else "submit it again",
        )
    else:
        failure = diagnosis(handle, seen)
    found = _replace(
        base,
        state=State.UNKNOWN if seen.state is State.UNKNOWN else State.FAILED,
        exit_code=failure.exit_code or 1,
        failure=failure,
        finished_at=finished,
        remark=remark if again else base.remark,
    )
    return found, again


def _alone(handle: RunHandle, restarts: int) -> str:
    """What does not happen to a run that goes on without its supervisor."""
    again = f" ({counted(restarts, 'restart')} left)" if restarts else ""
    if again and handle.plan.restarts:
        lost = "" if handle.plan.rejoin else ", nobody starts lost nodes again"
        return f"its nodes start failed ranks again{again}{lost}"
    facts = handle.folder.maybe_json("facts.json", Facts)
    together = facts is not None and facts.watch_port is not None  # its nodes watch each other
    ends = "" if together else " or ends the other nodes when one fails"
    return f"nobody restarts it{again}{ends}"


# ---------------------------------------------------------------- ending a run


def cancel(folder: RunFolder) -> RunStatus:
    """End a run, whoever watches it; fine to repeat, on a run that has ended, on a damaged one."""
    with Connections() as connections:
        before = reconcile(folder, connections)
        leftovers = folder.file(LEFTOVERS)
        if before.state.final and not leftovers.exists():
            if unfinished(folder, connections):  # by now it is: `attach` starts it no more
                before = _replace(before, remark=None)
                backend, handle, transport = _ending(folder, before.attempt, connections)
                with contextlib.suppress(ClusterkitError):  # nodes that had just been started
                    backend.cancel(handle, transport)
                _record_end(before, backend, handle, transport)
            return before
        with contextlib.suppress(RunFolderError):  # a folder that is full or gone: end what runs
            folder.mark_cancelled()
        backend, handle, transport = _ending(folder, before.attempt, connections)
        _await_end(folder, handle.plan.stop_grace + LAST_WORD_SECONDS)
        found = current(folder)
        if found is not None and found.state is State.CANCELLED and not leftovers.exists():
            return found  # its supervisor has ended it everywhere: no need to log in to every host
        if not folder.is_held():
            _sync(backend, handle, transport)
        remark = None
        try:
            backend.cancel(handle, transport)
        except ClusterkitError as error:
            with contextlib.suppress(RunFolderError):
                folder.write(LEFTOVERS, f"{error.message}\n")
            remark = folder.leftover_words(error.message)
        else:
            leftovers.unlink(missing_ok=True)
            _await_end(folder, LAST_WORD_SECONDS)  # a supervisor on a busy machine notices late
        after = _replace(reconcile(folder, connections), remark=remark)
        if after.state.final and folder.maybe_json("state.json", RunStatus) != after:
            # Nobody else is there to record it.
            record(folder, after)
        return after


def _await_end(folder: RunFolder, seconds: float) -> None:
    """Return when the supervisor has recorded the run's end, is gone, or after ``seconds``."""
    deadline = time.monotonic() + seconds
    while folder.is_held() and time.monotonic() < deadline:
        if (found := current(folder)) is not None and found.state.final:
            return
        time.sleep(POLL_SECONDS / 2)


def _ending(
    folder: RunFolder, attempt: int, connections: Connections
) -> tuple[Backend, RunHandle, Transport]:
    """What it takes to end a run, of a damaged folder as well: processes know the folder's name."""
    cluster: ClusterSpec = LocalCluster()
    with contextlib.suppress(RunFolderError):
        cluster = folder.cluster()
    try:
        handle = folder.handle(attempt)
    except RunFolderError:
        plan = Plan(
            run_id=folder.run_id, run_dir=str(folder.path), backend=cluster.backend, summary="",
            nodes=0, world_size=0,
        )  # fmt: skip
        handle = folder.handle(attempt, plan)
    return backends.backend(cluster.backend), handle, connections.to(cluster)


def forget(folder: RunFolder) -> None:
    """Remove what a run that has ended left on other machines, and with a service.

    Raises:
        Unavailable: a host does not answer.
    """
    try:
        handle, cluster = folder.handle(), folder.cluster()
    except RunFolderError:
        return  # damaged: nobody knows of hosts
    backend = backends.backend(handle.plan.backend)
    with Connections() as connections:
        if isinstance(backend, SupportsCleanup) and unfinished(folder, connections):
            backend.clean_up(handle, connections.to(cluster))
        if isinstance(backend, SupportsForget):
            backend.forget(handle, connections.to(cluster))


def abandon(folder: RunFolder) -> None:
    """End a submit that was interrupted: its nodes may have started, its supervisor come up."""
    if folder.file("state.json").exists():
        with contextlib.suppress(ClusterkitError):
            cancel(folder)
