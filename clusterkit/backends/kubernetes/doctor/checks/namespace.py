"""Checks of the namespace: the plan, what admission says of it, volumes, pull secrets."""

from __future__ import annotations

import re
from typing import Any

from clusterkit.backends.kubernetes.doctor.base import (
    NAMESPACE,
    ClusterAnswers,
    Reply,
    check,
    fail,
    ok,
    skip,
    templates,
    warn,
)
from clusterkit.backends.kubernetes.objects import new_object, parse_amount
from clusterkit.cluster import Claim
from clusterkit.doctor.base import Verdict, shortened
from clusterkit.errors import pluralize


@check()
def plan(seen: ClusterAnswers) -> Verdict:
    """The job fits the cluster's entry and can be planned for it."""
    if seen.problem is not None:
        return fail(seen.problem.message, seen.problem.hint)
    if not seen.objects:
        return skip("the API server did not answer")
    return ok(pluralize(sum(number for _, number, _ in templates(seen.objects)), "pod"))


@check(quick=True, planned=True)
def admission(seen: ClusterAnswers) -> Verdict | list[Verdict]:
    """The API server takes the job and a pod of it in a dry run: quotas, limit ranges, pod
    security, schema, webhooks, classes, accounts."""
    space = seen.reply(NAMESPACE)
    if space.reason == "NotFound":
        return skip("the namespace does not exist")
    kind = "" if seen.kind is None else seen.kind.kind
    found: dict[Verdict, list[str]] = {}
    taken, untried = [], False
    for what, reply in seen.rehearsed.items():
        name = what if what == kind else f"a pod ({what})"
        if not reply.reason:
            taken.append(name)
        elif "cannot create resource" in reply.detail:
            untried = True
        else:
            found.setdefault(_refused(seen, reply, a_pod=what != kind), []).append(name)
    if found:
        return [
            verdict._replace(cause=f"{' and '.join(names)} {_is(verdict, names)}: {verdict.cause}")
            for verdict, names in found.items()
        ]
    labels = (space.document.get("metadata") or {}).get("labels") or {}
    level = labels.get("pod-security.kubernetes.io/enforce")
    cause = f"pod security: the namespace enforces {level or 'no level'}"
    if space.reason:
        cause = "pod security: the level that the namespace enforces is unknown"
    if untried and level is not None and not seen.entry.patch:
        cause += ", which clusterkit's pods meet"
    not_tried = "not tried: no permission to create pods"
    if not taken:
        return skip(f"{cause}; {not_tried}" if untried else cause)
    cause += f"; it accepts {', '.join(taken)}"
    return ok(f"{cause}; pods were {not_tried}" if untried else cause)


_PREFIX = re.compile(r"\S+ \"[^\"]*\" is (?:forbidden|invalid): ")
"""What a refusal begins with: a name of the rehearsal."""
_QUOTA = re.compile(r"(exceeded|failed) quota: ([^\s,:]+)")
_EXCEEDED = re.compile(r"requested: (\S+), used: \S*, limited: (\S+)")
_LIMIT_RANGE = re.compile(
    # The last: above the limit that a limit range gives to containers without one.
    r"(?:maximum|minimum) \S+ usage per|limit to request ratio per|less than or equal to \S+ limit"
)
_UNDECIDED = re.compile(r"Internal|Unavailable|Unread|NotAsked|Timeout|TooMany|Conflict")
_AMOUNTS = "`cpus`, `memory` and `resources` of the cluster entry"


def _refused(seen: ClusterAnswers, reply: Reply, *, a_pod: bool) -> Verdict:
    """Return the verdict in the API server's words: a failure where the run would be refused too,
    a warning where that is not certain."""
    said = _PREFIX.sub("", reply.detail or reply.reason, count=1)
    webhook = "admission webhook" in said
    if _UNDECIDED.search(reply.reason) or "does not support dry run" in said or (webhook and a_pod):
        # A webhook may refuse pods that no job owns, as the rehearsed one.
        return warn(shortened(said, 800))
    here, remedy = ("-n", seen.namespace, "describe"), None
    if quota := _QUOTA.search(said):
        remedy = f"{_AMOUNTS}, or the quota: {seen.kubectl(*here, 'quota', quota[2])}"
    elif _LIMIT_RANGE.search(said):
        remedy = f"{_AMOUNTS}, or the limit range: {seen.kubectl(*here, 'limitrange')}"
    if (amounts := _EXCEEDED.search(said)) and _fits(*amounts.groups()):
        # What other pods use may be free later: until then the pods wait, with these words.
        return warn(shortened(said, 800), remedy)
    return fail(shortened(said, 800), remedy)


