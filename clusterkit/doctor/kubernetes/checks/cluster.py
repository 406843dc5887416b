"""Checks of the cluster: API server, namespace, kind of job, operator, name servers, rights."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.objects import new_object
from clusterkit.backends.kubernetes.rbac import ROLE, Right, denied, run_rights, watcher_rights
from clusterkit.doctor.base import Verdict
from clusterkit.doctor.kubernetes.base import (
    GROUPS,
    NAMESPACE,
    VERSION,
    Seen,
    check,
    fail,
    no_answer,
    ok,
    skip,
    warn,
)
from clusterkit.errors import ClusterkitError, counted

TRIED = 34
"""Minor version of Kubernetes 1 that clusterkit is tested with."""
SUPPORTED = 3
"""How many minor versions Kubernetes' project supports at a time, the newest included."""
LEAST = 27
"""Older ones do not label a Job's pods with ``batch.kubernetes.io/job-name``."""


@check(quick=True)
def api_server(seen: Seen) -> Verdict:
    """The API server answers, and its version is one that clusterkit knows."""
    reply = seen.reply(VERSION)
    if reply.reason:
        return fail(reply.detail or "it did not answer", "kubectl cluster-info")
    version = str(reply.document.get("gitVersion", "?"))
    cause = version + _age(str(reply.document.get("buildDate", "")), seen.now)
    found = re.match(r"v?1\.(\d+)", version)
    if found is None:
        return warn(f"{cause}: cannot tell how old that is")
    minor = int(found[1])
    if minor < LEAST:
        return fail(f"{cause}: older than 1.{LEAST}, which clusterkit needs")
    if minor <= TRIED - SUPPORTED:
        cause += f": older than the 1.{TRIED} that clusterkit was tried with, by "
        cause += f"{counted(TRIED - minor, 'version')}; Kubernetes' project supports {SUPPORTED}"
        return warn(cause)
    if minor < TRIED:
        cause += f"; clusterkit was tried with 1.{TRIED}"
    return ok(cause)


def _age(built: str, now: float) -> str:
    """Return its age as text; reproducible builds have a date of 1970, which is left out."""
    try:
        moment = datetime.fromisoformat(built.replace("Z", "+00:00"))
    except ValueError:
        return ""
    if moment.year < 2015:
        return ""
    months = max(0, round((now - moment.timestamp()) / (86400 * 365.25 / 12)))
    when = time.strftime("%Y-%m", moment.timetuple())
    return f", built {when}, {counted(months, 'month')} ago"


@check(quick=True)
def namespace(seen: Seen) -> Verdict:
    """The namespace is there."""
    reply, name = seen.reply(NAMESPACE), seen.namespace
    if reply.reason == "NotFound":
        remedy = seen.kubectl("create", "namespace", name)
        return fail(f"the cluster has no namespace {name}", remedy)
    if reply.reason:
        return reply.unknown(f"namespace {name}")
    if (reply.document.get("status") or {}).get("phase") == "Terminating":
        return fail(f"{name} is being deleted")
    return ok(name)


@check(GROUPS, quick=True, of="the API groups")
def kind(seen: Seen) -> Verdict:
    """The cluster serves the kind of job that is to keep the pods, in the version that is used."""
    name = seen.flavor
    if name is None and seen.entry.flavor == "auto":
        # Every cluster has Jobs, which can do all but mpirun.
        name = "mpijob" if seen.job.started_by == "mpirun" else "job"
    name = name or seen.entry.flavor
    flavor = FLAVORS[name]
    group, _, version = flavor.api.rpartition("/")
    groups = {each["name"]: each["versions"] for each in seen.reply(GROUPS).document["groups"]}
    versions = [each["version"] for each in groups.get(group, ())]
    served = name == "job" or flavor.served(seen.reply(f"/apis/{flavor.api}").document)
    if version in versions and served:
        why = f"; {seen.origin}" if seen.origin else ""
        return ok(f"{flavor.kind} ({flavor.api}){why}")
    cause = f"the cluster does not serve {flavor.kind} ({flavor.api})"
    if versions and version not in versions:
        cause += f"; of {group} it serves {', '.join(versions)}"
    remedy = f"install {flavor.operator or 'Kubernetes 1.27 or newer'}, or flavor: job"
    return fail(cause, remedy)


# ---------------------------------------------------------------- operators

DEPLOYMENTS = "/apis/apps/v1/deployments"
_CALLED = {
    "pytorchjob": (re.compile(r"training-operator"),),
    "mpijob": (re.compile(r"mpi-operator"),),
    # The trainer makes a JobSet, of which JobSet's controller makes Jobs.
    "jobset": (re.compile(r"jobset-controller"),),
    "trainjob": (re.compile(r"trainer-controller"), re.compile(r"jobset-controller")),
}
"""Names of operators' deployments, or of their images."""
_ONLY_IN = re.compile(r"--?namespace(?:=(\S*))?\Z")


