"""Does the namespace's pod security let the job's pods in?"""

from __future__ import annotations

from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    NAMESPACE,
    REHEARSAL,
    KubeCheck,
    KubeSubject,
    Seen,
    templates,
    unknown,
    unplanned,
)

NAME = "pod-security"
_LABEL = "pod-security.kubernetes.io/enforce"


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    if seen.reply(NAMESPACE).reason == "NotFound":
        return [Finding(NAME, CLUSTER, "skip", "there is no such namespace")]
    if not seen.objects:
        return unplanned(NAME, seen)
    labels = (seen.reply(NAMESPACE).document.get("metadata") or {}).get("labels") or {}
    level = labels.get(_LABEL)
    enforced = f"the namespace enforces {level}" if level else "the namespace enforces nothing"
    if seen.reply(NAMESPACE).reason:
        enforced = "what the namespace enforces is unknown"
    refused: dict[str, list[str]] = {}
    for role, _, _ in templates(seen.objects):
        reply = seen.reply(REHEARSAL, role)
        if "violates PodSecurity" in reply.said:
            words = "violates" + reply.said.partition("violates")[2]
            refused.setdefault(words, []).append(role)
        elif "cannot create resource" in reply.said:
            passes = (
                "" if subject.entry.patch or level is None else ", which clusterkit's pods pass"
            )
            cause = f"{enforced}{passes}; not tried: you may not create pods yourself"
            return [Finding(NAME, CLUSTER, "ok" if passes or level is None else "skip", cause)]
        elif reply.reason == "Unasked":
            return unknown(NAME, reply, "pods")
    if refused:
        return [
            Finding(NAME, CLUSTER, "fail", f"pods ({', '.join(roles)}) are refused: {words}")
            for words, roles in refused.items()
        ]
    return [Finding(NAME, CLUSTER, "ok", f"{enforced}; the job's pods pass")]


CHECK = KubeCheck(
    NAME,
    "The namespace's pod security admits the job's pods.",
    judge,
    (NAMESPACE, REHEARSAL),
)
