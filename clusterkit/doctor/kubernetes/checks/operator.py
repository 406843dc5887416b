"""Is somebody there who makes pods of the job?"""

from __future__ import annotations

import re
from typing import Any

from clusterkit.backends.kubernetes.flavors import OPERATORS
from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    KubeCheck,
    KubeSubject,
    Look,
    Seen,
    kubectl,
    one,
    unknown,
)

NAME = "operator"
DEPLOYMENTS = Look("deployments", one("/apis/apps/v1/deployments"))
_CALLED = {
    "pytorchjob": (re.compile(r"training-operator"),),
    "mpijob": (re.compile(r"mpi-operator"),),
    # The trainer makes a JobSet, and somebody else makes Jobs of that.
    "trainjob": (re.compile(r"trainer-controller"), re.compile(r"jobset-controller")),
}
"""What deployments of operators, or their images, are called."""
_ONLY_IN = re.compile(r"--?namespace(?:=(\S*))?\Z")


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    if seen.flavor is None:
        return [Finding(NAME, CLUSTER, "skip", "there is no kind of job to act on")]
    if seen.flavor == "job":
        return [Finding(NAME, CLUSTER, "ok", "Kubernetes' own controllers act on a Job")]
    who = OPERATORS[seen.flavor]
    reply = seen.reply(DEPLOYMENTS)
    if reply.reason:
        return unknown(NAME, reply, f"deployments, so not whether {who} is alive")
    findings = []
    for pattern in _CALLED[seen.flavor]:
        found = [each for each in reply.items if _is(each, pattern)]
        findings += _judge(found, pattern.pattern, who, seen.namespace, subject)
    bad = [finding for finding in findings if finding.level != "ok"]
    return bad or [Finding(NAME, CLUSTER, "ok", ", ".join(one.cause for one in findings))]


def _judge(
    found: list[Any], called: str, who: str, namespace: str, subject: KubeSubject
) -> list[Finding]:
    if not found:
        cause = f"unknown: no deployment is called {called}, as that of {who} is"
        return [Finding(NAME, CLUSTER, "warn", cause)]
    others = []
    for each in found:
        meta, wanted = each["metadata"], each["spec"].get("replicas", 1)
        place = f"{meta['namespace']}/{meta['name']}"
        only = _only_in(each)
        if only not in ("", namespace):
            others.append(f"{place} watches namespace {only} alone, not {namespace}")
            continue
        ready = (each.get("status") or {}).get("readyReplicas", 0)
        # One that is going is ready for a moment more.
        if ready and wanted:
            return [Finding(NAME, CLUSTER, "ok", f"{place} is ready")]
        words = ("-n", meta["namespace"])
        if not wanted:
            cause = f"{place} is scaled to 0: nobody acts on the job"
            mend = kubectl(subject, *words, "scale", "deployment", meta["name"], "--replicas=1")
        else:
            cause = f"{place}: {ready} of {wanted} pods are ready: nobody acts on the job"
            mend = kubectl(subject, *words, "describe", "deployment", meta["name"])
        return [Finding(NAME, CLUSTER, "fail", cause, mend)]
    return [Finding(NAME, CLUSTER, "fail", "; ".join(others))]


def _is(deployment: Any, pattern: re.Pattern[str]) -> bool:
    containers = deployment["spec"]["template"]["spec"]["containers"]
    names = [deployment["metadata"]["name"], *(str(each.get("image")) for each in containers)]
    return any(pattern.search(name) for name in names)


def _only_in(deployment: Any) -> str:
    """The namespace that the operator was told to keep to; empty: none."""
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        for word, after in zip(words, [*words[1:], ""], strict=True):
            if (match := _ONLY_IN.match(word)) is not None:
                return match[1] if match[1] is not None else after
    return ""


CHECK = KubeCheck(
    NAME,
    "Whoever makes pods of the job is alive, and watches this namespace.",
    judge,
    (DEPLOYMENTS,),
)
