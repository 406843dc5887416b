"""May we do what a run needs?"""

from __future__ import annotations

from collections.abc import Iterable

from clusterkit.backends.kubernetes.rights import ROLE, needed, to_watch
from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    ALONE,
    WATCHING,
    Ask,
    KubeSubject,
    Look,
    Seen,
    allowed,
    asking,
    check,
    fail,
    kubectl,
    ok,
    unknown,
)

_WHO = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


NEEDED = Look(
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


@check(
    "rights",
    "We may do all that a run needs; `k8s/rbac.yaml` is a role with just that.",
    WHO,
    NEEDED,
    WATCHING,
    quick=True,
)
def rights(seen: Seen, subject: KubeSubject) -> Finding:
    status = seen.reply(WHO).document.get("status") or {}
    who = str((status.get("userInfo") or {}).get("username") or "")
    wanted = needed(seen.flavor or "job")
    for verb, _, resource in wanted:
        reply = seen.reply(NEEDED, f"{verb} {resource}")
        if reply.reason:
            return unknown(reply, "your own rights")
    name = who or "you"
    missing = _missing(seen, NEEDED, wanted)
    if not missing:
        cause = f"{name} may do all {len(wanted)} things needed"
        lacking = "" if subject.entry.watcher is False else _missing(seen, WATCHING, to_watch())
        if lacking:
            cause += f"; runs have no watcher in the cluster without: {lacking}"
        return ok(cause)
    cause = f"{name} may not, in namespace {seen.namespace}: {missing}"
    here = ("-n", seen.namespace)
    account = who.removeprefix("system:serviceaccount:")
    whom = ("--user", who or "NAME") if account == who else ("--serviceaccount", account)
    apply = kubectl(subject, *here, "apply", "-f", "k8s/rbac.yaml")
    bind = kubectl(subject, *here, "create", "rolebinding", ROLE, "--role", ROLE, *whom)
    return fail(cause, f"{apply}\n{bind}")


def _missing(seen: Seen, look: Look, wanted: Iterable[tuple[str, str, str]]) -> str:
    """Which of these rights we lack, in words."""
    missing: dict[str, list[str]] = {}
    for verb, _, resource in wanted:
        if not allowed(seen.reply(look, f"{verb} {resource}")):
            missing.setdefault(resource, []).append(verb)
    return "; ".join(f"{', '.join(verbs)} {resource}" for resource, verbs in missing.items())
