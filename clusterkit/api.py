"""Every verb of clusterkit as a function; the command line only reads arguments and prints.

from clusterkit import api

run = api.submit("jobs/ddp.yaml", nodes=2)
for line in run.logs(follow=True):
    print(line.rank, line.text)
print(run.wait().state, run.metrics()[-1]["loss"])
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import clusterkit
from clusterkit import agent, backends, loader, logs, supervise
from clusterkit import runs as store
from clusterkit.backends.base import Backend, Handle, check_capabilities
from clusterkit.cluster import ClusterSpec, Facts
from clusterkit.errors import BadInput, RunFolderError
from clusterkit.logs import LogLine
from clusterkit.plan import Plan
from clusterkit.runs import Event, RunFolder, Submission
from clusterkit.spec import JobSpec, check_job
from clusterkit.status import RunStatus, State

Job = str | os.PathLike[str] | JobSpec | Sequence[str]
"""A job file's path, a `JobSpec`, or a command such as ``["python", "train.py", "--fast"]``."""


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
        while True:
            status = self.status()
            if status.state.final or (until is not None and until(status)):
                return status
            if status.state is State.UNKNOWN and not self._lives():
                return status  # it will not get any better
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.id} is {status.state} after {timeout:g} s")
            time.sleep(supervise.POLL_SECONDS / 2)

    def _lives(self) -> bool:
        """Whether any process of it runs on this machine, whatever its folder says."""
        watched = supervise.supervisor_alive(self._folder)
        return watched or bool(agent.processes_of(str(self.path)))

    def wait_started(self, timeout: float = 60.0) -> RunStatus:
        """The status once every node runs (or the run has ended)."""
        return self.wait(
            timeout,
            until=lambda status: (
                bool(status.nodes) and all(node.state is not State.PENDING for node in status.nodes)
            ),
        )

    def logs(
        self, *, rank: int | None = None, node: int | None = None, follow: bool = False
    ) -> Iterator[LogLine]:
        """Lines of all attempts, in order of time within each; with ``follow`` until the run ends.

        Raises:
            BadInput: the run has no such node or rank.
        """
        plan = self.plan
        if node is not None and not 0 <= node < plan.nodes:
            raise BadInput(f"node {node}: run {self.id} has nodes 0 to {plan.nodes - 1}")
        if rank is not None and not 0 <= rank < plan.world_size:
            raise BadInput(f"rank {rank}: run {self.id} has ranks 0 to {plan.world_size - 1}")
        return self._logs(plan, rank, node, follow)

    def _logs(
        self, plan: Plan, rank: int | None, node: int | None, follow: bool
    ) -> Iterator[LogLine]:
        backend = backends.backend(plan.backend)
        transport = backends.transport_for(supervise.read_cluster(self._folder))
        attempt = 1
        while True:

            def goes_on(attempt: int = attempt) -> bool:
                status = self.status()
                lost = status.state is State.UNKNOWN and not self._lives()
                return not status.state.final and not lost and status.attempt == attempt

            yield from backend.logs(
                Handle(plan, attempt),
                transport,
                rank=rank,
                node=node,
                follow=goes_on if follow else None,
            )
            if self.status().attempt <= attempt:
                return
            attempt += 1

    def metrics(self) -> list[dict[str, Any]]:
        """What rank 0 reported: a dict per step with ``step``, ``loss``, ``tokens_per_second``."""
        return list(logs.metrics(self.logs()))

    def marks(self) -> list[dict[str, Any]]:
        """Every marked line's object (`clusterkit.marks`), metrics among them."""
        return [event for line in self.logs() if (event := line.event) is not None]

    def cancel(self) -> RunStatus:
        """End it, with everything it started; fine to repeat."""
        return supervise.cancel(self._folder)

    def delete(self) -> None:
        """Remove the run's folder: logs, metrics, checkpoints in it.

        Raises:
            BadInput: the run has not ended.
        """
        status = self.status()
        if not status.state.final and (status.state is not State.UNKNOWN or self._lives()):
            raise BadInput(f"run {self.id} is {status.state}", hint=f"clusterkit cancel {self.id}")
        try:
            shutil.rmtree(self._folder.path)
        except OSError as error:
            raise RunFolderError(f"cannot remove {error.filename}: {error.strerror}") from error


@dataclass(frozen=True)
class Prepared:
    """A job, a cluster and the plan they make."""

    job: JobSpec
    cluster_name: str
    cluster: ClusterSpec
    facts: Facts
    backend: Backend
    plan: Plan


