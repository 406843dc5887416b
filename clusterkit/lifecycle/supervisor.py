"""A run's supervisor: starts its nodes, watches them, and records how it ends.

The nodes' agents restart ranks that fail (`clusterkit.agent.membership`); the supervisor follows
their attempts. It restarts nodes: lost ones, and all of them where the agents cannot.
"""

from __future__ import annotations

import contextlib
import os
import secrets as tokens
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from clusterkit import agent, backends
from clusterkit.agent import PEER_TOKEN
from clusterkit.backends.base import Backend, Monitor, Observation, SupportsCleanup
from clusterkit.backends.ports import move_port
from clusterkit.cluster import Facts
from clusterkit.errors import (
    EXIT_INTERRUPTED,
    ClusterkitError,
    RunFolderError,
    join_some,
    pluralize,
)
from clusterkit.files import write_atomic
from clusterkit.lifecycle.evidence import Terms, Verdict, facts_without, lost
from clusterkit.lifecycle.notify import notify
from clusterkit.lifecycle.outcome import diagnosis, port_was_taken, without_spares
from clusterkit.lifecycle.reconcile import (
    LOST_SECONDS,
    Action,
    Ended,
    Finish,
    Join,
    Look,
    Next,
    Reconciler,
    Stage,
    Start,
    Stop,
)
from clusterkit.output import mirror
from clusterkit.output.track import tracking
from clusterkit.run.begun import Begun
from clusterkit.run.folder import POLL_SECONDS, TOKEN, Event, RunFolder, RunHandle, Submission
from clusterkit.run.status import Failure, State
from clusterkit.shell import Secret
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

PROBED_SECONDS = 20.0
"""How long facts are valid: a port that was free when probed is assumed to be free."""
LONGEST_PAUSE = 30.0
"""The longest pause after errors in a row."""


