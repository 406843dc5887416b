"""Checks of the namespace: the plan, admission, quotas, limit ranges, volumes, pull secrets."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from clusterkit.backends.kubernetes.objects import new_object, parse_amount
from clusterkit.cluster import Claim
from clusterkit.doctor.base import Verdict, shortened
from clusterkit.doctor.kubernetes.base import (
    NAMESPACE,
    UNPLANNED,
    Seen,
    amount,
    check,
    fail,
    limits,
    ok,
    outcome_of,
    requests,
    skip,
    templates,
    warn,
)
from clusterkit.errors import counted


@check(quick=True)
def plan(seen: Seen) -> Verdict:
    """The job fits the cluster's entry and can be planned for it."""
    if seen.problem is not None:
        return fail(seen.problem.message, seen.problem.hint)
    if not seen.objects:
        return skip("the API server did not answer")
    return ok(counted(sum(number for _, number, _ in templates(seen.objects)), "pod"))


QUOTAS = "/api/v1/namespaces/{namespace}/resourcequotas"
_NOT_TRIED = "not tried: you may not create them yourself"


@check(planned=True)
def admission(seen: Seen) -> Verdict | list[Verdict]:
    """The API server would take the job and its pods: pod security, quotas, schema, webhooks,
    classes, accounts."""
    space = seen.reply(NAMESPACE)
    if space.reason == "NotFound":
        return skip("there is no such namespace")
    tried = {what: (outcome_of(each), each.detail) for what, each in seen.rehearsed.items()}
    kind = "" if seen.kind is None else seen.kind.kind
    names = {what: what if what == kind else f"a pod ({what})" for what in tried}
    refused: dict[str, tuple[str, list[str]]] = {}
    for what, (outcome, said) in tried.items():
        # Without the pod's own name, to be the same for all pods.
        why = said.rpartition(" is forbidden: ")[2]
        if outcome == "quota" and (why.startswith("failed") or not _exceeded(seen)):
            # A pod fails a quota if it does not say how much of the resource it takes.
            said = why
        elif outcome == "pod security":
            said = why = "violates" + said.partition("violates")[2]
        elif outcome != "refused":
            continue
        refused.setdefault(why, (said, []))[1].append(names[what])
    if refused:
        return [
            fail(
                f"{' and '.join(whats)} {'is' if len(whats) == 1 else 'are'} refused: "
                + shortened(said, 800)
            )
            for said, whats in refused.values()
        ]
    labels = (space.document.get("metadata") or {}).get("labels") or {}
    level = labels.get("pod-security.kubernetes.io/enforce")
    cause = f"the namespace enforces {level or 'nothing'}"
    if space.reason:
        cause = "what the namespace enforces is unknown"
    untried = any(outcome == "not allowed" for outcome, _ in tried.values())
    if untried and level is not None and not seen.entry.patch:
        cause += ", which clusterkit's pods pass"
    taken = [names[what] for what, (outcome, _) in tried.items() if outcome == "taken"]
    if not taken:
        return skip(f"{cause}; {_NOT_TRIED}" if untried else cause)
    cause += f"; it takes {', '.join(taken)}"
    return ok(f"{cause}; pods were {_NOT_TRIED}" if untried else cause)


@check(QUOTAS, of="quotas", planned=True)
def quota(seen: Seen) -> Verdict | list[Verdict]:
    """The namespace's quotas leave room for the job."""
    names = ", ".join(each["metadata"]["name"] for each in seen.reply(QUOTAS).items)
    return _exceeded(seen) or ok(f"room in {names}" if names else "there is none")


def _exceeded(seen: Seen) -> list[Verdict]:
    """Return a verdict for each resource of which the quotas leave too little for all pods."""
    wanted, findings = _wanted(seen), []
    for each in seen.reply(QUOTAS).items:
        name, spec, status = each["metadata"]["name"], each.get("spec") or {}, each.get("status")
        if spec.get("scopes") or spec.get("scopeSelector"):
            continue  # it counts some pods only, by rules that are not checked here
        hard = (status or {}).get("hard") or spec.get("hard") or {}
        used = (status or {}).get("used") or {}
        for resource, limit in hard.items():
            need, most = wanted.get(resource), parse_amount(limit)
            taken = parse_amount(used.get(resource, 0))
            if need is None or taken + need <= most:
                continue
            cause = f"quota {name} has {amount(resource, most)} of {resource}, "
            cause += f"{amount(resource, taken)} in use; the job needs {amount(resource, need)}"
            remedy = seen.kubectl("-n", seen.namespace, "describe", "quota", name)
            # What others use may be free later; more than the whole quota never fits.
            findings.append((fail if need > most else warn)(cause, remedy))
    return findings


