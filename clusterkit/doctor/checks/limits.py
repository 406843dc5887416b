"""Do the limits of a login session leave the ranks enough?"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import Answers, Check, Finding, Level, Script, Subject, read

NAME = "limits"
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
    try:
        with open("/proc/sys/kernel/core_pattern", encoding="utf-8", errors="replace") as file:
            pattern = file.read().strip()
    except OSError:
        pattern = ""
    return {
        "nofile": soft(resource.RLIMIT_NOFILE),
        "nproc": soft(resource.RLIMIT_NPROC),
        "memlock": soft(resource.RLIMIT_MEMLOCK),
        "core": soft(resource.RLIMIT_CORE),
        "root": os.geteuid() == 0,
        "infiniband": infiniband,
        "core_pattern": pattern,
        "cpus": os.cpu_count() or 1,
    }


LIMITS = Script("limits", collect, safe=True)


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    seen, findings = read(NAME, LIMITS, answers, subject, Seen)
    ranks = {machine.name: machine.slots or 8 for machine in subject.hosts}
    world = sum(ranks.values())
    for host, limits in seen.items():
        found: list[tuple[Level, str, str]] = []
        # A rank has a connection or two to every other, besides its libraries and data files.
        files = 256 + 4 * world
        if limits.nofile is not None and limits.nofile < max(files, NOFILE):
            level: Level = "fail" if limits.nofile < files else "warn"
            found.append(
                (level, f"nofile {limits.nofile}, {files} needed", _set("nofile", "1048576"))
            )
        # torch starts several pools of as many threads as there are cores, in every rank.
        threads = ranks[host] * (64 + 2 * min(limits.cpus, 64))
        if not limits.root and limits.nproc is not None and limits.nproc < max(threads, NPROC):
            level = "fail" if limits.nproc < threads else "warn"
            found.append(
                (level, f"nproc {limits.nproc}, about {threads} needed", _set("nproc", "unlimited"))
            )
        if limits.infiniband and limits.memlock is not None:
            cause = f"memlock {limits.memlock // 1024} KiB: InfiniBand needs it unlimited"
            found.append(("fail", cause, _set("memlock", "unlimited")))
        if limits.core != 0 and not limits.core_pattern.startswith("|"):
            cause = "core: a rank that aborts writes all its memory to the working folder"
            found.append(("warn", cause, _set("core", "0")))
        findings += [Finding(NAME, host, *fault) for fault in found]
        if not found:
            memlock = "unlimited" if limits.memlock is None else f"{limits.memlock // 1024} KiB"
            nofile = "unlimited" if limits.nofile is None else limits.nofile
            findings.append(Finding(NAME, host, "ok", f"nofile {nofile}, memlock {memlock}"))
    return findings


def _set(limit: str, value: str) -> str:
    line = f"* - {limit} {value}"
    return f"echo '{line}' | sudo tee /etc/security/limits.d/clusterkit-{limit}.conf"


CHECK = Check(
    NAME,
    "A session may open enough files, start enough processes, lock memory for InfiniBand, and "
    "writes no core dumps.",
    judge,
    (LIMITS,),
)
