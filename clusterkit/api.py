"""Every verb of clusterkit as a function; the command line only reads arguments and prints.

from clusterkit import api

run = api.submit("jobs/ddp.yaml", nodes=2)
for line in run.logs(follow=True):
    print(line.rank, line.text)
print(run.wait().state)
for metrics in run.metrics()[-1:]:  # none, if it failed before its first step
    print(metrics["loss"])
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import clusterkit
from clusterkit import agent, backends, execute, loader, logs, project, request, supervise
from clusterkit import runs as store
from clusterkit.backends.base import Backend, check_capabilities
from clusterkit.cluster import ClusterSpec, Facts
from clusterkit.errors import EXIT_FAILURE, BadInput, ClusterkitError, RunFailed, RunFolderError
from clusterkit.logs import LogLine
from clusterkit.plan import Note, Plan
from clusterkit.runs import Event, RunFolder, Submission
from clusterkit.spec import JobSpec, parse_nodes
from clusterkit.status import RunStatus, State
from clusterkit.transport import Transport, fan_out, in_order

if TYPE_CHECKING:
    from clusterkit import bandwidth
    from clusterkit import doctor as doctors
    from clusterkit.catalogue import CatalogueEntry
    from clusterkit.estimate import Estimate

Job = request.Job

Progress = Callable[[str, int, int], None]
"""Told of a host, bytes sent to it, bytes to send."""


class Run:
    """One submitted run, found again by its id from any process."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def __repr__(self) -> str:
        return f"<Run {self.id}>"

    @property
    def id(self) -> str:
        return self._folder.run_id

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._folder.path

    @property
    def plan(self) -> Plan:
        """What was carried out."""
        return supervise.read_plan(self._folder)

    def status(self) -> RunStatus:
        """How it stands now."""
        return supervise.current(self._folder)

    def events(self) -> list[Event]:
        """What the supervisor did beyond the plan: another port, a restart."""
        return self._folder.records("events.jsonl", Event)

    def wait(
        self, timeout: float | None = None, *, until: Callable[[RunStatus], bool] | None = None
    ) -> RunStatus:
        """The status once the run has ended, or once ``until`` holds of it.

        Raises:
            TimeoutError: not within ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with supervise.Connections() as connections:
            while True:
                status = supervise.current(self._folder, connections)
                if status.state.final or (until is not None and until(status)):
                    return status
                if status.state is State.UNKNOWN and not self._lives():
                    return status  # it will not get any better
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"run {self.id} is {status.state} after {timeout:g} s")
                time.sleep(supervise.POLL_SECONDS / 2)

    @property
    def watched(self) -> bool:
        """Whether its supervisor lives."""
        return supervise.supervisor_alive(self._folder)

    def _lives(self) -> bool:
        """Whether any process of it runs on this machine, whatever its folder says."""
        return self.watched or bool(agent.processes_of(str(self.path)))

    def wait_started(self, timeout: float = 60.0) -> RunStatus:
        """The status once every node runs (or the run has ended)."""
        return self.wait(
            timeout,
            until=lambda status: (
                bool(status.nodes) and all(node.state is not State.PENDING for node in status.nodes)
            ),
        )

    def logs(
        self,
        *,
        rank: int | None = None,
        node: int | None = None,
        follow: bool = False,
        note: Callable[[Event], None] = lambda event: None,
    ) -> Iterator[LogLine]:
        """Lines of all attempts, in order of time within each; with ``follow`` until the run ends.

        Args:
            note: gets the events of an attempt after its last line.

        Raises:
            BadInput: the run has no such node or rank.
        """
        batches = self.log_batches(rank=rank, node=node, follow=follow, note=note)
        return itertools.chain.from_iterable(batches)

    def log_batches(
        self,
        *,
        rank: int | None = None,
        node: int | None = None,
        follow: bool = False,
        note: Callable[[Event], None] = lambda event: None,
    ) -> Iterator[list[LogLine]]:
        """`logs`, some thousand lines at a time: for those who have a use for more than one.

        Raises:
            BadInput: the run has no such node or rank.
        """
        plan = self.plan
        if node is not None and not 0 <= node < plan.nodes:
            raise BadInput(f"node {node}: run {self.id} has nodes 0 to {plan.nodes - 1}")
        if rank is not None and not 0 <= rank < plan.world_size:
            raise BadInput(f"rank {rank}: run {self.id} has ranks 0 to {plan.world_size - 1}")
        nodes = range(plan.nodes) if node is None else (node,)
        return self._batches(nodes, rank, follow, note)

    def _batches(
        self, nodes: Sequence[int], rank: int | None, follow: bool, note: Callable[[Event], None]
    ) -> Iterator[list[LogLine]]:
        with supervise.Connections() as connections:
            # Where nobody watches over the run, this brings what only its hosts have.
            status = supervise.current(self._folder, connections)

            def goes_on() -> bool:
                nonlocal status
                status = supervise.current(self._folder, connections)
                lost = status.state is State.UNKNOWN and not self._lives()
                return not status.state.final and not lost and status.attempt == attempt

            for attempt in itertools.count(1):
                for batch in self._folder.log(attempt, nodes, goes_on if follow else None):
                    yield batch if rank is None else [x for x in batch if x.rank == rank]
                for event in self.events():
                    if event.attempt == attempt:
                        note(event)
                if status.attempt <= attempt:
                    return

    def metrics(self) -> list[dict[str, Any]]:
        """What rank 0 reported: a dict per step with ``step``, ``loss``, ``tokens_per_second``."""
        return list(logs.metrics(self.logs()))

    def marks(self) -> list[dict[str, Any]]:
        """Every marked line's object (`clusterkit.marks`), metrics among them."""
        return [event for line in self.logs() if (event := line.event) is not None]

    def attach(self) -> bool:
        """Have it watched over again: its supervisor was killed, or the machine it ran on. If the
        run has failed meanwhile, its restarts are used.

        Returns:
            False: somebody watches over it already, or nothing of it is left to do.

        Raises:
            BadInput: a secret that a restart needs is not in the environment.
        """
        if not supervise.unfinished(self._folder):
            return False
        _check_secrets(self._folder.read_json("job.json", JobSpec))
        if (lock := self._folder.hold()) is None:
            return False
        with lock:
            supervise.spawn(self._folder, lock, adopt=True)
        return True

    def cancel(self) -> RunStatus:
        """End it, with everything it started; fine to repeat."""
        return supervise.cancel(self._folder)

    def delete(self, *, force: bool = False) -> None:
        """Remove the run's folder, here and on its hosts: logs, metrics, checkpoints in it.

        Args:
            force: here also where a host does not answer.

        Raises:
            BadInput: the run has not ended.
            Unavailable: a host does not answer; the folder here stays.
        """
        status = self.status()
        if not status.state.final and (status.state is not State.UNKNOWN or self._lives()):
            raise BadInput(f"run {self.id} is {status.state}", hint=f"clusterkit cancel {self.id}")
        try:
            supervise.forget(self._folder)
        except ClusterkitError:
            if not force:
                raise
        try:
            shutil.rmtree(self._folder.path)
        except OSError as error:
            raise RunFolderError(f"cannot remove {error.filename}: {error.strerror}") from error


