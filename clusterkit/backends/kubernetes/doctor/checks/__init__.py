"""Every check of a Kubernetes cluster, in the order in which people read about them."""

from __future__ import annotations

from clusterkit.backends.kubernetes.doctor.checks import cluster, namespace, nodes
from clusterkit.doctor.base import Check

CHECKS: tuple[Check, ...] = (
    cluster.api_server, cluster.namespace, cluster.rights, cluster.kind, namespace.plan,
    nodes.nodes, nodes.gpus, namespace.pull_secrets, namespace.volumes, namespace.admission,
)  # fmt: skip