def _wanted(seen: Seen) -> dict[str, Decimal]:
    """Return what the job takes of each resource that quotas count."""
    found: dict[str, Decimal] = {}

    def add(name: str, value: Decimal | int) -> None:
        found[name] = found.get(name, Decimal(0)) + value

    for role, number, template in templates(seen.objects):
        spec = seen.spec_of(role, template)
        for name in ("pods", "count/pods"):
            add(name, number)
        for name, value in requests(spec).items():
            add(f"requests.{name}", value * number)
            if name in ("cpu", "memory", "ephemeral-storage"):
                add(name, value * number)
        for name, value in limits(spec).items():
            add(f"limits.{name}", value * number)
    copied = seen.entry.code == "copied"
    for name, number in (
        ("configmaps", 1 + copied + sum(each["kind"] == "ConfigMap" for each in seen.objects)),
        ("secrets", "secretKeyRef" in str(seen.objects)),
        ("services", sum(each["kind"] == "Service" for each in seen.objects)),
    ):
        if number:
            add(name, number)
            add(f"count/{name}", number)
    if (kind := seen.kind) is not None:
        add(f"count/{kind.plural}.{kind.group}", 1)
    return found


RANGES = "/api/v1/namespaces/{namespace}/limitranges"


@check(RANGES, of="limit ranges")
def limit_range(seen: Seen) -> Verdict | list[Verdict]:
    """A pod of the job is within what the namespace allows one to have."""
    reply = seen.reply(RANGES)
    if not reply.items:
        return ok("there is none")
    if not seen.objects:
        return skip(UNPLANNED)
    violations: list[str] = []
    defaults: dict[str, str] = {}
    for each in reply.items:
        name = each["metadata"]["name"]
        for rule in (each.get("spec") or {}).get("limits") or ():
            if rule.get("type") not in ("Container", "Pod"):
                continue
            for _, _, template in templates(seen.objects):
                violations += _violations(name, rule, template["spec"])
                defaults |= _defaults(rule, template["spec"])
    if violations:
        return [fail(cause) for cause in dict.fromkeys(violations)]
    names = ", ".join(each["metadata"]["name"] for each in reply.items)
    if not defaults:
        return ok(f"within {names}")
    what = ", ".join(f"{key} {value}" for key, value in defaults.items())
    tight = "limit memory" in defaults or "limit cpu" in defaults
    cause = f"{names} gives pods what the cluster entry leaves open: {what}"
    return (warn if tight else ok)(cause)


def _violations(name: str, rule: Any, spec: Any) -> list[str]:
    asked, most = requests(spec), limits(spec)
    found = []
    for bounds, sign, has, end, verb in (
        (rule.get("max"), 1, {**asked, **most}, "most", "has"),
        (rule.get("min"), -1, asked, "least", "asks for"),
    ):
        for resource, bound in (bounds or {}).items():
            value = has.get(resource)
            if value is not None and sign * value > sign * parse_amount(bound):
                found.append(
                    f"limit range {name}: {resource} {bound} at {end}, "
                    f"a pod of the job {verb} {amount(resource, value)}"
                )
    return found


def _defaults(rule: Any, spec: Any) -> dict[str, str]:
    """Return the defaults that a container gets."""
    asked, most = requests(spec), limits(spec)
    limit, request = rule.get("default") or {}, rule.get("defaultRequest") or {}
    return {
        **{f"limit {name}": str(value) for name, value in limit.items() if name not in most},
        **{f"request {name}": str(value) for name, value in request.items() if name not in asked},
    }


CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
_SEVERAL = {"ReadWriteMany", "ReadOnlyMany"}


@check()
def volumes(seen: Seen) -> Verdict | list[Verdict]:
    """The claims of the cluster entry are bound, and all pods can write to them."""
    if not seen.entry.volumes:
        return skip("the cluster entry names none")
    findings = [_claim(each, seen) for each in seen.entry.volumes]
    bad = [finding for finding in findings if finding.level != "ok"]
    return bad or ok("; ".join(each.cause for each in findings))


def _claim(volume: Claim, seen: Seen) -> Verdict:
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
    several = seen.job.node_range[1] > 1
    cause = f"{name}: {', '.join(sorted(modes))}" + ("" if phase == "Bound" else ", not bound yet")
    if several and not modes & (_SEVERAL if volume.read_only else {"ReadWriteMany"}):
        cause += f": pods on several nodes cannot {'read' if volume.read_only else 'write to'}"
        remedy = "a claim with accessModes: [ReadWriteMany] (k8s/pvc.yaml)"
        return fail(f"{cause} it together", remedy)
    return ok(cause)


def _class(seen: Seen, name: str | None) -> dict[str, Any] | None:
    for each in seen.reply(CLASSES).items:
        notes = each["metadata"].get("annotations") or {}
        default = notes.get("storageclass.kubernetes.io/is-default-class") == "true"
        if each["metadata"]["name"] == name or (name is None and default):
            found: dict[str, Any] = each
            return found
    return None


@check()
def pull_secrets(seen: Seen) -> Verdict | list[Verdict]:
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
