"""Every check of a Kubernetes cluster, in the order in which people read about them."""

from __future__ import annotations

from clusterkit.doctor.base import Check
from clusterkit.doctor.kubernetes.checks import cluster, namespace, nodes

CHECKS: tuple[Check, ...] = (
    cluster.api_server, cluster.namespace, cluster.rights, cluster.kind, cluster.operator,
    namespace.plan, nodes.nodes, nodes.gpus, nodes.room, nodes.image, namespace.pull_secrets,
    namespace.volumes, namespace.admission, namespace.quota, namespace.limit_range, cluster.dns,
)  # fmt: skip