class ListedRun(RunStatus, frozen=True, kw_only=True):
    """A run of a cluster, this machine's or not."""

    user: str | None = None
    """Who submitted it, where the cluster says so."""
    here: bool = True
    """Whether this machine has its folder; otherwise the state is what the cluster says."""
    nodes_asked: int | None = None
    """How many nodes it asks for, where they are not listed."""


@dataclass(frozen=True, repr=False)
class Prepared:
    """A job, a cluster and the plan they make."""

    job: JobSpec
    cluster_name: str
    cluster: ClusterSpec
    facts: Facts
    backend: Backend
    plan: Plan
    transport: Transport

    def __repr__(self) -> str:
        return f"<Prepared {self.job.name} for {self.cluster_name}: {self.plan.summary}>"


def prepare(
    job: Job,
    *,
    cluster: str = "local",
    clusters_file: str | os.PathLike[str] | None = None,
    nodes: int | str | None = None,
    gpus: int | None = None,
    settings: Sequence[str] = (),
    more_args: Sequence[str] = (),
    include: str | None = None,
    exclude: str | None = None,
    facts: Facts | None = None,
    doctor: bool = True,
    run_id: str | Callable[[str], str] | None = None,
) -> Prepared:
    """Read the job and the cluster, probe the cluster, make the plan; nothing is written.

    Args:
        job: see `Job`.
        cluster: an entry of the cluster file; ``local`` needs none.
        clusters_file: instead of the one that is found from here upwards.
        nodes: instead of the job's ``nodes``: ``2`` or ``"2:4"``.
        gpus: instead of the job's ``gpus_per_node``.
        settings: further ``key=value`` changes to the job file.
        more_args: further arguments of the program, after the job's own.
        include: only these hosts and GPUs of the cluster: ``host1@host2:0,1``.
        exclude: all hosts and GPUs but these.
        facts: instead of probing.
        doctor: examine the hosts first, where the nodes are other machines.
        run_id: instead of a new one; or what makes one of the job's name.

    Raises:
        ClusterkitError: anything that would keep the job from starting.
    """
    asked = request.read(job, settings, nodes, gpus, more_args, cluster)
    spec = asked.job
    with asked.locating():
        _check_secrets(spec)
    loaded = _cluster(cluster, clusters_file, include, exclude)
    entry = loaded.cluster
    kind = backends.backend_type(entry.backend)
    if kind.unsupported:
        everyone = {name: backends.backend_type(name) for name in backends.NAMES}
        check_capabilities(kind, spec, everyone)
    backend = kind()
    transport = backends.transport_for(entry)
    with asked.locating(loaded):
        if probed := facts is None:

            def probe() -> Facts:
                return backend.probe(entry, transport, spec)

            subject = None
            if doctor and backend.elsewhere and not backend.managed:
                subject = backend.subject(cluster, entry, spec)
            facts = probe() if subject is None else _probed(subject, transport, probe)
        if not facts.hosts:
            raise BadInput("facts: no host is named", hint="use the facts.json of a run")
        if callable(run_id):
            run_id = run_id(spec.name)
        run_id = store.check_run_id(run_id) if run_id else store.new_run_id(spec.name)
        plan = backend.plan(spec, entry, facts, run_id)
        notes = list(plan.notes)
        if spec.deepspeed is not None:
            from clusterkit import deepspeed_probe

            where = transport if probed and not backend.managed else None
            notes += deepspeed_probe.examine(spec, plan, facts, where, {**entry.env, **spec.env})
    warnings = [*asked.remarks, facts.project.remark if facts.project is not None else None]
    if any(host.gpus for host in facts.hosts):
        from clusterkit import estimate as estimates

        warnings.append(estimates.warning(spec, facts))
    notes += [Note("", warning, "") for warning in warnings if warning]
    plan = msgspec.structs.replace(plan, notes=tuple(notes))
    return Prepared(spec, cluster, entry, facts, backend, plan, transport)


