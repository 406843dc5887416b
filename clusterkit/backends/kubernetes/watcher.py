"""What a run has in the cluster for its lost pods: a small pod that runs `lost_pods`. Pure."""

from __future__ import annotations

import posixpath

from clusterkit.backends.kubernetes.flavors import Flavor
from clusterkit.backends.kubernetes.pods import (
    ATTEMPT,
    ROLE,
    RUN,
    Shape,
    container_security,
    metadata,
    placement,
    pod_security,
    silent_for,
)
from clusterkit.backends.kubernetes.text import Object, literal, made

PROGRAM = "lost_pods.py"
"""Its file in the run's config map."""
GONE_SECONDS = 30
"""How long a node that does not answer keeps it."""
RBAC = "rbac.authorization.k8s.io"


def watcher(shape: Shape, flavor: Flavor, python: str) -> list[Object]:
    """Its objects.

    Args:
        python: interpreter in the image.
    """
    name = f"{shape.name}-watch"
    meta = metadata(shape, name)
    del meta["labels"][ATTEMPT]
    # A PyTorchJob's pods have names that are known before; a Job holds its own.
    removes: Object = {"verbs": ["delete", "patch"]}
    if flavor.kind == "PyTorchJob":
        names = [flavor.node_name(shape, node) for node in range(shape.nodes)]
        removes = {"resourceNames": names, "verbs": ["delete"]}
    pods = {"apiGroups": [""], "resources": ["pods"]}
    account = {"kind": "ServiceAccount", "name": name, "namespace": shape.namespace}
    role = {"apiGroup": RBAC, "kind": "Role", "name": name}
    labels = {**meta["labels"], ROLE: "watcher"}
    pod = {"metadata": {"labels": labels}, "spec": _pod(shape, name, python)}
    return [
        made("v1", "ServiceAccount", meta, automountServiceAccountToken=False),
        made(f"{RBAC}/v1", "Role", meta, rules=[{**pods, "verbs": ["list"]}, {**pods, **removes}]),
        made(f"{RBAC}/v1", "RoleBinding", meta, roleRef=role, subjects=[account]),
        made(
            "batch/v1", "Job", {**meta, "labels": labels},
            spec={"backoffLimit": 1000, "template": pod},
        ),
    ]  # fmt: skip


def _pod(shape: Shape, account: str, python: str) -> Object:
    cluster, files = shape.cluster, "/clusterkit"
    selector = f"{RUN}={shape.labels[RUN]},{ROLE}=node"
    words = [python, "-I", posixpath.join(files, PROGRAM), shape.namespace, selector]
    container = {
        "name": "watcher",
        "image": shape.image,
        "imagePullPolicy": cluster.image_pull_policy,
        "command": [literal(word) for word in (*words, f"{cluster.lost_after:g}")],
        "resources": {
            "requests": {"cpu": "10m", "memory": "64Mi"},
            "limits": {"memory": "256Mi"},
        },
        "securityContext": container_security(),
        "volumeMounts": [{"name": "files", "mountPath": files, "readOnly": True}],
    }
    return {
        "restartPolicy": "OnFailure",
        "serviceAccountName": account,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        # On a node that is gone it must not stay for the five minutes that are usual.
        **placement(cluster, [*map(dict, cluster.tolerations), *silent_for(GONE_SECONDS)]),
        "securityContext": pod_security(cluster.user),
        "containers": [container],
        "volumes": [{"name": "files", "configMap": {"name": shape.name}}],
    }
