"""What happens while a run runs: starting it, watching it, restarts, and its end.

``python -m clusterkit.supervise`` is the process that does this (`spawn`), detached from the
terminal and from `clusterkit submit`; whoever follows the run only reads its folder. It holds the
folder's lock, so that there is one of them.
`current` tells the truth about a run whether its supervisor lives or not.
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
from collections import deque
from itertools import chain
from pathlib import Path
from typing import IO

import msgspec

from clusterkit import agent, backends, mirror
from clusterkit.backends.base import Backend, HandedOver, Handle, Newest, Observation, Watcher
from clusterkit.cluster import CLUSTER_TYPES, ClusterSpec, Facts, LocalCluster
from clusterkit.diagnose import PORT_TAKEN, diagnose
from clusterkit.errors import (
    EXIT_INTERRUPTED,
    ClusterkitError,
    RunFolderError,
    SubmitFailed,
    counted,
)
from clusterkit.plan import Plan, Step
from clusterkit.runs import Event, RunFolder, StepRecord, Submission
from clusterkit.shell import Secret
from clusterkit.spec import JobSpec
from clusterkit.status import AttemptStatus, Failure, NodeStatus, RunStatus, State
from clusterkit.transport import Transport

POLL_SECONDS = 0.1
PEERS_SECONDS = 2.0
"""How long the other nodes have to fail by themselves, so that the first failure is seen."""
PROBED_SECONDS = 20.0
"""How long a port that was free when probed is taken to be free; then it is looked at again."""
CANCEL_SECONDS = 5.0
"""Pause before nodes that did not end are told again."""
PORT_TRIES = 3
TAIL_LINES = 5000
"""Log lines per attempt that a diagnosis reads."""
BIRTH_SECONDS = 60.0
"""How long a supervisor may take to start; one that ends meanwhile is noticed at once."""
BORN = b"started\n"
"""What a supervisor answers to whoever started it."""
LATE_EXIT = 124
"""Exit code of a run that was ended at its time limit: that of timeout(1)."""
LEFTOVERS = "leftovers"
"""File that is there while something of the run could not be ended, and says where."""
RESERVE = ".reserve"
RESERVE_BYTES = 1 << 16
"""Kept free for the last ``state.json``, so that a full disk does not hide how a run ended."""


class Supervisor:
    """Carries one run from its first attempt to its last."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.submission = folder.read_json("run.json", Submission)
        self.job = folder.read_json("job.json", JobSpec)
        self.cluster = read_cluster(folder)
        self.facts = folder.read_json("facts.json", Facts)
        self.plan = read_plan(folder)
        self.backend: Backend = backends.backend(self.submission.backend)
        self.transport = backends.transport_for(self.cluster)
        self.secrets = {name: Secret(name, os.environ[name]) for name in self.job.secrets}
        self.attempt = 1
        self.attempts: tuple[AttemptStatus, ...] = ()
        self.remark: str | None = None
        self.nodes: tuple[NodeStatus, ...] = ()
        self.running_since: float | None = None
        self.late = False
        self.terminated = False

    def begin(self) -> None:
        """Take the run over: from now on ``state.json`` says how it stands.

        Raises:
            RunFolderError: no space.
        """
        self.folder.write_json("supervisor.json", agent.identity(os.getpid()))
        if not self.folder.file("state.json").exists():
            self.folder.write_json("state.json", self._status(State.PENDING, None))

    def main(self, *, adopt: bool = False) -> None:
        """Run to the end; whatever happens, ``state.json`` says how it ended.

        Args:
            adopt: the newest attempt has been started already.
        """
        for signum in (signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminated)
        try:
            self._attempts(adopt)
        except HandedOver as error:
            self._event(error.message)
        except ClusterkitError as error:
            self._cancel()
            failure = Failure(
                node=None, rank=None, exit_code=error.exit_code, cause=error.message,
                hint=error.hint,
            )  # fmt: skip
            self._finish(State.FAILED, failure)
        except Exception as error:
            self._cancel()
            cause = f"clusterkit's supervisor failed: {type(error).__name__}: {error}"
            hint = f"a bug of clusterkit's; {self.folder.file('supervisor.log')} holds the details"
            self._finish(
                State.FAILED, Failure(node=None, rank=None, exit_code=1, cause=cause, hint=hint)
            )
            raise

    def _terminated(self, signum: int, frame: object) -> None:
        """SIGTERM (the machine shuts down): as good as a cancel."""
        self.terminated = True

    def _to_be_ended(self) -> bool:
        return self.terminated or self.folder.is_cancelled()

    def _attempts(self, adopt: bool = False) -> None:
        gone_on: Newest | None = None
        if adopt:
            adopt, gone_on = self._adopted()
        restarts_left = max(0, self.job.restarts - (self.attempt - 1))
        port_tries = PORT_TRIES
        while True:
            if gone_on is not None:
                restarts_left = max(0, restarts_left - (gone_on.attempt - self.attempt))
                adopt = gone_on.begun if gone_on.watched else adopt
                self.attempt = gone_on.attempt
                if gone_on.late:
                    self._cancel()
                    return self._finish(State.FAILED, over_time(self.job))
            if self._to_be_ended():
                if adopt:
                    self._cancel()
                return self._finish(State.CANCELLED)
            if not adopt:
                age = time.time() - self.submission.created_at
                stale = self.attempt > 1 or age > PROBED_SECONDS or not self.backend.elsewhere
                if stale and not self.backend.own_network:
                    self._settle_port()
                self.running_since = None
                self._save(State.PENDING)
                self.backend.submit(
                    self.plan,
                    self.transport,
                    attempt=self.attempt,
                    secrets=self.secrets,
                    record=self._record,
                )
            adopt = False
            handle = Handle(self.folder, self.plan, self.attempt)
            seen = self._watch(handle)
            if (gone_on := seen.superseded) is not None:
                self._event(f"attempt {gone_on.attempt} continues; the cluster started it")
                self._attempt_ended(None)
                continue
            if self.backend.managed:
                self._cancel()  # what has ended would stay
            if seen.state is State.SUCCEEDED:
                return self._finish(State.SUCCEEDED)
            if any(node.state is State.UNKNOWN for node in seen.nodes):
                self._cancel()  # something may still run there
            if self._to_be_ended():
                return self._finish(State.CANCELLED)
            if self.late:
                return self._finish(State.FAILED, over_time(self.job))
            failure = diagnosis(handle, seen)
            if self._port_was_taken(failure) and port_tries:
                port_tries -= 1
                why = f"port {self.plan.port} was taken before the run could listen there"
                self._new_port(None, why)
            elif restarts_left:
                restarts_left -= 1
                self._event(
                    f"attempt {self.attempt} failed: {failure.who}: {failure.summary}; "
                    f"starting again, {counted(restarts_left, 'restart')} left"
                )
            else:
                return self._finish(State.FAILED, failure)
            self._attempt_ended(failure)
            self._save(State.RESTARTING, failure=failure)
            self.attempt += 1

    def _attempt_ended(self, failure: Failure | None) -> None:
        now = time.time()
        before = self.attempts[-1].finished_at if self.attempts else self.submission.created_at
        ended = AttemptStatus(
            attempt=self.attempt, state=State.FAILED, failure=failure, started_at=before,
            finished_at=max((node.ended_at or 0.0 for node in self.nodes), default=0.0) or now,
        )  # fmt: skip
        self.attempts = (*self.attempts, ended)

    def _adopted(self) -> tuple[bool, Newest | None]:
        """Whether the newest attempt known here has been started; and what came after it."""
        saved = self.folder.maybe_json("state.json", RunStatus)
        begun = saved is None or saved.state is not State.RESTARTING
        if saved is not None:
            self.attempts = saved.attempts
            if saved.state is State.PENDING and not self._carried_out(saved.attempt):
                # Its supervisor was killed meanwhile: nobody knows what runs.
                self._cancel()
                begun = False
            self.attempt = saved.attempt + (not begun)
            self.running_since = saved.running_since if begun else None
        handle = Handle(self.folder, self.plan, self.attempt)
        with contextlib.suppress(ClusterkitError):
            return begun, self.backend.newest(handle, self.transport)
        return begun, None

    def _carried_out(self, attempt: int) -> bool:
        """Whether all steps of the plan were."""
        done = self.folder.records("steps.jsonl", StepRecord)
        return sum(step.attempt == attempt for step in done) >= len(self.plan.steps)

    # -- one attempt --------------------------------------------------------

    def _watch(self, handle: Handle) -> Observation:
        """Until every node has ended; a failed node takes the others down, unless elastic."""
        watcher = self.backend.watch(handle, self.transport)
        try:
            return self._until_ended(watcher)
        finally:
            watcher.close()

    def _until_ended(self, watcher: Watcher) -> Observation:
        needed = self.plan.topology.get("min_nodes", self.plan.nodes)
        if self.plan.nodes < self.plan.topology.get("nodes", self.plan.nodes):
            needed = self.plan.nodes  # one launcher for all nodes (mpirun)
        started = mirror.awake()
        give_up: float | None = None
        again = 0.0
        while True:
            seen = watcher.status()
            if seen is None:
                raise RunFolderError(f"the folder of run {self.folder.run_id} is gone")
            if seen.superseded is not None:
                return seen
            self._note_progress(seen, needed)
            now = mirror.awake()
            states = [node.state for node in seen.nodes]
            if State.PENDING in states and now > started + self.backend.start_seconds:
                silent = states.index(State.PENDING)
                raise ClusterkitError(
                    f"node {silent} did not report within {self.backend.start_seconds:g} s",
                    hint=f"see the logs in {self.folder.path}/attempts/{self.attempt}",
                )
            if not {State.RUNNING, State.PENDING} & set(states):
                return self._ended(seen, needed)
            if self._to_be_ended() or self._is_late():
                give_up = now
            lost = sum(s in (State.FAILED, State.CANCELLED, State.UNKNOWN) for s in states)
            if give_up is None and len(states) - lost < needed:
                give_up = now + PEERS_SECONDS
            if give_up is not None and now >= max(give_up, again):
                self._cancel()
                again = mirror.awake() + CANCEL_SECONDS
            time.sleep(POLL_SECONDS)

    def _ended(self, seen: Observation, needed: int) -> Observation:
        succeeded = sum(node.state is State.SUCCEEDED for node in seen.nodes)
        if succeeded >= needed and seen.state is not State.SUCCEEDED:
            self._event(f"{len(seen.nodes) - succeeded} of {len(seen.nodes)} elastic nodes failed")
            return msgspec.structs.replace(seen, state=State.SUCCEEDED)
        return seen

    def _is_late(self) -> bool:
        limit = self.job.limit_seconds
        if limit is None or self.running_since is None or time.time() < self.running_since + limit:
            return False
        if not self.late:
            self.late = True
            self._event(f"attempt {self.attempt} is over its time limit: stopping it")
        return True

    def _note_progress(self, seen: Observation, needed: int) -> None:
        begun = sum(node.state is not State.PENDING for node in seen.nodes)
        if self.running_since is None and begun >= needed:
            self.running_since = time.time()
        if seen.nodes != self.nodes:
            self.nodes = seen.nodes
            state = State.PENDING if seen.state is State.PENDING else State.RUNNING
            self._save(state)

    def _cancel(self) -> None:
        """End what runs; a host where that cannot be done is remembered, and told of."""
        try:
            reason = "the run is over its time limit" if self.late else "another node has ended"
            if self._to_be_ended():
                reason = "cancelled"
            handle = Handle(self.folder, self.plan, self.attempt)
            self.backend.cancel(handle, self.transport, reason)
        except ClusterkitError as error:
            if error.message != self.remark:
                self._event(f"not all nodes could be stopped: {error.message}")
            self.remark = str(error.message)
            with contextlib.suppress(RunFolderError):
                self.folder.write(LEFTOVERS, f"{error.message}\n")
        else:
            self.remark = None
            self.folder.file(LEFTOVERS).unlink(missing_ok=True)

    # -- the port -----------------------------------------------------------

    def _settle_port(self) -> None:
        """Ours may have been taken since it was probed, or since the last attempt."""
        host = self.facts.hosts[0].host
        found = self.transport.free_port(host, self.plan.port)
        if found != self.plan.port:
            return self._new_port(found, f"port {self.plan.port} was taken meanwhile")
        if (watch := self.facts.watch_port) is not None:
            free = self.transport.free_port(host, watch)
            if free != watch:
                self._event(
                    f"port {watch} was taken meanwhile; the nodes watch each other at {free}"
                )
                self._plan_anew(msgspec.structs.replace(self.facts, watch_port=free))
        return None

    def _new_port(self, port: int | None, why: str) -> None:
        if self.cluster.port != "auto":
            raise ClusterkitError(
                f"{why}, and the cluster entry asks for that one",
                hint="port: auto, or end the program that listens there",
            )
        chosen = port or self.transport.free_port(self.facts.hosts[0].host)
        self._event(f"{why}; {chosen} chosen instead")
        origin = f"{why}; free when probed again"
        watch = self.facts.watch_port and chosen + 1
        self._plan_anew(
            msgspec.structs.replace(self.facts, port=chosen, port_origin=origin, watch_port=watch)
        )

    def _plan_anew(self, facts: Facts) -> None:
        self.facts = facts
        self.plan = self.backend.plan(self.job, self.cluster, self.facts, self.folder.run_id)
        save_plan(self.folder, self.facts, self.plan)

    def _port_was_taken(self, failure: Failure) -> bool:
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
        self.folder.file(RESERVE).unlink(missing_ok=True)
        self.folder.write_json("state.json", status)

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
            failure=failure,
            started_at=self.submission.created_at,
            running_since=self.running_since,
            remark=self.remark and leftover_words(self.folder, self.remark),
        )

    def _event(self, text: str) -> None:
        self.folder.append("events.jsonl", Event(at=time.time(), attempt=self.attempt, text=text))

    def _record(self, step: Step, outcome: str) -> None:
        self.folder.append(
            "steps.jsonl",
            StepRecord(
                at=time.time(), attempt=self.attempt, kind=step.kind, host=step.host,
                node=step.node, argv=step.argv, outcome=outcome,
            ),
        )  # fmt: skip