def _probed(subject: doctors.Patient, transport: Transport, probe: Callable[[], Facts]) -> Facts:
    """What ``probe`` finds; at the same time the quick checks look whether the hosts are fit.

    Raises:
        ClusterkitError: they are not.
    """
    from concurrent.futures import ThreadPoolExecutor

    from clusterkit import doctor as preflight

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(preflight.examine, subject, transport, quick=True)
        if subject.port is not None:
            looking.exception()  # both try to listen on the fixed port: one after the other
        facts = problem = None
        try:
            facts = probe()
        except ClusterkitError as error:
            problem = error
        refusal = preflight.refusal(looking.result())
    if refusal is not None and not isinstance(problem, BadInput):
        raise refusal
    if facts is None:
        assert problem is not None
        raise problem
    return facts


def settled_cluster(
    name: str,
    clusters_file: str | os.PathLike[str] | None = None,
    *,
    include: str | None = None,
    exclude: str | None = None,
) -> ClusterSpec:
    """A cluster's entry with its hosts read from the inventory.

    Raises:
        ClusterkitError: no such entry, an inventory that cannot be used.
    """
    return _cluster(name, clusters_file, include, exclude).cluster


def _cluster(
    name: str,
    clusters_file: str | os.PathLike[str] | None,
    include: str | None,
    exclude: str | None,
) -> loader.LoadedCluster:
    """As `settled_cluster`, with the file that the entry stands in."""
    loaded = loader.read_cluster(name, clusters_file)
    kind = backends.backend_type(loaded.cluster.backend)
    flags = {"include": "--include", "exclude": "--exclude"} if include or exclude else {}
    with loader.locating(None, loaded, flags):
        cluster = kind.settled(loaded.cluster, loaded.folder, include, exclude)
    return dataclasses.replace(loaded, cluster=cluster)


