"""Reads the status of a run, cancels it and removes what it left, from any process.

`current` only reads the record. Where no supervisor updates that, `reconcile` asks the backend,
copies what the nodes wrote, and removes what a service keeps of a run that has ended.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

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
from clusterkit.errors import (
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    ClusterkitError,
    RunFolderError,
    pluralize,
)
from clusterkit.lifecycle.evidence import Terms, Verdict, verdict
from clusterkit.lifecycle.outcome import diagnosis, without_spares
from clusterkit.plan import Plan
from clusterkit.run.folder import (
    BY_HAND,
    LEFTOVERS,
    LOCK,
    POLL_SECONDS,
    RunFolder,
    RunHandle,
    Submission,
)
from clusterkit.run.status import Failure, RunStatus, State
from clusterkit.spec import JobSpec

if TYPE_CHECKING:
    from clusterkit.transport import Transport

_replace = msgspec.structs.replace
_RUNNING = (State.RUNNING, State.RESTARTING)
_NOT_SEEN = {State.PENDING, State.UNKNOWN}
RECORD_SECONDS = 10.0
"""How long a supervisor has to record the end of a run whose nodes have ended."""
UNSTARTED = "clusterkit was killed before the run started"


class Connections(contextlib.ExitStack):
    """Connections to the hosts of one run: made when first needed, kept until this is closed, so
    that a caller that polls logs in once."""

    _transport: Transport | None = None

    def to(self, cluster: ClusterSpec) -> Transport:
        """Return the transport of the run's cluster, which is the same in each call."""
        if self._transport is None:
            made = contextlib.closing(backends.transport_for(cluster))
            self._transport = self.enter_context(made)
        return self._transport


def current(folder: RunFolder) -> RunStatus | None:
    """Return the recorded status of a run that has ended or has a supervisor. Only reads.

    Returns:
        None if the record may be out of date: call `reconcile`.
    """
    supervised = folder.has_supervisor()
    # In this order: where no supervisor runs any more, this is the last status that it wrote.
    saved = folder.saved_status()
    if saved is not None and (supervised or saved.state.final):
        return saved
    with contextlib.suppress(RunFolderError):
        return folder.read_json("run.json", Submission).initial_status() if supervised else None
    return None


def elsewhere(folder: RunFolder) -> str | None:
    """Return the other machine whose processes a run's nodes are; None: this one can judge it."""
    submission = folder.maybe_json("run.json", Submission)
    if submission is None or not backends.backend(submission.backend).runs_here:
        return None
    from clusterkit.agent import boot_id  # deferred: most commands do without

    here = submission.boot_id == boot_id() or submission.host in ("", os.uname().nodename)
    return None if here else submission.host


def reconcile(folder: RunFolder, connections: Connections | None = None) -> RunStatus:
    """Return the status of a run now. Records the end of a run whose nodes a service keeps, and
    removes them there.

    Never raises for a damaged folder: the state is then UNKNOWN, with a remark.

    Args:
        connections: of a caller that polls.
    """
    if (found := current(folder)) is not None:
        return found
    if connections is None:
        with Connections() as connections:
            return reconcile(folder, connections)
    saved = folder.saved_status()
    try:
        submission = folder.read_json("run.json", Submission)
        handle = folder.handle(saved.attempt if saved else 1)
        transport = connections.to(folder.cluster())
        backend = backends.backend(submission.backend)
    except ClusterkitError as error:
        unknown = saved or RunStatus.unknown(folder.run_id)
        if _unrecorded(folder):
            hint = f"clusterkit rm {folder.run_id} removes what is left of it"
            failure = Failure(exit_code=EXIT_REFUSED, cause=UNSTARTED, hint=hint)
            return _replace(unknown, state=State.FAILED, exit_code=EXIT_REFUSED, failure=failure)
        return _replace(unknown, state=State.UNKNOWN, remark=error.message)
    base = saved or submission.initial_status()
    if (host := elsewhere(folder)) is not None:
        remark = f"its processes run on {host}: `clusterkit status {folder.run_id}` there shows it"
        return _replace(base, state=State.UNKNOWN, remark=remark)
    job = folder.maybe_json("job.json", JobSpec)
    if base.restarts_left is None and job is not None:
        base = _replace(base, restarts_left=job.restarts)
    while seen := backend.status(handle, transport):
        seen = without_spares(handle.plan, seen)
        if seen.next_attempt is None or seen.next_attempt <= handle.attempt:
            break
        base = _replace(base, restarts_left=seen.remaining_restarts(base.restarts_left or 0))
        handle = folder.handle(seen.next_attempt, handle.plan)
        base = _replace(base, attempt=handle.attempt, running_since=None)
    if saved is None and (seen is None or {node.state for node in seen.nodes} <= _NOT_SEEN):
        # state.json is written before nodes are started; a host may not even have the run's folder.
        seen = Observation(state=State.PENDING, nodes=())
    if seen is None:
        return _replace(base, state=State.UNKNOWN, remark="nothing of the run was found")
    if seen.state not in _RUNNING:
        _sync(backend, handle, transport)
    found, can_attach = _unsupervised(_replace(base, nodes=seen.nodes), handle, seen)
    if folder.has_supervisor():
        # Since `current`: its submit was still recording it, or `attach` began.
        return current(folder) or base
    if found.state.final and not can_attach and isinstance(backend, SupportsCleanup):
        _record_end(found, backend, handle, transport)
    return found


