"""Are the volumes there, and can all pods write to them?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterkit.cluster import Claim
from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    Ask,
    KubeCheck,
    KubeSubject,
    Look,
    Reply,
    Seen,
    kubectl,
    one,
    unknown,
)

NAME = "volumes"


def _ask(seen: Seen, subject: KubeSubject) -> Mapping[str, Ask]:
    path = f"/api/v1/namespaces/{seen.namespace}/persistentvolumeclaims"
    return {each.claim: Ask(f"{path}/{each.claim}") for each in subject.entry.volumes}


CLAIMS = Look("claims", _ask)
CLASSES = Look("classes", one("/apis/storage.k8s.io/v1/storageclasses"))
_SEVERAL = {"ReadWriteMany", "ReadOnlyMany"}


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    if not subject.entry.volumes:
        return [Finding(NAME, CLUSTER, "skip", "the cluster entry names none")]
    findings = [
        finding
        for each in subject.entry.volumes
        for finding in _of(each, seen.reply(CLAIMS, each.claim), seen, subject)
    ]
    bad = [finding for finding in findings if finding.level != "ok"]
    return bad or [Finding(NAME, CLUSTER, "ok", "; ".join(each.cause for each in findings))]


def _of(volume: Claim, reply: Reply, seen: Seen, subject: KubeSubject) -> list[Finding]:
    name = f"claim {volume.claim}"
    describe = kubectl(subject, "-n", seen.namespace, "describe", "pvc", volume.claim)
    if reply.reason == "NotFound":
        cause = f"namespace {seen.namespace} has no volume {name}"
        return [Finding(NAME, CLUSTER, "fail", cause, "k8s/pvc.yaml makes one: give it that name")]
    if reply.reason:
        return unknown(NAME, reply, f"volume claims, so not at {volume.claim}")
    spec, status = reply.document["spec"], reply.document.get("status") or {}
    phase, storage = status.get("phase"), _class(seen, spec.get("storageClassName"))
    if phase == "Lost":
        return [Finding(NAME, CLUSTER, "fail", f"{name}: its volume is gone", describe)]
    waits = storage is not None and storage.get("volumeBindingMode") == "WaitForFirstConsumer"
    if phase != "Bound" and not waits:
        cause = f"{name} is not bound: no volume was found or made for it"
        if storage is None and not seen.reply(CLASSES).reason:
            wanted = spec.get("storageClassName")
            cause += f"; the cluster has no storage class {wanted}" if wanted else "; it names no "
            cause += "" if wanted else "storage class and the cluster has no default one"
        return [Finding(NAME, CLUSTER, "fail", cause, describe)]
    modes = set(status.get("accessModes") or spec.get("accessModes") or ())
    several = subject.job.node_range[1] > 1
    told = f"{name}: {', '.join(sorted(modes))}" + ("" if phase == "Bound" else ", not bound yet")
    if several and not modes & (_SEVERAL if volume.read_only else {"ReadWriteMany"}):
        cause = f"{told}: pods on several nodes cannot {'read' if volume.read_only else 'write to'}"
        mend = "a claim with accessModes: [ReadWriteMany] (k8s/pvc.yaml)"
        return [Finding(NAME, CLUSTER, "fail", f"{cause} it together", mend)]
    return [Finding(NAME, CLUSTER, "ok", told)]


def _class(seen: Seen, name: str | None) -> dict[str, Any] | None:
    for each in seen.reply(CLASSES).items:
        notes = each["metadata"].get("annotations") or {}
        default = notes.get("storageclass.kubernetes.io/is-default-class") == "true"
        if each["metadata"]["name"] == name or (name is None and default):
            found: dict[str, Any] = each
            return found
    return None


CHECK = KubeCheck(
    NAME,
    "The claims of the cluster entry are bound, and all pods can write to them.",
    judge,
    (CLAIMS, CLASSES),
)
