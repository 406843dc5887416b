"""The watcher that a run has in the cluster: its objects and its rules. Pure.

`watcher` is what runs there, `lease` how it and the submitter's side take turns.
"""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from clusterkit.backends.kubernetes.apply import collection, path_of
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
from clusterkit.backends.kubernetes.watcher import Rules, lease_seconds
from clusterkit.spec import JobSpec

RULES, PROGRAM = "watch.json", "watcher.py"
"""Its files in the run's config map."""
SUBMITTER = "clusterkit-submitter"
"""Holder of the Lease before anybody has renewed it."""
GONE_SECONDS = 30
"""How long a node that does not answer keeps it."""
STAY_SECONDS = 7 * 24 * 3600
"""How long a run that has ended stays in the cluster when nobody comes for it."""


def watch_name(name: str) -> str:
    """What its objects are called, for a run whose objects are called ``name``."""
    return f"{name}-watch"


# ---------------------------------------------------------------- its objects (pure)


def rules_of(
    shape: Shape, flavor: Flavor, objects: Sequence[Object], job: JobSpec, launchers: int
) -> Rules:
    """The rules for a run whose manifests are ``objects`` and whose agents run on ``launchers``
    nodes."""
    made: list[Object] = [
        {"path": path_of(each, shape.namespace), "body": each}
        for each in objects
        if each["kind"] != "Service"
    ]
    return Rules(
        run=shape.labels[RUN],
        name=shape.name,
        namespace=shape.namespace,
        job=made[-1]["path"],
        objects=made,
        rank_label=flavor.index,
        nodes=launchers,
        needed=min(launchers, shape.min_nodes),
        replaces=shape.elastic or shape.rejoin,
        force=shape.cluster.replace_lost,
        restarts=job.restarts,
        time_limit=job.limit_seconds,
        lost_after=shape.cluster.lost_after,
        stop_grace=shape.cluster.stop_grace,
    )


def rules_text(rules: Rules) -> str:
    return json.dumps(rules._asdict(), indent=1) + "\n"


def guard(shape: Shape, flavor: Flavor, objects: Sequence[Object], python: str) -> list[Object]:
    """The watcher's own objects; the Job at the end owns all of the run's.

    Args:
        objects: the run's manifests.
        python: interpreter in the image.
    """
    name = watch_name(shape.name)
    meta = metadata(shape, name)
    meta["labels"] = {key: value for key, value in meta["labels"].items() if key != ATTEMPT}
    rbac = "rbac.authorization.k8s.io"

    def made(api: str, kind: str, **rest: Any) -> Object:
        return {"apiVersion": api, "kind": kind, "metadata": meta, **rest}

    lease = {
        "holderIdentity": SUBMITTER,
        "leaseDurationSeconds": math.ceil(lease_seconds(shape.cluster.lost_after)),
    }
    return [
        made("v1", "ServiceAccount", automountServiceAccountToken=False),
        made(f"{rbac}/v1", "Role", rules=_rules(shape, flavor, objects, name)),
        made(
            f"{rbac}/v1",
            "RoleBinding",
            roleRef={"apiGroup": rbac, "kind": "Role", "name": name},
            subjects=[{"kind": "ServiceAccount", "name": name, "namespace": shape.namespace}],
        ),
        made("coordination.k8s.io/v1", "Lease", spec=lease),
        made("v1", "ConfigMap"),
        _job(shape, meta, name, python),
    ]


def _rules(shape: Shape, flavor: Flavor, objects: Sequence[Object], name: str) -> list[Object]:
    """Rights for this run alone, as far as they can be narrowed down by name: pods whose names are
    not known before cannot be."""
    named = flavor.kind == "PyTorchJob"
    pods = [flavor.node_name(shape, node) for node in range(shape.nodes)] if named else None
    kinds = sorted(
        {(_group(each), collection(each, "x").rpartition("/")[2]) for each in objects}
        - {("", "services")}
    )

    def rule(group: str, resource: str, names: list[str] | None, *verbs: str) -> Object:
        only = {} if names is None else {"resourceNames": names}
        return {"apiGroups": [group], "resources": [resource], **only, "verbs": list(verbs)}

    return [
        rule("", "pods", None, "list", "watch"),
        # A Job's pod on a node that is gone stays until its finalizer is taken away.
        rule("", "pods", pods, *(("delete",) if named else ("delete", "patch"))),
        rule("", "pods/log", pods, "get"),
        *(
            rule(group, plural, [shape.name], "get", "create", "patch", "delete")
            for group, plural in kinds
        ),
        rule("batch", "jobs", [name], "get", "delete"),
        rule("", "configmaps", [name], "get", "patch"),
        rule("coordination.k8s.io", "leases", [name], "get", "patch"),
    ]


def _group(each: Mapping[str, Any]) -> str:
    group, slash, _ = str(each["apiVersion"]).partition("/")
    return group if slash else ""


def _job(shape: Shape, meta: Object, name: str, python: str) -> Object:
    cluster = shape.cluster
    files = "/clusterkit"
    words = [python, "-I", posixpath.join(files, PROGRAM), posixpath.join(files, RULES)]
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
                "command": [literal(word) for word in words],
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
            # Whoever does not come for a run that has ended in a week does not come.
            "ttlSecondsAfterFinished": STAY_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