def _check_secrets(spec: JobSpec, why: str = "") -> None:
    """Refuse a job whose secrets are not in the environment."""
    missing = [name for name in spec.secrets if name not in os.environ]
    if missing:
        raise BadInput(
            f"secrets: {missing[0]} is not set in your environment",
            hint=f"{why}export {missing[0]}=...",
            job="secrets",
        )


def plan(job: Job, **options: Any) -> Plan:
    """Exactly what `submit` would do, as data; options as for `prepare`."""
    if options.get("run_id") is None:
        options["run_id"] = lambda name: f"{store.slug(name)}-plan"
    return prepare(job, **options).plan


def submit(job: Job, **options: Any) -> Run:
    """Start a job and return at once; it goes on when this process ends.

    Options as for `prepare`.

    Raises:
        ClusterkitError: nothing was started and nothing is left behind.
    """
    return launch(prepare(job, **options))


def launch(ready: Prepared, progress: Progress | None = None) -> Run:
    """Write the run folder, send the project, start the run's supervisor.

    Args:
        progress: told of a host, the bytes sent to it and the bytes to send.
    """
    elsewhere = ready.backend.elsewhere
    folder = RunFolder.create(
        ready.plan.run_id, store.home() if elsewhere else Path(ready.facts.home)
    )
    try:
        lock = folder.hold()
        assert lock is not None  # the folder is new
        with lock:
            folder.write_json("job.json", ready.job)
            entry = {"backend": ready.backend.name} | _plain(ready.cluster)
            folder.write_json("cluster.json", entry)
            supervise.save_plan(folder, ready.facts, ready.plan)
            folder.write_json(
                "run.json",
                Submission(
                    run=folder.run_id,
                    job=ready.job.name,
                    cluster=ready.cluster_name,
                    backend=ready.backend.name,
                    created_at=time.time(),
                    clusterkit=clusterkit.__version__,
                ),
            )
            _send_trees(ready, progress)
            supervise.spawn(folder, lock)
    except BaseException:
        supervise.abandon(folder)
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return Run(folder)


def _send_trees(ready: Prepared, progress: Progress | None = None) -> None:
    """Bring the plan's folders to all its hosts, at once.

    Raises:
        ClusterkitError: a host does not take them, or they have changed since they were probed.
    """
    plan = ready.plan
    snapshots = {}
    for tree in plan.trees:
        shipped = ready.facts.shipped is not None and tree.digest == ready.facts.shipped.digest
        found = (
            project.own_package()
            if shipped
            else project.snapshot(Path(ready.job.workdir or "."), ready.job.program)
        )
        if found.digest != tree.digest:
            raise BadInput(
                f"{tree.source} has changed since the run was planned",
                hint="submit again; a file that changes all the time cannot be part of the project",
            )
        snapshots[tree.path] = found

    def send(host: str) -> None:
        for tree in plan.trees:
            project.send(
                snapshots[tree.path], tree, host, plan.python, ready.transport,
                progress or (lambda *_: None),
            )  # fmt: skip

    if plan.trees:
        in_order(fan_out(execute.everyone(plan), send))


