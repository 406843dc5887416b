"""Are the volumes and the registry's credentials there that the cluster entry names?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterkit.cluster import Claim
from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    Ask,
    KubeSubject,
    Look,
    Reply,
    Seen,
    check,
    fail,
    ok,
    one,
    skip,
)


def _claims(seen: Seen, subject: KubeSubject) -> Mapping[str, Ask]:
    path = f"/api/v1/namespaces/{seen.namespace}/persistentvolumeclaims"
    return {each.claim: Ask(f"{path}/{each.claim}") for each in subject.entry.volumes}


CLAIMS = Look("claims", _claims)
CLASSES = Look("classes", one("/apis/storage.k8s.io/v1/storageclasses"))
_SEVERAL = {"ReadWriteMany", "ReadOnlyMany"}


@check(
    "volumes",
    "The claims of the cluster entry are bound, and all pods can write to them.",
    CLAIMS,
    CLASSES,
)
def volumes(seen: Seen, subject: KubeSubject) -> Finding | list[Finding]:
    if not subject.entry.volumes:
        return skip("the cluster entry names none")
    findings = [
        _of(each, seen.reply(CLAIMS, each.claim), seen, subject) for each in subject.entry.volumes
    ]
    bad = [finding for finding in findings if finding.level != "ok"]
    return bad or ok("; ".join(each.cause for each in findings))


def _of(volume: Claim, reply: Reply, seen: Seen, subject: KubeSubject) -> Finding:
    name = f"claim {volume.claim}"
    describe = subject.kubectl("-n", seen.namespace, "describe", "pvc", volume.claim)
    if reply.reason == "NotFound":
        cause = f"namespace {seen.namespace} has no volume {name}"
        return fail(cause, "k8s/pvc.yaml makes one: give it that name")
    if reply.reason:
        return reply.unknown(f"volume claims, so not at {volume.claim}")
    spec, status = reply.document["spec"], reply.document.get("status") or {}
    phase, storage = status.get("phase"), _class(seen, spec.get("storageClassName"))
    if phase == "Lost":
        return fail(f"{name}: its volume is gone", describe)
    waits = storage is not None and storage.get("volumeBindingMode") == "WaitForFirstConsumer"
    if phase != "Bound" and not waits:
        cause = f"{name} is not bound: no volume was found or made for it"
        if storage is None and not seen.reply(CLASSES).reason:
            wanted = spec.get("storageClassName")
            cause += f"; the cluster has no storage class {wanted}" if wanted else "; it names no "
            cause += "" if wanted else "storage class and the cluster has no default one"
        return fail(cause, describe)
    modes = set(status.get("accessModes") or spec.get("accessModes") or ())
    several = subject.job.node_range[1] > 1
    cause = f"{name}: {', '.join(sorted(modes))}" + ("" if phase == "Bound" else ", not bound yet")
    if several and not modes & (_SEVERAL if volume.read_only else {"ReadWriteMany"}):
        cause += f": pods on several nodes cannot {'read' if volume.read_only else 'write to'}"
        mend = "a claim with accessModes: [ReadWriteMany] (k8s/pvc.yaml)"
        return fail(f"{cause} it together", mend)
    return ok(cause)


def _class(seen: Seen, name: str | None) -> dict[str, Any] | None:
    for each in seen.reply(CLASSES).items:
        notes = each["metadata"].get("annotations") or {}
        default = notes.get("storageclass.kubernetes.io/is-default-class") == "true"
        if each["metadata"]["name"] == name or (name is None and default):
            found: dict[str, Any] = each
            return found
    return None


def _secrets(seen: Seen, subject: KubeSubject) -> Mapping[str, Ask]:
    """Whether one could be made of that name, without making it: nobody has to read a secret."""
    path = f"/api/v1/namespaces/{seen.namespace}/secrets?dryRun=All"
    return {
        name: Ask(path, {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}})
        for name in subject.entry.image_pull_secrets
    }


SECRETS = Look("pull-secrets", _secrets)


@check("pull-secrets", "The secrets with the registry's credentials are there.", SECRETS)
def pull_secrets(seen: Seen, subject: KubeSubject) -> Finding | list[Finding]:
    names = subject.entry.image_pull_secrets
    if not names:
        return skip("the cluster entry names none")
    findings = []
    for name in names:
        reply = seen.reply(SECRETS, name)
        if reply.reason == "AlreadyExists":
            continue
        if reply.reason:
            findings.append(reply.unknown("secrets"))
            continue
        mend = subject.kubectl(
            "-n", seen.namespace, "create", "secret", "docker-registry", name,
            "--docker-server=...", "--docker-username=...", "--docker-password=...",
        )  # fmt: skip
        findings.append(fail(f"namespace {seen.namespace} has no secret {name}", mend))
    return findings or ok(", ".join(names))