@check()
def operator(seen: Seen) -> Verdict | list[Verdict]:
    """The job's operator is alive, and watches this namespace."""
    if seen.flavor is None:
        return skip("there is no kind of job to act on")
    if seen.flavor == "job":
        return ok("Kubernetes' own controllers act on a Job")
    who = FLAVORS[seen.flavor].operator
    reply = seen.reply(DEPLOYMENTS)
    if reply.reason:
        return reply.unknown(f"deployments, so not whether {who} is alive")
    findings = []
    for pattern in _CALLED[seen.flavor]:
        found = [each for each in reply.items if _is(each, pattern)]
        if found:
            findings.append(_alive(found, seen))
        else:
            cause = f"unknown: no deployment is called {pattern.pattern}, as that of {who} is"
            findings.append(warn(cause))
    bad = [finding for finding in findings if finding.level != "ok"]
    return bad or ok(", ".join(one.cause for one in findings))


def _alive(found: list[Any], seen: Seen) -> Verdict:
    """Return whether one of several deployments acts on jobs of the namespace."""
    others = []
    for each in found:
        meta, wanted = each["metadata"], each["spec"].get("replicas", 1)
        place = f"{meta['namespace']}/{meta['name']}"
        only = _only_in(each)
        if only not in ("", seen.namespace):
            others.append(f"{place} watches namespace {only} alone, not {seen.namespace}")
            continue
        ready = (each.get("status") or {}).get("readyReplicas", 0)
        # One that was scaled to 0 is ready for a moment more.
        if ready and wanted:
            return ok(f"{place} is ready")
        words = ("-n", meta["namespace"])
        if not wanted:
            remedy = seen.kubectl(*words, "scale", "deployment", meta["name"], "--replicas=1")
            return fail(f"{place} is scaled to 0: nobody acts on the job", remedy)
        remedy = seen.kubectl(*words, "describe", "deployment", meta["name"])
        return fail(f"{place}: {ready} of {wanted} pods are ready: nobody acts on the job", remedy)
    return fail("; ".join(others))


def _is(deployment: Any, pattern: re.Pattern[str]) -> bool:
    containers = deployment["spec"]["template"]["spec"]["containers"]
    names = [deployment["metadata"]["name"], *(str(each.get("image")) for each in containers)]
    return any(pattern.search(name) for name in names)


def _only_in(deployment: Any) -> str:
    """Return the only namespace that an operator watches, by its arguments; empty: all."""
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        for word, after in zip(words, [*words[1:], ""], strict=True):
            if (match := _ONLY_IN.match(word)) is not None:
                return match[1] if match[1] is not None else after
    return ""


# ---------------------------------------------------------------- names

SERVERS = (
    "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices"
    "?labelSelector=kubernetes.io%2Fservice-name%3Dkube-dns"
)


@check(SERVERS, of="the name servers in kube-system")
def dns(seen: Seen) -> Verdict:
    """The cluster's name servers are ready."""
    reply = seen.reply(SERVERS)
    ready = {
        address
        for each in reply.items
        for endpoint in each.get("endpoints") or ()
        # Without the condition it is ready.
        if (endpoint.get("conditions") or {}).get("ready", True) is not False
        for address in endpoint.get("addresses") or ()
    }
    if ready:
        return ok(f"{counted(len(ready), 'name server')} behind kube-system/kube-dns")
    if not reply.items:
        return warn(
            "unknown: there is no service kube-system/kube-dns; pods find each other by name"
        )
    remedy = seen.kubectl("-n", "kube-system", "get", "pods", "-l", "k8s-app=kube-dns")
    cause = "no name server behind kube-system/kube-dns is ready: pods cannot find each other"
    return fail(cause, remedy)


# ---------------------------------------------------------------- rights

_WHO = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


@check(quick=True)
def rights(seen: Seen) -> Verdict:
    """We may do all that a run needs; `k8s/rbac.yaml` is a role with just that."""
    asked = new_object("authentication.k8s.io/v1", "SelfSubjectReview")
    status = seen.reply(_WHO, asked).document.get("status") or {}
    who = str((status.get("userInfo") or {}).get("username") or "")
    name = who or "you"
    wanted = run_rights(seen.flavor or "job")
    if seen.entry.watcher is True:
        wanted += watcher_rights()
    try:
        missing = _by_resource(denied(seen, wanted))
    except ClusterkitError as error:
        return no_answer(error).unknown("your own rights")
    if not missing:
        return ok(f"{name} may do all {len(wanted)} things needed")
    cause = f"{name} may not, in namespace {seen.namespace}: {missing}"
    here = ("-n", seen.namespace)
    account = who.removeprefix("system:serviceaccount:")
    whom = ("--user", who or "NAME") if account == who else ("--serviceaccount", account)
    apply = seen.kubectl(*here, "apply", "-f", "k8s/rbac.yaml")
    bind = seen.kubectl(*here, "create", "rolebinding", ROLE, "--role", ROLE, *whom)
    return fail(cause, f"{apply}\n{bind}")


def _by_resource(rights: Iterable[Right]) -> str:
    found: dict[str, list[str]] = {}
    for verb, _, resource in rights:
        found.setdefault(resource, []).append(verb)
    return "; ".join(f"{', '.join(verbs)} {resource}" for resource, verbs in found.items())
