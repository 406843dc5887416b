"""The pod of one node, the same for every kind of job. Pure."""

from __future__ import annotations

import copy
import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterkit.agent import PEER_TOKEN
from clusterkit.backends.kubernetes.nodes import gpu_toleration
from clusterkit.backends.kubernetes.text import Object, given, literal, quantity
from clusterkit.cluster import KubernetesCluster
from clusterkit.rendezvous import NODE_ADDRESS, Topology
from clusterkit.shell import quote

RUN, ATTEMPT, ROLE = "clusterkit/run", "clusterkit/attempt", "clusterkit/role"
MANAGER = "clusterkit"
JOB = "clusterkit/job"
USER = "clusterkit/user"
"""Label of all objects of a run: who submitted it."""
STOP_EXTRA = 5
"""Seconds that a pod has beyond its ranks' own to end."""
TMP = "/tmp"
PROJECT = "project.tar.gz"
"""Of the config map `code_of`."""
QUEUE = "kueue.x-k8s.io/queue-name"


def code_of(name: str) -> str:
    """The config map that holds the project of a run whose objects are called ``name``."""
    return f"{name}-code"


@dataclass(frozen=True)
class Shape:
    """What the manifests of a run are made of."""

    name: str
    namespace: str
    cluster: KubernetesCluster
    image: str
    run_dir: str
    """The run's folder in the pods."""
    topology: Topology
    gpus: int
    """GPUs of a pod."""
    labels: Mapping[str, str]
    command: tuple[str, ...]
    secrets: tuple[str, ...] = ()
    copied: bool = False
    """Whether the project comes in a config map."""
    rejoin: bool = False
    """Whether the run waits for another pod in the place of one that is lost."""
    deadline: int | None = None
    """Seconds after which a node of the cluster ends a pod whose agent has not done so."""

    @property
    def unpack(self) -> str:
        """Lines of shell that unpack it, if it was copied."""
        if not self.copied:
            return ""
        archive = posixpath.join(self.run_dir, "code", PROJECT)
        project = posixpath.join(self.run_dir, "project")
        return (
            f"mkdir -p {quote(project)}\n"
            f"tar -xzf {quote(archive)} -C {quote(project)} --no-same-owner || exit 73\n"
        )


