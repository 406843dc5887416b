"""May we do what a run needs?"""

from __future__ import annotations

from clusterkit.backends.kubernetes.rights import ROLE, needed, to_watch
from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    ALONE,
    CLUSTER,
    WATCHING,
    Ask,
    KubeCheck,
    KubeSubject,
    Look,
    Seen,
    allowed,
    asking,
    kubectl,
    unknown,
)

NAME = "rights"
_WHO = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


RIGHTS = Look(
    "rights",
    lambda seen, subject: asking(needed(seen.flavor or "job"), seen.namespace),
    late=True,
)
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
        if not allowed(reply):
            missing.setdefault(resource, []).append(verb)
    name = who or "you"
    if not missing:
        cause = f"{name} may do all {len(wanted)} things needed"
        if lacking := _for_a_watcher(seen, subject):
            cause += f"; runs have no watcher in the cluster without: {lacking}"
        return [Finding(NAME, CLUSTER, "ok", cause)]
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


def _for_a_watcher(seen: Seen, subject: KubeSubject) -> str:
    """The rights that are missing for one; empty: none, or nobody wants one."""
    if subject.entry.watcher is False:
        return ""
    missing: dict[str, list[str]] = {}
    for verb, _, resource in to_watch():
        if not allowed(seen.reply(WATCHING, f"{verb} {resource}")):
            missing.setdefault(resource, []).append(verb)
    return "; ".join(f"{', '.join(verbs)} {resource}" for resource, verbs in missing.items())


def _subject_flag(who: str) -> tuple[str, str]:
    if who.startswith("system:serviceaccount:"):
        return "--serviceaccount", who.removeprefix("system:serviceaccount:")
    return "--user", who or "NAME"


CHECK = KubeCheck(
    NAME,
    "We may do all that a run needs; `k8s/rbac.yaml` is a role with just that.",
    judge,
    (WHO, RIGHTS, WATCHING),
    quick=True,
)
