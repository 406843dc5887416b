"""Every verb of the command line as a function.

from clusterkit import api
run = api.submit("jobs/ddp.yaml", nodes=2)
for line in run.logs(follow=True):
    print(line.rank, line.text)
print(run.wait().state)
for metrics in run.metrics()[-1:]:  # none, if it failed before its first step
    print(metrics["loss"])
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from clusterkit import backends
from clusterkit.backends.base import SupportsDoctor, SupportsRemoteRuns
from clusterkit.cluster import Facts
from clusterkit.errors import BadInput, CapabilityError
from clusterkit.jobfile.arguments import checked
from clusterkit.lifecycle import control
from clusterkit.lifecycle.run import Run as Run
from clusterkit.lifecycle.run import failed
from clusterkit.lifecycle.run import get as get
from clusterkit.run import folder as run_folder
from clusterkit.run.find import all_runs
from clusterkit.run.folder import Submission
from clusterkit.run.status import RunStatus, State
from clusterkit.spec import Job as Job
from clusterkit.spec import parse_nodes

if TYPE_CHECKING:
    from clusterkit import doctor as doctors
    from clusterkit.bench import bandwidth
    from clusterkit.convert import Converted
    from clusterkit.estimate import Estimate
    from clusterkit.jobfile.catalogue import CatalogueEntry
    from clusterkit.jobfile.examples import example as example
    from clusterkit.jobfile.examples import examples as examples
    from clusterkit.lifecycle.clusters import Cluster as Cluster
    from clusterkit.lifecycle.clusters import clusters as clusters
    from clusterkit.lifecycle.export import plan_as as plan_as
    from clusterkit.lifecycle.launch import Prepared as Prepared
    from clusterkit.lifecycle.launch import Progress as Progress
    from clusterkit.lifecycle.launch import launch as launch
    from clusterkit.lifecycle.launch import prepare as prepare
    from clusterkit.lifecycle.launch import prepare_again as prepare_again
    from clusterkit.lifecycle.launch import rerun as rerun
    from clusterkit.lifecycle.launch import resolved_cluster as resolved_cluster
    from clusterkit.lifecycle.scaffold import init as init
    from clusterkit.lifecycle.within import cp as cp
    from clusterkit.lifecycle.within import exec as exec
    from clusterkit.lifecycle.within import forward as forward
    from clusterkit.lifecycle.within import stack as stack
    from clusterkit.plan import Plan
    from clusterkit.run.logs import LogLine
    from clusterkit.web.server import Server

_LAUNCH = (
    "Prepared", "Progress", "launch", "prepare", "prepare_again", "rerun", "resolved_cluster",
)  # fmt: skip
_LAZY = {
    **dict.fromkeys(_LAUNCH, "lifecycle.launch"),
    **dict.fromkeys(("example", "examples"), "jobfile.examples"),
    "init": "lifecycle.scaffold",
    "plan_as": "lifecycle.export",
    **dict.fromkeys(("Cluster", "clusters"), "lifecycle.clusters"),
    **dict.fromkeys(("cp", "exec", "forward", "stack"), "lifecycle.within"),
}


def __getattr__(name: str) -> Any:
    """Import what starts a job only when it is used: `clusterkit ls` starts faster without."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"clusterkit.{_LAZY[name]}"), name)


class ListedRun(RunStatus, frozen=True, kw_only=True):
    """A run of a cluster, submitted from this machine or another."""

    user: str | None = None
    """Who submitted it; None if the cluster does not tell."""
    here: bool = True
    """Whether its folder is on this machine; if not, its state is as the cluster reports it."""
    nodes_asked: int | None = None
    """How many nodes it requests, if ``nodes`` does not list them."""


def plan(job: Job, **options: Any) -> Plan:
    """Return exactly what `submit` would do; options as for `prepare`."""
    with _planned(job, options) as ready:
        return ready.plan


@checked
def write_plan(job: Job, out: str | os.PathLike[str], **options: Any) -> int:
    """Write what `plan` returns into a folder, to start it by hand; return the number of files.

    Options as for `prepare`. In the folder that the plan names for the run, `status` and the other
    verbs then follow what is started.

    Raises:
        ClusterkitError: as `submit`; a run has begun in that folder already.
    """
    from clusterkit.lifecycle.launch import write_plan as write

    return write(_planned(job, options), out)


