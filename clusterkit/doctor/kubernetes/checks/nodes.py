"""Are there nodes that take pods, and are they well?"""

from __future__ import annotations

from typing import Any

from clusterkit.backends.kubernetes.nodes import tolerates
from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    NODES,
    KubeCheck,
    KubeSubject,
    Seen,
    is_ready,
    kubectl,
    nodes_of,
    unknown,
)

NAME = "nodes"
_PRESSURE = {"MemoryPressure": "memory", "DiskPressure": "disk", "PIDPressure": "process ids"}


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    reply = seen.reply(NODES)
    if reply.reason:
        return unknown(NAME, reply, "nodes")
    nodes = nodes_of(seen, subject)
    if not nodes:
        wanted = ", ".join(f"{key}={value}" for key, value in subject.entry.node_selector.items())
        cause = f"no node has the labels {wanted}" if wanted else "the cluster has no nodes"
        return [Finding(NAME, CLUSTER, "fail", cause, kubectl(subject, "get", "nodes"))]
    findings = [_of(node, subject) for node in nodes]
    if not any(finding.level == "ok" for finding in findings):
        cause = "no node takes pods of the job: " + "; ".join(
            dict.fromkeys(finding.cause for finding in findings)
        )
        findings.append(Finding(NAME, CLUSTER, "fail", cause))
    return findings


def _of(node: Any, subject: KubeSubject) -> Finding:
    name = node["metadata"]["name"]
    conditions = {each["type"]: each for each in (node.get("status") or {}).get("conditions") or ()}
    if not is_ready(node):
        said = str((conditions.get("Ready") or {}).get("message") or "it has never been ready")
        mend = kubectl(subject, "describe", "node", name)
        return Finding(NAME, name, "warn", f"not ready: {said}", mend)
    if (node.get("spec") or {}).get("unschedulable"):
        mend = kubectl(subject, "uncordon", name)
        return Finding(NAME, name, "warn", "it takes no pods (cordoned)", mend)
    taints = [
        f"{each.get('key')}={each.get('value', '')}:{each.get('effect')}".replace("=:", ":")
        for each in untolerated(node, subject)
    ]
    if taints:
        # Meant so, most of the time.
        return Finding(NAME, name, "skip", f"it takes no pods of the job: taint {taints[0]}")
    short = [word for kind, word in _PRESSURE.items()
             if (conditions.get(kind) or {}).get("status") == "True"]  # fmt: skip
    if short:
        return Finding(NAME, name, "warn", f"short of {' and '.join(short)}: pods may be evicted")
    return Finding(NAME, name, "ok", "ready")


def untolerated(node: Any, subject: KubeSubject) -> list[Any]:
    """The node's taints that keep the job's pods away."""
    entry = subject.entry
    tolerated = [*entry.tolerations, {"key": entry.gpu_resource, "operator": "Exists"}]
    return [
        taint
        for taint in (node.get("spec") or {}).get("taints") or ()
        if taint.get("effect") != "PreferNoSchedule"
        and not any(tolerates(each, taint) for each in tolerated)
    ]


CHECK = KubeCheck(
    NAME, "There are nodes that take pods of the job, and they are well.", judge, (NODES,)
)
