"""Can the job be planned for this cluster?"""

from __future__ import annotations

from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    KubeCheck,
    KubeSubject,
    Seen,
    templates,
)
from clusterkit.errors import counted

NAME = "plan"


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    if seen.problem is not None:
        return [Finding(NAME, CLUSTER, "fail", seen.problem.message, seen.problem.hint)]
    if not seen.objects:
        return [Finding(NAME, CLUSTER, "skip", "the API server did not answer")]
    pods = sum(number for _, number, _ in templates(seen.objects))
    return [Finding(NAME, CLUSTER, "ok", counted(pods, "pod"))]


CHECK = KubeCheck(
    NAME, "The job fits the cluster's entry and can be planned for it.", judge, quick=True
)
