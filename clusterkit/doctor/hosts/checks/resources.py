"""Resources of a host: memory, shared memory, limits of a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import Level, Verdict, fail, ok, warn
from clusterkit.doctor.hosts.base import Answers, check, script
from clusterkit.doctor.hosts.helpers import level_of, most_common, size_text
from clusterkit.doctor.hosts.runner import text_of

MEMORY_WARN = 1 << 30
MEMORY_FAIL = 256 << 20
"""Bytes per rank. Importing torch alone takes about 300 MiB."""
_UNLIKE = 0.2
"""Fraction by which one host's memory may differ from that of the others."""


class Memory(Struct):
    """Bytes; ``limit`` is the control group's, if it has one."""

    total: int
    available: int
    limit: int | None


@script("memory", Memory, in_process=True)
def collect_memory(given: dict[str, Any]) -> Any:
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


@check(collect_memory)
def memory(answers: Answers) -> Iterator[Verdict]:
    """There is memory for every rank, and about as much on every host."""
    seen = answers.read(collect_memory)
    totals = {host: min(each.total, each.limit or each.total) for host, each in seen.items()}
    usual = most_common(totals.values(), 0)
    for host, found in seen.items():
        available = min(found.available, totals[host])
        share = available / (answers.machines[host].slots or 1)
        level = level_of(share, warn_below=MEMORY_WARN, fail_below=MEMORY_FAIL)
        free = f"{size_text(available)} of {size_text(totals[host])} available"
        if level != "ok":
            cause = f"{free}: {size_text(share)} for each rank"
            yield Verdict(host, level, cause, "ps -eo pid,user,rss,args --sort=-rss | head")
        elif abs(totals[host] - usual) > _UNLIKE * usual:
            cause = f"{size_text(totals[host])} of memory, but {size_text(usual)} on other hosts"
            yield warn(host, cause, "free -h")
        yield ok(host, free)


# ---------------------------------------------------------------- shared memory

SHM_WARN = 1 << 30
SHM_FAIL = 64 << 20


class Shm(Struct):
    """/dev/shm, in bytes."""

    exists: bool
    writable: bool
    free: int
    total: int


@script("shm", Shm, in_process=True)
def collect_shm(given: dict[str, Any]) -> Any:
    path = "/dev/shm"
    if not os.path.isdir(path):
        return {"exists": False, "writable": False, "free": 0, "total": 0}
    disk = os.statvfs(path)
    return {
        "exists": True,
        "writable": os.access(path, os.W_OK | os.X_OK),
        "free": disk.f_bavail * disk.f_frsize,
        "total": disk.f_blocks * disk.f_frsize,
    }


@check(collect_shm)
def shm(answers: Answers) -> Iterator[Verdict]:
    """/dev/shm has room for the buffers of NCCL and of data loaders."""
    for host, found in answers.read(collect_shm).items():
        level = level_of(found.free, warn_below=SHM_WARN, fail_below=SHM_FAIL)
        if not found.writable:
            cause = "/dev/shm cannot be written to" if found.exists else "there is no /dev/shm"
            yield fail(host, cause, "sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm")
        elif level != "ok":
            left = f"/dev/shm has {size_text(found.free)} left of {size_text(found.total)}"
            cause = f"{left}: NCCL and data loaders put their buffers there"
            remedy = "sudo mount -o remount,size=50% /dev/shm"
            if found.total >= SHM_WARN:
                remedy = "ls -la /dev/shm  # rm what dead processes left"
            yield Verdict(host, level, cause, remedy)
        yield ok(host, f"{size_text(found.free)} free")


# ---------------------------------------------------------------- limits

NOFILE = 4096
NPROC = 4096


class Limits(Struct):
    """Soft limits, None: unlimited; and what decides whether they matter."""

    nofile: int | None
    nproc: int | None
    memlock: int | None
    core: int | None
    root: bool
    """Whether it is root, whose processes are not counted."""
    infiniband: bool
    core_pattern: str
    cpus: int


@script("limits", Limits, in_process=True)
def collect_limits(given: dict[str, Any]) -> Any:
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


@check(collect_limits)
def limits(answers: Answers) -> Iterator[Verdict]:
    """A session may open enough files, start enough processes, lock memory for InfiniBand, and
    writes no core dumps."""
    ranks = {host: machine.slots or 8 for host, machine in answers.machines.items()}
    # A rank has a connection or two to every other, besides its libraries and data files.
    files = 256 + 4 * sum(ranks.values())
    for host, soft in answers.read(collect_limits).items():
        if soft.nofile is not None and soft.nofile < max(files, NOFILE):
            cause, remedy = f"nofile {soft.nofile}, {files} needed", _set_limit("nofile", "1048576")
            yield Verdict(host, "fail" if soft.nofile < files else "warn", cause, remedy)
        # torch starts several pools of as many threads as there are cores, in every rank.
        threads = ranks[host] * (64 + 2 * min(soft.cpus, 64))
        if not soft.root and soft.nproc is not None and soft.nproc < max(threads, NPROC):
            cause = f"nproc {soft.nproc}, about {threads} needed"
            level: Level = "fail" if soft.nproc < threads else "warn"
            yield Verdict(host, level, cause, _set_limit("nproc", "unlimited"))
        memlock = "unlimited" if soft.memlock is None else f"{soft.memlock // 1024} KiB"
        if soft.infiniband and soft.memlock is not None:
            cause = f"memlock {memlock}: InfiniBand needs it unlimited"
            yield fail(host, cause, _set_limit("memlock", "unlimited"))
        if soft.core != 0 and not soft.core_pattern.startswith("|"):
            cause = "core: a rank that aborts writes all its memory to the working folder"
            yield warn(host, cause, _set_limit("core", "0"))
        nofile = "unlimited" if soft.nofile is None else soft.nofile
        yield ok(host, f"nofile {nofile}, memlock {memlock}")


def _set_limit(limit: str, value: str) -> str:
    return f"echo '* - {limit} {value}' | sudo tee /etc/security/limits.d/clusterkit-{limit}.conf"
