"""What a plan has to know of a cluster, found out with requests that change nothing."""

from __future__ import annotations

import getpass
import io
import math
import os
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import msgspec

from clusterkit.backends.kubernetes.client import Refusal
from clusterkit.backends.kubernetes.flavors import FLAVORS, Flavor, choose
from clusterkit.backends.kubernetes.nodes import best_node, gpus_of, selected, usable
from clusterkit.backends.kubernetes.rights import ROLE_HINT, Right, access_review, to_watch
from clusterkit.backends.kubernetes.server import Server
from clusterkit.backends.placing import own_ports
from clusterkit.backends.probing import PACKAGES, TOOLS, UNSEEN, interpreter
from clusterkit.cluster import Facts, Gpu, HostFacts, KubernetesCluster, KubernetesFacts, Project
from clusterkit.errors import BadInput, Unavailable
from clusterkit.project import snapshot, words
from clusterkit.runs import home
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

MOST_BYTES = 1_040_000
"""Of a project, compressed; a config map takes 1 MiB."""


def context_of(cluster: KubernetesCluster) -> tuple[str, str]:
    """The name of the context, so that it is the same one later, and the namespace."""
    from kubernetes import config

    try:
        found = config.list_kube_config_contexts(cluster.kubeconfig)  # type: ignore[no-untyped-call]
    except config.ConfigException:  # in a pod there is none
        return cluster.context or "", cluster.namespace or "default"
    contexts, active = found
    chosen = next((each for each in contexts if each["name"] == cluster.context), active)
    own = chosen["context"].get("namespace")
    return str(chosen["name"]), str(cluster.namespace or own or "default")


def probe(cluster: KubernetesCluster, transport: Transport, job: JobSpec | None) -> Facts:
    """As `Backend.probe`."""
    server = Server.of(cluster, transport)
    try:
        version = server.get("/version")
    except Refusal as error:
        raise Unavailable(f"{error.message} (/version)") from None
    context, namespace = context_of(cluster)
    _check_namespace(server, namespace)
    gpus, most_gpus = _gpus(cluster, job, server)
    kubernetes = KubernetesFacts(
        version=str(version.get("gitVersion", "?")),
        context=context,
        namespace=namespace,
        kubeconfig=cluster.kubeconfig or os.environ.get("KUBECONFIG"),
        kinds=_kinds(server),
        user=_user(),
        most_gpus=most_gpus,
    )
    if job is not None:
        flavor = FLAVORS[choose(job, cluster, kubernetes)[0]]
        may_watch = _check_rights(flavor, cluster, server, namespace)
        kubernetes = msgspec.structs.replace(kubernetes, may_watch=may_watch)
    return facts_of(cluster, kubernetes, gpus, job)


def facts_of(
    cluster: KubernetesCluster,
    kube: KubernetesFacts,
    gpus: tuple[Gpu, ...],
    job: JobSpec | None,
) -> Facts:
    """What a plan has to know; reads the job's project where that is copied.

    Raises:
        BadInput: the project is too large.
    """
    port, watch_port = own_ports(cluster.port)
    python, origin = interpreter(job, (cluster.python, "cluster: python"))
    return Facts(
        home=str(home()),
        hosts=(
            HostFacts(
                host="pods",
                address="node-0",
                cpus=max(1, math.floor(cluster.cpus or 1)),
                memory_mib=0,
                gpus=gpus,
                python=python,
                python_origin=origin,
                versions=dict.fromkeys(PACKAGES, UNSEEN),
                tools=dict.fromkeys(TOOLS, UNSEEN),
            ),
        ),
        port=port,
        port_origin="every pod has its own" if cluster.port == "auto" else "cluster: port",
        interface=cluster.interface,
        watch_port=watch_port,
        project=_project(job) if cluster.code == "copied" and job is not None else None,
        kubernetes=kube,
    )


def places(cluster: KubernetesCluster, transport: Transport) -> int:
    """How many nodes of the cluster may have pods of a run.

    Raises:
        Unavailable: we may not look.
    """
    try:
        nodes = Server.of(cluster, transport).get("/api/v1/nodes")["items"]
    except Refusal as error:
        cause = f"how many nodes the cluster has is unknown: {error.message}"
        raise Unavailable(cause, hint="--nodes N") from None
    return sum(selected(node, cluster) and usable(node, cluster) for node in nodes)


def _user() -> str:
    """Who submits, as a label may say it; empty where nobody knows."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a user id without a name, as in many a container
        return ""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:63].strip("_.-")


def _project(job: JobSpec) -> Project:
    """The working tree, if a config map takes it.

    Raises:
        BadInput: it is too large.
    """
    found = snapshot(Path(job.workdir or "."), job.program)
    packed = io.BytesIO()
    if found.size < 32 * MOST_BYTES:
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
            for entry in found.entries:
                archive.add(found.root / entry.path, entry.path, recursive=False)
    if found.size >= 32 * MOST_BYTES or packed.tell() > MOST_BYTES:
        raise BadInput(
            f"code: {found.root} is too large for a config map ({words(found.facts())})",
            hint="code: baked, with the project in the image or in a volume",
            cluster="code",
        )
    return found.facts()


def _check_namespace(server: Server, namespace: str) -> None:
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


def _lacking(rights: Iterable[Right], server: Server, namespace: str) -> str | None:
    """The first of these rights that the API server does not give us, in words."""
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    for right in rights:
        try:
            status = server.post(path, access_review(namespace, *right)).get("status", {})
        except Refusal:
            status = {}
        if not status.get("allowed"):
            return f"you may not {right[0]} {right[2]} in namespace {namespace}"
    return None


def _check_rights(
    flavor: Flavor, cluster: KubernetesCluster, server: Server, namespace: str
) -> bool:
    """Refuse what the API server would not let us do, before anything is made; whether the run can
    have a watcher in the cluster.

    Raises:
        Unavailable: names the right that is missing.
    """
    job = ("create", flavor.group, flavor.plural)
    rights = (job, ("create", "", "configmaps"), ("list", "", "pods"))
    if lacking := _lacking(rights, server, namespace):
        raise Unavailable(lacking, hint=ROLE_HINT)
    if cluster.watcher is False:
        return False
    wanted = [right for right in to_watch() if right[0] == "create"]
    lacking = _lacking(wanted, server, namespace)
    if lacking and cluster.watcher is True:
        hint = "k8s/rbac.yaml has these rights; or watcher: false"
        raise Unavailable(f"watcher: {lacking}", hint=hint)
    return not lacking


def _kinds(server: Server) -> tuple[str, ...]:
    """Kinds of jobs that the cluster serves, besides the plain one."""
    return tuple(
        flavor.kind
        for flavor in FLAVORS.values()
        if flavor.operator and flavor.served(server.find(f"/apis/{flavor.api}", Refusal) or {})
    )


def _gpus(
    cluster: KubernetesCluster, job: JobSpec | None, server: Server
) -> tuple[tuple[Gpu, ...], int | None]:
    """Those of a pod, and how many a node has now at most, as far as anybody knows."""
    if cluster.gpus == 0 or (job is not None and job.device == "cpu"):
        return (), None
    found = server.find("/api/v1/nodes", Refusal)
    nodes = None if found is None else found["items"]
    return gpus_of(cluster, job, nodes), None if nodes is None else best_node(cluster, nodes)[0]
