"""A run's supervisor: starts its nodes, watches them, and records how it ends.

The nodes' agents restart ranks that fail (`clusterkit.agent.membership`); the supervisor follows
their attempts. It restarts nodes: lost ones, and all of them where the agents cannot.
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
from clusterkit.backends.ports import move_port
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
from clusterkit.run import lost_nodes
from clusterkit.run.folder import POLL_SECONDS, Event, RunFolder, RunHandle, Submission
from clusterkit.run.notify import notify
from clusterkit.run.outcome import Phase, diagnosis, phase, without_spares
from clusterkit.run.status import AttemptStatus, Failure, NodeStatus, State
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
LOST_SECONDS = 600.0
"""How long to wait for lost nodes."""
EARLY_SECONDS = 60.0
EARLY_LOSSES = 3
"""How often in a row nodes may be lost within EARLY_SECONDS of the start."""


class Supervisor:
    """Supervises one run, from its first attempt to its last."""

    def __init__(self, folder: RunFolder, transport: Transport | None = None) -> None:
        self.folder = folder
        self.job = folder.read_json("job.json", JobSpec)
        self.cluster = folder.cluster()
        self.facts = folder.read_json("facts.json", Facts)
        self.plan = folder.plan()
        submission = folder.read_json("run.json", Submission)
        self.backend: Backend = backends.backend(submission.backend)
        self.transport = transport or backends.transport_for(self.cluster)
        self.secrets = {name: Secret(name, os.environ[name]) for name in self.job.secrets}
        self.status = submission.pending(restarts_left=self.job.restarts)
        self.followed = False  # whether the agents of the previous attempt started this one
        self.terminated = False
        self.port_tries = PORT_TRIES
        self.replaces_lost = self.job.on_node_loss != "fail" and (
            self.plan.restarts > 0 or self.job.spares > 0
        )
        self.early_losses = 0  # in a row
        self.rejoin = lost_nodes.Rejoin(folder, self.job, self.plan)

    def begin(self) -> None:
        """Record this process as the run's supervisor, and the run as pending if it is new."""
        # The ranks may have filled the disk already.
        with contextlib.suppress(RunFolderError):
            self.folder.write_json("supervisor.json", agent.identity(os.getpid()))
            if not self.folder.file("state.json").exists():
                self.folder.write_json("state.json", self.status)

    def start(self) -> bool:
        """Start the first attempt. Return whether it started; if not, ``state.json`` says why."""
        self._recorded(self._start_attempt)
        return not self.status.state.final

    def main(self, *, adopt: bool = False) -> None:
        """Supervise the run until it ends. ``state.json`` records the end, also of an error.

        Args:
            adopt: the previous supervisor may not have started the newest attempt.
        """
        for signum in (signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminated)
        with tracking(self.job, self.folder, lambda: self.status.attempt, self._event):
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

    @property
    def restarts_left(self) -> int:
        return self.status.restarts_left or 0

    # -- from attempt to attempt ---------------------------------------------

    def _attempts(self, adopt: bool = False) -> None:
        """Supervise from the newest attempt to the last. `start` has started the first."""
        started = self._adopt() if adopt else True
        while not self._to_be_ended():
            if not started:
                self._start_attempt()
            handle = self._handle()
            seen = self._watch(handle)
            self.followed = started = seen.next_attempt is not None
            self._update(restarts_left=seen.remaining_restarts(self.restarts_left))
            if not started and (end := self._clean_up(handle, seen)) is not None:
                return self._finish(end)
            failure = diagnosis(handle, seen)
            if started:
                self._failed_event(failure)
            elif (end := self._prepare_next(handle, seen, failure)) is not None:
                return self._finish(end, failure if end is State.FAILED else None)
            self._attempt_ended(failure)
            if not started:
                self._save(State.RESTARTING, failure)
            self._update(attempt=seen.next_attempt or self.status.attempt + 1, running_since=None)
        if started:
            self._cancel()
        self._finish(State.CANCELLED)

    def _adopt(self) -> bool:
        """Load the previous supervisor's status. Return whether the newest attempt was started."""
        saved = self.folder.saved_status()
        if saved is None:
            return True
        self._update(attempt=saved.attempt, attempts=saved.attempts)
        if saved.restarts_left is not None:
            self._update(restarts_left=saved.restarts_left)
        # A saved attempt that has ended means that the next one was not started.
        started = all(ended.attempt != saved.attempt for ended in saved.attempts)
        steps = self.folder.steps_by_attempt()[saved.attempt]  # 0: agents started the attempt
        if saved.state is State.PENDING and steps < len(self.plan.steps):
            # Its supervisor was killed while it started the nodes: which run is not known.
            self._cancel()
            started = False
        self.followed = started and steps == 0
        if started:
            self._update(running_since=saved.running_since)
        else:
            self._update(attempt=saved.attempt + 1)
        return started

    def _start_attempt(self) -> None:
        self._check_again()
        self._save(State.PENDING)
        self.backend.submit(
            self.plan,
            self.transport,
            attempt=self.status.attempt,
            secrets={**self.secrets, **self.rejoin.new_token()},
            record=partial(self.folder.record, self.status.attempt),
        )

    def _clean_up(self, handle: RunHandle, seen: Observation) -> State | None:
        """Clean up after an attempt that has ended. Return the state in which the run ends; None
        if the attempt failed."""
        if isinstance(self.backend, SupportsCleanup):
            self._stop(partial(self.backend.clean_up, handle, self.transport))
        if seen.state is State.SUCCEEDED:
            return State.SUCCEEDED
        if any(node.state is State.UNKNOWN for node in seen.nodes):
            self._cancel()  # something may still run there
        return State.CANCELLED if self._to_be_ended() else None

    def _prepare_next(self, handle: RunHandle, seen: Observation, failure: Failure) -> State | None:
        """After a failed attempt: plan the next one, or return the state in which the run ends."""
        lost = lost_nodes.lost(seen)
        decided = seen.final or seen.late
        if self.port_tries and self._port_was_taken(failure):
            self.port_tries -= 1
            why = f"port {self.plan.port} was taken before the run could listen there"
            port = self.transport.free_port(self.facts.hosts[0].host)
            self._plan_anew(*move_port(self.cluster, self.facts, port, why))
        elif lost and self.replaces_lost and not decided and self._losses_allowed():
            return self._replace(lost, handle, seen, failure)
        elif not self.restarts_left or decided or (lost and self.job.on_node_loss == "fail"):
            return State.FAILED
        else:
            self._update(restarts_left=self.restarts_left - 1)
            self._failed_event(failure)
        return None

    def _losses_allowed(self) -> bool:
        """Count a loss of nodes. Return False if they were lost early too often in a row."""
        now = time.time()
        early = now - (self.status.running_since or now) < EARLY_SECONDS
        self.early_losses = self.early_losses + 1 if early else 0
        return self.early_losses <= EARLY_LOSSES

    def _replace(
        self, lost: list[NodeStatus], handle: RunHandle, seen: Observation, failure: Failure
    ) -> State | None:
        """Do `_prepare_next` after nodes were lost: wait for them, or plan without them."""
        hosts = [self.plan.hosts[node.node] for node in lost]
        why, until = f"waiting for {lost_nodes.names(lost)}", time.time() + LOST_SECONDS
        waiting = partial(msgspec.structs.replace, state=State.RESTARTING, reason=why, until=until)
        self._event(
            f"attempt {self.status.attempt} has lost {lost_nodes.names(lost)}: {failure.summary}"
        )
        self._update(nodes=tuple(map(waiting, seen.nodes)))
        self._save(State.RESTARTING, failure)
        others = lost_nodes.facts_without(hosts, self.job, self.facts)
        timeout = LOST_SECONDS if others is None else 0.0
        if lost_nodes.wait_for_hosts(hosts, self.transport, self._to_be_ended, timeout):
            with contextlib.suppress(ClusterkitError):
                self.backend.status(handle, self.transport)  # what they wrote meanwhile
            self._event("all nodes answer; starting again, which costs no restart")
        elif self._to_be_ended():
            return State.CANCELLED
        elif others is None:
            return State.FAILED
        else:
            facts, spares = others
            used = listed([host.host for host in facts.hosts], 4)
            self._plan_anew(facts, f"starting again on {used}, which costs no restart", spares)
        return None

    def _failed_event(self, failure: Failure) -> None:
        self._event(
            f"attempt {self.status.attempt} failed: {failure.line}; "
            f"starting again, {counted(self.restarts_left, 'restart')} left"
        )

    def _attempt_ended(self, failure: Failure) -> None:
        before = self.status
        finished = max((node.ended_at or 0.0 for node in before.nodes), default=0.0)
        ended = AttemptStatus(
            attempt=before.attempt,
            state=State.FAILED,
            failure=failure,
            started_at=before.attempts[-1].finished_at
            if before.attempts
            else before.started_at or 0.0,
            finished_at=finished or time.time(),
        )
        self._update(state=State.RESTARTING, failure=failure, attempts=(*before.attempts, ended))
        notify(self.cluster.notify, self.status, self._event)

    # -- one attempt --------------------------------------------------------

    def _watch(self, handle: RunHandle) -> Observation:
        """Wait until the attempt ends, and return what was observed last.

        Once the nodes with ranks have ended, or too few are left, the others are cancelled.
        """
        with contextlib.closing(self.backend.watch(handle, self.transport)) as monitor:
            return self._until_ended(monitor)

    def _until_ended(self, monitor: Monitor) -> Observation:
        report_by = mirror.awake() + self.backend.start_seconds
        cancel_at: float | None = None
        cancelled = False
        while True:
            found = monitor.status()
            if found is None:
                raise RunFolderError(f"the folder of run {self.folder.run_id} is gone")
            seen = without_spares(self.plan, found)
            self._save_progress(seen)
            now = mirror.awake()
            pending = self._pending(seen, cancelled=cancelled)
            if pending and now > report_by:
                raise ClusterkitError(
                    f"node {pending[0]} did not report within {self.backend.start_seconds:g} s",
                    hint=f"see the logs in {self.folder.path}/attempts/{self.status.attempt}",
                )
            unreported = not (cancelled or seen.next_attempt) and self.rejoin.unreported(
                seen, now, self.followed
            )
            reached = phase(self.plan, seen, pending=bool(pending), unreported=unreported)
            if reached is Phase.ENDED:
                failed = self.plan.places - sum(n.state is State.SUCCEEDED for n in seen.nodes)
                if seen.state is State.SUCCEEDED and failed > 0:
                    self._event(f"{failed} of {self.plan.places} elastic nodes failed")
                return seen
            if self._to_be_ended() and not cancelled:
                cancel_at = now
            elif reached is Phase.ENDING and cancel_at is None:
                cancel_at = now + PEERS_SECONDS
            if cancel_at is None:
                self._rejoin_lost(seen, now)
            elif now >= cancel_at:
                self._cancel()
                cancelled, cancel_at = True, mirror.awake() + CANCEL_SECONDS
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

    def _rejoin_lost(self, seen: Observation, now: float) -> None:
        for node in self.rejoin.due(seen, now, self.followed):
            plan = self.backend.node_plan(self.plan, node)
            # No steps: the backend cannot start one node. A host may have blocked the loop.
            if plan.steps and not self._to_be_ended():
                submit = partial(self.backend.submit, plan, self.transport)
                self._event(self.rejoin.start(node, submit, self.secrets))

    def _save_progress(self, seen: Observation) -> None:
        begun = sum(node.state is not State.PENDING for node in seen.nodes)
        if self.status.running_since is None and begun >= self.plan.least:
            self._update(running_since=time.time())
        if seen.nodes != self.status.nodes:
            self._update(nodes=seen.nodes)
            if seen.state is State.PENDING and not self.followed:
                self._save(State.PENDING)
            elif seen.state is State.RESTARTING:
                self._save(State.RESTARTING)
            else:
                self._save(State.RUNNING)

    def _cancel(self) -> None:
        reason = "cancelled" if self._to_be_ended() else "another node has ended"
        self._stop(partial(self.backend.cancel, self._handle(), self.transport, reason))

    def _stop(self, work: Callable[[], None]) -> None:
        """Call ``work``, which stops nodes. An error is recorded in the run's remark and events."""
        error, remark = self.folder.stop(work)
        if error is not None and remark != self.status.remark:
            self._event(f"not all nodes could be stopped: {error.message}")
        self._update(remark=remark)

    def _handle(self) -> RunHandle:
        return self.folder.handle(self.status.attempt, self.plan)

    # -- the plan -------------------------------------------------------------

    def _check_again(self) -> None:
        """Plan again if the port was taken since it was probed, or restarts were used."""
        age = time.time() - (self.status.started_at or 0.0)
        fresh = self.status.attempt == 1 and age <= PROBED_SECONDS
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
        restarts = self.restarts_left
        job = msgspec.structs.replace(self.job, restarts=restarts, spares=spares)
        self.plan = self.backend.plan(job, self.cluster, self.facts, self.folder.run_id)
        self.folder.save_plan(self.facts, self.plan)

    def _port_was_taken(self, failure: Failure) -> bool:
        from clusterkit.output.diagnose import PORT_TAKEN

        # Only our port: the program may listen on ports of its own.
        text = f"{failure.cause}\n{failure.traceback or ''}"
        ours = re.search(rf"\b{self.plan.port}\b", text)
        return self.cluster.port == "auto" and bool(ours and PORT_TAKEN.search(text))

    # -- the record ---------------------------------------------------------

    def _update(self, **changes: object) -> None:
        self.status = msgspec.structs.replace(self.status, **changes)

    def _save(self, state: State, failure: Failure | None = None) -> None:
        self._update(state=state, failure=failure)
        # A full disk is no reason to end the training.
        with contextlib.suppress(RunFolderError):
            self.folder.write_json("state.json", self.status)

    def _finish(self, state: State, failure: Failure | None = None) -> None:
        codes = {State.SUCCEEDED: 0, State.CANCELLED: EXIT_INTERRUPTED}
        code = codes.get(state, (failure.exit_code if failure else None) or 1)
        self._update(state=state, failure=failure, exit_code=code, finished_at=time.time())
        self.folder.record_end(self.status)
        notify(self.cluster.notify, self.status, self._event)

    def _event(self, text: str) -> None:
        event = Event(at=time.time(), attempt=self.status.attempt, text=text)
        self.folder.append("events.jsonl", event)
