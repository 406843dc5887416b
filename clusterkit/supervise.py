"""What happens while a run runs: starting it, watching it, restarts, and its end.

``python -m clusterkit.supervise RUN_DIR`` is the process that does this, detached from the
terminal and from `clusterkit submit`; whoever follows the run only reads its folder. With
``--adopt`` it takes over a run whose supervisor is gone.
`current` tells the truth about a run whether its supervisor lives or not.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import msgspec

from clusterkit import agent, backends
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
from clusterkit.status import Failure, NodeStatus, RunStatus, State
from clusterkit.transport import LocalTransport, Transport

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
BIRTH_SECONDS = 10.0
"""How long after a submit its supervisor may still be about to start."""
ABANDON_SECONDS = 2.0
"""How long an interrupted submit waits for a supervisor that it may have started."""
STAND_BY = "--stand-by"
_SUPERVISOR = (sys.executable, "-P", "-m", "clusterkit.supervise")
LATE_EXIT = 124
"""Exit code of a run that was ended at its time limit: that of timeout(1)."""
LEFTOVERS = "leftovers"
"""File that is there while something of the run could not be ended, and says where."""
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
        self.remark: str | None = None
        self.nodes: tuple[NodeStatus, ...] = ()
        self.running_since: float | None = None
        self.late = False
        self.terminated = False

    def main(self, *, adopt: bool = False) -> None:
        """Run to the end; whatever happens, ``state.json`` says how it ended.

        Args:
            adopt: the newest attempt has been started already.
        """
        self.folder.write_json("supervisor.json", agent.identity(os.getpid()))
        self.folder.write(".reserve", bytes(RESERVE_BYTES))
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
            handle = handle_of(self.folder, self.backend, self.plan, self.attempt)
            seen = self._watch(handle)
            if (gone_on := seen.superseded) is not None:
                self._event(f"attempt {gone_on.attempt} goes on; it was begun in the cluster")
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
            failure = diagnosis(self.backend, handle, seen, self.transport)
            if self._port_was_taken(failure) and port_tries:
                port_tries -= 1
                why = f"port {self.plan.port} was taken before the run could listen there"
                self._new_port(None, why)
            elif restarts_left:
                restarts_left -= 1
                self._event(
                    f"attempt {self.attempt} failed: {failure.summary}; starting again, "
                    f"{restarts_left} restarts left"
                )
            else:
                return self._finish(State.FAILED, failure)
            self._save(State.RESTARTING, failure=failure)
            self.attempt += 1

    def _adopted(self) -> tuple[bool, Newest | None]:
        """Whether the newest attempt known here has been started; and what came after it."""
        saved = self.folder.maybe_json("state.json", RunStatus)
        begun = saved is None or saved.state is not State.RESTARTING
        if saved is not None:
            self.attempt = saved.attempt + (not begun)
            self.running_since = saved.running_since if begun else None
        handle = handle_of(self.folder, self.backend, self.plan, self.attempt)
        with contextlib.suppress(ClusterkitError):
            return begun, self.backend.newest(handle, self.transport)
        return begun, None

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
        started = time.monotonic()
        give_up: float | None = None
        again = 0.0
        while True:
            seen = watcher.status()
            if seen is None:
                raise RunFolderError(f"the folder of run {self.folder.run_id} is gone")
            if seen.superseded is not None:
                return seen
            self._note_progress(seen, needed)
            now = time.monotonic()
            states = [node.state for node in seen.nodes]
            if State.PENDING in states and now > started + self.backend.start_seconds:
                silent = states.index(State.PENDING)
                raise ClusterkitError(
                    f"node {silent} showed no sign of life within {self.backend.start_seconds:g} s",
                    hint=f"look into {self.folder.path}/attempts/{self.attempt}",
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
                again = time.monotonic() + CANCEL_SECONDS
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
            self._event(f"attempt {self.attempt} is over its time limit: ending it")
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
            self.backend.cancel(Handle(self.plan, self.attempt), self.transport)
        except ClusterkitError as error:
            if error.message != self.remark:
                self._event(f"not all could be ended: {error.message}")
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
            self._new_port(found, f"port {self.plan.port} was taken meanwhile")

    def _new_port(self, port: int | None, why: str) -> None:
        if self.cluster.port != "auto":
            raise ClusterkitError(
                f"{why}, and the cluster entry asks for that one",
                hint="port: auto, or end the program that listens there",
            )
        chosen = port or self.transport.free_port(self.facts.hosts[0].host)
        self._event(f"{why}; {chosen} chosen instead")
        origin = f"{why}; free when probed again"
        self.facts = msgspec.structs.replace(self.facts, port=chosen, port_origin=origin)
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
        self.folder.file(".reserve").unlink(missing_ok=True)
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
        cause=f"it was ended at its time_limit of {job.time_limit}",
        hint="a larger time_limit; a checkpoint is what another run can go on from",
    )


def diagnosis(backend: Backend, handle: Handle, seen: Observation, transport: Transport) -> Failure:
    """Why an attempt that has ended did not succeed."""
    plan = handle.plan
    tail = deque(backend.logs(handle, transport), maxlen=TAIL_LINES)
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


def handle_of(folder: RunFolder, backend: Backend, plan: Plan, attempt: int) -> Handle:
    """One attempt; its nodes' files come to the run's folder where they are elsewhere."""
    return Handle(plan, attempt, folder.path if backend.elsewhere else None)


def leftover_words(folder: RunFolder, message: str) -> str:
    """What a person should know where not all of a run could be ended."""
    return (
        f"not all of it could be ended: {message}; `clusterkit cancel {folder.run_id}` tries again"
    )


def supervisor_alive(folder: RunFolder) -> bool:
    recorded = folder.maybe_json("supervisor.json", dict)
    return recorded is not None and agent.is_alive(recorded)


def current(folder: RunFolder) -> RunStatus:
    """How a run stands now, from its folder and from the processes it recorded.

    Never raises for a damaged folder: what cannot be told is UNKNOWN, with a remark.
    """
    saved = folder.maybe_json("state.json", RunStatus)
    if saved is not None and saved.state.final:
        return saved
    watched = supervisor_alive(folder)
    if saved is not None and watched and saved.nodes:
        return saved
    try:
        submission = folder.read_json("run.json", Submission)
        plan = read_plan(folder)
        transport = backends.transport_for(read_cluster(folder))
        backend = backends.backend(submission.backend)
    except ClusterkitError as error:
        if saved is not None:
            return msgspec.structs.replace(saved, state=State.UNKNOWN, remark=error.message)
        return RunStatus(
            run=folder.run_id, job="?", cluster="?", backend="?", state=State.UNKNOWN,
            remark=error.message,
        )  # fmt: skip
    attempt = saved.attempt if saved else 1
    handle = handle_of(folder, backend, plan, attempt)
    newborn = time.time() - submission.created_at < BIRTH_SECONDS
    newborn = newborn and folder.maybe_json("supervisor.json", dict) is None
    base = saved or RunStatus(
        run=folder.run_id, job=submission.job, cluster=submission.cluster,
        backend=submission.backend, state=State.PENDING, started_at=submission.created_at,
    )  # fmt: skip
    if (backend.elsewhere or backend.managed) and (watched or newborn):
        return base  # its supervisor asks; nobody else needs to
    newest = Newest(attempt=attempt)
    with contextlib.suppress(ClusterkitError):
        if not watched:
            newest = backend.newest(handle, transport)
    if newest.attempt > attempt:
        handle = handle_of(folder, backend, plan, newest.attempt)
        base = msgspec.structs.replace(base, attempt=newest.attempt, state=State.RUNNING)
    seen = backend.status(handle, transport)
    if seen is None:
        return msgspec.structs.replace(base, state=State.UNKNOWN, remark="nothing is left of it")
    base = msgspec.structs.replace(base, nodes=seen.nodes)
    if watched or (newborn and not seen_life(seen)):
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
    found = _unwatched(folder, base, backend, handle, seen, transport, newest)
    if found.state.final and backend.managed:
        # Nobody else is there to clear up, and to record it.
        with contextlib.suppress(ClusterkitError):
            backend.cancel(handle, transport)
            folder.write_json("state.json", found)
    return found


def seen_life(seen: Observation) -> bool:
    """Whether any node of it has started."""
    return any(node.state is not State.PENDING for node in seen.nodes)


def _unwatched(
    folder: RunFolder,
    base: RunStatus,
    backend: Backend,
    handle: Handle,
    seen: Observation,
    transport: Transport,
    newest: Newest,
) -> RunStatus:
    """The supervisor was killed: only the nodes can tell, and whatever watches where they are."""
    replace = msgspec.structs.replace
    job = folder.maybe_json("job.json", JobSpec)
    restarts = 0 if job is None else max(0, job.restarts - (handle.attempt - 1))
    if seen.state is State.RUNNING:
        return replace(
            base,
            state=State.RUNNING,
            remark=f"its supervisor is gone: {_alone(backend, newest, restarts)}; "
            f"`clusterkit attach {folder.run_id}` watches over it again, "
            f"`clusterkit cancel {folder.run_id}` ends it",
        )
    if folder.is_cancelled():
        return replace(base, state=State.CANCELLED, exit_code=EXIT_INTERRUPTED)
    finished = max((node.ended_at or 0.0 for node in seen.nodes), default=0.0) or None
    if newest.late and job is not None:
        failure = over_time(job)
    elif seen.state is State.SUCCEEDED:
        return replace(base, state=State.SUCCEEDED, exit_code=0, finished_at=finished)
    elif newest.watched and not newest.settled and (restarts or not seen_life(seen)):
        words = f"it starts again; `clusterkit attach {folder.run_id}` follows it"
        return replace(base, state=State.RESTARTING, remark=f"a watcher in the cluster: {words}")
    elif not seen_life(seen):
        failure = Failure(
            node=None, rank=None, exit_code=1, cause="clusterkit was killed before it started it",
            hint="submit it again",
        )  # fmt: skip
    else:
        failure = diagnosis(backend, handle, seen, transport)
    left = f"nobody was there to start it again ({counted(restarts, 'restart')} left)"
    return replace(
        base,
        state=State.UNKNOWN if seen.state is State.UNKNOWN else State.FAILED,
        exit_code=failure.exit_code or 1,
        failure=failure,
        finished_at=finished,
        remark=left if restarts and not newest.late else base.remark,
    )


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
    before = current(folder)
    leftovers = folder.file(LEFTOVERS)
    if before.state.final and not leftovers.exists():
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
    transport = backends.transport_for(cluster)
    deadline = time.monotonic() + plan.stop_grace + 10
    while supervisor_alive(folder) and time.monotonic() < deadline:
        if current(folder).state.final:
            break
        time.sleep(POLL_SECONDS / 2)
    if not supervisor_alive(folder):
        with contextlib.suppress(ClusterkitError):
            backend.collect(handle_of(folder, backend, plan, before.attempt), transport)
    try:
        backend.cancel(Handle(plan, before.attempt), transport)
    except ClusterkitError as error:
        with contextlib.suppress(RunFolderError):
            folder.write(LEFTOVERS, f"{error.message}\n")
        after = msgspec.structs.replace(
            current(folder), remark=leftover_words(folder, error.message)
        )
    else:
        leftovers.unlink(missing_ok=True)
        after = msgspec.structs.replace(current(folder), remark=None)
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
    """Remove what a run left on other machines.

    Raises:
        Unavailable: a host does not answer.
    """
    try:
        plan, cluster = read_plan(folder), read_cluster(folder)
    except RunFolderError:
        return  # damaged: nobody knows of hosts
    backend = backends.backend(plan.backend)
    if backend.elsewhere:
        backend.forget(handle_of(folder, backend, plan, 1), backends.transport_for(cluster))


def abandon(folder: RunFolder) -> None:
    """End a submit that was interrupted: its supervisor may be about to come up."""
    if not folder.file("supervisor.log").exists():
        return  # it was not started
    deadline = time.monotonic() + ABANDON_SECONDS
    with contextlib.suppress(ClusterkitError):
        folder.mark_cancelled()
        while not folder.file("supervisor.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        cancel(folder)


def spawn(folder: RunFolder, *, adopt: bool = False) -> None:
    """Start the supervisor, detached from this process and from the terminal.

    Args:
        adopt: it takes over a run whose supervisor is gone.

    Raises:
        SubmitFailed: it does not come up; the message holds what it said.
    """
    log = str(folder.file("supervisor.log"))
    argv = [*_SUPERVISOR, str(folder.path)]
    if adopt:
        argv.append("--adopt")
        folder.file("supervisor.json").unlink(missing_ok=True)
    LocalTransport().start("localhost", ["/bin/sh", "-c", 'exec "$@" >>"$0" 2>&1', log, *argv])
    _await_birth(folder)


def _await_birth(folder: RunFolder) -> None:
    deadline = time.monotonic() + BIRTH_SECONDS
    while not folder.file("supervisor.json").exists():
        if time.monotonic() > deadline:
            said = folder.read("supervisor.log").decode(errors="replace").strip()
            raise SubmitFailed(f"the run's supervisor did not start: {said or 'no output'}")
        time.sleep(0.01)


class Standby:
    """A supervisor that starts up while its run is still being prepared.

    It imports what it needs and waits to be told the run's folder. It ends when it is not needed
    (`close`), and with this process.
    """

    def __init__(self, backend: str) -> None:
        # As in `LocalTransport.start`: the shell ends at once, so that it is nobody's child.
        shell = subprocess.Popen(
            ["/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh", *_SUPERVISOR, STAND_BY, backend],
            start_new_session=True, stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        shell.wait()
        assert shell.stdin is not None
        self._pipe = shell.stdin

    def take(self, folder: RunFolder) -> None:
        """Have it supervise the run; as `spawn`."""
        folder.write("supervisor.log", b"")
        try:
            self._pipe.write(os.fsencode(folder.path))
            self._pipe.close()
        except BrokenPipeError:  # somebody has killed it
            spawn(folder)
        else:
            _await_birth(folder)

    def close(self) -> None:
        """It is not needed; fine to repeat, and after `take`."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()


def _stood_by(backend: str) -> Path | None:
    """The folder of the run that this process was started for, once it is there."""
    with contextlib.suppress(ImportError):  # which will be told when it is needed
        backends.backend_type(backend).warm()
    told = sys.stdin.buffer.read()
    if not told:
        return None
    path = Path(os.fsdecode(told))
    log = os.open(path / "supervisor.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(ours, theirs)
    return path


def main(argv: list[str]) -> None:
    """``RUN_DIR [--adopt]``, or ``--stand-by BACKEND``."""
    path = _stood_by(argv[1]) if argv[0] == STAND_BY else Path(argv[0])
    if path is not None:
        Supervisor(RunFolder(path)).main(adopt="--adopt" in argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
