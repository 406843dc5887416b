"""Does the cluster serve the kind of job that keeps the pods?"""

from __future__ import annotations

from clusterkit.backends.kubernetes.flavors import FLAVORS, OPERATORS, served
from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    GROUPS,
    KINDS,
    KubeCheck,
    KubeSubject,
    Seen,
    unknown,
)

NAME = "kind"


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    name = seen.flavor
    if name is None and subject.entry.flavor == "auto":
        # Only mpirun cannot do with what every cluster has.
        name = "mpijob" if subject.job.launcher == "mpirun" else "job"
    name = name or subject.entry.flavor
    flavor = FLAVORS[name]
    if seen.reply(GROUPS).reason:
        return unknown(NAME, seen.reply(GROUPS), "the API groups")
    group, _, version = flavor.API.rpartition("/")
    groups = {each["name"]: each["versions"] for each in seen.reply(GROUPS).document["groups"]}
    versions = [each["version"] for each in groups.get(group, ())]
    there = name == "job" or served(seen.reply(KINDS, name).document, flavor)
    if version in versions and there:
        why = f"; {seen.origin}" if seen.origin else ""
        return [Finding(NAME, CLUSTER, "ok", f"{flavor.KIND} ({flavor.API}){why}")]
    mend = f"install {OPERATORS.get(name, 'Kubernetes 1.27 or newer')}, or flavor: job"
    cause = f"the cluster does not serve {flavor.KIND} ({flavor.API})"
    if versions and version not in versions:
        cause += f"; of {group} it serves {', '.join(versions)}"
    return [Finding(NAME, CLUSTER, "fail", cause, mend)]


CHECK = KubeCheck(
    NAME,
    "The cluster serves the kind of job that is to keep the pods, in the version that is used.",
    judge,
    (GROUPS, KINDS),
    quick=True,
)
