"""Does the API server answer, and is it new enough?"""

from __future__ import annotations

import re
import time
from datetime import datetime

from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import CLUSTER, VERSION, KubeCheck, KubeSubject, Seen
from clusterkit.errors import counted

NAME = "api-server"
TRIED = 34
"""Minor version of Kubernetes 1 that clusterkit was tried with."""
SUPPORTED = 3
"""How many minor versions Kubernetes' project supports at a time, the newest included."""
LEAST = 27
"""Before it a Job's pods lack ``batch.kubernetes.io/job-name``, by which they are found."""


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    reply = seen.reply(VERSION)
    if reply.reason:
        cause = reply.said or "it did not answer"
        return [Finding(NAME, CLUSTER, "fail", cause, "kubectl cluster-info")]
    version = str(reply.document.get("gitVersion", "?"))
    cause = version + _age(str(reply.document.get("buildDate", "")), seen.now)
    found = re.match(r"v?1\.(\d+)", version)
    if found is None:
        return [Finding(NAME, CLUSTER, "warn", f"{cause}: cannot tell how old that is")]
    minor = int(found[1])
    if minor < LEAST:
        cause += f": older than 1.{LEAST}, which clusterkit needs"
        return [Finding(NAME, CLUSTER, "fail", cause)]
    if minor <= TRIED - SUPPORTED:
        cause += f": older than the 1.{TRIED} that clusterkit was tried with, by "
        cause += f"{counted(TRIED - minor, 'version')}; Kubernetes' project supports {SUPPORTED}"
        return [Finding(NAME, CLUSTER, "warn", cause)]
    if minor < TRIED:
        cause += f"; clusterkit was tried with 1.{TRIED}"
    return [Finding(NAME, CLUSTER, "ok", cause)]


def _age(built: str, now: float) -> str:
    """When it was built, in words; builders that want the same bytes each time say 1970."""
    try:
        moment = datetime.fromisoformat(built.replace("Z", "+00:00"))
    except ValueError:
        return ""
    if moment.year < 2015:
        return ""
    months = max(0, round((now - moment.timestamp()) / (86400 * 365.25 / 12)))
    when = time.strftime("%Y-%m", moment.timetuple())
    return f", built {when}, {counted(months, 'month')} ago"


CHECK = KubeCheck(
    NAME,
    "The API server answers, and its version is one that clusterkit knows.",
    judge,
    (VERSION,),
    quick=True,
)