def over_time(job: JobSpec) -> Failure:
    """Why a run failed that was ended at its time limit."""
    return Failure(
        node=None,
        rank=None,
        exit_code=LATE_EXIT,
        cause=f"it was stopped at its time_limit of {job.time_limit}",
        hint="raise time_limit; another run can resume from this one's checkpoint",
    )


def diagnosis(handle: Handle, seen: Observation) -> Failure:
    """Why an attempt that has ended did not succeed."""
    plan = handle.plan
    lines = chain.from_iterable(handle.folder.log(handle.attempt, range(plan.nodes)))
    tail = deque(lines, maxlen=TAIL_LINES)
    nproc = plan.topology.get("nproc_per_node", 1)
    failure = diagnose(
        seen.nodes,
        tail,
        rank_exits=seen.rank_exits,
        nproc_per_node=nproc,
        oom_kills=seen.oom_kills,
        causes=seen.causes,
    )
    if plan.nodes < plan.topology.get("nodes", plan.nodes) and failure.rank is not None:
        # One launcher for all nodes (mpirun): its log does not tell them apart, the rank does.
        failure = msgspec.structs.replace(failure, node=failure.rank // nproc)
    return failure


# ---------------------------------------------------------------- the folder's documents


def read_plan(folder: RunFolder) -> Plan:
    """The run's plan.

    Raises:
        RunFolderError: missing or damaged.
    """
    return folder.read_json("plan.json", Plan)


def read_cluster(folder: RunFolder) -> ClusterSpec:
    """The run's cluster entry.

    Raises:
        RunFolderError: missing or damaged.
    """
    entry = folder.read_json("cluster.json", dict)
    kind = CLUSTER_TYPES.get(str(entry.get("backend", "local")))
    if kind is None:
        raise RunFolderError(f"run {folder.run_id}: cluster.json names an unknown backend")
    try:
        return msgspec.convert(entry, kind)
    except msgspec.ValidationError as error:
        raise RunFolderError(f"run {folder.run_id}: cluster.json is damaged ({error})") from error


def save_plan(folder: RunFolder, facts: Facts, plan: Plan) -> None:
    """Facts and plan, as JSON and for people."""
    folder.write_json("facts.json", facts)
    folder.write("plan.json", plan.to_json())
    folder.write("plan.txt", plan.to_text())


# ---------------------------------------------------------------- telling the truth later


class Connections:
    """What reaches a run's hosts: made when it is first needed, kept until this is closed.

    A context manager; with it, whoever looks often at a run logs in to its hosts once.
    """

    def __init__(self) -> None:
        self._transport: Transport | None = None

    def to(self, cluster: ClusterSpec) -> Transport:
        """The run's cluster is one and the same each time."""
        if self._transport is None:
            self._transport = backends.transport_for(cluster)
        return self._transport

    def __enter__(self) -> Connections:
        return self

    def __exit__(self, *_: object) -> None:
        if self._transport is not None:
            self._transport.close()


def leftover_words(folder: RunFolder, message: str) -> str:
    """What a person should know where not all of a run could be ended."""
    return f"parts of it may still run: {message}; `clusterkit cancel {folder.run_id}` tries again"


def supervisor_alive(folder: RunFolder) -> bool:
    """Whether somebody watches over the run: its supervisor, or the submit that is to start it."""
    return folder.is_held()


def current(folder: RunFolder, connections: Connections | None = None) -> RunStatus:
    """How a run stands now, from its folder and from the processes it recorded.

    Never raises for a damaged folder: what cannot be told is UNKNOWN, with a remark.

    Args:
        connections: of a caller that asks several times.
    """
    if connections is None:
        with Connections() as connections:
            return current(folder, connections)
    watched = supervisor_alive(folder)
    # In this order: where nobody watches any more, this is the supervisor's last word.
    saved = folder.maybe_json("state.json", RunStatus)
    if saved is not None and saved.state.final:
        return saved
    if saved is not None and watched and saved.nodes:
        return saved
    try:
        submission = folder.read_json("run.json", Submission)
        plan = read_plan(folder)
        transport = connections.to(read_cluster(folder))
        backend = backends.backend(submission.backend)
    except ClusterkitError as error:
        if saved is not None:
            return msgspec.structs.replace(saved, state=State.UNKNOWN, remark=error.message)
        return RunStatus(
            run=folder.run_id, job="?", cluster="?", backend="?", state=State.UNKNOWN,
            remark=error.message,
        )  # fmt: skip
    attempt = saved.attempt if saved else 1
    handle = Handle(folder, plan, attempt)
    base = saved or RunStatus(
        run=folder.run_id, job=submission.job, cluster=submission.cluster,
        backend=submission.backend, state=State.PENDING, started_at=submission.created_at,
    )  # fmt: skip
    if (backend.elsewhere or backend.managed) and watched:
        return base  # its supervisor asks; nobody else needs to
    newest = Newest(attempt=attempt)
    with contextlib.suppress(ClusterkitError):
        if not watched:
            newest = backend.newest(handle, transport)
    if newest.attempt > attempt:
        handle = Handle(folder, plan, newest.attempt)
        base = msgspec.structs.replace(base, attempt=newest.attempt, state=State.RUNNING)
    seen = backend.status(handle, transport)
    if seen is None:
        return msgspec.structs.replace(base, state=State.UNKNOWN, remark="nothing of it was found")
    base = msgspec.structs.replace(base, nodes=seen.nodes)
    if watched:
        again = folder.maybe_json("state.json", RunStatus)
        if again is not None and again.state.final:
            return again  # it ended while we looked
        if base.state is State.RESTARTING:
            return base
        running = seen_life(seen)
        return msgspec.structs.replace(base, state=State.RUNNING if running else State.PENDING)
    if seen.state is not State.RUNNING:
        with contextlib.suppress(ClusterkitError):
            backend.collect(handle, transport)
    found, startable = _unwatched(folder, base, backend, handle, seen, newest)
    if found.state.final and backend.managed and not startable:
        _record_end(folder, found, backend, handle, transport)
    return found


def _record_end(
    folder: RunFolder, found: RunStatus, backend: Backend, handle: Handle, transport: Transport
) -> None:
    """Nobody else is there to clear up, and to write down how a run ended."""
    with contextlib.suppress(ClusterkitError):
        if backend.managed:
            backend.cancel(handle, transport)
        folder.write_json("state.json", found)


def unfinished(folder: RunFolder, connections: Connections | None = None) -> bool:
    """Whether there is anything left to do for a supervisor."""
    saved = folder.maybe_json("state.json", RunStatus)
    return not (saved or current(folder, connections)).state.final


def seen_life(seen: Observation) -> bool:
    """Whether any node of it has started."""
    return any(node.state is not State.PENDING for node in seen.nodes)


def _unwatched(
    folder: RunFolder,
    base: RunStatus,
    backend: Backend,
    handle: Handle,
    seen: Observation,
    newest: Newest,
) -> tuple[RunStatus, bool]:
    """The supervisor was killed: only the nodes can tell, and whatever watches where they are.

    Returns:
        The status, and whether `attach` would start the run again.
    """
    replace = msgspec.structs.replace
    job = folder.maybe_json("job.json", JobSpec)
    restarts = 0 if job is None else max(0, job.restarts - (handle.attempt - 1))
    attach = f"`clusterkit attach {folder.run_id}`"
    if seen.state is State.RUNNING:
        remark = (
            f"its supervisor is gone: {_alone(backend, newest, restarts)}; {attach} watches over "
            f"it again, `clusterkit cancel {folder.run_id}` ends it"
        )
        return replace(base, state=State.RUNNING, remark=remark), False
    if folder.is_cancelled():
        return replace(base, state=State.CANCELLED, exit_code=EXIT_INTERRUPTED), False
    finished = max((node.ended_at or 0.0 for node in seen.nodes), default=0.0) or None
    again = not newest.late and not newest.settled and restarts > 0
    left = counted(restarts, "restart")
    remark = f"it was not restarted ({left} left): {attach} does"
    if newest.late and job is not None:
        failure = over_time(job)
    elif seen.state is State.SUCCEEDED:
        return replace(base, state=State.SUCCEEDED, exit_code=0, finished_at=finished), False
    elif newest.watched and not newest.settled and (restarts or not seen_life(seen)):
        remark = f"a watcher in the cluster: it starts again; {attach} follows it"
        return replace(base, state=State.RESTARTING, remark=remark), False
    elif not seen_life(seen):
        again = folder.file("state.json").exists()
        remark = f"it was not started: {attach} does"
        failure = Failure(
            node=None, rank=None, exit_code=1, cause="clusterkit was killed before the run started",
            hint=f"{attach} starts it" if again else "submit it again",
        )  # fmt: skip
    else:
        failure = diagnosis(handle, seen)
    found = replace(
        base,
        state=State.UNKNOWN if seen.state is State.UNKNOWN else State.FAILED,
        exit_code=failure.exit_code or 1,
        failure=failure,
        finished_at=finished,
        remark=remark if again else base.remark,
    )
    return found, again


def _alone(backend: Backend, newest: Newest, restarts: int) -> str:
    """What does not happen to a run that goes on without its supervisor."""
    if newest.watched:
        return "the watcher in the cluster goes on with it"
    # Nodes on other machines, and in containers, watch each other (clusterkit.agent.Peers).
    together = backend.elsewhere or backend.managed
    again = f" ({counted(restarts, 'restart')} left)" if restarts else ""
    return (
        f"nobody restarts it{again}{'' if together else ' or ends the other nodes when one fails'}"
    )


def cancel(folder: RunFolder) -> RunStatus:
    """End a run, whoever watches it; fine to repeat, on a run that has ended, on a damaged one."""
    with Connections() as connections:
        return _cancel(folder, connections)


def _cancel(folder: RunFolder, connections: Connections) -> RunStatus:
    before = current(folder, connections)
    leftovers = folder.file(LEFTOVERS)
    if before.state.final and not leftovers.exists():
        if unfinished(folder, connections):  # by now it is: `attach` starts it no more
            before = msgspec.structs.replace(before, remark=None)
            plan, cluster = read_plan(folder), read_cluster(folder)
            transport = connections.to(cluster)
            handle = Handle(folder, plan, before.attempt)
            _record_end(folder, before, backends.backend(plan.backend), handle, transport)
        return before
    with contextlib.suppress(RunFolderError):  # a folder that is full or gone: end what runs
        folder.mark_cancelled()
    try:
        plan = read_plan(folder)
        cluster = read_cluster(folder)
    except RunFolderError:
        # What runs is known by the folder's name; that is enough to end it.
        cluster = _remembered_cluster(folder)
        plan = Plan(
            run_id=folder.run_id, run_dir=str(folder.path), backend=cluster.backend, summary="",
            nodes=0, world_size=0,
        )  # fmt: skip
    backend = backends.backend(plan.backend)
    transport = connections.to(cluster)
    handle = Handle(folder, plan, before.attempt)
    deadline = time.monotonic() + plan.stop_grace + 10
    while supervisor_alive(folder) and time.monotonic() < deadline:
        if current(folder, connections).state.final:
            break
        time.sleep(POLL_SECONDS / 2)
    if not supervisor_alive(folder):
        with contextlib.suppress(ClusterkitError):
            backend.collect(handle, transport)
    try:
        backend.cancel(handle, transport)
    except ClusterkitError as error:
        with contextlib.suppress(RunFolderError):
            folder.write(LEFTOVERS, f"{error.message}\n")
        after = msgspec.structs.replace(
            current(folder, connections), remark=leftover_words(folder, error.message)
        )
    else:
        leftovers.unlink(missing_ok=True)
        after = msgspec.structs.replace(current(folder, connections), remark=None)
    if after.state.final and folder.maybe_json("state.json", RunStatus) != after:
        # Nobody else is there to record it.
        folder.write_json("state.json", after)
    return after


def _remembered_cluster(folder: RunFolder) -> ClusterSpec:
    """Where to look for what a damaged run may have left."""
    with contextlib.suppress(RunFolderError):
        cluster = read_cluster(folder)
        if backends.backend_type(cluster.backend).managed:
            return cluster
    return LocalCluster()


def forget(folder: RunFolder) -> None:
    """Remove what a run that has ended left on other machines, and with a service.

    Raises:
        Unavailable: a host does not answer.
    """
    try:
        plan, cluster = read_plan(folder), read_cluster(folder)
    except RunFolderError:
        return  # damaged: nobody knows of hosts
    backend = backends.backend(plan.backend)
    handle = Handle(folder, plan)
    with Connections() as connections:
        if backend.managed and unfinished(folder, connections):
            backend.cancel(handle, connections.to(cluster))
        if backend.elsewhere:
            backend.forget(handle, connections.to(cluster))


def abandon(folder: RunFolder) -> None:
    """End a submit that was interrupted: its supervisor may have come up."""
    if supervisor_alive(folder):
        with contextlib.suppress(ClusterkitError):
            cancel(folder)


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
        while select.select([answer], [], [], BIRTH_SECONDS)[0] and (data := answer.read(4096)):
            said += data
    if said == BORN:
        return
    log_text = folder.read("supervisor.log").decode(errors="replace").strip()
    words, _, hint = said.decode().partition("\n")
    raise SubmitFailed(
        f"the run's supervisor did not start: {words or log_text or 'no output'}", hint=hint or None
    )


def main(argv: list[str]) -> None:
    """``RUN_DIR LOCK ANSWER [--adopt]``: LOCK and ANSWER are open files, the run folder's lock and
    a pipe that takes `BORN`, or why this process cannot supervise the run."""
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
        pipe.write(BORN)
    supervisor.main(adopt="--adopt" in argv)


if __name__ == "__main__":
    main(sys.argv[1:])