def _planned(job: Job, options: dict[str, Any]) -> Prepared:
    from clusterkit.lifecycle.launch import prepare

    if options.get("run_id") is None:
        options["run_id"] = lambda name: f"{run_folder.slug(name)}-plan"
    return prepare(job, **options)


def submit(job: Job, **options: Any) -> Run:
    """Start a job and return at once; the run continues when this process ends.

    Options as for `prepare`.

    Raises:
        ClusterkitError: the run could not be started; nothing is left behind.
    """
    from clusterkit.lifecycle.launch import launch, prepare

    return launch(prepare(job, **options))


def _several(runs: Sequence[str | Run]) -> list[Run]:
    each: Sequence[Any] = runs if isinstance(runs, list | tuple) else [runs]
    return [get(run) for run in each]


def runs() -> list[RunStatus]:
    """Return the status of every run of this machine, newest first."""
    return [control.reconcile(folder) for folder in all_runs()]


@checked
def runs_of(
    cluster: str, *, clusters_file: str | os.PathLike[str] | None = None
) -> list[ListedRun]:
    """Return the runs of a cluster, newest first.

    They are those of this machine, and others that the cluster keeps a record of.

    Raises:
        Unavailable: the cluster does not answer.
    """
    from clusterkit.lifecycle.launch import resolved_cluster

    entry = resolved_cluster(cluster, clusters_file)
    backend = backends.backend(entry.backend)
    remote = {}
    if isinstance(backend, SupportsRemoteRuns):
        with contextlib.closing(backends.transport_for(entry)) as transport:
            remote = {run.run: run for run in backend.listing(entry, transport)}
    found = []
    for status in runs():
        if status.cluster == cluster or status.run in remote:
            user = getattr(remote.pop(status.run, None), "user", None)
            found.append(ListedRun(**msgspec.structs.asdict(status), user=user))
    found += [
        ListedRun(
            run=run.run, job=run.job, cluster=cluster, backend=backend.name, state=run.state,
            attempt=run.attempt, started_at=run.started_at, finished_at=run.finished_at,
            remark=f"{run.kind} of {run.user or 'another user'}; "
            f"{run.attach or f'`clusterkit attach {run.run} --cluster {cluster}`'} takes it over",
            user=run.user, here=False, nodes_asked=run.pods,
        )
        for run in remote.values()
    ]  # fmt: skip
    return sorted(found, key=lambda run: run.started_at or 0.0, reverse=True)


def status(run: str | Run) -> RunStatus:
    """Return `Run.status` of a run."""
    return get(run).status()


def log_lines(run: str | Run, **options: Any) -> Iterator[LogLine]:
    """Return `Run.logs` of a run; same options."""
    return get(run).logs(**options)


def metrics(run: str | Run) -> list[dict[str, Any]]:
    """Return `Run.metrics` of a run."""
    return get(run).metrics()


def prometheus(run: str | Run) -> str:
    """Return a run's state and the newest value of each metric in Prometheus' text format."""
    from clusterkit.web import prometheus as text_format

    found = get(run)
    return text_format.of_run(found._folder, found.status())


@checked
def attach(
    run: str | Run,
    *,
    cluster: str | None = None,
    clusters_file: str | os.PathLike[str] | None = None,
) -> Run:
    """Start a run's supervisor again if it is gone, or take over a run of another machine.

    Args:
        run: as for `get`.
        cluster: where the run is, if it was submitted from another machine and the cluster keeps a
            record of it; it becomes a run of this machine. ``last`` is the newest there.
        clusters_file: as for `prepare`.

    Raises:
        RunNotFound: neither this machine nor the cluster has such a run.
        BadInput: a secret that a restart needs is not in the environment.
    """
    if cluster is not None and isinstance(run, str):
        known = run_folder.RUN_ID.match(run) and (run_folder.home() / "runs" / run).is_dir()
        if not known:
            from clusterkit.lifecycle.launch import take_over

            return take_over(run, cluster, clusters_file)
    found = get(run)
    found.attach()
    return found


def cancel(run: str | Run) -> RunStatus:
    """Cancel a run (`Run.cancel`) and return its status."""
    return get(run).cancel()


