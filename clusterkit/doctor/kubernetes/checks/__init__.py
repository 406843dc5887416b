"""Every check of a Kubernetes cluster, in the order in which people read about them."""

from __future__ import annotations

from clusterkit.doctor.kubernetes.base import KubeCheck
from clusterkit.doctor.kubernetes.checks import (
    admission,
    api_server,
    dns,
    gpus,
    image,
    kind,
    limit_range,
    namespace,
    nodes,
    operator,
    plan,
    pod_security,
    pull_secrets,
    quota,
    rights,
    room,
    volumes,
)

CHECKS: tuple[KubeCheck, ...] = tuple(
    module.CHECK
    for module in (
        api_server, namespace, rights, kind, operator, plan,
        nodes, gpus, room, image, pull_secrets, volumes,
        pod_security, admission, quota, limit_range, dns,
    )
)  # fmt: skip
