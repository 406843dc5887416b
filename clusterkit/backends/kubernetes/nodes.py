"""Which nodes of a cluster may have a run's pods, and how many GPUs those have. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clusterkit.backends.kubernetes.lost_pods import conditions_of
from clusterkit.cluster import Gpu, KubernetesCluster
from clusterkit.spec import JobSpec


def best_node(
    cluster: KubernetesCluster, nodes: Sequence[Mapping[str, Any]]
) -> tuple[int, str, int]:
    """GPUs of the node that has most of them now, what they are and their MiB."""
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
    """GPUs of a pod: as many as are asked for by number, else those of the node that has most.

    A number is taken although no node has as many now: where nodes with GPUs are started when a
    pod waits for them, a pool of them at zero is how it always is.

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
    """How many GPUs the node offers to pods."""
    text = str((node["status"].get("allocatable") or {}).get(cluster.gpu_resource, "0"))
    return int(text) if text.isdigit() else 0


def selected(node: Mapping[str, Any], cluster: KubernetesCluster) -> bool:
    """Whether the node has the labels that the entry asks for."""
    labels = node["metadata"].get("labels", {})
    if cluster.topology_key is not None and cluster.topology_key not in labels:
        return False
    return all(labels.get(key) == value for key, value in cluster.node_selector.items())


def is_ready(node: Mapping[str, Any]) -> bool:
    return conditions_of(node).get("Ready", {}).get("status") == "True"


def usable(node: Mapping[str, Any], cluster: KubernetesCluster) -> bool:
    """Whether pods of the cluster entry would be put there."""
    return not (node.get("spec") or {}).get("unschedulable") and not repelling(node, cluster)


def repelling(node: Mapping[str, Any], cluster: KubernetesCluster) -> list[Mapping[str, Any]]:
    """The node's taints that keep pods of the cluster entry away."""
    tolerated = [*cluster.tolerations, gpu_toleration(cluster)]
    return [
        taint
        for taint in (node.get("spec") or {}).get("taints") or ()
        if taint.get("effect") != "PreferNoSchedule"
        and not any(_tolerates(each, taint) for each in tolerated)
    ]


def gpu_toleration(cluster: KubernetesCluster) -> dict[str, Any]:
    """Of the taint that keeps pods without GPUs off the nodes that have them: pods that ask for
    GPUs get it, as not every cluster has the admission plugin ExtendedResourceToleration."""
    return {"key": cluster.gpu_resource, "operator": "Exists"}


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    same = toleration.get("key") == taint.get("key")
    return same and (toleration.get("value") or "") == (taint.get("value") or "")