@checked
def plot(names: Sequence[str | Run], output: str | os.PathLike[str]) -> Path:
    """Draw loss and tokens per second of one or several runs to a .png, .svg or .pdf file.

    The legend names a run after its job, or by its id if several have the same job.

    Raises:
        BadInput: a run has no metrics, or the file's suffix is another.
        Unavailable: matplotlib is not installed.
    """
    from clusterkit.ui import plots

    chosen = {run.id: run for run in _several(names)}
    jobs = {name: run._folder.read_json("run.json", Submission).job for name, run in chosen.items()}
    labels = {name: name if [*jobs.values()].count(job) > 1 else job for name, job in jobs.items()}
    return plots.draw({name: run.metrics() for name, run in chosen.items()}, Path(output), labels)


@checked
def web(runs: Sequence[str | Run] = (), *, host: str = "127.0.0.1", port: int = 0) -> Server:
    """Return a server that shows runs live in a browser at its ``url``, once `serve_forever` runs.

    Args:
        runs: the runs that the page shows first.
        host: address to listen on; other machines can reach it unless it is a loopback address.
        port: 0 for any free one.

    Raises:
        RunNotFound: there is no such run.
        Unavailable: the address is not this machine's, or the port is in use.
    """
    from clusterkit.web.server import Server

    return Server(host, port, [run.id for run in _several(runs)])


@checked
def report(runs: Sequence[str | Run], output: str | os.PathLike[str]) -> Path:
    """Write what `web` shows of runs as one HTML file, which needs no server and no network.

    Raises:
        RunNotFound: there is no such run.
        RunFolderError: the file cannot be written.
    """
    from clusterkit.web import site

    return site.write_report([run.id for run in _several(runs)], Path(output))


@checked
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
    """Measure bandwidth and latency of the collectives in a run of its own, and wait for its end.

    Args:
        nodes: by default every host of the cluster.
        gpus, cluster, clusters_file, include, exclude: as for `prepare`.
        watch: waits for the run's end; an exception in it cancels the run.
        choices: what to measure, as for `clusterkit.bench.bandwidth.choose`.

    Raises:
        RunFailed: the run did not succeed; the exit code is the run's own.
        ClusterkitError: it cannot be measured, or not all of it was.
    """
    from clusterkit.bench import bandwidth
    from clusterkit.lifecycle.launch import launch, prepare, resolved_cluster
    from clusterkit.ui.formatting import failure_text

    options = bandwidth.choose(**choices)
    hosts: dict[str, Any] = {
        "clusters_file": clusters_file, "include": include, "exclude": exclude,
    }  # fmt: skip
    if nodes is None:
        entry = resolved_cluster(cluster, **hosts)
        with contextlib.closing(backends.transport_for(entry)) as transport:
            nodes = max(1, backends.backend(entry.backend).capacity(entry, transport))
    ready = prepare(bandwidth.job_of(options), cluster=cluster, nodes=nodes, gpus=gpus, **hosts)
    bandwidth.check(options, ready.plan, ready.facts)
    run = launch(ready)
    try:
        status = watch(run)
    except BaseException:
        run.cancel()
        raise
    if status.state is not State.SUCCEEDED:
        raise failed(status, failure_text(status, with_hint=False))
    return bandwidth.report(run.id, run.reported_events(), [node.host for node in status.nodes])


