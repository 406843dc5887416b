"""Is there enough memory, and as much everywhere?"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import (
    Answers,
    Check,
    Finding,
    Level,
    Script,
    Subject,
    common,
    read,
    size,
)

NAME = "memory"
WARN_BYTES = 1 << 30
FAIL_BYTES = 256 << 20
"""Per rank. Importing torch alone takes about 300 MiB."""
_UNLIKE = 0.2
"""Part by which one host's memory may differ from that of the others."""


class Seen(Struct):
    """Bytes; ``limit`` is that of the control group, if it has one."""

    total: int
    available: int
    limit: int | None


def collect(given: dict[str, Any]) -> Any:
    values = {}
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if rest.split()[:1] and rest.split()[0].isdigit():
                values[name] = int(rest.split()[0]) * 1024
    limit = None
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            with open(f"/sys/fs/cgroup/{name}", encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < values["MemTotal"]:
            limit = int(text)
    # Kernels before 3.14 have no MemAvailable.
    available = values.get("MemAvailable", values["MemFree"] + values.get("Cached", 0))
    return {"total": values["MemTotal"], "available": available, "limit": limit}


MEMORY = Script("memory", collect, safe=True)


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    seen, findings = read(NAME, MEMORY, answers, subject, Seen)
    ranks = {machine.name: machine.slots or 1 for machine in subject.hosts}
    totals = {
        host: min(memory.total, memory.limit or memory.total) for host, memory in seen.items()
    }
    usual = common(totals, 0)
    for host, memory in seen.items():
        available = min(memory.available, totals[host])
        share = available / ranks[host]
        told = f"{size(available)} of {size(totals[host])} available"
        if share < WARN_BYTES:
            cause = f"{told}: {size(share)} for each rank"
            mend = "ps -eo pid,user,rss,args --sort=-rss | head"
            level: Level = "fail" if share < FAIL_BYTES else "warn"
            findings.append(Finding(NAME, host, level, cause, mend))
        elif abs(totals[host] - usual) > _UNLIKE * usual:
            cause = f"{size(totals[host])} of memory, but {size(usual)} on other hosts"
            findings.append(Finding(NAME, host, "warn", cause, "free -h"))
        else:
            findings.append(Finding(NAME, host, "ok", told))
    return findings


CHECK = Check(
    NAME, "There is memory for every rank, and about as much on every host.", judge, (MEMORY,)
)