def _plain(struct: Any) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(struct)
    return plain


def get(run: str | Run) -> Run:
    """A run by its id, the beginning of its id, or ``last``; a `Run` is itself.

    Raises:
        RunNotFound: none, or several.
    """
    return run if isinstance(run, Run) else Run(store.find(run))


def runs() -> list[RunStatus]:
    """Every run's status, newest first."""
    return [supervise.current(folder) for folder in store.all_runs()]


def _unpack(packed: bytes, path: Path) -> None:
    """A tar.gz as a folder; nothing of it can lie outside.

    Raises:
        RunFolderError: it is damaged, or there is no room.
    """
    import io
    import tarfile

    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(path, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise RunFolderError(f"the project of the run cannot be unpacked: {error}") from error


def runs_of(
    cluster: str, *, clusters_file: str | os.PathLike[str] | None = None
) -> list[ListedRun]:
    """Runs of a cluster, newest first: this machine's, and those of others that it knows of.

    Raises:
        Unavailable: the cluster does not answer.
    """
    entry = settled_cluster(cluster, clusters_file)
    backend = backends.backend(entry.backend)
    there = {run.run: run for run in backend.listing(entry, backends.transport_for(entry))}
    found = []
    for status in runs():
        if status.cluster == cluster or status.run in there:
            other = there.pop(status.run, None)
            found.append(
                ListedRun(
                    **msgspec.structs.asdict(status), user=None if other is None else other.user
                )
            )
    found += [
        ListedRun(
            run=run.run, job=run.job, cluster=cluster, backend=backend.name, state=run.state,
            attempt=run.attempt, started_at=run.started_at, finished_at=run.finished_at,
            remark=f"a {run.kind} of {run.user or 'somebody'}'s; "
            f"`clusterkit attach {run.run} --cluster {cluster}` takes it up",
            user=run.user, here=False, nodes_asked=run.pods,
        )
        for run in there.values()
    ]  # fmt: skip
    return sorted(found, key=lambda run: run.started_at or 0.0, reverse=True)


def status(run: str | Run) -> RunStatus:
    """`Run.status` by id."""
    return get(run).status()


def log_lines(run: str | Run, **options: Any) -> Iterator[LogLine]:
    """`Run.logs` by id; options as there."""
    return get(run).logs(**options)


def metrics(run: str | Run) -> list[dict[str, Any]]:
    """`Run.metrics` by id."""
    return get(run).metrics()


def attach(
    run: str | Run,
    *,
    cluster: str | None = None,
    clusters_file: str | os.PathLike[str] | None = None,
) -> Run:
    """`Run.attach` by id.

    Args:
        run: as for `get`.
        cluster: where a run of another machine runs, if the cluster remembers what it was made of;
            it becomes one of this machine's. ``last`` is the newest there.
        clusters_file: as for `prepare`.

    Raises:
        RunNotFound: neither this machine nor the cluster knows of it.
        BadInput: a secret that a restart needs is not in the environment.
    """
    if cluster is not None and isinstance(run, str):
        known = store.RUN_ID.match(run) and (store.home() / "runs" / run).is_dir()
        if not known:
            return _taken_up(run, cluster, clusters_file)
    found = get(run)
    found.attach()
    return found


def _taken_up(run: str, cluster: str, clusters_file: str | os.PathLike[str] | None) -> Run:
    """A run of another machine, with a folder here and a supervisor that watches over it."""
    entry = settled_cluster(cluster, clusters_file)
    backend = backends.backend(entry.backend)
    transport = backends.transport_for(entry)
    found = backend.recover(run, entry, transport)
    if (store.home() / "runs" / found.run).is_dir():
        return attach(found.run)
    _check_secrets(found.job, f"a restart of run {found.run} needs it: ")
    plan = backend.plan(found.job, found.cluster, found.facts, found.run)
    folder = RunFolder.create(found.run)
    try:
        folder.write_json("job.json", found.job)
        folder.write_json("cluster.json", {"backend": backend.name} | _plain(found.cluster))
        supervise.save_plan(folder, found.facts, plan)
        execute.write_files(plan, transport)
        if found.project is not None:
            _unpack(found.project, Path(plan.trees[0].path))
        submission = Submission(
            run=found.run,
            job=found.job.name,
            cluster=cluster,
            backend=backend.name,
            created_at=found.created_at,
            clusterkit=clusterkit.__version__,
        )
        folder.write_json(
            "state.json",
            RunStatus(
                run=found.run, job=found.job.name, cluster=cluster, backend=backend.name,
                state=State.RUNNING, attempt=found.attempt, started_at=found.created_at,
            ),
        )  # fmt: skip
        folder.write_json("run.json", submission)
        text = f"taken up on this machine, in attempt {found.attempt}"
        folder.append("events.jsonl", Event(at=time.time(), attempt=found.attempt, text=text))
        lock = folder.hold()
        assert lock is not None  # the folder is new
        with lock:
            supervise.spawn(folder, lock, adopt=True)
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return Run(folder)


def cancel(run: str | Run) -> RunStatus:
    """`Run.cancel` by id."""
    return get(run).cancel()


def plot(names: Sequence[str | Run], output: str | os.PathLike[str]) -> Path:
    """Loss and tokens per second of one or several runs as a picture; the suffix says which kind.

    A run is named in it after its job, or by its id where two have the same job.

    Raises:
        BadInput: a run without metrics, or a suffix that is no picture's.
        Unavailable: matplotlib is not installed.
    """
    from clusterkit.ui import plots

    chosen = {run.id: run for run in map(get, names)}
    jobs = {name: run._folder.read_json("run.json", Submission).job for name, run in chosen.items()}
    labels = {name: name if [*jobs.values()].count(job) > 1 else job for name, job in jobs.items()}
    return plots.draw({name: run.metrics() for name, run in chosen.items()}, Path(output), labels)


def bench(
    *,
    nodes: int | None = None,
    gpus: int | None = None,
    cluster: str = "local",
    clusters_file: str | os.PathLike[str] | None = None,
    include: str | None = None,
    exclude: str | None = None,
    watch: Callable[[Run], RunStatus] = Run.wait,
    **choices: Any,
) -> bandwidth.Report:
    """Measure bandwidth and latency of the collectives in a run of its own; waits for its end.

    Args:
        nodes: how many; by default every host of the cluster.
        gpus: ranks per node, as for `prepare`.
        cluster: as for `prepare`, and so are the file and the hosts to take.
        clusters_file: as for `prepare`.
        include: as for `prepare`.
        exclude: as for `prepare`.
        watch: waits for the run's end; whoever interrupts it cancels the run.
        choices: what to measure, as for `clusterkit.bandwidth.choose`.

    Raises:
        RunFailed: the run did not succeed; the exit code is the run's own.
        ClusterkitError: it cannot be measured, or not all of it was.
    """
    from clusterkit import bandwidth
    from clusterkit.ui.words import failure_text

    options = bandwidth.choose(**choices)
    if nodes is None:
        entry = settled_cluster(cluster, clusters_file, include=include, exclude=exclude)
        backend = backends.backend_type(entry.backend)()
        nodes = max(1, backend.places(entry, backends.transport_for(entry)))
    ready = prepare(
        bandwidth.job_of(options),
        cluster=cluster,
        clusters_file=clusters_file,
        nodes=nodes,
        gpus=gpus,
        include=include,
        exclude=exclude,
    )
    bandwidth.check(options, ready.plan, ready.facts)
    run = launch(ready)
    try:
        status = watch(run)
    except BaseException:
        run.cancel()
        raise
    if status.state is not State.SUCCEEDED:
        failure, hint = status.failure, None
        if failure is not None:
            hint, failure = failure.hint, msgspec.structs.replace(failure, hint=None)
        why = failure_text(msgspec.structs.replace(status, failure=failure)) or status.remark
        raise RunFailed(
            f"run {run.id} is {status.state}{f': {why}' if why else ''}",
            hint=hint or f"clusterkit logs {run.id}",
            exit_code=status.exit_code or EXIT_FAILURE,
        )
    return bandwidth.report(run.id, run.marks(), [node.host for node in status.nodes])


def estimate(
    job: Job | None = None,
    *,
    nodes: int | str | None = None,
    gpus: int | None = None,
    cluster: str = "local",
    clusters_file: str | os.PathLike[str] | None = None,
    facts: Facts | None = None,
    settings: Sequence[str] = (),
    more_args: Sequence[str] = (),
    **question: Any,
) -> Estimate:
    """The memory that a job, or a model, takes on a GPU, for every way to divide it.

    Args:
        job: see `Job`; None where the question names a model.
        nodes: instead of the job's ``nodes``; of a range, the larger number counts.
        gpus: GPUs per node.
        cluster: whose GPUs; not looked at when the question says ``gpu_memory`` and the number
            of GPUs is known.
        clusters_file: as for `prepare`.
        facts: instead of probing.
        settings: as for `prepare`.
        more_args: as for `prepare`.
        question: fields of `clusterkit.estimate.Question`, such as ``gpu_memory="80GB"``.

    Raises:
        ClusterkitError: the model is not known, or cannot be divided like this.
    """
    from clusterkit import estimate as estimates

    asked = estimates.check(estimates.Question(**question))
    spec = None
    if job is not None:
        spec = request.read(job, settings, nodes, gpus, more_args).job
    elif nodes is not None or gpus is not None:
        request.read(JobSpec(name="model", command=("none",)), (), nodes, gpus)
    counted = gpus is not None or (spec is not None and spec.gpus_per_node != "auto")
    if facts is None and not (asked.gpu_memory is not None and counted):
        entry = settled_cluster(cluster, clusters_file)
        backend = backends.backend(entry.backend)
        facts = backend.probe(entry, backends.transport_for(entry), spec)
    count = None if nodes is None else parse_nodes(nodes)[1]
    return estimates.estimate(spec, facts, nodes=count, gpus=gpus, question=asked)


def doctor(
    job: Job | None = None,
    *,
    cluster: str = "local",
    clusters_file: str | os.PathLike[str] | None = None,
    nodes: int | str | None = None,
    gpus: int | None = None,
    settings: Sequence[str] = (),
    include: str | None = None,
    exclude: str | None = None,
    quick: bool = False,
    only: Sequence[str] | None = None,
    progress: doctors.Progress | None = None,
) -> doctors.Report:
    """Look at every host of a cluster: is it fit, and if not, which command mends it?

    Args:
        job: what the hosts are held against; without one, against what most jobs need.
        cluster, clusters_file, nodes, gpus, settings, include, exclude: as for `prepare`.
        quick: only the checks that `submit` makes as well.
        only: only the checks of these names.
        progress: told of the phase (1, 2, 3) and the hosts that have not answered yet.

    Raises:
        ClusterkitError: no such cluster, job or check. A host that does not answer is a finding.
    """
    from clusterkit import doctor as doctors

    spec = None
    if job is not None:
        spec = request.read(job, settings, nodes, gpus).job
    elif nodes is not None or gpus is not None:
        spec = request.read(JobSpec(name="any", command=("true",)), (), nodes, gpus).job
    entry = settled_cluster(cluster, clusters_file, include=include, exclude=exclude)
    subject = backends.backend(entry.backend).subject(cluster, entry, spec)
    transport = backends.transport_for(entry)
    try:
        return doctors.examine(
            subject, transport, quick=quick, only=only, progress=progress or (lambda *_: None)
        )
    finally:
        transport.close()


def jobs() -> list[CatalogueEntry]:
    """Every job file in the nearest ``jobs`` folder from here upwards, and what each needs.

    A file that cannot be read is listed with its error.

    Raises:
        BadInput: there is no such folder.
    """
    from clusterkit import catalogue

    return catalogue.entries(catalogue.find_folder())


def schema() -> dict[str, Any]:
    """JSON schema of job files, for editors."""
    from clusterkit.schema import json_schema

    return json_schema()
