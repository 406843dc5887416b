"""A run's supervisor: starts its nodes, watches them, and records how it ends.

The nodes' agents restart ranks that fail (`clusterkit.agent.membership`); the supervisor follows
their attempts. It restarts nodes: lost ones, and all of them where the agents cannot go on.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial

import msgspec

from clusterkit import agent, backends
from clusterkit.backends.base import Backend, Monitor, Observation, SupportsCleanup
from clusterkit.backends.ports import moved_port
from clusterkit.cluster import Facts
from clusterkit.errors import (
    EXIT_INTERRUPTED,
    ClusterkitError,
    RunFolderError,
    counted,
    listed,
)
from clusterkit.output import mirror
from clusterkit.output.track import tracking
from clusterkit.run.folder import (
    LEFTOVERS,
    POLL_SECONDS,
    Event,
    RunFolder,
    RunHandle,
    StepRecord,
    Submission,
)
from clusterkit.run.lost_nodes import LOST_SECONDS, Losses, Returns, names
from clusterkit.run.notify import notify
from clusterkit.run.outcome import diagnosis, record, without_spares
from clusterkit.run.status import AttemptStatus, Failure, NodeStatus, RunStatus, State
from clusterkit.shell import Secret
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

PEERS_SECONDS = 2.0
"""How long the other nodes have to end by themselves, so that the first failure is recorded."""
PROBED_SECONDS = 20.0
"""How long facts are valid: a port that was free when probed is assumed to be free."""
CANCEL_SECONDS = 5.0
"""Pause before nodes that did not end are cancelled again."""
PORT_TRIES = 3


class Supervisor:
    """Supervises one run, from its first attempt to its last."""

    def __init__(self, folder: RunFolder, transport: Transport | None = None) -> None:
        self.folder = folder
        self.submission = folder.read_json("run.json", Submission)
        self.job = folder.read_json("job.json", JobSpec)
        self.cluster = folder.cluster()
        self.facts = folder.read_json("facts.json", Facts)
        self.plan = folder.plan()
        self.backend: Backend = backends.backend(self.submission.backend)
        self.transport = transport or backends.transport_for(self.cluster)
        self.secrets = {name: Secret(name, os.environ[name]) for name in self.job.secrets}
        self.attempt = 1
        self.restarts_left = self.job.restarts
        self.attempts: tuple[AttemptStatus, ...] = ()
        self.remark: str | None = None
        self.nodes: tuple[NodeStatus, ...] = ()
        self.running_since: float | None = None
        self.returns = Returns(folder, self.job, self.plan)
        self.losses = Losses(self.job, self.plan)
        self.port_tries = PORT_TRIES
        self.followed = False  # whether the agents of the previous attempt started this one
        self.terminated = False

    def begin(self) -> None:
        """Record this process as the run's supervisor, and the run as pending if it is new."""
        # The ranks may have filled the disk already.
        with contextlib.suppress(RunFolderError):
            self.folder.write_json("supervisor.json", agent.identity(os.getpid()))
            if not self.folder.file("state.json").exists():
                self.folder.write_json("state.json", self._status(State.PENDING, None))

    def start(self) -> bool:
        """Start the first attempt. Return whether it started; if not, ``state.json`` says why."""
        self._recorded(self._start_attempt)
        return self.folder.read_json("state.json", RunStatus).state is State.PENDING

    def main(self, *, adopt: bool = False) -> None:
        """Supervise the run until it ends. ``state.json`` records the end, also of an error.

        Args:
            adopt: the previous supervisor may not have started the newest attempt.
        """
        for signum in (signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminated)
        with tracking(self.job, self.folder, lambda: self.attempt, self._event):
            self._recorded(partial(self._attempts, adopt))

    def _recorded(self, work: Callable[[], None]) -> None:
        """Call ``work``. An error cancels the run, and is recorded as its failure."""
        try:
            work()
        except ClusterkitError as error:
            self._cancel()
            failure = Failure(exit_code=error.exit_code, cause=error.message, hint=error.hint)
            self._finish(State.FAILED, failure)
        except Exception as error:
            self._cancel()
            cause = f"clusterkit's supervisor failed: {type(error).__name__}: {error}"
            hint = f"a bug of clusterkit's; {self.folder.file('supervisor.log')} holds the details"
            self._finish(State.FAILED, Failure(exit_code=1, cause=cause, hint=hint))
            raise

    def _terminated(self, signum: int, frame: object) -> None:
        """Treat SIGTERM (the machine shuts down) as a cancel."""
        self.terminated = True

    def _to_be_ended(self) -> bool:
        return self.terminated or self.folder.is_cancelled()

    def _attempts(self, adopt: bool = False) -> None:
        """Supervise from the newest attempt to the last. `start` has started the first."""
        begun = self._adopted() if adopt else True
        while True:
            if self._to_be_ended():
                if begun:
                    self._cancel()
                return self._finish(State.CANCELLED)
            if not begun:
                self._start_attempt()
            handle = self._handle()
            seen = self._watch(handle)
            self.followed = begun = seen.goes_on is not None
            self.restarts_left = seen.left_of(self.restarts_left)
            if not begun:
                if isinstance(self.backend, SupportsCleanup):
                    self._end(partial(self.backend.clean_up, handle, self.transport))
                if seen.state is State.SUCCEEDED:
                    return self._finish(State.SUCCEEDED)
                if any(node.state is State.UNKNOWN for node in seen.nodes):
                    self._cancel()  # something may still run there
                if self._to_be_ended():
                    return self._finish(State.CANCELLED)
            failure = diagnosis(handle, seen)
            if begun:
                self._failed_event(failure)
            elif (end := self._prepare_next(handle, seen, failure)) is not None:
                return self._finish(end, failure if end is State.FAILED else None)
            self._attempt_ended(failure)
            if not begun:
                self._save(State.RESTARTING, failure=failure)
            self.attempt = seen.goes_on or self.attempt + 1
            self.running_since = None

    def _prepare_next(self, handle: RunHandle, seen: Observation, failure: Failure) -> State | None:
        """After a failed attempt: plan the next one, or return the state in which the run ends."""
        if self.port_tries and self._port_was_taken(failure):
            self.port_tries -= 1
            why = f"port {self.plan.port} was taken before the run could listen there"
            port = self.transport.free_port(self.facts.hosts[0].host)
            self._plan_anew(*moved_port(self.cluster, self.facts, port, why))
        elif lost := self.losses.of(seen, self.running_since):
            return self._replace(lost, handle, seen, failure)
        elif not self.restarts_left or seen.final or seen.late or self.losses.end(seen):
            return State.FAILED
        else:
            self.restarts_left -= 1
            self._failed_event(failure)
        return None

    def _replace(
        self, lost: list[NodeStatus], handle: RunHandle, seen: Observation, failure: Failure
    ) -> State | None:
        """As `_prepare_next`, after nodes were lost: wait for them, or plan without them."""
        self._event(f"attempt {self.attempt} has lost {names(lost)}: {failure.summary}")
        self.nodes = self.losses.waiting(seen, lost)
        self._save(State.RESTARTING, failure=failure)
        others = self.losses.others(lost, self.job, self.facts)
        patience = LOST_SECONDS if others is None else 0.0
        if self.losses.answer(lost, self.transport, self._to_be_ended, patience):
            with contextlib.suppress(ClusterkitError):
                self.backend.status(handle, self.transport)  # what they wrote meanwhile
            self._event("all nodes answer; starting again, which costs no restart")
        elif self._to_be_ended():
            return State.CANCELLED
        elif others is None:
            return State.FAILED
        else:
            hosts = listed([host.host for host in others[0].hosts], 4)
            why = f"starting again on {hosts}, which costs no restart"
            self._plan_anew(others[0], why, spares=others[1])
            self.losses.plan = self.plan
        return None

    def _failed_event(self, failure: Failure) -> None:
        self._event(
            f"attempt {self.attempt} failed: {failure.who}: {failure.summary}; "
            f"starting again, {counted(self.restarts_left, 'restart')} left"
        )

    def _start_attempt(self) -> None:
        self._check_again()
        self._save(State.PENDING)
        self.backend.submit(
            self.plan,
            self.transport,
            attempt=self.attempt,
            secrets={**self.secrets, **self.returns.begin()},
            record=partial(self.folder.record, self.attempt),
        )

    def _attempt_ended(self, failure: Failure) -> None:
        now = time.time()
        before = self.attempts[-1].finished_at if self.attempts else self.submission.created_at
        ended = AttemptStatus(
            attempt=self.attempt, state=State.FAILED, failure=failure, started_at=before,
            finished_at=max((node.ended_at or 0.0 for node in self.nodes), default=0.0) or now,
        )  # fmt: skip
        self.attempts = (*self.attempts, ended)
        notify(self.cluster.notify, self._status(State.RESTARTING, failure), self._event)

    def _adopted(self) -> bool:
        """Load the previous supervisor's state. Return whether the newest attempt was started."""
        saved = self.folder.maybe_json("state.json", RunStatus)
        # A saved attempt that has ended means that the next one was not started.
        begun = saved is None or all(one.attempt != saved.attempt for one in saved.attempts)
        if saved is not None:
            self.attempts = saved.attempts
            if saved.restarts_left is not None:
                self.restarts_left = saved.restarts_left
            done = self._steps_done(saved.attempt)
            if saved.state is State.PENDING and done < len(self.plan.steps):
                # Its supervisor was killed while it started the nodes: which run is not known.
                self._cancel()
                begun = False
            self.followed = begun and not done
            self.attempt = saved.attempt + (not begun)
            self.running_since = saved.running_since if begun else None
        return begun

    def _steps_done(self, attempt: int) -> int:
        """Return how many steps of the plan were run: none in an attempt that agents started."""
        done = self.folder.records("steps.jsonl", StepRecord)
        return sum(step.attempt == attempt for step in done)

    # -- one attempt --------------------------------------------------------

    def _watch(self, handle: RunHandle) -> Observation:
        """Wait until the attempt ends, and return what was observed last.

        Once the nodes with ranks have ended, or too few are left, the others are cancelled.
        """
        with contextlib.closing(self.backend.watch(handle, self.transport)) as monitor:
            return self._until_ended(monitor)

    def _until_ended(self, monitor: Monitor) -> Observation:
        started = mirror.awake()
        cancel_at: float | None = None
        again_at = 0.0  # after a cancel: when the next one is due
        while True:
            found = monitor.status()
            if found is None:
                raise RunFolderError(f"the folder of run {self.folder.run_id} is gone")
            seen = without_spares(self.plan, found)
            self._note_progress(seen)
            now = mirror.awake()
            pending = self._pending(seen, cancelled=again_at > 0)
            if pending and now > started + self.backend.start_seconds:
                raise ClusterkitError(
                    f"node {pending[0]} did not report within {self.backend.start_seconds:g} s",
                    hint=f"see the logs in {self.folder.path}/attempts/{self.attempt}",
                )
            states = [node.state for node in seen.nodes]
            running, lost = {State.RUNNING, State.RESTARTING}, {State.FAILED, State.CANCELLED}
            (running if seen.queued else lost).add(State.UNKNOWN)
            busy = pending or running & set(states)
            succeeded = seen.state is State.SUCCEEDED
            over = succeeded or all(node.spare or node.state.final for node in seen.nodes)
            hidden = not (again_at or seen.goes_on) and self.returns.hidden(
                seen, now, self.followed
            )
            if not (busy or hidden) or (over and seen.goes_on is not None):
                failed = self.plan.places - states.count(State.SUCCEEDED)
                if succeeded and failed > 0:
                    self._event(f"{failed} of {self.plan.places} elastic nodes failed")
                return seen
            few = len(states) - sum(state in lost for state in states) < self.plan.least
            if self._to_be_ended():
                cancel_at = now
            elif cancel_at is None and seen.goes_on is None and (over or not busy or few):
                cancel_at = now + PEERS_SECONDS
            if cancel_at is None:
                self._start_returning(seen, now)
            elif now >= max(cancel_at, again_at):
                self._cancel()
                again_at = mirror.awake() + CANCEL_SECONDS
            time.sleep(POLL_SECONDS)

    def _pending(self, seen: Observation, *, cancelled: bool) -> list[int]:
        """Return the nodes with ranks that have yet to start; none of an attempt that needs none.

        A node that is missing from an attempt that agents started may run nowhere: it is waited for
        only while the others are too few.
        """
        pending = [n.node for n in seen.nodes if n.state is State.PENDING and not n.spare]
        enough = len(seen.nodes) - len(pending) >= self.plan.least
        if seen.state is State.SUCCEEDED or (self.followed and (cancelled or enough)):
            return []
        return pending

    def _start_returning(self, seen: Observation, now: float) -> None:
        """Start lost nodes that are due, to join the others."""
        for node in self.returns.due(seen, now, self.followed):
            plan = self.backend.only(self.plan, node)
            # No steps: the backend cannot start one node. A host may have blocked the loop.
            if plan.steps and not self._to_be_ended():
                start = partial(self.backend.submit, plan, self.transport)
                self._event(self.returns.start(node, start, self.secrets))

    def _note_progress(self, seen: Observation) -> None:
        begun = sum(node.state is not State.PENDING for node in seen.nodes)
        if self.running_since is None and begun >= self.plan.least:
            self.running_since = time.time()
        if seen.nodes != self.nodes:
            self.nodes = seen.nodes
            waits = seen.state is State.PENDING and not self.followed
            again = State.RESTARTING if seen.state is State.RESTARTING else State.RUNNING
            self._save(State.PENDING if waits else again)

    def _cancel(self) -> None:
        reason = "cancelled" if self._to_be_ended() else "another node has ended"
        self._end(partial(self.backend.cancel, self._handle(), self.transport, reason))

    def _end(self, work: Callable[[], None]) -> None:
        """Call ``work``, which stops nodes. An error is recorded in the run's remark and events."""
        try:
            work()
        except ClusterkitError as error:
            if error.message != self.remark:
                self._event(f"not all nodes could be stopped: {error.message}")
            self.remark = str(error.message)
            with contextlib.suppress(RunFolderError):
                self.folder.write(LEFTOVERS, f"{error.message}\n")
        else:
            self.remark = None
            self.folder.file(LEFTOVERS).unlink(missing_ok=True)

    def _handle(self) -> RunHandle:
        return self.folder.handle(self.attempt, self.plan)

    # -- the facts ----------------------------------------------------------

    def _check_again(self) -> None:
        """Plan again if the port was taken since it was probed, or restarts were used."""
        age = time.time() - self.submission.created_at
        fresh = self.attempt == 1 and age <= PROBED_SECONDS
        changed = self.backend.before_attempt(self.cluster, self.facts, self.transport, fresh=fresh)
        if changed is not None:
            self._plan_anew(*changed)
        elif self.restarts_left < self.plan.restarts:
            self._plan_anew(self.facts)

    def _plan_anew(self, facts: Facts, why: str | None = None, spares: int | None = None) -> None:
        """Plan the next attempt. Its agents get the restarts and spares that are left."""
        if why is not None:
            self._event(why)
        self.facts = facts
        if spares is None:
            spares = self.job.spares and self.plan.nodes - self.plan.topology["nodes"]
        job = msgspec.structs.replace(self.job, restarts=self.restarts_left, spares=spares)
        self.plan = self.backend.plan(job, self.cluster, self.facts, self.folder.run_id)
        self.folder.save_plan(self.facts, self.plan)

    def _port_was_taken(self, failure: Failure) -> bool:
        from clusterkit.output.diagnose import PORT_TAKEN

        # Only our port: the program may listen on ports of its own.
        said = f"{failure.cause}\n{failure.traceback or ''}"
        ours = re.search(rf"\b{self.plan.port}\b", said)
        return self.cluster.port == "auto" and bool(ours and PORT_TAKEN.search(said))

    # -- the record ---------------------------------------------------------

    def _save(self, state: State, *, failure: Failure | None = None) -> None:
        # A full disk is no reason to end the training.
        with contextlib.suppress(RunFolderError):
            self.folder.write_json("state.json", self._status(state, failure))

    def _finish(self, state: State, failure: Failure | None = None) -> None:
        codes = {State.SUCCEEDED: 0, State.CANCELLED: EXIT_INTERRUPTED}
        code = codes.get(state, (failure.exit_code if failure else None) or 1)
        status = msgspec.structs.replace(
            self._status(state, failure), exit_code=code, finished_at=time.time()
        )
        record(self.folder, status)
        notify(self.cluster.notify, status, self._event)

    def _status(self, state: State, failure: Failure | None) -> RunStatus:
        return RunStatus(
            run=self.folder.run_id,
            job=self.submission.job,
            cluster=self.submission.cluster,
            backend=self.submission.backend,
            state=state,
            attempt=self.attempt,
            nodes=self.nodes,
            attempts=self.attempts,
            restarts_left=self.restarts_left,
            failure=failure,
            started_at=self.submission.created_at,
            running_since=self.running_since,
            remark=self.remark and self.folder.leftover_words(self.remark),
        )

    def _event(self, text: str) -> None:
        self.folder.append("events.jsonl", Event(at=time.time(), attempt=self.attempt, text=text))