def _unrecorded(folder: RunFolder) -> bool:
    """Return whether submit was killed before the record was complete, and so before any start.

    Submit holds the lock from when it makes the file: where there is none, nothing is known.
    """
    # `os.path.exists` and not Path's, which raises in another user's folder.
    if not os.path.exists(folder.file(LOCK)) or folder.has_supervisor():
        return False
    names = ("run.json", "state.json", "attempts")
    return not any(os.path.exists(folder.file(name)) for name in names)


def _sync(backend: Backend[Any], handle: RunHandle, transport: Transport) -> None:
    if isinstance(backend, SupportsSync):
        with contextlib.suppress(ClusterkitError):
            backend.sync(handle, transport)


def _record_end(
    found: RunStatus, backend: Backend[Any], handle: RunHandle, transport: Transport
) -> None:
    """Clean up and record the end of a run that has no supervisor to do it."""
    with contextlib.suppress(ClusterkitError):
        if isinstance(backend, SupportsCleanup):
            backend.clean_up(handle, transport)
        handle.folder.record_end(found)


def needs_supervisor(folder: RunFolder, connections: Connections | None = None) -> bool:
    """Return whether a supervisor would have anything left to do."""
    return not (folder.saved_status() or reconcile(folder, connections)).state.final


def _unsupervised(base: RunStatus, handle: RunHandle, seen: Observation) -> tuple[RunStatus, bool]:
    """Return the status of a run whose supervisor is gone, and whether `attach` would start it
    again."""
    folder = handle.folder
    restarts = seen.remaining_restarts(base.restarts_left or 0)
    base = _replace(base, restarts_left=restarts)
    begun = any(node.state is not State.PENDING for node in seen.nodes)
    attach = f"`clusterkit attach {folder.run_id}`"
    finished = max((node.ended_at or 0.0 for node in seen.nodes), default=0.0) or None
    # A service may list a run for a moment after all of its nodes have recorded their end.
    all_ended = all(node.spare or node.state.final for node in seen.nodes)
    if seen.state in _RUNNING or (seen.queued and not all_ended):
        remark = (
            f"its supervisor is gone: {_missing(handle, restarts)}; {attach} supervises it again, "
            f"`clusterkit cancel {folder.run_id}` ends it"
        )
        state = State.RUNNING if seen.state.final else seen.state
        return _replace(base, state=state, remark=remark), False
    job, facts = folder.maybe_json("job.json", JobSpec), folder.maybe_json("facts.json", Facts)
    if job is None or facts is None:
        return _replace(base, state=State.UNKNOWN, remark="job.json or facts.json is damaged"), True
    terms = Terms.of(job, handle.plan, facts, 0.0)
    found = verdict(terms, seen, restarts_left=restarts, cancelled=folder.is_cancelled())
    if found is Verdict.SUCCEEDED:
        return _replace(base, state=State.SUCCEEDED, exit_code=0, finished_at=finished), False
    if any(node.state is State.UNKNOWN for node in seen.nodes):
        # Silence ends nothing: the hosts, or this machine, may be cut off.
        since = next(node.reason for node in seen.nodes if node.state is State.UNKNOWN)
        remark = f"not known: {since}; {attach} follows it, once the hosts answer"
        return _replace(base, state=State.UNKNOWN, remark=remark), True
    if found is Verdict.CANCELLED:
        why = base.remark if folder.is_cancelled() else seen.removed
        ended = _replace(base, state=State.CANCELLED, exit_code=EXIT_INTERRUPTED, remark=why)
        return ended, False
    if not begun and folder.file(BY_HAND).exists():
        remark = f"its plan was written with -o, to be started by hand: {folder.file('files')}"
        return _replace(base, state=State.PENDING, remark=remark), False
    if begun:
        failure = diagnosis(handle, seen)
        can_attach = found is not Verdict.FAILED
        left = f"{pluralize(restarts, 'restart')} left"
        remark = f"not restarted ({left}): run {attach} to restart it"
    else:
        can_attach = folder.saved_status() is not None
        remark = f"run {attach} to start it"
        again = f"clusterkit was killed before attempt {base.attempt} started"
        failure = Failure(
            exit_code=EXIT_REFUSED,
            cause=UNSTARTED if base.attempt == 1 else again,
            hint=f"{attach} starts it" if can_attach else "submit it again",
        )
    after = _replace(
        base,
        state=State.FAILED,
        exit_code=failure.exit_code or 1,
        failure=failure,
        finished_at=finished,
        remark=remark if can_attach else base.remark,
    )
    return after, can_attach


