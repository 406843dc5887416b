"""Is a pod of the job within what the namespace allows one to have?"""

from __future__ import annotations

from typing import Any

from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    KubeCheck,
    KubeSubject,
    Look,
    Seen,
    amount,
    limits,
    one,
    quantity,
    requests,
    templates,
    unknown,
    unplanned,
)

NAME = "limit-range"
RANGES = Look("limit-ranges", one("/api/v1/namespaces/{namespace}/limitranges"))


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    reply = seen.reply(RANGES)
    if reply.reason:
        return unknown(NAME, reply, "limit ranges")
    if not reply.items:
        return [Finding(NAME, CLUSTER, "ok", "there is none")]
    if not seen.objects:
        return unplanned(NAME, seen)
    wrong: list[str] = []
    given: dict[str, str] = {}
    for each in reply.items:
        name = each["metadata"]["name"]
        for rule in (each.get("spec") or {}).get("limits") or ():
            if rule.get("type") not in ("Container", "Pod"):
                continue
            for _, _, template in templates(seen.objects):
                wrong += _broken(name, rule, template["spec"])
                given |= _given(rule, template["spec"])
    if wrong:
        return [Finding(NAME, CLUSTER, "fail", cause) for cause in dict.fromkeys(wrong)]
    names = ", ".join(each["metadata"]["name"] for each in reply.items)
    if given:
        what = ", ".join(f"{key} {value}" for key, value in given.items())
        cause = f"{names} gives pods what the cluster entry leaves open: {what}"
        tight = "limit memory" in given or "limit cpu" in given
        return [Finding(NAME, CLUSTER, "warn" if tight else "ok", cause)]
    return [Finding(NAME, CLUSTER, "ok", f"within {names}")]


def _broken(name: str, rule: Any, spec: Any) -> list[str]:
    asked, most = requests(spec), limits(spec)
    found = []
    for resource, limit in (rule.get("max") or {}).items():
        value = most.get(resource, asked.get(resource))
        if value is not None and value > quantity(limit):
            found.append(
                f"limit range {name}: {resource} {limit} at most, "
                f"a pod of the job has {amount(resource, value)}"
            )
    for resource, least in (rule.get("min") or {}).items():
        value = asked.get(resource)
        if value is not None and value < quantity(least):
            found.append(
                f"limit range {name}: {resource} {least} at least, "
                f"a pod of the job asks for {amount(resource, value)}"
            )
    return found


def _given(rule: Any, spec: Any) -> dict[str, str]:
    """What a container gets that says nothing of it."""
    asked, most = requests(spec), limits(spec)
    found = {}
    for resource, value in (rule.get("default") or {}).items():
        if resource not in most:
            found[f"limit {resource}"] = str(value)
    for resource, value in (rule.get("defaultRequest") or {}).items():
        if resource not in asked:
            found[f"request {resource}"] = str(value)
    return found


CHECK = KubeCheck(
    NAME, "A pod of the job is within what the namespace allows one to have.", judge, (RANGES,)
)
