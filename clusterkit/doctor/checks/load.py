"""Has the host enough cores, and nothing else to do?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import Verdict, common, ok, warn
from clusterkit.doctor.check import Answers, Check, Script
from clusterkit.errors import counted


class Seen(Struct):
    """Cores that a session may use, and processes that wanted one, on average of a minute."""

    cpus: int
    load: float


def collect(given: dict[str, Any]) -> Any:
    import os

    return {"cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}


LOAD = Script("load", collect, Seen, safe=True)


def judge(answers: Answers) -> Iterator[Verdict]:
    seen = answers.read(LOAD)
    usual = common((load.cpus for load in seen.values()), 0)
    for host, load in seen.items():
        ranks, cores = answers.machines[host].slots or 1, counted(load.cpus, "core")
        if load.load > max(2, load.cpus):
            busy = "ps -eo pid,user,pcpu,args --sort=-pcpu | head"
            yield warn(host, f"load {load.load:.0f} on {cores}: others use it", busy)
        elif load.cpus < ranks:
            yield warn(host, f"{ranks} ranks share {cores}", "nproc")
        elif load.cpus != usual:
            yield warn(host, f"{cores}, but {usual} on other hosts", "nproc")
        else:
            yield ok(host, cores)


CHECK = Check(
    "load", "There is a core for every rank, and nothing else keeps them busy.", judge, (LOAD,)
)
