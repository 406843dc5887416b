"""The nodes of a cluster: which may have a run's pods, and their GPUs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from clusterkit.backends.kubernetes.lost_pods import conditions_of
from clusterkit.backends.kubernetes.objects import parse_amount
from clusterkit.cluster import Gpu, KubernetesCluster
from clusterkit.spec import JobSpec


def best_node(
    cluster: KubernetesCluster, nodes: Sequence[Mapping[str, Any]]
) -> tuple[int, str, int]:
    """Return the most GPUs that a node has now, their product name and their MiB."""
    best: tuple[int, str, int] = (0, "GPU", 0)
    for node in nodes:
        if selected(node, cluster) and usable(node, cluster):
            labels = node["metadata"].get("labels", {})
            memory = str(labels.get("nvidia.com/gpu.memory", "0"))
            product = str(labels.get("nvidia.com/gpu.product", "GPU"))
            best = max(
                best,
                (gpu_count(node, cluster), product, int(memory) if memory.isdigit() else 0),
            )
    return best


def gpus_of(
    cluster: KubernetesCluster, job: JobSpec | None, nodes: Sequence[Mapping[str, Any]] | None
) -> tuple[Gpu, ...]:
    """Return the GPUs of a pod: as many as entry or job ask for, else those of `best_node`.

    A number holds although no node has as many now: an autoscaler starts nodes for pods that wait.

    Args:
        nodes: as the API server lists them; None: we may not look.
    """
    count, product, memory_mib = best_node(cluster, nodes or ())
    if cluster.gpus != "auto":
        count = cluster.gpus
    elif job is not None and job.gpus_per_node != "auto" and (count or job.device == "cuda"):
        count = max(count, job.gpus_per_node)
    return tuple(Gpu(str(index), product, memory_mib) for index in range(count))


def gpu_count(node: Mapping[str, Any], cluster: KubernetesCluster) -> int:
    text = str((node["status"].get("allocatable") or {}).get(cluster.gpu_resource, "0"))
    return int(text) if text.isdigit() else 0


def cores_of(cluster: KubernetesCluster, nodes: Sequence[Mapping[str, Any]], gpus: int) -> int:
    """Return the cores that fall to a pod's GPUs, on the node with the fewest for each GPU.

    A pod without a CPU request may use all cores of its node, which pods with the other GPUs share.

    Returns:
        0: not known.
    """
    shares = []
    for node in nodes:
        count = gpu_count(node, cluster)
        if count and selected(node, cluster) and usable(node, cluster):
            cores = parse_amount((node["status"].get("allocatable") or {}).get("cpu", 0))
            shares.append(cores * min(gpus, count) / count)
    return math.floor(min(shares, default=0))


def selected(node: Mapping[str, Any], cluster: KubernetesCluster) -> bool:
    """Whether a node has the labels that the cluster entry asks for."""
    labels = node["metadata"].get("labels", {})
    if cluster.topology_key is not None and cluster.topology_key not in labels:
        return False
    return all(labels.get(key) == value for key, value in cluster.node_selector.items())


def is_ready(node: Mapping[str, Any]) -> bool:
    return conditions_of(node).get("Ready", {}).get("status") == "True"


def usable(node: Mapping[str, Any], cluster: KubernetesCluster) -> bool:
    """Whether a node takes pods with the tolerations of the cluster entry."""
    return not (node.get("spec") or {}).get("unschedulable") and not repelling(node, cluster)


def repelling(node: Mapping[str, Any], cluster: KubernetesCluster) -> list[Mapping[str, Any]]:
    """Return the node's taints that the cluster entry does not tolerate."""
    tolerated = [*cluster.tolerations, gpu_toleration(cluster)]
    return [
        taint
        for taint in (node.get("spec") or {}).get("taints") or ()
        if taint.get("effect") != "PreferNoSchedule"
        and not any(_tolerates(each, taint) for each in tolerated)
    ]


def gpu_toleration(cluster: KubernetesCluster) -> dict[str, Any]:
    """Tolerate the taint that keeps pods without GPUs off nodes with GPUs: not every cluster has
    the admission plugin ExtendedResourceToleration, which would add this."""
    return {"key": cluster.gpu_resource, "operator": "Exists"}


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    same = toleration.get("key") == taint.get("key")
    return same and (toleration.get("value") or "") == (taint.get("value") or "")
