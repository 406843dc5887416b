"""May we do what a run needs?"""

from __future__ import annotations

from collections.abc import Mapping

from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    ALONE,
    CLUSTER,
    Ask,
    KubeCheck,
    KubeSubject,
    Look,
    Seen,
    kubectl,
    unknown,
)
from clusterkit.kubernetes.rights import ROLE, access_review, needed

NAME = "rights"
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_WHO = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


def _ask(seen: Seen, subject: KubeSubject) -> Mapping[str, Ask]:
    return {
        f"{verb} {resource}": Ask(_REVIEWS, access_review(seen.namespace, verb, group, resource))
        for verb, group, resource in needed(seen.flavor or "job")
    }


RIGHTS = Look("rights", _ask, late=True)
WHO = Look(
    "who",
    lambda seen, subject: {
        ALONE: Ask(_WHO, {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"})
    },
)


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    status = seen.reply(WHO).document.get("status") or {}
    who = str((status.get("userInfo") or {}).get("username") or "")
    missing: dict[str, list[str]] = {}
    wanted = needed(seen.flavor or "job")
    for verb, _, resource in wanted:
        reply = seen.reply(RIGHTS, f"{verb} {resource}")
        if reply.reason:
            return unknown(NAME, reply, "your own rights")
        if not (reply.document.get("status") or {}).get("allowed"):
            missing.setdefault(resource, []).append(verb)
    name = who or "you"
    if not missing:
        return [Finding(NAME, CLUSTER, "ok", f"{name} may do all {len(wanted)} things needed")]
    rights = "; ".join(f"{', '.join(verbs)} {resource}" for resource, verbs in missing.items())
    cause = f"{name} may not, in namespace {seen.namespace}: {rights}"
    mend = "\n".join((
        kubectl(subject, "-n", seen.namespace, "apply", "-f", "k8s/rbac.yaml"),
        kubectl(
            subject, "-n", seen.namespace, "create", "rolebinding", ROLE, "--role", ROLE,
            *_subject_flag(who),
        ),
    ))  # fmt: skip
    return [Finding(NAME, CLUSTER, "fail", cause, mend)]


def _subject_flag(who: str) -> tuple[str, str]:
    if who.startswith("system:serviceaccount:"):
        return "--serviceaccount", who.removeprefix("system:serviceaccount:")
    return "--user", who or "NAME"


CHECK = KubeCheck(
    NAME,
    "We may do all that a run needs; `k8s/rbac.yaml` is a role with just that.",
    judge,
    (WHO, RIGHTS),
    quick=True,
)
