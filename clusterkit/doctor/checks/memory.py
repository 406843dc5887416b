"""Is there enough memory, and as much everywhere?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import Verdict, common, ok, size, warn
from clusterkit.doctor.check import Answers, Check, Script
from clusterkit.doctor.driver import text_of

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
    for line in text_of("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if rest.split()[:1] and rest.split()[0].isdigit():
            values[name] = int(rest.split()[0]) * 1024
    limit = None
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = text_of(f"/sys/fs/cgroup/{name}").strip()
        if text.isdigit() and int(text) < values["MemTotal"]:
            limit = int(text)
    # Kernels before 3.14 have no MemAvailable.
    available = values.get("MemAvailable", values["MemFree"] + values.get("Cached", 0))
    return {"total": values["MemTotal"], "available": available, "limit": limit}


MEMORY = Script("memory", collect, Seen, safe=True)


def judge(answers: Answers) -> Iterator[Verdict]:
    seen = answers.read(MEMORY)
    totals = {
        host: min(memory.total, memory.limit or memory.total) for host, memory in seen.items()
    }
    usual = common(totals.values(), 0)
    for host, memory in seen.items():
        available = min(memory.available, totals[host])
        share = available / (answers.machines[host].slots or 1)
        free = f"{size(available)} of {size(totals[host])} available"
        if share < WARN_BYTES:
            cause = f"{free}: {size(share)} for each rank"
            mend = "ps -eo pid,user,rss,args --sort=-rss | head"
            yield Verdict(host, "fail" if share < FAIL_BYTES else "warn", cause, mend)
        elif abs(totals[host] - usual) > _UNLIKE * usual:
            cause = f"{size(totals[host])} of memory, but {size(usual)} on other hosts"
            yield warn(host, cause, "free -h")
        else:
            yield ok(host, free)


CHECK = Check(
    "memory", "There is memory for every rank, and about as much on every host.", judge, (MEMORY,)
)
