"""Exports a job as one file of another tool: `clusterkit export`.

The backend makes it from its plan. Without a cluster nothing is probed: facts are assumed, and the
file says so.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgspec

from clusterkit import backends
from clusterkit.backends.base import SupportsFile, check_capabilities
from clusterkit.cluster import CLUSTER_TYPES, Facts
from clusterkit.errors import BadInput, choices
from clusterkit.jobfile import request, values
from clusterkit.jobfile.arguments import checked
from clusterkit.lifecycle.launch import resolved_cluster
from clusterkit.run import folder as run_folder
from clusterkit.spec import Job


@checked
def plan_as(
    job: Job,
    form: str,
    *,
    cluster: str | None = None,
    clusters_file: str | os.PathLike[str] | None = None,
    include: str | None = None,
    exclude: str | None = None,
    facts: Facts | None = None,
    run_id: str | None = None,
    **asked: Any,
) -> str:
    """Return the job in one of the `clusterkit.backends.FORMS`.

    Args:
        cluster: an entry of that kind, which is probed; None: nothing is.
        run_id: names what the file makes; by default the job's name.
        asked: arguments of `clusterkit.jobfile.request.read`.

    Raises:
        ClusterkitError: the backend cannot run the job, or the entry is of another kind.
    """
    if form not in backends.FORMS:
        raise BadInput(f"form: {form!r} is unknown", choices(backends.FORMS, form))
    name, keys = backends.FORMS[form]
    backend = backends.backend(name)
    assert isinstance(backend, SupportsFile)
    wanted = request.read(job, cluster=cluster or "local", **asked)
    with wanted.locating():
        spec = wanted.job
        check_capabilities(type(backend), spec, map(backends.backend_type, backends.NAMES))
    if cluster is None:
        entry = CLUSTER_TYPES[name]()
    else:
        entry = resolved_cluster(cluster, clusters_file, include=include, exclude=exclude)
        if entry.backend != name:
            raise BadInput(
                f"{form} needs a cluster of backend {name}, and {cluster} is {entry.backend}",
                hint="leave --cluster out: then nothing is probed",
            )
    entry = msgspec.structs.replace(entry, **keys)
    head = []
    facts = None if facts is None else values.checked(facts, "facts")
    if facts is None and cluster is None:
        facts = backend.assumed_facts(entry, spec)
        head.append("No cluster was looked at: GPUs, cores, Python and port are assumed.")
    elif facts is None:
        with contextlib.closing(backends.transport_for(entry)) as transport:
            facts = backend.probe(entry, transport, spec)
    run_id = run_folder.check_run_id(run_id or run_folder.slug(spec.name))
    plan = backend.plan(spec, entry, facts, run_id)
    notes = [str(note) for note in plan.notes]
    head = [f"{spec.name}: {plan.summary}", *head, *notes, *wanted.remarks(plan.topology)]
    return backend.one_file(plan, entry, head)
