"""Does the API server take the job and its pods?"""

from __future__ import annotations

from clusterkit.doctor.base import Finding, shortened
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    NAMESPACE,
    REHEARSAL,
    KubeCheck,
    KubeSubject,
    Seen,
    templates,
    unplanned,
)

NAME = "admission"
_OTHERS = ("violates PodSecurity", "exceeded quota", "failed quota")
"""What other checks tell of."""


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    if seen.reply(NAMESPACE).reason == "NotFound":
        return [Finding(NAME, CLUSTER, "skip", "there is no such namespace")]
    if not seen.objects:
        return unplanned(NAME, seen)
    answers = dict(seen.replies.get(REHEARSAL.name, {}))
    if not answers:
        return [Finding(NAME, CLUSTER, "skip", "the API server did not answer")]
    taken, untried = [], []
    refused: dict[str, tuple[str, list[str]]] = {}
    for what, reply in answers.items():
        if "cannot create resource" in reply.said:
            untried.append(what)
        elif reply.reason and not any(words in reply.said for words in _OTHERS):
            name = what if what == getattr(seen.kind, "KIND", "") else f"a pod ({what})"
            # A refusal begins with the pod's own name.
            why = reply.said.rpartition(" is forbidden: ")[2]
            refused.setdefault(why, (reply.said, []))[1].append(name)
        elif not reply.reason:
            taken.append(what)
    if refused:
        causes = [
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} refused: "
            + shortened(said, 400)
            for said, names in refused.values()
        ]
        return [Finding(NAME, CLUSTER, "fail", cause) for cause in causes]
    if not taken:
        return [Finding(NAME, CLUSTER, "skip", "not tried: you may not create them yourself")]
    roles = {role for role, _, _ in templates(seen.objects)}
    told = [f"a pod ({what})" if what in roles else what for what in taken]
    cause = f"it takes {', '.join(told)}"
    if untried:
        cause += "; pods were not tried: you may not create them yourself"
    return [Finding(NAME, CLUSTER, "ok", cause)]


CHECK = KubeCheck(
    NAME,
    "The API server would take the job and its pods: schema, webhooks, classes, accounts.",
    judge,
    (NAMESPACE, REHEARSAL),
)