def _missing(handle: RunHandle, restarts: int) -> str:
    """Return what is not done for a run that continues without its supervisor."""
    again = f" ({pluralize(restarts, 'restart')} left)" if restarts else ""
    if again and handle.plan.restarts:
        lost = "" if handle.plan.rejoin else ", lost nodes will not be restarted"
        return f"its nodes restart failed ranks{again}{lost}"
    facts = handle.folder.maybe_json("facts.json", Facts)
    nodes_watch_each_other = facts is not None and facts.watch_port is not None
    ends = "" if nodes_watch_each_other else " or ends the other nodes when one fails"
    return f"it will not be restarted{again}{ends}"


# ---------------------------------------------------------------- ending a run


def cancel(folder: RunFolder) -> RunStatus:
    """End a run, supervised or not, also with a damaged folder. Idempotent.

    Raises:
        RunFolderError: it is another user's.
    """
    with Connections() as connections:
        before = reconcile(folder, connections)
        leftovers = folder.file(LEFTOVERS)
        saved = folder.saved_status()
        if saved is not None and saved.state.final and not leftovers.exists():
            return _replace(before, remark=None)  # of why it ended; here it says what is left
        if before.state.final and not folder.has_supervisor():
            # An agent that was killed may have left ranks. And `attach` is not to start it again.
            before = _replace(before, remark=None)
            backend, handle, transport = _access(folder, before.attempt, connections)
            _, remark = folder.stop(partial(backend.cancel, handle, transport))
            _record_end(before, backend, handle, transport)
            return _replace(before, remark=remark)
        try:
            folder.mark_cancelled()
        except RunFolderError as full:  # a folder that is full or gone: end what runs
            if isinstance(full.__cause__, PermissionError):
                raise
        backend, handle, transport = _access(folder, before.attempt, connections)
        _await_end(folder, handle.plan.stop_grace + RECORD_SECONDS)
        if elsewhere(folder) is not None:
            return reconcile(folder, connections)
        found = current(folder)
        if found is not None and found.state is State.CANCELLED and not leftovers.exists():
            # Its supervisor has ended it everywhere: no need to log in to every host.
            return _replace(found, remark=None)
        if not folder.has_supervisor():
            _sync(backend, handle, transport)
        error, remark = folder.stop(partial(backend.cancel, handle, transport))
        if error is None:
            _await_end(folder, RECORD_SECONDS)  # a supervisor on a busy machine notices late
        after = _replace(reconcile(folder, connections), remark=remark)
        if after.state.final and folder.saved_status() != after:
            with contextlib.suppress(RunFolderError):  # the disk is full, and the run has ended
                folder.record_end(after)
        return after


def _await_end(folder: RunFolder, seconds: float) -> None:
    """Return when the supervisor has recorded the run's end, is gone, or after ``seconds``."""
    deadline = time.monotonic() + seconds
    while folder.has_supervisor() and time.monotonic() < deadline:
        if (found := current(folder)) is not None and found.state.final:
            return
        time.sleep(POLL_SECONDS / 2)


def _access(
    folder: RunFolder, attempt: int, connections: Connections
) -> tuple[Backend[Any], RunHandle, Transport]:
    """Return what reaches a run's nodes. A damaged folder's name is enough to find its
    processes."""
    cluster: ClusterSpec = LocalCluster()
    with contextlib.suppress(RunFolderError):
        cluster = folder.cluster()
    try:
        handle = folder.handle(attempt)
    except RunFolderError:
        plan = Plan(
            run_id=folder.run_id,
            run_dir=str(folder.path),
            backend=cluster.backend,
            summary="",
            nodes=0,
            world_size=0,
        )
        handle = folder.handle(attempt, plan)
    return backends.backend(cluster.backend), handle, connections.to(cluster)


def remove_remote_files(folder: RunFolder) -> None:
    """Remove what a run that has ended left on other machines, and with a service.

    Raises:
        Unavailable: a host does not answer, or something of the run could not be ended.
    """
    try:
        handle, cluster = folder.handle(), folder.cluster()
    except RunFolderError:
        return  # damaged: its hosts are not known
    backend = backends.backend(handle.plan.backend)
    with Connections() as connections:
        saved = folder.saved_status()
        if saved is None or not saved.state.final or folder.file(LEFTOVERS).exists():
            # An agent that was killed may have left ranks.
            backend.cancel(handle, connections.to(cluster))
        if isinstance(backend, SupportsCleanup) and needs_supervisor(folder, connections):
            backend.clean_up(handle, connections.to(cluster))
        if isinstance(backend, SupportsForget):
            backend.remove_remote_files(handle, connections.to(cluster))


def undo_submit(folder: RunFolder) -> None:
    """End what an interrupted submit may have started: nodes and a supervisor."""
    if folder.file("state.json").exists():
        with contextlib.suppress(ClusterkitError):
            cancel(folder)
