"""Do the namespace's quotas leave room for the job?"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    REHEARSAL,
    KubeCheck,
    KubeSubject,
    Look,
    Seen,
    amount,
    kubectl,
    limits,
    one,
    quantity,
    requests,
    spec_of,
    templates,
    unknown,
    unplanned,
)

NAME = "quota"
QUOTAS = Look("quotas", one("/api/v1/namespaces/{namespace}/resourcequotas"))


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    if seen.reply(QUOTAS).reason:
        return unknown(NAME, seen.reply(QUOTAS), "quotas")
    if not seen.objects:
        return unplanned(NAME, seen)
    wanted = _wanted(seen, subject)
    quotas = [each for each in seen.reply(QUOTAS).items if not _scoped(each)]
    findings = [finding for each in quotas for finding in _of(each, wanted, seen, subject)]
    for role, _, _ in templates(seen.objects):
        said = seen.reply(REHEARSAL, role).said
        if "failed quota" in said:
            # Such as that a pod has to say how much memory it wants.
            words = said[said.index("failed quota") :]
            findings.append(Finding(NAME, CLUSTER, "fail", f"a pod ({role}) is refused: {words}"))
        elif "exceeded quota" in said and not findings:
            words = said[said.index("exceeded quota") :]
            findings.append(Finding(NAME, CLUSTER, "fail", f"a pod ({role}) is refused: {words}"))
    if findings:
        return findings
    names = ", ".join(each["metadata"]["name"] for each in seen.reply(QUOTAS).items)
    return [Finding(NAME, CLUSTER, "ok", f"room in {names}" if names else "there is none")]


def _scoped(quota: Any) -> bool:
    """Whether it counts some pods only, by rules that are not followed here."""
    spec = quota.get("spec") or {}
    return bool(spec.get("scopes") or spec.get("scopeSelector"))


def _of(quota: Any, wanted: dict[str, Decimal], seen: Seen, subject: KubeSubject) -> list[Finding]:
    name = quota["metadata"]["name"]
    status = quota.get("status") or {}
    hard = status.get("hard") or (quota.get("spec") or {}).get("hard") or {}
    used = status.get("used") or {}
    findings = []
    for resource, limit in hard.items():
        need, most = wanted.get(resource), quantity(limit)
        taken = quantity(used.get(resource, 0))
        if need is None or taken + need <= most:
            continue
        cause = f"quota {name} has {amount(resource, most)} of {resource}, "
        cause += f"{amount(resource, taken)} in use; the job needs {amount(resource, need)}"
        mend = kubectl(subject, "-n", seen.namespace, "describe", "quota", name)
        # What is in use now may be free later; what is more than all of it never fits.
        level = "fail" if need > most else "warn"
        findings.append(Finding(NAME, CLUSTER, level, cause, mend))  # type: ignore[arg-type]
    return findings


def _wanted(seen: Seen, subject: KubeSubject) -> dict[str, Decimal]:
    """What the job takes of everything that quotas count, by their names for it."""
    found: dict[str, Decimal] = {}

    def add(name: str, value: Decimal | int) -> None:
        found[name] = found.get(name, Decimal(0)) + value

    for role, number, template in templates(seen.objects):
        spec = spec_of(seen, role, template)
        for name in ("pods", "count/pods"):
            add(name, number)
        for name, value in requests(spec).items():
            add(f"requests.{name}", value * number)
            if name in ("cpu", "memory", "ephemeral-storage"):
                add(name, value * number)
        for name, value in limits(spec).items():
            add(f"limits.{name}", value * number)
    copied = subject.entry.code == "copied"
    for name, number in (
        ("configmaps", 1 + copied + sum(each["kind"] == "ConfigMap" for each in seen.objects)),
        ("secrets", "secretKeyRef" in str(seen.objects)),
        ("services", sum(each["kind"] == "Service" for each in seen.objects)),
    ):
        if number:
            add(name, number)
            add(f"count/{name}", number)
    if (kind := seen.kind) is not None:
        group = kind.API.rpartition("/")[0]
        add(f"count/{kind.PLURAL}.{group}", 1)
    return found


CHECK = KubeCheck(
    NAME, "The namespace's quotas leave room for the job.", judge, (QUOTAS, REHEARSAL)
)
