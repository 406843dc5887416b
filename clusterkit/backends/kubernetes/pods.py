"""The pod template of a node, the same for every flavor. Pure."""

from __future__ import annotations

import copy
import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterkit.agent import PEER_TOKEN
from clusterkit.backends.kubernetes.nodes import gpu_toleration
from clusterkit.backends.kubernetes.objects import (
    ATTEMPT,
    ROLE,
    RUN,
    Object,
    literal,
    quantity,
    without_empty,
)
from clusterkit.cluster import KubernetesCluster
from clusterkit.rendezvous import NODE_ADDRESS, Topology
from clusterkit.shell import quote

STOP_EXTRA = 5
"""Seconds of a pod's grace period beyond that of its ranks."""
TMP = "/tmp"
PROJECT = "project.tar.gz"
"""File of the config map `code_of`."""
QUEUE = "kueue.x-k8s.io/queue-name"


def code_of(name: str) -> str:
    """Return the name of the config map with the project of the run that is called ``name``."""
    return f"{name}-code"


@dataclass(frozen=True)
class Shape:
    """What the manifests of a run are made of.

    Attributes:
        run_dir: the run's folder in the pods.
        gpus: GPUs of a pod.
        copied: whether the project comes in a config map.
        rejoin: whether the run waits for a replacement of a lost pod.
        deadline: seconds after which the kubelet ends a pod whose agent has not done so.
    """

    name: str
    namespace: str
    cluster: KubernetesCluster
    image: str
    run_dir: str
    topology: Topology
    gpus: int
    labels: Mapping[str, str]
    command: tuple[str, ...]
    secrets: tuple[str, ...] = ()
    copied: bool = False
    rejoin: bool = False
    deadline: int | None = None

    @property
    def unpack(self) -> str:
        """Shell lines that unpack the project, if it was copied."""
        if not self.copied:
            return ""
        archive = posixpath.join(self.run_dir, "code", PROJECT)
        project = posixpath.join(self.run_dir, "project")
        return (
            f"mkdir -p {quote(project)}\n"
            f"tar -xzf {quote(archive)} -C {quote(project)} --no-same-owner || exit 73\n"
        )


def metadata(shape: Shape, name: str | None = None) -> Object:
    """Return the metadata of an object of the run; without a name, that of its job."""
    labels = dict(shape.labels)
    if shape.cluster.queue and name is None:
        labels[QUEUE] = shape.cluster.queue
    return without_empty(
        name=name or shape.name, namespace=shape.namespace, labels=labels,
        annotations=dict(shape.cluster.annotations),
    )  # fmt: skip


def template(
    shape: Shape,
    container: str,
    *,
    rank: str | None,
    command: Sequence[str] | None = None,
    role: str = "node",
    ranks: bool = True,
    more: Mapping[str, Any] | None = None,
    subdomain: str | None = None,
) -> Object:
    """Return the template of a node's pod.

    Args:
        container: name of the container, as the flavor's operator wants it.
        rank: field of the pod that holds the node's rank; None: there is only node 0.
        command: None: the shape's, which starts a node agent.
        role: ``node``, or ``worker`` for a pod that runs no node agent.
        ranks: whether ranks run in it.
        more: further keys of the container.
        subdomain: the service that resolves the pods' names.
    """
    cluster, node = shape.cluster, role == "node"
    env: list[Object] = []
    if node:
        env.append({"name": "NODE_RANK", **({"value": "0"} if rank is None else _field(rank))})
        env.append({"name": "CLUSTERKIT_ATTEMPT", **_field(f"metadata.labels['{ATTEMPT}']")})
        if shape.topology.elastic:
            env.append({"name": NODE_ADDRESS.name, **_field("status.podIP")})
    env += [
        {"name": "HOME", "value": TMP},
        {"name": "USER", "value": "clusterkit"},
        {"name": "LOGNAME", "value": "clusterkit"},
    ]
    if node:
        env += [
            {"name": name, "valueFrom": {"secretKeyRef": _key(shape, name)}}
            for name in shape.secrets
        ]
    gpus = shape.gpus if ranks else 0
    argv = shape.command if command is None else command
    body: Object = {
        "name": container,
        "image": shape.image,
        "imagePullPolicy": cluster.image_pull_policy,
        "command": [literal(word) for word in argv],
        "env": env,
        **without_empty(resources=resources(cluster, gpus, ranks=ranks)),
        "securityContext": container_security(read_only=cluster.read_only_root),
        "volumeMounts": [mount for _, mount in _volumes(shape)],
        **(more or {}),
    }
    spec: Object = {
        "restartPolicy": "OnFailure" if shape.topology.elastic else "Never",
        "terminationGracePeriodSeconds": math.ceil(cluster.stop_grace) + STOP_EXTRA,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **without_empty(
            # The pod's, not the job's: the wait for a node does not count.
            activeDeadlineSeconds=shape.deadline,
            subdomain=subdomain,
            serviceAccountName=cluster.service_account,
            **placement(cluster, _tolerations(shape, gpus)),
            affinity=_pod_affinity(shape),
        ),
        "securityContext": pod_security(cluster.user),
        "containers": [body],
        "volumes": [volume for volume, _ in _volumes(shape)],
    }
    labels = {**shape.labels, ROLE: role}
    annotations = without_empty(annotations=dict(cluster.annotations))
    return {"metadata": {"labels": labels, **annotations}, "spec": merged(spec, cluster.patch)}