@checked
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
    """Estimate the memory per GPU of a job, or of a model, for every way to divide it.

    Args:
        job: see `Job`; None if the question names a model.
        nodes: instead of the job's ``nodes``; of a range, the larger number counts.
        gpus: GPUs per node.
        cluster: probed for its GPUs, unless the question gives ``gpu_memory`` and the number of
            GPUs is known.
        facts: instead of probing.
        clusters_file, settings, more_args: as for `prepare`.
        question: fields of `clusterkit.estimate.Question`, such as ``gpu_memory="80GB"``.

    Raises:
        ClusterkitError: the model is unknown, or cannot be divided like this.
    """
    from clusterkit import estimate as estimates
    from clusterkit.jobfile import request, values
    from clusterkit.lifecycle.launch import resolved_cluster

    asked = estimates.check(values.of_fields(question, estimates.Question))
    request.spec_of(None, settings, nodes, gpus)  # checks both, without a job too
    read = None if job is None else request.read(job, settings, nodes, gpus, more_args)
    spec = None if read is None else read.job
    facts = None if facts is None else values.checked(facts, "facts")
    counted = gpus is not None or (spec is not None and spec.gpus_per_node != "auto")
    if facts is None and not (asked.gpu_memory is not None and counted):
        entry = resolved_cluster(cluster, clusters_file)
        with contextlib.closing(backends.transport_for(entry)) as transport:
            facts = backends.backend(entry.backend).probe(entry, transport, spec)
    count = None if nodes is None else parse_nodes(nodes)[1]
    with contextlib.nullcontext() if read is None else read.locating():
        return estimates.estimate(spec, facts, nodes=count, gpus=gpus, question=asked)


@checked
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
    """Check every host of a cluster, and name the command that fixes a fault.

    Args:
        job: the hosts are compared with its needs; None: with those of most jobs.
        cluster, clusters_file, nodes, gpus, settings, include, exclude: as for `prepare`.
        quick: make only the checks that `submit` makes, too.
        only: make only the checks of these names.
        progress: called with the phase (1, 2, 3) and the hosts that have not answered yet.

    Raises:
        ClusterkitError: no such cluster, job or check. A host that does not answer is a finding.
    """
    from clusterkit import doctor as doctors
    from clusterkit.jobfile import request
    from clusterkit.lifecycle.launch import resolved_cluster

    spec = request.spec_of(job, settings, nodes, gpus)
    entry = resolved_cluster(cluster, clusters_file, include=include, exclude=exclude)
    backend = backends.backend(entry.backend)
    if not isinstance(backend, SupportsDoctor):
        raise CapabilityError(f"backend {backend.name} has no doctor yet")
    subject = backend.subject(cluster, entry, spec)
    with contextlib.closing(backends.transport_for(entry)) as transport:
        return doctors.examine(
            subject, transport, quick=quick, only=only, progress=progress or (lambda *_: None)
        )


def jobs() -> list[CatalogueEntry]:
    """List the job files in the nearest ``jobs`` folder, here or above, and what each needs.

    A file that cannot be read is listed with its error.

    Raises:
        BadInput: there is no such folder.
    """
    from clusterkit.jobfile import catalogue

    return catalogue.entries(catalogue.find_folder())


@checked
def convert(
    file: str | os.PathLike[str] | None, words: Sequence[str] = (), *, kind: str | None = None
) -> Converted:
    """Convert what another tool takes to a job, and to an entry of the cluster file.

    Args:
        file: a script, manifest or config; None for a command line.
        words: the command line, or the program if the file names none.
        kind: one of `clusterkit.convert.KINDS`; by default recognized from the file.

    Raises:
        BadInput: an option has no equivalent; the message has its line and name.
    """
    from clusterkit import convert as converter
    from clusterkit.convert import files

    name = "" if file is None else os.fspath(file)
    text = None
    if file is not None:
        if os.path.isdir(file):
            name = os.path.join(name, "plan.json")  # a folder that `plan -o` wrote
        text = files.text_of(name)
    return converter.convert(text, words, name=name, kind=kind, read=files.named)


@checked
def notify(cluster: str = "local", clusters_file: str | os.PathLike[str] | None = None) -> str:
    """Send a test notification as a cluster's entry says; return a line that says where to.

    Raises:
        BadInput: the entry has no `notify`.
        NotifyFailed: the notification was not accepted.
    """
    from clusterkit.lifecycle import notify as notifications
    from clusterkit.lifecycle.launch import resolved_cluster

    spec = resolved_cluster(cluster, clusters_file).notify
    if spec is None:
        hint = f"{cluster}: {{..., notify: {{url_from: SLACK_WEBHOOK, on: [failed]}}}}"
        raise BadInput(f"cluster {cluster} has no `notify`", hint)
    test = notifications.Notification("test", f"clusterkit: a test of cluster {cluster}")
    return notifications.send(spec, test)


def schema() -> dict[str, Any]:
    """Return the JSON schema of job files, for editors."""
    from clusterkit.jobfile.schema import json_schema

    return json_schema()
