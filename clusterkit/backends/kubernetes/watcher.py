"""What a run has in the cluster for its lost pods: a small pod that runs `lost_pods`. Pure."""

from __future__ import annotations

import posixpath
from typing import Any

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
from clusterkit.backends.kubernetes.text import Object, literal

PROGRAM = "lost_pods.py"
"""Its file in the run's config map."""
KINDS = (
    ("batch/v1", "jobs"), ("v1", "serviceaccounts"),
    ("rbac.authorization.k8s.io/v1", "rolebindings"), ("rbac.authorization.k8s.io/v1", "roles"),
)  # fmt: skip
"""API and plural of its objects."""
GONE_SECONDS = 30
"""How long a node that does not answer keeps it."""


def watch_name(name: str) -> str:
    """What its objects are called, for a run whose objects are called ``name``."""
    return f"{name}-watch"


def watcher(shape: Shape, flavor: Flavor, python: str) -> list[Object]:
    """Its objects.

    Args:
        python: interpreter in the image.
    """
    name = watch_name(shape.name)
    meta = metadata(shape, name)
    meta["labels"] = {key: value for key, value in meta["labels"].items() if key != ATTEMPT}
    rbac = "rbac.authorization.k8s.io"
    # A PyTorchJob's pods have names that are known before; a Job holds its own.
    named = flavor.kind == "PyTorchJob"
    names = {"resourceNames": [flavor.node_name(shape, node) for node in range(shape.nodes)]}
    pods = {"apiGroups": [""], "resources": ["pods"]}
    removes = {**names, "verbs": ["delete"]} if named else {"verbs": ["delete", "patch"]}

    def made(api: str, kind: str, **rest: Any) -> Object:
        return {"apiVersion": api, "kind": kind, "metadata": meta, **rest}

    return [
        made("v1", "ServiceAccount", automountServiceAccountToken=False),
        made(f"{rbac}/v1", "Role", rules=[{**pods, "verbs": ["list"]}, {**pods, **removes}]),
        made(
            f"{rbac}/v1",
            "RoleBinding",
            roleRef={"apiGroup": rbac, "kind": "Role", "name": name},
            subjects=[{"kind": "ServiceAccount", "name": name, "namespace": shape.namespace}],
        ),
        _job(shape, meta, name, python),
    ]


def _job(shape: Shape, meta: Object, name: str, python: str) -> Object:
    cluster, files = shape.cluster, "/clusterkit"
    selector = f"{RUN}={shape.labels[RUN]},{ROLE}=node"
    words = [python, "-I", posixpath.join(files, PROGRAM), shape.namespace, selector]
    spec: Object = {
        "restartPolicy": "OnFailure",
        "serviceAccountName": name,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        # On a node that is gone it must not stay for the five minutes that are usual.
        **placement(cluster, [*map(dict, cluster.tolerations), *silent_for(GONE_SECONDS)]),
        "securityContext": pod_security(cluster.user),
        "containers": [
            {
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
        ],
        "volumes": [{"name": "files", "configMap": {"name": shape.name}}],
    }
    labels = {**meta["labels"], ROLE: "watcher"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**meta, "labels": labels},
        "spec": {
            "backoffLimit": 1000,
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