def _pod_affinity(shape: Shape) -> Object | None:
    """Keep the pods of all nodes where `topology_key` is the same; the watcher has no ATTEMPT. (The
    scheduler lets the first pod be anywhere.)"""
    if not shape.cluster.topology_key:
        return None
    own = {
        "matchLabels": {RUN: shape.labels[RUN]},
        "matchExpressions": [{"key": ATTEMPT, "operator": "Exists"}],
    }
    term = {"labelSelector": own, "topologyKey": shape.cluster.topology_key}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def placement(cluster: KubernetesCluster, tolerations: list[Object]) -> Object:
    """Return a pod spec's keys for the choice of a node and the pull of the image."""
    return without_empty(
        priorityClassName=cluster.priority_class,
        nodeSelector=dict(cluster.node_selector),
        tolerations=tolerations,
        imagePullSecrets=[{"name": name} for name in cluster.image_pull_secrets],
    )


def _tolerations(shape: Shape, gpus: int) -> list[Object]:
    """Return the cluster entry's tolerations, that of the GPU taint for a pod with GPUs, and, where
    a lost pod is replaced, `lost_after` of an unreachable node: by default Kubernetes waits 300 s,
    in which all other nodes wait as well."""
    found = [dict(each) for each in shape.cluster.tolerations]
    keys = {each.get("key") for each in found}
    if gpus and not keys & {None, shape.cluster.gpu_resource}:
        found.append(gpu_toleration(shape.cluster))
    if shape.rejoin and None not in keys:
        waited = unreachable_for(shape.cluster.lost_after)
        found += [each for each in waited if each["key"] not in keys]
    return found


def unreachable_for(seconds: float) -> list[Object]:
    """Tolerate for so many seconds that the pod's node does not answer."""
    return [
        {
            "key": f"node.kubernetes.io/{key}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": math.ceil(seconds),
        }
        for key in ("not-ready", "unreachable")
    ]


def pod_security(user: int) -> Object:
    """Return what pod security "restricted" demands of a pod."""
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(*, read_only: bool = True) -> Object:
    """Return what "restricted" demands of a container, and a read-only root file system."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": read_only,
        "capabilities": {"drop": ["ALL"]},
    }


def _key(shape: Shape, name: str) -> Object:
    """Refer to a key of the run's Secret. PEER_TOKEN is optional: who applies the manifests by hand
    has none."""
    found: Object = {"name": shape.name, "key": name}
    return found | {"optional": True} if name == PEER_TOKEN else found


def _field(path: str) -> Object:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


LAUNCHER_CPUS, LAUNCHER_MEMORY = 0.1, "1Gi"
"""Requests of a pod without ranks: an MPIJob's launcher (deepspeed loads torch there)."""


def resources(cluster: KubernetesCluster, gpus: int, *, ranks: bool = True) -> Object:
    """Return a container's requests and limits.

    Args:
        ranks: whether ranks run in it; if not it requests little, and only what the entry names.
    """
    requests: Object = {}
    limits: Object = {}
    if cluster.cpus is not None:
        requests["cpu"] = f"{cluster.cpus if ranks else LAUNCHER_CPUS:g}"
    if cluster.memory is not None:
        requests["memory"] = limits["memory"] = cluster.memory if ranks else LAUNCHER_MEMORY
    if ranks:
        amounts = {name: quantity(name, each) for name, each in cluster.resources.items()}
        limits |= amounts
        requests |= amounts
    if gpus:
        limits[cluster.gpu_resource] = str(gpus)
    return without_empty(requests=requests, limits=limits)


def _volumes(shape: Shape) -> list[tuple[Object, Object]]:
    """Return each volume with its mount."""
    files, code = (posixpath.join(shape.run_dir, each) for each in ("files", "code"))
    shm = {"medium": "Memory", "sizeLimit": shape.cluster.shm_size}
    found: list[tuple[str, Object, str, bool]] = [
        ("run", {"emptyDir": {}}, shape.run_dir, False),
        ("files", {"configMap": {"name": shape.name}}, files, True),
        ("tmp", {"emptyDir": {}}, TMP, False),
        ("shm", {"emptyDir": shm}, "/dev/shm", False),
    ]
    if shape.copied:
        found.insert(2, ("code", {"configMap": {"name": code_of(shape.name)}}, code, True))
    for number, each in enumerate(shape.cluster.volumes):
        claim = {"claimName": each.claim, **without_empty(readOnly=each.read_only)}
        source = {"persistentVolumeClaim": claim}
        found.append((f"claim-{number}", source, each.path, each.read_only))
    return [
        ({"name": name, **source}, without_empty(name=name, mountPath=path, readOnly=read_only))
        for name, source, path, read_only in found
    ]


def merged(base: Any, patch: Any) -> Any:
    """Merge as a strategic merge patch: mappings by key, lists by ``name``, all else replaced."""
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        found = copy.deepcopy(dict(base))
        for key, value in patch.items():
            if value is None:
                found.pop(key, None)
            else:
                found[key] = merged(found.get(key), value)
        return found
    if _named(base) and _named(patch):
        by_name = {each["name"]: copy.deepcopy(each) for each in base}
        for each in patch:
            by_name[each["name"]] = merged(by_name.get(each["name"]), each)
        return list(by_name.values())
    return copy.deepcopy(patch)


def _named(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(each, Mapping) and "name" in each for each in value)
    )
