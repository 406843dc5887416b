"""Do the limits of a login session leave the ranks enough?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import Verdict, fail, ok, warn
from clusterkit.doctor.check import Answers, Check, Script
from clusterkit.doctor.driver import text_of

NOFILE = 4096
NPROC = 4096


class Seen(Struct):
    """Soft limits, None: unlimited; and what makes them matter."""

    nofile: int | None
    nproc: int | None
    memlock: int | None
    core: int | None
    root: bool
    """Root's processes are not counted."""
    infiniband: bool
    core_pattern: str
    cpus: int


def collect(given: dict[str, Any]) -> Any:
    import os
    import resource

    def soft(which: int) -> Any:
        value = resource.getrlimit(which)[0]
        return None if value == resource.RLIM_INFINITY else value

    try:
        infiniband = bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        infiniband = False
    return {
        "nofile": soft(resource.RLIMIT_NOFILE),
        "nproc": soft(resource.RLIMIT_NPROC),
        "memlock": soft(resource.RLIMIT_MEMLOCK),
        "core": soft(resource.RLIMIT_CORE),
        "root": os.geteuid() == 0,
        "infiniband": infiniband,
        "core_pattern": text_of("/proc/sys/kernel/core_pattern").strip(),
        "cpus": os.cpu_count() or 1,
    }


LIMITS = Script("limits", collect, Seen, safe=True)


def judge(answers: Answers) -> Iterator[Verdict]:
    ranks = {host: machine.slots or 8 for host, machine in answers.machines.items()}
    # A rank has a connection or two to every other, besides its libraries and data files.
    files = 256 + 4 * sum(ranks.values())
    for host, limits in answers.read(LIMITS).items():
        faults = list(_faults(host, limits, files, ranks[host]))
        memlock = "unlimited" if limits.memlock is None else f"{limits.memlock // 1024} KiB"
        nofile = "unlimited" if limits.nofile is None else limits.nofile
        yield from faults or [ok(host, f"nofile {nofile}, memlock {memlock}")]


def _faults(host: str, limits: Seen, files: int, ranks: int) -> Iterator[Verdict]:
    if limits.nofile is not None and limits.nofile < max(files, NOFILE):
        cause, mend = f"nofile {limits.nofile}, {files} needed", _set("nofile", "1048576")
        yield Verdict(host, "fail" if limits.nofile < files else "warn", cause, mend)
    # torch starts several pools of as many threads as there are cores, in every rank.
    threads = ranks * (64 + 2 * min(limits.cpus, 64))
    if not limits.root and limits.nproc is not None and limits.nproc < max(threads, NPROC):
        cause, mend = f"nproc {limits.nproc}, about {threads} needed", _set("nproc", "unlimited")
        yield Verdict(host, "fail" if limits.nproc < threads else "warn", cause, mend)
    if limits.infiniband and limits.memlock is not None:
        cause = f"memlock {limits.memlock // 1024} KiB: InfiniBand needs it unlimited"
        yield fail(host, cause, _set("memlock", "unlimited"))
    if limits.core != 0 and not limits.core_pattern.startswith("|"):
        cause = "core: a rank that aborts writes all its memory to the working folder"
        yield warn(host, cause, _set("core", "0"))


def _set(limit: str, value: str) -> str:
    line = f"* - {limit} {value}"
    return f"echo '{line}' | sudo tee /etc/security/limits.d/clusterkit-{limit}.conf"


CHECK = Check(
    "limits",
    "A session may open enough files, start enough processes, lock memory for InfiniBand, and "
    "writes no core dumps.",
    judge,
    (LIMITS,),
)
