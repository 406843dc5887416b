"""Prepares a job, launches it as a run, and takes over a run of another machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import clusterkit
from clusterkit import agent, backends
from clusterkit.backends.base import (
    Backend,
    SupportsPreflight,
    SupportsRemoteRuns,
    check_capabilities,
)
from clusterkit.cluster import ClusterSpec, Facts
from clusterkit.errors import (
    BadInput,
    CapabilityError,
    ClusterkitError,
    RunFolderError,
    Unavailable,
)
from clusterkit.files import user_name, write_atomic
from clusterkit.jobfile import loader, request, sources, values
from clusterkit.jobfile.arguments import checked
from clusterkit.jobfile.command import file_of
from clusterkit.lifecycle import control, supervise
from clusterkit.lifecycle.run import Run, check_secrets, get
from clusterkit.output.track import check_trackers
from clusterkit.plan import Note, Plan
from clusterkit.run import folder as run_folder
from clusterkit.run.folder import Event, RunFolder, Submission
from clusterkit.run.status import State
from clusterkit.spec import Job, JobSpec
from clusterkit.transport import Transport, fan_out, in_order

if TYPE_CHECKING:
    from clusterkit import doctor as doctors

Progress = Callable[[str, int, int], None]
"""Called with a host, the bytes sent to it and the bytes to send."""


@dataclass(frozen=True, repr=False)
class Prepared(contextlib.AbstractContextManager["Prepared"]):
    """A job, a cluster and their plan. As a context manager it closes its connections."""

    job: JobSpec
    cluster_name: str
    cluster: ClusterSpec
    facts: Facts
    backend: Backend[Any]
    plan: Plan
    transport: Transport

    def __repr__(self) -> str:
        return f"<Prepared {self.job.name} for {self.cluster_name}: {self.plan.summary}>"

    def __exit__(self, *_: object) -> None:
        self.transport.close()


@checked
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
    """Read the job and the cluster, probe the cluster and make the plan. Writes nothing.

    Args:
        job: see `clusterkit.spec.Job`.
        cluster: an entry of the cluster file; ``local`` needs none.
        clusters_file: by default the one in this folder or the nearest one above it.
        nodes: replaces the job's ``nodes``: ``2`` or ``"2:4"``.
        gpus: replaces the job's ``gpus_per_node``.
        settings: further ``key=value`` changes to the job file.
        more_args: arguments of the program after the job's own.
        include: only these hosts and GPUs of the cluster: ``host1@host2:0,1``.
        exclude: all hosts and GPUs but these.
        facts: used instead of probing.
        doctor: examine the hosts first, if the nodes are other machines.
        run_id: by default a new one; a function gets the job's name.

    Raises:
        ClusterkitError: the job could not start.
    """
    asked = request.read(job, settings, nodes, gpus, more_args, cluster)
    facts = None if facts is None else values.checked(facts, "facts")
    loaded = _cluster(cluster, clusters_file, include, exclude)
    return _prepare(asked, loaded, facts, doctor, run_id)


@checked
def prepare_again(
    run: Run,
    *,
    nodes: int | str | None = None,
    gpus: int | None = None,
    settings: Sequence[str] = (),
    more_args: Sequence[str] = (),
    doctor: bool = True,
) -> Prepared:
    """Prepare the recorded job of a run on its recorded cluster entry, as `prepare` does.

    Raises:
        RunFolderError: the record is missing or damaged.
        ClusterkitError: the job could not start.
    """
    folder = RunFolder(run.path)
    name = folder.read_json("run.json", Submission).cluster
    asked = request.read(
        folder.read_json("job.json", JobSpec), settings, nodes, gpus, more_args, name
    )
    loaded = loader.LoadedCluster(name, folder.cluster(), folder.path)
    return _prepare(asked, loaded, None, doctor, None)


def rerun(run: str | Run, **options: Any) -> Run:
    """Start the job of a run again, as a new run; options as for `prepare_again`.

    Raises:
        ClusterkitError: the run could not be started; nothing is left behind.
    """
    return launch(prepare_again(get(run), **options))


def _prepare(
    asked: request.Request,
    loaded: loader.LoadedCluster,
    facts: Facts | None,
    doctor: bool,
    run_id: str | Callable[[str], str] | None,
) -> Prepared:
    spec, cluster = asked.job, loaded.name
    with asked.locating():
        if spec.command is not None:
            from clusterkit.convert import nested  # deferred: most jobs have a program instead

            nested.check(spec)
            file = file_of(spec.command)
            if asked.missing is not None and loaded.cluster.starts_from_here(file or ""):
                raise asked.missing
        check_secrets(spec)
        check_trackers(spec)
    entry = loaded.cluster
    kind = backends.backend_type(entry.backend)
    check_capabilities(kind, spec, map(backends.backend_type, backends.NAMES))
    backend = kind()
    with contextlib.ExitStack() as undo, asked.locating(loaded):
        transport = undo.enter_context(contextlib.closing(backends.transport_for(entry)))
        if probed := facts is None:

            def probe() -> Facts:
                return backend.probe(entry, transport, spec)

            subject = None
            if doctor and isinstance(backend, SupportsPreflight):
                subject = backend.subject(cluster, entry, spec)
            facts = probe() if subject is None else _probed(subject, transport, probe)
        if not facts.hosts:
            raise BadInput("--facts names no hosts", hint="use the facts.json of a run")
        if callable(run_id):
            run_id = run_id(spec.name)
        run_id = run_folder.check_run_id(run_id) if run_id else run_folder.new_run_id(spec.name)
        if probed:
            _check_torch(spec, entry, facts)
        plan = backend.plan(spec, entry, facts, run_id)
        notes = list(plan.notes)
        if spec.deepspeed is not None:
            from clusterkit.lifecycle import deepspeed_probe

            # Ranks that the transport starts have the hosts' own Python, which can be run.
            startable = any(step.kind == "start" for step in plan.steps)
            hosts = transport if probed and startable else None
            notes += deepspeed_probe.examine(spec, plan, facts, hosts, {**entry.env, **spec.env})
        warnings = [
            *asked.remarks(plan.topology),
            facts.project.remark if facts.project is not None else None,
        ]
        if any(host.gpus for host in facts.hosts):
            from clusterkit import estimate as estimates

            warnings.append(estimates.warning(spec, facts))
        notes += [Note("", warning, "") for warning in warnings if warning]
        plan = msgspec.structs.replace(plan, notes=tuple(notes))
        undo.pop_all()
        return Prepared(spec, cluster, entry, facts, backend, plan, transport)


def _check_torch(job: JobSpec, entry: ClusterSpec, facts: Facts) -> None:
    """Refuse a Python without torch for a program that certainly imports it.

    Raises:
        Unavailable: naming the Python, and why it was chosen.
    """
    found = [host for host in facts.hosts if "torch" not in host.versions]
    # Not where the job itself puts packages on the path.
    if not found or getattr(entry, "setup", None) or "PYTHONPATH" in {**entry.env, **job.env}:
        return
    if sources.always_imports("torch", *sources.starts_of(job)):
        host = found[0]
        raise Unavailable(
            f"{job.program or job.module} imports torch, which {host.python} on {host.host} does "
            f"not have ({host.python_origin})",
            hint="create .venv in the project and install torch in it, activate the environment "
            "that has it, or name its Python: --set python=/path/to/bin/python",
        )


def _probed(subject: doctors.Subject, transport: Transport, probe: Callable[[], Facts]) -> Facts:
    """Return what ``probe`` returns, and run doctor's quick checks meanwhile.

    Raises:
        ClusterkitError: a check or ``probe`` failed.
    """
    from concurrent.futures import ThreadPoolExecutor

    from clusterkit import doctor as preflight

    with ThreadPoolExecutor(1) as pool:
        checks = pool.submit(preflight.examine, subject, transport, quick=True)
        if subject.port is not None:
            checks.exception()  # both try to listen on the fixed port: one after the other
        facts = problem = None
        try:
            facts = probe()
        except ClusterkitError as error:
            problem = error
        refusal = preflight.refusal(checks.result())
    if refusal is not None and not isinstance(problem, BadInput):
        raise refusal
    if facts is None:
        assert problem is not None
        raise problem
    return facts


@checked
def resolved_cluster(
    name: str,
    clusters_file: str | os.PathLike[str] | None = None,
    *,
    include: str | None = None,
    exclude: str | None = None,
) -> ClusterSpec:
    """Return a cluster's entry with its hosts, as read from the inventory.

    Raises:
        ClusterkitError: the entry does not exist, or its inventory cannot be used.
    """
    return _cluster(name, clusters_file, include, exclude).cluster


def _cluster(
    name: str,
    clusters_file: str | os.PathLike[str] | None,
    include: str | None,
    exclude: str | None,
) -> loader.LoadedCluster:
    """Return `resolved_cluster`, with the file of the entry."""
    loaded = loader.read_cluster(name, clusters_file)
    kind = backends.backend_type(loaded.cluster.backend)
    flags = {"include": "--include", "exclude": "--exclude"} if include or exclude else {}
    with loader.locating(None, loaded, flags):
        cluster = kind.resolved(loaded.cluster, loaded.folder, include, exclude)
    return dataclasses.replace(loaded, cluster=cluster)


def launch(ready: Prepared, progress: Progress | None = None) -> Run:
    """Write the run folder, send the project and start the run. Closes ``ready``."""

    def complete(folder: RunFolder) -> None:
        owner = f"{user_name() or os.getuid()}@{os.uname().nodename}:{folder.path}"
        ready.backend.claim(ready.plan, ready.transport, owner)
        send_trees(ready, progress)

    return _start(ready, complete, time.time())


def _start(
    ready: Prepared,
    complete: Callable[[RunFolder], None],
    created_at: float,
    *,
    adopt: bool = False,
) -> Run:
    """Make a run's folder and start its supervisor.

    Args:
        complete: called in between.
        adopt: the run has been started already; it is not ended if this fails.
    """
    folder, started = None, False
    try:
        with ready:
            folder = RunFolder.create(ready.plan.run_id, ready.backend.home(ready.facts))
            lock = folder.acquire_supervisor_lock()
            assert lock is not None  # the folder is new
            with lock:
                _record(folder, ready, created_at)
                complete(folder)
                if adopt:
                    supervise.spawn(folder, lock, adopt=True)
                else:
                    supervise.launch(folder, lock, ready.transport)
            started = True
    except BaseException:  # also Ctrl-C while the connections are being closed: it runs by then
        if folder is not None and not adopt:
            control.undo_submit(folder)
        if folder is not None and not started:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return Run(folder)


def _record(folder: RunFolder, ready: Prepared, created_at: float) -> None:
    """Write what describes a run."""
    folder.write_json("job.json", ready.job)
    entry = {"backend": ready.backend.name} | msgspec.to_builtins(ready.cluster)
    folder.write_json("cluster.json", entry)
    folder.save_plan(ready.facts, ready.plan)
    submission = Submission(
        run=folder.run_id,
        job=ready.job.name,
        cluster=ready.cluster_name,
        backend=ready.backend.name,
        created_at=created_at,
        clusterkit=clusterkit.__version__,
        host=os.uname().nodename,
        boot_id=agent.boot_id(),
    )
    folder.write_json("run.json", submission)


def write_plan(ready: Prepared, out: str | os.PathLike[str]) -> int:
    """Write a plan's files, to be started by hand; return their number. Closes ``ready``.

    In the folder that the plan names for its run, the files of a run are written as well: then
    `status`, `logs` and the like follow what is started there.

    Raises:
        BadInput: that run exists already.
        RunFolderError: a file cannot be written.
    """
    with ready:
        plan, base = ready.plan, Path(out)
        if base.resolve() == Path(plan.run_dir).resolve():
            folder = RunFolder.create(plan.run_id, Path(plan.run_dir).parents[1])
            _record(folder, ready, time.time())
            folder.write(run_folder.BY_HAND, "")
        contents = {os.path.relpath(file.path, plan.run_dir): file for file in plan.files}
        for relative, file in contents.items():
            write_atomic(base / relative, file.content(), file.mode)
        write_atomic(base / "plan.json", plan.to_json())
        write_atomic(base / "plan.txt", plan.to_text().encode())
        return len(contents) + 2


def send_trees(ready: Prepared, progress: Progress | None = None) -> None:
    """Send the plan's folders to all its hosts, in parallel.

    Raises:
        ClusterkitError: a host does not accept them, or they have changed since they were probed.
    """
    plan = ready.plan
    if not plan.trees:
        return
    from clusterkit import execute
    from clusterkit.sync import relay, snapshot
    from clusterkit.sync.upload import Upload

    snapshots = []
    for tree in plan.trees:
        shipped = ready.facts.shipped is not None and tree.digest == ready.facts.shipped.digest
        found = (
            snapshot.own_package()
            if shipped
            else snapshot.take(Path(ready.job.workdir or "."), ready.job.program)
        )
        if found.digest != tree.digest:
            raise BadInput(
                f"{tree.source} has changed since the run was planned",
                hint="submit again; a file that changes all the time cannot be part of the project",
            )
        snapshots.append(found)

    hosts = execute.all_hosts(plan)
    with contextlib.ExitStack() as stack:
        addresses = {host.host: host.address for host in ready.facts.hosts}

        def passing_on() -> relay.Relay | None:
            if len(hosts) <= relay.HOSTS:
                return None
            return stack.enter_context(relay.Relay(addresses))

        uploads = [
            Upload(found, tree, passing_on(), run_dir=plan.run_dir, ended=_has_ended)
            for found, tree in zip(snapshots, plan.trees, strict=True)
        ]

        def send(host: str) -> None:
            for upload in uploads:
                upload.send(host, plan.python, ready.transport, progress or (lambda *_: None))

        in_order(fan_out(hosts, send))


def _has_ended(run_id: str) -> bool:
    """Return whether a run of this machine has ended on all of its hosts."""
    folder = RunFolder(run_folder.home() / "runs" / run_id)
    status = folder.saved_status()
    return (
        status is not None and status.state.final and not folder.file(run_folder.LEFTOVERS).exists()
    )


@checked
def take_over(run: str, cluster: str, clusters_file: str | os.PathLike[str] | None = None) -> Run:
    """Make a folder and a supervisor on this machine for a run of another machine.

    Args:
        run: its id, the beginning of its id, or ``last`` for the newest in the cluster.

    Raises:
        CapabilityError: clusters of this kind keep no record of runs.
        RunNotFound: the cluster has no such run.
        BadInput: a secret that a restart needs is not in the environment.
    """
    from clusterkit import execute

    entry = resolved_cluster(cluster, clusters_file)
    backend = backends.backend(entry.backend)
    if not isinstance(backend, SupportsRemoteRuns):
        raise CapabilityError(
            f"backend {backend.name}: its clusters keep no record of a run's job",
            hint="attach on the machine and with the CLUSTERKIT_HOME that submitted it",
        )
    with contextlib.closing(backends.transport_for(entry)) as transport:
        found = backend.recover(run, entry, transport)
        if (run_folder.home() / "runs" / found.run).is_dir():
            known = get(found.run)
            known.attach()
            return known
        check_secrets(found.job, f"a restart of run {found.run} needs this secret: ")
        plan = backend.plan(found.job, found.cluster, found.facts, found.run)

        def complete(folder: RunFolder) -> None:
            execute.write_files(plan, transport)
            if found.project is not None:
                _unpack(found.project, Path(plan.trees[0].path))
            status = folder.read_json("run.json", Submission).initial_status()
            status = msgspec.structs.replace(status, state=State.RUNNING, attempt=found.attempt)
            folder.write_json("state.json", status)
            folder.write(run_folder.OWNS_CLUSTER_OBJECTS, "")
            text = f"attached on this machine in attempt {found.attempt}"
            folder.append("events.jsonl", Event(at=time.time(), attempt=found.attempt, text=text))

        ready = Prepared(found.job, cluster, found.cluster, found.facts, backend, plan, transport)
        return _start(ready, complete, found.created_at, adopt=True)


def _unpack(packed: bytes, path: Path) -> None:
    """Unpack a tar.gz into a folder; no member can be written outside of it.

    Raises:
        RunFolderError: it is damaged, or the disk is full.
    """
    import io
    import tarfile

    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(path, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise RunFolderError(f"the project of the run cannot be unpacked: {error}") from error