def metadata(shape: Shape, name: str | None = None) -> Object:
    """Of an object of the run."""
    labels = dict(shape.labels)
    if shape.cluster.queue and name is None:
        labels[QUEUE] = shape.cluster.queue
    return given(
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
    """The template of a node's pod.

    Args:
        container: what the kind of job wants the container to be called.
        rank: field of the pod that holds the node's rank; None: there is only node 0.
        command: instead of the shape's own, which starts a node.
        role: ``node``, or ``worker`` for a pod that runs no node agent.
        ranks: whether ranks run in it.
        more: further keys of the container.
        subdomain: of the pods' names.
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
    words = shape.command if command is None else command
    body: Object = {
        "name": container,
        "image": shape.image,
        "imagePullPolicy": cluster.image_pull_policy,
        "command": [literal(word) for word in words],
        "env": env,
        **given(resources=resources(cluster, gpus, ranks=ranks)),
        "securityContext": container_security(read_only=cluster.read_only_root),
        "volumeMounts": [mount for _, mount in _volumes(shape)],
        **(more or {}),
    }
    spec: Object = {
        "restartPolicy": "OnFailure" if shape.topology.elastic else "Never",
        "terminationGracePeriodSeconds": math.ceil(cluster.stop_grace) + STOP_EXTRA,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **given(
            # Of the pod, not of its job: waiting for a node does not count.
            activeDeadlineSeconds=shape.deadline,
            subdomain=subdomain,
            serviceAccountName=cluster.service_account,
            **placement(cluster, _tolerations(shape, gpus)),
            affinity=_together(shape),
        ),
        "securityContext": pod_security(cluster.user),
        "containers": [body],
        "volumes": [volume for volume, _ in _volumes(shape)],
    }
    labels = {**shape.labels, ROLE: role}
    annotations = given(annotations=dict(cluster.annotations))
    return {"metadata": {"labels": labels, **annotations}, "spec": merged(spec, cluster.patch)}


def _together(shape: Shape) -> Object | None:
    """Keeps the run's pods where `topology_key` is the same: those but the watcher, which belongs
    to no attempt. Of the first one of them nothing is asked."""
    if not shape.cluster.topology_key:
        return None
    own = {
        "matchLabels": {RUN: shape.labels[RUN]},
        "matchExpressions": [{"key": ATTEMPT, "operator": "Exists"}],
    }
    term = {"labelSelector": own, "topologyKey": shape.cluster.topology_key}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def placement(cluster: KubernetesCluster, tolerations: list[Object]) -> Object:
    """Keys of a pod's spec that say which nodes may have it, and who may pull its image."""
    return given(
        priorityClassName=cluster.priority_class,
        nodeSelector=dict(cluster.node_selector),
        tolerations=tolerations,
        imagePullSecrets=[{"name": name} for name in cluster.image_pull_secrets],
    )


def _tolerations(shape: Shape, gpus: int) -> list[Object]:
    """Those of the cluster entry; of the taint of nodes with GPUs, for a pod that gets some; and
    for how long a node that does not answer keeps the pod, where another pod is waited for:
    Kubernetes' own 300 s are long while all others stand still."""
    found = [dict(each) for each in shape.cluster.tolerations]
    taken = {each.get("key") for each in found}
    if gpus and not taken & {None, shape.cluster.gpu_resource}:
        found.append(gpu_toleration(shape.cluster))
    if shape.rejoin and None not in taken:
        kept = silent_for(math.ceil(shape.cluster.lost_after))
        found += [each for each in kept if each["key"] not in taken]
    return found


def silent_for(seconds: int) -> list[Object]:
    """Tolerations: for so long a node that does not answer keeps the pod."""
    return [
        {
            "key": f"node.kubernetes.io/{key}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": seconds,
        }
        for key in ("not-ready", "unreachable")
    ]


def pod_security(user: int) -> Object:
    """What pod security "restricted" asks of a pod."""
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(*, read_only: bool = True) -> Object:
    """What it asks of a container, and a root file system that stays as it is."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": read_only,
        "capabilities": {"drop": ["ALL"]},
    }


def _key(shape: Shape, name: str) -> Object:
    """Of the run's Secret; a run that a person applies by hand may do without clusterkit's own."""
    found: Object = {"name": shape.name, "key": name}
    return found | {"optional": True} if name == PEER_TOKEN else found


def _field(path: str) -> Object:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


LAUNCHER_CPUS, LAUNCHER_MEMORY = 0.1, "1Gi"
"""What a pod asks for that only starts the ranks of others (deepspeed loads torch for that)."""


def resources(cluster: KubernetesCluster, gpus: int, *, ranks: bool = True) -> Object:
    """What a pod asks for; GPUs and memory cannot be had beyond that.

    Args:
        ranks: whether ranks run in it; another one asks for little, where the entry asks at all.
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
    return given(requests=requests, limits=limits)


def _volumes(shape: Shape) -> list[tuple[Object, Object]]:
    """What a pod mounts: each volume's definition, and where it is."""
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
        claim = {"claimName": each.claim, **given(readOnly=each.read_only)}
        name, where = f"claim-{number}", each.path
        found.append((name, {"persistentVolumeClaim": claim}, where, each.read_only))
    return [
        ({"name": name, **what}, given(name=name, mountPath=path, readOnly=read_only))
        for name, what, path, read_only in found
    ]


def merged(base: Any, patch: Any) -> Any:
    """A strategic merge: mappings key by key, lists of named things by name, all else replaced."""
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        found = copy.deepcopy(dict(base))
        for key, value in patch.items():
            if value is None:
                found.pop(key, None)
            else:
                found[key] = merged(found.get(key), value)
        return found
    if _named(base) and _named(patch):
        found_list = copy.deepcopy(list(base))
        for each in patch:
            at = next((n for n, one in enumerate(found_list) if one["name"] == each["name"]), None)
            if at is None:
                found_list.append(copy.deepcopy(each))
            else:
                found_list[at] = merged(found_list[at], each)
        return found_list
    return copy.deepcopy(patch)


def _named(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(each, Mapping) and "name" in each for each in value)
    )
