"""Has the host enough cores, and nothing else to do?"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import Answers, Check, Finding, Script, Subject, common, read
from clusterkit.errors import counted

NAME = "load"


class Seen(Struct):
    """Cores that a session may use, and processes that wanted one, on average of a minute."""

    cpus: int
    load: float


def collect(given: dict[str, Any]) -> Any:
    import os

    return {"cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}


LOAD = Script("load", collect, safe=True)


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    seen, findings = read(NAME, LOAD, answers, subject, Seen)
    ranks = {machine.name: machine.slots or 1 for machine in subject.hosts}
    usual = common({host: load.cpus for host, load in seen.items()}, 0)
    for host, load in seen.items():
        busy = "ps -eo pid,user,pcpu,args --sort=-pcpu | head"
        if load.load > max(2, load.cpus):
            cause = f"load {load.load:.0f} on {counted(load.cpus, 'core')}: others use it"
            findings.append(Finding(NAME, host, "warn", cause, busy))
        elif load.cpus < ranks[host]:
            cause = f"{ranks[host]} ranks share {counted(load.cpus, 'core')}"
            findings.append(Finding(NAME, host, "warn", cause, "nproc"))
        elif load.cpus != usual:
            cause = f"{counted(load.cpus, 'core')}, but {usual} on other hosts"
            findings.append(Finding(NAME, host, "warn", cause, "nproc"))
        else:
            findings.append(Finding(NAME, host, "ok", counted(load.cpus, "core")))
    return findings


CHECK = Check(
    NAME, "There is a core for every rank, and nothing else keeps them busy.", judge, (LOAD,)
)