def prepare(
    job: Job,
    *,
    cluster: str = "local",
    clusters_file: str | os.PathLike[str] | None = None,
    nodes: int | str | None = None,
    gpus: int | None = None,
    settings: Sequence[str] = (),
    more_args: Sequence[str] = (),
    facts: Facts | None = None,
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
        facts: instead of probing.
        run_id: instead of a new one; or what makes one of the job's name.

    Raises:
        ClusterkitError: anything that would keep the job from starting.
    """
    spec, document = _job(job, settings)
    flags = {"nodes": "--nodes"} if nodes is not None else {}
    flags |= {"gpus_per_node": "--gpus"} if gpus is not None else {}
    with document.locating(flags) if document else contextlib.nullcontext():
        spec = msgspec.structs.replace(spec, args=(*spec.args, *more_args))
        spec = _with_flags(spec, nodes, gpus)
        missing = [name for name in spec.secrets if name not in os.environ]
        if missing:
            raise BadInput(
                f"secrets: {missing[0]} is not set in your environment",
                hint=f"export {missing[0]}=...",
            )
    entry = loader.load_cluster(cluster, clusters_file)
    kind = backends.backend_type(entry.backend)
    if kind.unsupported:
        everyone = {name: backends.backend_type(name) for name in backends.NAMES}
        check_capabilities(kind, spec, everyone)
    backend = kind()
    if facts is None:
        facts = backend.probe(entry, backends.transport_for(entry))
    if not facts.hosts:
        raise BadInput("facts: they name no host", hint="take the facts.json of a run")
    if callable(run_id):
        run_id = run_id(spec.name)
    run_id = store.check_run_id(run_id) if run_id else store.new_run_id(spec.name)
    with document.locating(flags) if document else contextlib.nullcontext():
        plan = backend.plan(spec, entry, facts, run_id)
    return Prepared(spec, cluster, entry, facts, backend, plan)


def _with_flags(spec: JobSpec, nodes: int | str | None, gpus: int | None) -> JobSpec:
    if gpus is not None and gpus < 1:
        raise BadInput(f"gpus_per_node: {gpus}: a node needs at least 1 rank")
    spec = msgspec.structs.replace(
        spec,
        nodes=spec.nodes if nodes is None else nodes,
        gpus_per_node=spec.gpus_per_node if gpus is None else gpus,
    )
    check_job(spec)
    return spec


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


def launch(ready: Prepared) -> Run:
    """Write the run folder and start the run's supervisor."""
    folder = RunFolder.create(ready.plan.run_id, Path(ready.facts.home))
    try:
        folder.write_json("job.json", ready.job)
        folder.write_json("cluster.json", {"backend": ready.backend.name} | _plain(ready.cluster))
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
        supervise.spawn(folder)
    except BaseException:
        supervise.abandon(folder)
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return Run(folder)


def _job(job: Job, settings: Sequence[str]) -> tuple[JobSpec, loader.Document | None]:
    """The job, and the file it stands in, if any."""
    if isinstance(job, (str, os.PathLike)):
        loaded = loader.read_job(Path(job), settings)
        return loaded.job, loaded.document
    if not isinstance(job, JobSpec):
        job = loader.job_from_command(list(job))
    elif job.workdir is None:
        check_job(job)
        job = loader.locate_program(job, [loader.current_folder()])
    if not settings:
        return job, None
    document = loader.Document("--set", _plain(job), {})
    for setting in settings:
        loader.apply_setting(document, setting)
    changed = loader.convert(document, (), document.data, JobSpec)
    check_job(changed)
    return changed, None


def _plain(struct: Any) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(struct)
    return plain


def get(run: str) -> Run:
    """A run by its id, the beginning of its id, or ``last``.

    Raises:
        RunNotFound: none, or several.
    """
    return Run(store.find(run))


def runs() -> list[RunStatus]:
    """Every run's status, newest first."""
    return [supervise.current(folder) for folder in store.all_runs()]


def status(run: str) -> RunStatus:
    """`Run.status` by id."""
    return get(run).status()


def log_lines(
    run: str, *, rank: int | None = None, node: int | None = None, follow: bool = False
) -> Iterator[LogLine]:
    """`Run.logs` by id."""
    return get(run).logs(rank=rank, node=node, follow=follow)


def metrics(run: str) -> list[dict[str, Any]]:
    """`Run.metrics` by id."""
    return get(run).metrics()


def cancel(run: str) -> RunStatus:
    """`Run.cancel` by id."""
    return get(run).cancel()


def plot(names: Sequence[str], output: str | os.PathLike[str]) -> Path:
    """Loss and tokens per second of one or several runs as a picture; the suffix says which kind.

    Raises:
        BadInput: a run without metrics, or a suffix that is no picture's.
        Unavailable: matplotlib is not installed.
    """
    from clusterkit.ui import plots

    chosen = [get(name) for name in names]
    return plots.draw({run.id: run.metrics() for run in chosen}, Path(output))


def schema() -> dict[str, Any]:
    """JSON schema of job files, for editors."""
    return loader.json_schema()