def _is(verdict: Verdict, names: list[str]) -> str:
    are = "is" if len(names) == 1 else "are"
    return f"{are} refused" if verdict.level == "fail" else f"{are} refused in a dry run"


def _fits(requested: str, limited: str) -> bool:
    """Return whether ``cpu=2,pods=1`` is within ``cpu=4,pods=3``."""
    asked, most = (
        {name: parse_amount(text) for name, _, text in (part.partition("=") for part in parts)}
        for parts in (requested.split(","), limited.split(","))
    )
    return all(value <= most.get(name, value) for name, value in asked.items())


CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
_SEVERAL = {"ReadWriteMany", "ReadOnlyMany"}


@check()
def volumes(seen: ClusterAnswers) -> Verdict | list[Verdict]:
    """The claims of the cluster entry are bound, and all pods can write to them."""
    if not seen.entry.volumes:
        return skip("the cluster entry names none")
    findings = [_claim(each, seen) for each in seen.entry.volumes]
    bad = [finding for finding in findings if finding.level != "ok"]
    return bad or ok("; ".join(each.cause for each in findings))


def _claim(volume: Claim, seen: ClusterAnswers) -> Verdict:
    name = f"claim {volume.claim}"
    reply = seen.reply(seen.path("v1", "PersistentVolumeClaim", volume.claim))
    describe = seen.kubectl("-n", seen.namespace, "describe", "pvc", volume.claim)
    if reply.reason == "NotFound":
        cause = f"namespace {seen.namespace} has no volume {name}"
        return fail(cause, "k8s/pvc.yaml makes one: give it that name")
    if reply.reason:
        return reply.unknown(f"volume claims, so not at {volume.claim}")
    spec, status = reply.document["spec"], reply.document.get("status") or {}
    phase, storage = status.get("phase"), _class(seen, spec.get("storageClassName"))
    if phase == "Lost":
        return fail(f"{name}: Lost: its volume is gone", describe)
    waits = storage is not None and storage.get("volumeBindingMode") == "WaitForFirstConsumer"
    if phase != "Bound" and not waits:
        cause = f"{name} is not bound: no volume was found or provisioned for it"
        if storage is None and not seen.reply(CLASSES).reason:
            wanted = spec.get("storageClassName")
            cause += f"; the cluster has no storage class {wanted}" if wanted else "; it names no "
            cause += "" if wanted else "storage class and the cluster has no default one"
        return fail(cause, describe)
    modes = set(status.get("accessModes") or spec.get("accessModes") or ())
    several = seen.job.node_range[1] > 1
    cause = f"{name}: {', '.join(sorted(modes))}" + ("" if phase == "Bound" else ", not bound yet")
    if several and not modes & (_SEVERAL if volume.read_only else {"ReadWriteMany"}):
        verb = "read" if volume.read_only else "write to"
        remedy = "a claim with accessModes: [ReadWriteMany] (k8s/pvc.yaml)"
        return fail(f"{cause}: pods on several nodes cannot all {verb} it", remedy)
    return ok(cause)


def _class(seen: ClusterAnswers, name: str | None) -> dict[str, Any] | None:
    for each in seen.reply(CLASSES).items:
        notes = each["metadata"].get("annotations") or {}
        default = notes.get("storageclass.kubernetes.io/is-default-class") == "true"
        if each["metadata"]["name"] == name or (name is None and default):
            found: dict[str, Any] = each
            return found
    return None


@check()
def pull_secrets(seen: ClusterAnswers) -> Verdict | list[Verdict]:
    """The secrets with the registry's credentials are there."""
    names = seen.entry.image_pull_secrets
    if not names:
        return skip("the cluster entry names none")
    findings = []
    for name in names:
        # A dry run that creates one of that name needs no right to read secrets.
        path = f"{seen.path('v1', 'Secret')}?dryRun=All"
        reply = seen.reply(path, new_object("v1", "Secret", {"name": name}))
        if reply.reason == "AlreadyExists":
            continue
        if reply.reason:
            findings.append(reply.unknown("secrets"))
            continue
        remedy = seen.kubectl(
            "-n", seen.namespace, "create", "secret", "docker-registry", name,
            "--docker-server=...", "--docker-username=...", "--docker-password=...",
        )  # fmt: skip
        findings.append(fail(f"namespace {seen.namespace} has no secret {name}", remedy))
    return findings or ok(", ".join(names))
