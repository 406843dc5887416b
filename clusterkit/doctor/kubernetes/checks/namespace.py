"""Is the namespace there?"""

from __future__ import annotations

from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    NAMESPACE,
    KubeCheck,
    KubeSubject,
    Seen,
    kubectl,
    unknown,
)

NAME = "namespace"


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    reply, name = seen.reply(NAMESPACE), seen.namespace
    if reply.reason == "NotFound":
        mend = kubectl(subject, "create", "namespace", name)
        return [Finding(NAME, CLUSTER, "fail", f"the cluster has no namespace {name}", mend)]
    if reply.reason:
        return unknown(NAME, reply, f"namespace {name}")
    if (reply.document.get("status") or {}).get("phase") == "Terminating":
        return [Finding(NAME, CLUSTER, "fail", f"{name} is being deleted")]
    return [Finding(NAME, CLUSTER, "ok", name)]


CHECK = KubeCheck(NAME, "The namespace is there.", judge, (NAMESPACE,), quick=True)
