"""Checks of the cluster: API server, namespace, kind of job, rights."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from datetime import datetime

from clusterkit.backends.kubernetes.doctor.base import (
    GROUPS,
    NAMESPACE,
    VERSION,
    ClusterAnswers,
    check,
    fail,
    no_answer,
    ok,
    warn,
)
from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.objects import new_object
from clusterkit.backends.kubernetes.rbac import ROLE, Right, denied, run_rights, watcher_rights
from clusterkit.doctor.base import Verdict
from clusterkit.errors import ClusterkitError, pluralize

TRIED = 34
"""Minor version of Kubernetes 1 that clusterkit is tested with."""
SUPPORTED = 3
"""How many minor versions Kubernetes' project supports at a time, the newest included."""
LEAST = 27
"""Older ones do not label a Job's pods with ``batch.kubernetes.io/job-name``."""


@check()
def api_server(seen: ClusterAnswers) -> Verdict:
    """The API server answers, and its version is one that clusterkit knows."""
    reply = seen.reply(VERSION)
    if reply.reason:
        return fail(reply.detail or "it did not answer", "kubectl cluster-info")
    version = str(reply.document.get("gitVersion", "?"))
    cause = version + _age(str(reply.document.get("buildDate", "")), seen.now)
    found = re.match(r"v?1\.(\d+)", version)
    if found is None:
        return warn(f"{cause}: unknown version")
    minor = int(found[1])
    if minor < LEAST:
        return fail(f"{cause}: older than 1.{LEAST}, which clusterkit needs")
    if minor <= TRIED - SUPPORTED:
        return warn(
            f"{cause}: {pluralize(TRIED - minor, 'version')} older than the 1.{TRIED} that "
            f"clusterkit was tested with; the Kubernetes project supports {SUPPORTED}"
        )
    if minor < TRIED:
        cause += f"; clusterkit was tested with 1.{TRIED}"
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
    return f", built {when}, {pluralize(months, 'month')} ago"


@check()
def namespace(seen: ClusterAnswers) -> Verdict:
    """The namespace is there."""
    reply, name = seen.reply(NAMESPACE), seen.namespace
    if reply.reason == "NotFound":
        remedy = seen.kubectl("create", "namespace", name)
        return fail(f"the cluster has no namespace {name}", remedy)
    if reply.reason:
        return reply.unknown(f"namespace {name}")
    if (reply.document.get("status") or {}).get("phase") == "Terminating":
        return fail(f"Terminating: namespace {name} is being deleted")
    return ok(name)


@check(GROUPS, of="the API groups")
def kind(seen: ClusterAnswers) -> Verdict:
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


# ---------------------------------------------------------------- rights

_WHO = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


@check()
def rights(seen: ClusterAnswers) -> Verdict:
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
        return ok(f"{name} has all {len(wanted)} permissions needed")
    cause = f"Forbidden: in namespace {seen.namespace} {name} may not {missing}"
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
