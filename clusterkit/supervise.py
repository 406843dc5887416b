"""What happens while a run runs: starting it, watching it, and its end.

Ranks that failed are started again by the nodes' agents (`clusterkit.agent.membership`): that is
only followed here. Nodes are started again here: lost ones, and where the agents cannot go on.

The process that submits starts the nodes (`launch`): it has the connections and all imports. The
rest is done by ``python -m clusterkit.supervise`` (`spawn`), detached from the terminal, which
starts while the ranks do; whoever follows the run only reads its folder. It holds the folder's
lock, so that there is one of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from clusterkit import agent, backends, mirror
from clusterkit.backends.base import Backend, Monitor, Observation, SupportsCleanup
from clusterkit.backends.ports import moved_port
from clusterkit.cluster import Facts
from clusterkit.errors import (
    EXIT_INTERRUPTED,
    ClusterkitError,
    RunFolderError,
    SubmitFailed,
    counted,
    listed,
)
from clusterkit.losses import LOST_SECONDS, Losses, Returns, names
from clusterkit.notify import notify
from clusterkit.runs import (
    LEFTOVERS,
    POLL_SECONDS,
    Event,
    RunFolder,
    RunHandle,
    StepRecord,
    Submission,
)
from clusterkit.shell import Secret
from clusterkit.spec import JobSpec
from clusterkit.status import AttemptStatus, Failure, NodeStatus, RunStatus, State
from clusterkit.track import tracking
from clusterkit.transport import Transport
from clusterkit.verdict import RESERVE, diagnosis, record, settled

PEERS_SECONDS = 2.0
"""How long the other nodes have to end by themselves, so that the first failure is seen."""
PROBED_SECONDS = 20.0
"""How long facts are fresh: a port that was free when probed is taken to be free."""
CANCEL_SECONDS = 5.0
"""Pause before nodes that did not end are told again."""
PORT_TRIES = 3
START_SECONDS = 60.0
"""How long a supervisor may take to start; one that ends meanwhile is noticed at once."""
STARTED = b"started\n"
"""What a supervisor answers to whoever started it."""
RESERVE_BYTES = 1 << 16
"""So that a full disk does not hide how a run ended."""


class Supervisor:
    """Carries one run from its first attempt to its last."""

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
        self.followed = False  # whether this attempt was begun by the agents of the one before
        self.terminated = False

    def begin(self) -> None:
        """Take the run over: from now on ``state.json`` says how it stands."""
        # The ranks may have filled the disk already: whoever prints much is fast.
        with contextlib.suppress(RunFolderError):
            self.folder.write_json("supervisor.json", agent.identity(os.getpid()))
            if not self.folder.file("state.json").exists():
                self.folder.write_json("state.json", self._status(State.PENDING, None))

    def start(self) -> bool:
        """Start the first attempt. False: the run has ended with that, as ``state.json`` says."""
        self._recorded(self._start_attempt)
        return self.folder.read_json("state.json", RunStatus).state is State.PENDING

    def main(self, *, adopt: bool = False) -> None:
        """Run to the end; whatever happens, ``state.json`` says how it ended.

        Args:
            adopt: of the newest attempt it is not known whether it was started.
        """
        for signum in (signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminated)
        with tracking(self.job, self.folder, lambda: self.attempt, self._event):
            self._recorded(partial(self._attempts, adopt))

    def _recorded(self, work: Callable[[], None]) -> None:
        """Do it; an error ends the run, and is how it ended."""
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
        """SIGTERM (the machine shuts down): as good as a cancel."""
        self.terminated = True

    def _to_be_ended(self) -> bool:
        return self.terminated or self.folder.is_cancelled()

    def _attempts(self, adopt: bool = False) -> None:
        """From the newest attempt to the last; the first has been started by `start`."""
        begun = self._adopted() if adopt else True
        port_tries, losses = PORT_TRIES, Losses(self.job, self.plan)
        while True:
            if self._to_be_ended():
                if begun:
                    self._cancel()
                return self._finish(State.CANCELLED)
            if not begun:
                self._start_attempt()
            begun = False
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
            if not begun and self._port_was_taken(failure) and port_tries:
                port_tries -= 1
                why = f"port {self.plan.port} was taken before the run could listen there"
                port = self.transport.free_port(self.facts.hosts[0].host)
                self._plan_anew(*moved_port(self.cluster, self.facts, port, why))
            elif not begun and (lost := losses.of(seen, self.running_since)):
                self._event(f"attempt {self.attempt} has lost {names(lost)}: {failure.summary}")
                self.nodes = losses.waiting(seen, lost)
                self._save(State.RESTARTING, failure=failure)
                others = losses.others(lost, self.job, self.facts)
                patience = LOST_SECONDS if others is None else 0.0
                if losses.answer(lost, self.transport, self._to_be_ended, patience):
                    with contextlib.suppress(ClusterkitError):
                        self.backend.status(handle, self.transport)  # what they wrote meanwhile
                    self._event("all nodes answer; starting again, which costs no restart")
                elif others is None or self._to_be_ended():
                    ended = self._to_be_ended()
                    return self._finish(*((State.CANCELLED,) if ended else (State.FAILED, failure)))
                else:
                    hosts = listed([host.host for host in others[0].hosts], 4)
                    why = f"starting again on {hosts}, which costs no restart"
                    self._plan_anew(others[0], why, spares=others[1])
                    losses.plan = self.plan
            elif begun or (
                self.restarts_left and not (seen.final or seen.late or losses.end(seen))
            ):
                self.restarts_left -= not begun
                self._event(
                    f"attempt {self.attempt} failed: {failure.who}: {failure.summary}; "
                    f"starting again, {counted(self.restarts_left, 'restart')} left"
                )
            else:
                return self._finish(State.FAILED, failure)
            self._attempt_ended(failure)
            if not begun:
                self._save(State.RESTARTING, failure=failure)
            self.attempt = seen.goes_on or self.attempt + 1
            self.running_since = None

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
        """Whether the newest attempt known here has been started."""
        saved = self.folder.maybe_json("state.json", RunStatus)
        # The attempt that is saved as one that has ended is followed by one that has not begun.
        begun = saved is None or all(one.attempt != saved.attempt for one in saved.attempts)
        if saved is not None:
            self.attempts = saved.attempts
            if saved.restarts_left is not None:
                self.restarts_left = saved.restarts_left
            done = self._steps_done(saved.attempt)
            if saved.state is State.PENDING and done < len(self.plan.steps):
                # Its supervisor was killed meanwhile: nobody knows what runs.
                self._cancel()
                begun = False
            self.followed = begun and not done
            self.attempt = saved.attempt + (not begun)
            self.running_since = saved.running_since if begun else None
        return begun

    def _steps_done(self, attempt: int) -> int:
        """How many steps of the plan were carried out; none for an attempt that agents began."""
        done = self.folder.records("steps.jsonl", StepRecord)
        return sum(step.attempt == attempt for step in done)

    # -- one attempt --------------------------------------------------------

    def _watch(self, handle: RunHandle) -> Observation:
        """Until every node has ended: a failed one takes the others down, unless elastic, and those
        that have ranks the spares."""
        with contextlib.closing(self.backend.watch(handle, self.transport)) as monitor:
            return self._until_ended(monitor)

    def _until_ended(self, monitor: Monitor) -> Observation:
        needed, places = self.plan.least, self.plan.places
        started = mirror.awake()
        give_up: float | None = None
        again = 0.0
        while True:
            found = monitor.status()
            if found is None:
                raise RunFolderError(f"the folder of run {self.folder.run_id} is gone")
            seen = settled(self.plan, found)
            self._note_progress(seen, needed)
            now = mirror.awake()
            states = [node.state for node in seen.nodes]
            succeeded = seen.state is State.SUCCEEDED
            waiting = [n.node for n in seen.nodes if n.state is State.PENDING and not n.spare]
            # One that its agent did not begin may not have been begun anywhere.
            enough = len(waiting) <= len(states) - needed
            if succeeded or (self.followed and (again or enough)):
                waiting = []
            if waiting and now > started + self.backend.start_seconds:
                raise ClusterkitError(
                    f"node {waiting[0]} did not report within {self.backend.start_seconds:g} s",
                    hint=f"see the logs in {self.folder.path}/attempts/{self.attempt}",
                )
            going_on, gone = {State.RUNNING, State.RESTARTING}, {State.FAILED, State.CANCELLED}
            (going_on if seen.queued else gone).add(State.UNKNOWN)
            busy = waiting or going_on & set(states)
            over = succeeded or all(node.spare or node.state.final for node in seen.nodes)
            hidden = not (again or seen.goes_on) and self.returns.hidden(seen, now, self.followed)
            if not (busy or hidden) or (over and seen.goes_on is not None):
                failed = places - states.count(State.SUCCEEDED)
                if succeeded and failed > 0:
                    self._event(f"{failed} of {places} elastic nodes failed")
                return seen
            if self._to_be_ended():
                give_up = now
            lost = sum(state in gone for state in states)
            alone = over or not busy or len(states) - lost < needed
            if give_up is None and seen.goes_on is None and alone:
                give_up = now + PEERS_SECONDS
            if give_up is not None and now >= max(give_up, again):
                self._cancel()
                again = mirror.awake() + CANCEL_SECONDS
            elif give_up is None:
                for node in self.returns.due(seen, now, self.followed):
                    plan = self.backend.only(self.plan, node)
                    # None: it cannot be started without the others.
                    if plan.steps and not self._to_be_ended():  # a host may keep it waiting
                        start = partial(self.backend.submit, plan, self.transport)
                        self._event(self.returns.start(node, start, self.secrets))
            time.sleep(POLL_SECONDS)

    def _note_progress(self, seen: Observation, needed: int) -> None:
        begun = sum(node.state is not State.PENDING for node in seen.nodes)
        if self.running_since is None and begun >= needed:
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
        """End what runs; a host where that cannot be done is remembered, and told of."""
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
        """Before an attempt: the port may have been taken since it was probed, or used last."""
        age = time.time() - self.submission.created_at
        fresh = self.attempt == 1 and age <= PROBED_SECONDS
        changed = self.backend.before_attempt(self.cluster, self.facts, self.transport, fresh=fresh)
        if changed is not None:
            self._plan_anew(*changed)
        elif self.restarts_left < self.plan.restarts:
            self._plan_anew(self.facts)

    def _plan_anew(self, facts: Facts, why: str | None = None, spares: int | None = None) -> None:
        """Plan what is started next; agents are given the restarts and spares that are left."""
        if why is not None:
            self._event(why)
        self.facts = facts
        if spares is None:
            spares = self.job.spares and self.plan.nodes - self.plan.topology["nodes"]
        job = msgspec.structs.replace(self.job, restarts=self.restarts_left, spares=spares)
        self.plan = self.backend.plan(job, self.cluster, self.facts, self.folder.run_id)
        self.folder.save_plan(self.facts, self.plan)

    def _port_was_taken(self, failure: Failure) -> bool:
        from clusterkit.diagnose import PORT_TAKEN

        # With our own number in it: a program may have ports of its own.
        said = f"{failure.cause}\n{failure.traceback or ''}"
        ours = re.search(rf"\b{self.plan.port}\b", said)
        return self.cluster.port == "auto" and bool(ours and PORT_TAKEN.search(said))

    # -- the record ---------------------------------------------------------

    def _save(self, state: State, *, failure: Failure | None = None) -> None:
        # A disk that is full by now is no reason to end the training.
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


# ---------------------------------------------------------------- the process


def launch(folder: RunFolder, lock: IO[bytes], transport: Transport) -> None:
    """Start a new run's nodes, then its supervisor. If the nodes do not start, the run has failed.

    Args:
        lock: as for `spawn`.

    Raises:
        RunFolderError, SubmitFailed: as of `spawn`.
    """
    folder.write(RESERVE, bytes(RESERVE_BYTES))
    if Supervisor(folder, transport).start():
        spawn(folder, lock)


def spawn(folder: RunFolder, lock: IO[bytes], *, adopt: bool = False) -> None:
    """Start the supervisor, detached from this process and from the terminal.

    Args:
        lock: what `RunFolder.hold` gave; the supervisor keeps it for its life.
        adopt: it takes over a run whose supervisor is gone.

    Raises:
        RunFolderError: no space for what it will write.
        SubmitFailed: it does not come up; the message holds what it said.
    """
    if not folder.file(RESERVE).exists():
        folder.write(RESERVE, bytes(RESERVE_BYTES))
    read, write = os.pipe()
    with open(read, "rb", buffering=0) as answer:
        with open(write, "wb"), folder.file("supervisor.log").open("ab") as log:
            files = (lock.fileno(), write)
            argv = [sys.executable, "-P", "-m", "clusterkit.supervise", str(folder.path)]
            argv += [*map(str, files), *(["--adopt"] if adopt else [])]
            # The shell ends at once, so that it is nobody's child and leaves no zombie.
            subprocess.run(
                ["/bin/sh", "-c", '"$@" &', "sh", *argv], start_new_session=True, pass_fds=files,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True,
            )  # fmt: skip
        said = b""
        while select.select([answer], [], [], START_SECONDS)[0] and (data := answer.read(4096)):
            said += data
    if said == STARTED:
        return
    log_text = folder.read("supervisor.log").decode(errors="replace").strip()
    words, _, hint = said.decode().partition("\n")
    raise SubmitFailed(
        f"the run's supervisor did not start: {words or log_text or 'no output'}", hint=hint or None
    )


def main(argv: list[str]) -> None:
    """``RUN_DIR LOCK ANSWER [--adopt]``: LOCK and ANSWER are open files, the run folder's lock and
    a pipe that takes `STARTED`, or why this process cannot supervise the run."""
    path, lock, answer = argv[:3]
    os.set_inheritable(int(lock), False)
    # Whoever started this may have been killed meanwhile.
    with contextlib.suppress(BrokenPipeError), open(int(answer), "wb", buffering=0) as pipe:
        os.set_inheritable(int(answer), False)
        try:
            supervisor = Supervisor(RunFolder(Path(path)))
            supervisor.begin()
        except ClusterkitError as error:
            pipe.write(f"{error.message}\n{error.hint or ''}".encode())
            raise
        pipe.write(STARTED)
    supervisor.main(adopt="--adopt" in argv)


if __name__ == "__main__":
    main(sys.argv[1:])
