"""The facts of a cluster for a plan, by requests that change nothing."""

from __future__ import annotations

import io
import math
import os
import re
import tarfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

from clusterkit.backends.kubernetes.api_server import (
    PARALLEL_REQUESTS,
    ClusterServer,
    Refusal,
    Server,
)
from clusterkit.backends.kubernetes.flavors import FLAVORS, choose
from clusterkit.backends.kubernetes.nodes import best_node, cores_of, gpus_of, selected, usable
from clusterkit.backends.kubernetes.objects import Object
from clusterkit.backends.kubernetes.rbac import CREATE_WATCHER, ROLE_HINT, Right, denied
from clusterkit.backends.ports import default_ports
from clusterkit.backends.probing import assumed_host, interpreter
from clusterkit.cluster import Facts, Gpu, KubernetesCluster, KubernetesFacts, Project
from clusterkit.errors import BadInput, Unavailable
from clusterkit.files import user_name
from clusterkit.run.folder import home
from clusterkit.spec import JobSpec
from clusterkit.sync import snapshot
from clusterkit.transport import Transport

MOST_BYTES = 1_040_000
"""Limit of a project, compressed; a config map takes 1 MiB."""


def probe(cluster: KubernetesCluster, transport: Transport, job: JobSpec | None) -> Facts:
    """As `Backend.probe`."""
    server = ClusterServer(cluster, transport)
    with ThreadPoolExecutor(1) as pool:
        checked = pool.submit(_check_namespace, server)
        kubernetes, gpus = survey(cluster, job, server)
        checked.result()
    if job is not None:
        flavor = FLAVORS[choose(job, cluster, kubernetes)[0]]
        needed = (
            ("create", flavor.group, flavor.plural), ("create", "", "configmaps"),
            ("list", "", "pods"),
        )  # fmt: skip
        _require(needed, server, hint=ROLE_HINT)
        if cluster.watcher is True:
            hint = "k8s/rbac.yaml has these rights; or watcher: false"
            _require(CREATE_WATCHER, server, "watcher: ", hint=hint)
    return facts_of(cluster, kubernetes, gpus, job)


def survey(
    cluster: KubernetesCluster, job: JobSpec | None, server: ClusterServer
) -> tuple[KubernetesFacts, tuple[Gpu, ...]]:
    """Return what the API server says of the cluster, and the GPUs of a pod.

    Raises:
        Unavailable: the API server does not answer, or refuses.
    """
    on_cpus = cluster.gpus == 0 or (job is not None and job.device == "cpu")
    operated = [
        flavor
        for name, flavor in FLAVORS.items()
        if flavor.operator and cluster.flavor in ("auto", name)
    ]
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        version = pool.submit(server.get, "/version")
        listed = None if on_cpus else pool.submit(_nodes, server)
        apis = pool.map(lambda flavor: server.find(f"/apis/{flavor.api}", Refusal), operated)
    try:
        number = str(version.result().get("gitVersion", "?"))
    except Refusal as error:
        raise Unavailable(f"{error.message} (/version)") from None
    nodes = None if listed is None else listed.result()
    gpus = () if on_cpus else gpus_of(cluster, job, nodes)
    kubernetes = KubernetesFacts(
        version=number,
        context=server.context_name,
        namespace=server.namespace,
        kubeconfig=cluster.kubeconfig or os.environ.get("KUBECONFIG"),
        kinds=tuple(
            flavor.kind
            for flavor, api in zip(operated, apis, strict=True)
            if flavor.served(api or {})
        ),
        user=_user(),
        most_gpus=None if nodes is None else best_node(cluster, nodes)[0],
        gpu_cores=cores_of(cluster, nodes or (), len(gpus)),
    )
    return kubernetes, gpus


def facts_of(
    cluster: KubernetesCluster,
    kube: KubernetesFacts,
    gpus: tuple[Gpu, ...],
    job: JobSpec | None,
) -> Facts:
    """Return the facts of a plan; reads the job's project if that is copied.

    Raises:
        BadInput: the project is too large.
    """
    port, watch_port = default_ports(cluster.port)
    python = interpreter(job, (cluster.python, "cluster: python"))
    return Facts(
        home=str(home()),
        hosts=(
            assumed_host("pods", "node-0", max(1, math.floor(cluster.cpus or 1)), gpus, python),
        ),
        port=port,
        port_origin="every pod has its own" if cluster.port == "auto" else "cluster: port",
        interface=cluster.interface,
        watch_port=watch_port,
        project=_project(job) if cluster.code == "copied" and job is not None else None,
        kubernetes=kube,
    )


def count_nodes(cluster: KubernetesCluster, transport: Transport) -> int:
    """Count the nodes of the cluster that may have pods of a run.

    Raises:
        Unavailable: we may not look.
    """
    try:
        nodes = ClusterServer(cluster, transport).items("/api/v1/nodes")
    except Refusal as error:
        cause = f"how many nodes the cluster has is unknown: {error.message}"
        raise Unavailable(cause, hint="--nodes N") from None
    return sum(selected(node, cluster) and usable(node, cluster) for node in nodes)


def _nodes(server: Server) -> list[Object] | None:
    """Return the cluster's nodes; None: we may not look."""
    try:
        return server.items("/api/v1/nodes")
    except Refusal:
        return None


def _user() -> str:
    """Return the user's name as the value of a label; empty if it has none."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", user_name() or "")[:63].strip("_.-")


def _project(job: JobSpec) -> Project:
    """Return the working tree.

    Raises:
        BadInput: it is too large for a config map.
    """
    found = snapshot.take(Path(job.workdir or "."), job.program)
    packed = io.BytesIO()
    if found.size < 32 * MOST_BYTES:
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
            for entry in found.entries:
                archive.add(found.root / entry.path, entry.path, recursive=False)
    if found.size >= 32 * MOST_BYTES or packed.tell() > MOST_BYTES:
        raise BadInput(
            f"code: {found.root} is too large for a config map ({snapshot.summary(found.facts())})",
            hint="code: baked, with the project in the image or in a volume",
            cluster="code",
        )
    return found.facts()


def _check_namespace(server: Server) -> None:
    namespace = server.namespace
    try:
        found = server.find(f"/api/v1/namespaces/{quote(namespace)}")
    except Refusal:  # we may not look
        return
    if found is None:
        raise BadInput(
            f"namespace: the cluster has no {namespace}",
            hint=f"kubectl create namespace {namespace}",
            cluster="namespace",
        )


def _denied(rights: Iterable[Right], server: Server) -> list[Right]:
    """As `rbac.denied`; all of them if we may not even ask."""
    try:
        return denied(server, rights)
    except Refusal:
        return list(rights)


def _require(rights: Iterable[Right], server: Server, key: str = "", *, hint: str) -> None:
    """Check rights before anything is created.

    Args:
        key: prefix of the message: the key of the cluster entry that needs them.

    Raises:
        Unavailable: names the first right that is missing.
    """
    for verb, _, resource in _denied(rights, server):
        cause = f"{key}you may not {verb} {resource} in namespace {server.namespace}"
        raise Unavailable(cause, hint=hint)
