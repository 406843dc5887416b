"""Every check of a Kubernetes cluster, in the order in which people read about them."""

from __future__ import annotations

from clusterkit.doctor.kubernetes.base import KubeCheck
from clusterkit.doctor.kubernetes.checks import cluster, nodes, pods, volumes

CHECKS: tuple[KubeCheck, ...] = (
    cluster.api_server, cluster.namespace, cluster.rights, cluster.kind, cluster.operator,
    pods.plan, nodes.nodes, nodes.gpus, nodes.room, nodes.image, volumes.pull_secrets,
    volumes.volumes, pods.pod_security, pods.admission, pods.quota, pods.limit_range, cluster.dns,
)  # fmt: skip
