"""Asks the clusters of a cluster file whether they can be reached."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import msgspec

from clusterkit import backends
from clusterkit.errors import ClusterkitError
from clusterkit.jobfile import loader
from clusterkit.jobfile.arguments import checked
from clusterkit.lifecycle.launch import resolved_cluster


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the cluster file, and what was found when it was asked."""

    name: str
    backend: str | None = None
    nodes: int | None = None
    """How many nodes a run can have; None if that is not limited or not known."""
    gpus: int | None = None
    """GPUs of all hosts that were looked at."""
    error: str | None = None
    """Why it cannot be used; None if it can be reached."""


@checked
def clusters(clusters_file: str | os.PathLike[str] | None = None) -> list[Cluster]:
    """Ask every cluster of the cluster file, all at once, whether it can be reached.

    Raises:
        BadInput: there is no such file, or it is no cluster file.
    """
    names = loader.cluster_names(clusters_file)
    with ThreadPoolExecutor(len(names)) as pool:
        return [*pool.map(lambda name: _asked(name, clusters_file), names)]


def _asked(name: str, clusters_file: str | os.PathLike[str] | None) -> Cluster:
    found = Cluster(name=name)
    try:
        entry = resolved_cluster(name, clusters_file)
        found = Cluster(name=name, backend=entry.backend)
        backend = backends.backend(entry.backend)
        with contextlib.closing(backends.transport_for(entry)) as transport:
            facts = backend.probe(entry, transport, None)
            nodes = backend.capacity(entry, transport) or None
    except ClusterkitError as error:
        return msgspec.structs.replace(found, error=error.message)
    gpus = sum(len(host.gpus) for host in facts.hosts)
    return msgspec.structs.replace(found, nodes=nodes, gpus=gpus)