class Supervisor:
    """Supervises one run, from its first attempt to its last.

    It observes, asks `reconcile.Reconciler` what to do, and does that. Whatever goes wrong here is
    tried again: the run goes on, and only `clusterkit cancel` ends its ranks.
    """

    def __init__(self, folder: RunFolder, transport: Transport | None = None) -> None:
        self.folder = folder
        self.job = folder.read_json("job.json", JobSpec)
        self.cluster = folder.cluster()
        self.facts = folder.read_json("facts.json", Facts)
        self.plan = folder.plan()
        submission = folder.read_json("run.json", Submission)
        self.backend: Backend[Any] = backends.backend(submission.backend)
        self.transport = transport or backends.transport_for(self.cluster)
        self.secrets = {name: Secret(name, os.environ[name]) for name in self.job.secrets}
        self.status = submission.initial_status(restarts_left=self.job.restarts)
        self.machine = Reconciler(self._terms(), self.job.restarts)
        self.terminated = False
        self.monitor: Monitor | None = None
        self.failure: Failure | None = None
        self.trouble: str | None = None
        self.tried_at = 0.0
        """When the newest attempt was to start, Unix time."""
        self.moves = False
        """Whether the next attempt needs another port."""
        self.without: list[str] = []
        """Hosts that the next attempt does without."""

    def _terms(self) -> Terms:
        return Terms.of(self.job, self.plan, self.facts, self.backend.start_seconds)

    def begin(self) -> None:
        """Record this process as the run's supervisor, and the run as pending if it is new."""
        # The ranks may have filled the disk already.
        with contextlib.suppress(RunFolderError):
            self.folder.write_json("supervisor.json", agent.identity(os.getpid()))
            if not self.folder.file("state.json").exists():
                self.folder.write_json("state.json", self.status)

    def start(self) -> bool:
        """Start the first attempt. Return whether it started; if not, ``state.json`` says why."""
        while self.machine.stage is not Stage.WATCH and not self.status.state.final:
            self.step()
        return not self.status.state.final

    def main(self, *, adopt: bool = False) -> None:
        """Supervise the run until it ends, which ``state.json`` then says, or until SIGTERM.

        Args:
            adopt: the previous supervisor may not have started the newest attempt.
        """
        for signum in (signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminated)
        with tracking(self.job, self.folder, lambda: self.status.attempt, self._event):
            self.supervise(adopt)

    def _terminated(self, signum: int, frame: object) -> None:
        """Handle SIGTERM (shutdown, logout): this process ends, and the run goes on without it."""
        self.terminated = True

    def supervise(self, adopt: bool = False) -> None:
        """Take steps until the run has ended. `start` has started the first attempt."""
        if adopt:
            self._adopt()
        elif self.machine.stage is Stage.START and not self.folder.is_cancelled():
            self.machine.started(mirror.awake())
        errors = 0
        while not (self.status.state.final or self.terminated):
            try:
                self.step()
            except Exception as error:
                # A bug, a full disk, a proxy's answer, an upgrade of this package: not the run's.
                errors += 1
                self._stop_watching()
                pause = min(2.0 ** (errors - 1), LONGEST_PAUSE)
                self._troubled(error, pause)
                self._sleep(pause)
            else:
                if errors:
                    errors, self.trouble = 0, None
                    self._update(remark=None)
                    self._save(self.status.state)
                time.sleep(POLL_SECONDS)
            if not self.folder.path.is_dir():
                break  # somebody removed it: there is nothing to record an end in
        self._stop_watching()

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.terminated and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))

    def _troubled(self, error: Exception, pause: float) -> None:
        """Record an error of this process's, once."""
        message = error.message if isinstance(error, ClusterkitError) else f"{error}"
        text = f"supervisor error, retrying: {type(error).__name__}: {message}"
        if text != self.trouble:
            self.trouble = text
            self._event(text)
            traceback.print_exception(error)  # to supervisor.log
        with contextlib.suppress(Exception):
            self._update(remark=text)
            self._save(self.status.state)

    # -- one step -------------------------------------------------------------

    def step(self) -> None:
        """Observe, decide, act."""
        machine, seen = self.machine, None
        if machine.stage is Stage.WATCH:
            seen = self._observe()
        for action in machine.decide(seen, mirror.awake(), self.folder.is_cancelled()):
            self._perform(action)

    def _observe(self) -> Observation | None:
        if self.monitor is None:
            self.monitor = self.backend.watch(self._handle(), self.transport)
        found = self.monitor.status()
        if found is None:
            return None
        seen = without_spares(self.plan, found)
        self._save_progress(seen)
        return seen

    def _stop_watching(self) -> None:
        monitor, self.monitor = self.monitor, None
        if monitor is not None:
            with contextlib.suppress(Exception):
                monitor.close()

    def _perform(self, action: Action) -> None:
        match action:
            case Start():
                self._start_attempt()
            case Join(node):
                self._join(node)
            case Stop(why):
                self._stop(why)
            case Look():
                self.machine.looked_at(self._look())
            case Ended():
                for following in self._judge():
                    self._perform(following)
            case Next():
                self._next(action)
            case Finish(state):
                self._finish(state)

    def _start_attempt(self) -> None:
        self.tried_at, attempt = time.time(), self.status.attempt
        # What is not on record, the next supervisor would start once more, or on other hosts.
        self._leave_out()
        Begun(attempt, whole=False).record(self.folder.path)
        self._save(State.PENDING)
        try:
            self._check_again()
            self.backend.submit(
                self.plan,
                self.transport,
                attempt=attempt,
                secrets={**self.secrets, **self._new_token()},
                record=partial(self.folder.record, attempt),
            )
        except ClusterkitError as error:
            self.failure = Failure(exit_code=error.exit_code, cause=error.message, hint=error.hint)
            self.machine.not_started(mirror.awake(), error.message)
        else:
            with contextlib.suppress(RunFolderError):  # then the next supervisor looks for itself
                Begun(attempt, whole=True).record(self.folder.path)
            self.machine.started(mirror.awake())

    def _stop(self, why: str) -> None:
        error = self._stopping(partial(self.backend.cancel, self._handle(), self.transport, why))
        self.machine.stopped(mirror.awake(), acknowledged=error is None)
        if error is not None and self.machine.starts_again:
            self._show_waiting(error)

    def _look(self) -> Observation | None:
        """Return the newest attempt as its hosts have it now; a monitor hears of them later.

        None of a first attempt that could not be started just now: its submitter waits.
        """
        again = self.machine.starts_again
        if not again and time.time() - self.tried_at < PROBED_SECONDS:
            return None
        try:
            found = self.backend.status(self._handle(), self.transport)
        except ClusterkitError:
            if again:
                raise  # it is tried again: nothing is started before this is known
            return None
        return None if found is None else without_spares(self.plan, found)

    def _show_waiting(self, error: ClusterkitError) -> None:
        """Show what the next attempt waits for: that nothing of this one can live."""
        seen = self.machine.seen
        names = ", ".join(f"node {n.node} ({n.host})" for n in (lost(seen) if seen else ()))
        why = f"waiting for {names}" if names else f"waiting: {error.message}"
        if self.status.state is not State.RESTARTING:
            until = time.time() + LOST_SECONDS
            waiting = partial(
                msgspec.structs.replace, state=State.RESTARTING, reason=why, until=until
            )
            self._update(nodes=tuple(map(waiting, self.status.nodes)))
            self._event(f"attempt {self.status.attempt}: {why}")
            self._save(State.RESTARTING, self.failure)

    def _stopping(self, work: Callable[[], None]) -> ClusterkitError | None:
        """Call ``work``, which stops nodes. An error is recorded in the run's remark and events."""
        error, remark = self.folder.stop(work)
        if error is not None and remark != self.status.remark:
            self._event(f"not all nodes could be stopped: {error.message}")
        self._update(remark=remark)
        return error

    def _judge(self) -> list[Action]:
        """Clean up after an attempt that has ended, and find out why it did."""
        self._stop_watching()
        handle, seen, cleaned = self._handle(), self.machine.seen, True
        assert seen is not None
        if isinstance(self.backend, SupportsCleanup) and seen.next_attempt is None:
            cleaned = self._stopping(partial(self.backend.clean_up, handle, self.transport)) is None
        self._update(restarts_left=self.machine.restarts_left)
        cancelled = self.folder.is_cancelled()
        if seen.state is State.SUCCEEDED:
            failed = self.plan.nodes_with_ranks - sum(
                n.state is State.SUCCEEDED for n in seen.nodes
            )
            if failed > 0:
                self._event(f"{failed} of {self.plan.nodes_with_ranks} elastic nodes failed")
        elif not cancelled or seen.next_attempt is not None:
            self.failure = diagnosis(handle, seen, late=self.machine.over_time_limit)
        taken = self.cluster.port == "auto" and port_was_taken(self.failure, self.plan.port)
        return self.machine.judged(
            mirror.awake(), cancelled=cancelled, cleaned=cleaned, port_taken=taken
        )

    def _next(self, action: Next) -> None:
        """Record the newest attempt as failed, and another one as the newest.

        Whatever can go wrong in planning that does so when it starts: this is done once.
        """
        self._stop_watching()
        failure, self.failure = self.failure, None
        if failure is None and self.machine.problem:
            failure = Failure(exit_code=1, cause=self.machine.problem)
        self._update(restarts_left=self.machine.restarts_left, ran_seconds=self.machine.ran_seconds)
        if failure is not None:
            self._tell(action, failure)
            self.status = self.status.after_failure(failure, time.time())
            notify(self.cluster.notify, self.status, self._event)
        self.moves |= action.verdict is Verdict.MOVE
        self.without = [self.plan.hosts[node] for node in action.without]
        if action.verdict is not None:
            self._save(State.RESTARTING, failure)
        self._update(attempt=action.attempt, running_since=None)

    def _tell(self, action: Next, failure: Failure) -> None:
        """Write the event of an attempt that has failed."""
        attempt, left = self.status.attempt, pluralize(self.machine.restarts_left, "restart")
        if action.verdict is Verdict.REPLACE:
            what = "could not be started" if self.machine.not_starting else "has lost nodes"
            text = f"attempt {attempt} {what}: {failure.summary}; starting again, "
            self._event(f"{text}which uses no restart")
        elif action.verdict is not Verdict.MOVE:
            self._event(f"attempt {attempt} failed: {failure.line}; starting again, {left} left")

    def _adopt(self) -> None:
        """Continue where the previous supervisor stopped."""
        saved = self.folder.saved_status()
        if saved is None:
            self.machine.started(mirror.awake())
            return
        begun = Begun.read(self.folder.path)
        self.machine = machine = Reconciler.adopt(self._terms(), saved, begun, self.job.restarts)
        self._update(
            attempt=saved.attempt,
            attempts=saved.attempts,
            restarts_left=machine.restarts_left,
            ran_seconds=saved.ran_seconds,
        )
        if machine.stage is Stage.WATCH:
            self._update(running_since=saved.running_since)
            if saved.running_since is not None:
                ran = max(0.0, time.time() - saved.running_since)
                machine.running_since = mirror.awake() - ran

    # -- nodes that join a running attempt --------------------------------------

    def _new_token(self) -> dict[str, Secret]:
        """Return the secret of a new attempt's nodes, which those that join it need; nothing where
        none can join."""
        if not self.machine.terms.rejoins:
            return {}
        token = tokens.token_hex(16)
        with contextlib.suppress(RunFolderError):
            write_atomic(self.folder.file(TOKEN), token.encode(), 0o600)
        return {PEER_TOKEN: Secret(PEER_TOKEN, token)}

    def _join(self, node: int) -> None:
        plan = self.backend.node_plan(self.plan, node)
        # No steps: the backend cannot start one node. A host may have blocked the loop.
        if not plan.steps or self.folder.is_cancelled():
            return
        # Its agent starts in the attempt in which the others started, and follows them from there.
        begun = Begun.read(self.folder.path)
        attempt = begun.attempt if begun else 1
        text = f"node {node} was started again, to join the others"
        try:
            token = Secret(PEER_TOKEN, self.folder.read(TOKEN).decode())
            self.backend.submit(
                plan,
                self.transport,
                attempt=attempt,
                secrets={**self.secrets, PEER_TOKEN: token},
                record=partial(self.folder.record, attempt),
            )
        except ClusterkitError as error:
            text = f"node {node} could not be started again: {error.message}"
        finally:  # the submit may have taken long
            self.machine.joined(mirror.awake(), 2 * mirror.BACK_SECONDS)
        self._event(text)

    def _save_progress(self, seen: Observation) -> None:
        begun = sum(node.state is not State.PENDING for node in seen.nodes)
        if self.status.running_since is None and begun >= self.plan.min_nodes:
            self._update(running_since=time.time())
        if seen.nodes != self.status.nodes:
            self._update(nodes=seen.nodes)
            if seen.state is State.PENDING and not self.machine.started_by_agents:
                self._save(State.PENDING)
            elif seen.state is State.RESTARTING:
                self._save(State.RESTARTING)
            elif {State.UNKNOWN} == {node.state for node in seen.nodes if not node.spare}:
                self._save(State.UNKNOWN)
            else:
                self._save(State.RUNNING)

    def _handle(self) -> RunHandle:
        return self.folder.handle(self.status.attempt, self.plan)

    # -- the plan -------------------------------------------------------------

    def _leave_out(self) -> None:
        """Plan the next attempt without hosts that are out of sight."""
        if self.without:
            others = facts_without(self.without, self.job, self.facts)
            assert others is not None  # `Terms.dispensable`
            used = join_some([host.host for host in others[0].hosts], 4)
            why = f"starting again on {used}, which uses no restart"
            self._replan(others[0], why, others[1])
            self.without = []

    def _check_again(self) -> None:
        """Plan again if the port was taken since it was probed, or restarts were used."""
        if self.moves:
            why = f"port {self.plan.port} was taken before the run could listen there"
            port = self.transport.free_port(self.facts.hosts[0].host)
            self._replan(*move_port(self.cluster, self.facts, port, why))
            self.moves = False
        age = time.time() - (self.status.started_at or 0.0)
        fresh = self.status.attempt == 1 and age <= PROBED_SECONDS
        changed = self.backend.before_attempt(self.cluster, self.facts, self.transport, fresh=fresh)
        if changed is not None:
            self._replan(*changed)
        elif self.machine.restarts_left < self.plan.restarts:
            self._replan(self.facts)

    def _replan(self, facts: Facts, why: str | None = None, spares: int | None = None) -> None:
        """Plan the next attempt. Its agents get the restarts and spares that are left.

        Raises:
            RunFolderError: it has other hosts, and cannot be recorded.
        """
        if spares is None:
            spares = self.job.spares and self.plan.nodes - self.plan.topology["nodes"]
        restarts = self.machine.restarts_left
        job = msgspec.structs.replace(self.job, restarts=restarts, spares=spares)
        plan = self.backend.plan(job, self.cluster, facts, self.folder.run_id)
        try:
            self.folder.save_plan(facts, plan)
        except RunFolderError:
            if plan.hosts != self.plan.hosts:
                raise
        self.facts, self.plan = facts, plan
        self.machine.terms = self._terms()
        if why is not None:
            self._event(why)

    # -- the record ---------------------------------------------------------

    def _update(self, **changes: object) -> None:
        self.status = msgspec.structs.replace(self.status, **changes)

    def _save(self, state: State, failure: Failure | None = None) -> None:
        self._update(state=state, failure=failure)
        # A full disk is no reason to end the training.
        with contextlib.suppress(RunFolderError):
            self.folder.write_json("state.json", self.status)

    def _ended_at(self) -> float:
        """Return when the last node ended, Unix time: this process may have stood still since."""
        nodes = self.status.nodes
        ended = [node.ended_at for node in nodes if node.ended_at is not None]
        return max(ended) if ended and len(ended) == len(nodes) else time.time()

    def _finish(self, state: State) -> None:
        """Record the end. Where that fails, the next step does it again."""
        failure = self.failure if state is State.FAILED else None
        if state is State.FAILED and failure is None:
            failure = Failure(exit_code=1, cause=self.machine.problem or "its nodes were lost")
        codes = {State.SUCCEEDED: 0, State.CANCELLED: EXIT_INTERRUPTED}
        code = codes.get(state, (failure.exit_code if failure else None) or 1)
        ended = msgspec.structs.replace(
            self.status, state=state, failure=failure, exit_code=code, finished_at=self._ended_at()
        )
        if self.trouble is not None and ended.remark == self.trouble:
            ended = msgspec.structs.replace(ended, remark=None)
        removed = self.machine.seen.removed if self.machine.seen else None
        if state is State.CANCELLED and removed is not None:
            ended = msgspec.structs.replace(ended, remark=ended.remark or removed)
        self.folder.record_end(ended)
        self.status = ended
        notify(self.cluster.notify, self.status, self._event)

    def _event(self, text: str) -> None:
        event = Event(at=time.time(), attempt=self.status.attempt, text=text)
        self.folder.append("events.jsonl", event)
