"""Can the job be planned, and does the namespace admit its pods?"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from clusterkit.doctor.base import Finding, shortened
from clusterkit.doctor.kubernetes.base import (
    NAMESPACE,
    REHEARSAL,
    KubeSubject,
    Look,
    Seen,
    amount,
    check,
    fail,
    limits,
    ok,
    one,
    quantity,
    requests,
    skip,
    templates,
    unplanned,
    warn,
)
from clusterkit.errors import counted


@check("plan", "The job fits the cluster's entry and can be planned for it.", quick=True)
def plan(seen: Seen, subject: KubeSubject) -> Finding:
    if seen.problem is not None:
        return fail(seen.problem.message, seen.problem.hint)
    if not seen.objects:
        return skip("the API server did not answer")
    return ok(counted(sum(number for _, number, _ in templates(seen.objects)), "pod"))


# ---------------------------------------------------------------- whether it admits them


@check("pod-security", "The namespace's pod security admits the job's pods.", NAMESPACE, REHEARSAL)
def pod_security(seen: Seen, subject: KubeSubject) -> Finding | list[Finding]:
    space = seen.reply(NAMESPACE)
    if space.reason == "NotFound":
        return skip("there is no such namespace")
    if not seen.objects:
        return unplanned()
    labels = (space.document.get("metadata") or {}).get("labels") or {}
    level = labels.get("pod-security.kubernetes.io/enforce")
    enforced = f"the namespace enforces {level}" if level else "the namespace enforces nothing"
    if space.reason:
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
            return ok(cause) if passes or level is None else skip(cause)
        elif reply.reason == "Unasked":
            return reply.unknown("pods")
    if refused:
        return [
            fail(f"pods ({', '.join(roles)}) are refused: {words}")
            for words, roles in refused.items()
        ]
    return ok(f"{enforced}; the job's pods pass")


_OTHERS = ("violates PodSecurity", "exceeded quota", "failed quota")
"""What other checks than `admission` tell of."""


@check(
    "admission",
    "The API server would take the job and its pods: schema, webhooks, classes, accounts.",
    NAMESPACE,
    REHEARSAL,
)
def admission(seen: Seen, subject: KubeSubject) -> Finding | list[Finding]:
    if seen.reply(NAMESPACE).reason == "NotFound":
        return skip("there is no such namespace")
    if not seen.objects:
        return unplanned()
    answers = seen.replies.get(REHEARSAL.name, {})
    if not answers:
        return skip("the API server did not answer")
    kind = "" if seen.kind is None else seen.kind.kind
    names = {what: what if what == kind else f"a pod ({what})" for what in answers}
    taken = [names[what] for what, reply in answers.items() if not reply.reason]
    untried = any("cannot create resource" in reply.said for reply in answers.values())
    refused: dict[str, tuple[str, list[str]]] = {}
    for what, reply in answers.items():
        others = any(words in reply.said for words in ("cannot create resource", *_OTHERS))
        if reply.reason and not others:
            # A refusal begins with the pod's own name.
            why = reply.said.rpartition(" is forbidden: ")[2]
            refused.setdefault(why, (reply.said, []))[1].append(names[what])
    if refused:
        return [
            fail(
                f"{' and '.join(whats)} {'is' if len(whats) == 1 else 'are'} refused: "
                + shortened(said, 400)
            )
            for said, whats in refused.values()
        ]
    if not taken:
        return skip("not tried: you may not create them yourself")
    more = "; pods were not tried: you may not create them yourself" if untried else ""
    return ok(f"it takes {', '.join(taken)}{more}")


# ---------------------------------------------------------------- how much it may have

QUOTAS = Look("quotas", one("/api/v1/namespaces/{namespace}/resourcequotas"))


@check("quota", "The namespace's quotas leave room for the job.", QUOTAS, REHEARSAL)
def quota(seen: Seen, subject: KubeSubject) -> Finding | list[Finding]:
    if seen.reply(QUOTAS).reason:
        return seen.reply(QUOTAS).unknown("quotas")
    if not seen.objects:
        return unplanned()
    wanted = _wanted(seen, subject)
    quotas = [each for each in seen.reply(QUOTAS).items if not _scoped(each)]
    findings = [finding for each in quotas for finding in _exceeded(each, wanted, seen, subject)]
    for role, _, _ in templates(seen.objects):
        said = seen.reply(REHEARSAL, role).said
        for words in ("failed quota", "exceeded quota"):
            # The first such as that a pod has to say how much memory it wants.
            if words in said and (words == "failed quota" or not findings):
                cause = f"a pod ({role}) is refused: {said[said.index(words) :]}"
                findings.append(fail(cause))
                break
    names = ", ".join(each["metadata"]["name"] for each in seen.reply(QUOTAS).items)
    return findings or ok(f"room in {names}" if names else "there is none")


def _scoped(quota: Any) -> bool:
    """Whether it counts some pods only, by rules that are not followed here."""
    spec = quota.get("spec") or {}
    return bool(spec.get("scopes") or spec.get("scopeSelector"))


def _exceeded(
    quota: Any, wanted: dict[str, Decimal], seen: Seen, subject: KubeSubject
) -> list[Finding]:
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
        mend = subject.kubectl("-n", seen.namespace, "describe", "quota", name)
        # What is in use now may be free later; what is more than all of it never fits.
        findings.append((fail if need > most else warn)(cause, mend))
    return findings


def _wanted(seen: Seen, subject: KubeSubject) -> dict[str, Decimal]:
    """What the job takes of everything that quotas count, by their names for it."""
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
        add(f"count/{kind.plural}.{kind.group}", 1)
    return found


RANGES = Look("limit-ranges", one("/api/v1/namespaces/{namespace}/limitranges"))


@check("limit-range", "A pod of the job is within what the namespace allows one to have.", RANGES)
def limit_range(seen: Seen, subject: KubeSubject) -> Finding | list[Finding]:
    reply = seen.reply(RANGES)
    if reply.reason:
        return reply.unknown("limit ranges")
    if not reply.items:
        return ok("there is none")
    if not seen.objects:
        return unplanned()
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
        return [fail(cause) for cause in dict.fromkeys(wrong)]
    names = ", ".join(each["metadata"]["name"] for each in reply.items)
    if not given:
        return ok(f"within {names}")
    what = ", ".join(f"{key} {value}" for key, value in given.items())
    tight = "limit memory" in given or "limit cpu" in given
    cause = f"{names} gives pods what the cluster entry leaves open: {what}"
    return (warn if tight else ok)(cause)


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
    defaults, wanted = rule.get("default") or {}, rule.get("defaultRequest") or {}
    return {
        **{f"limit {name}": str(value) for name, value in defaults.items() if name not in most},
        **{f"request {name}": str(value) for name, value in wanted.items() if name not in asked},
    }
