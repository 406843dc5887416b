"""Resources of a host: memory, shared memory, limits of a session."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from clusterkit.doctor.base import Level, Verdict, fail, ok, warn
from clusterkit.doctor.hosts.base import Answers, Collector, check
from clusterkit.doctor.hosts.collect import system as collect
from clusterkit.doctor.hosts.helpers import level_of, most_common, size_text

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


MEMORY = Collector(collect.memory, Memory)


@check(MEMORY)
def memory(answers: Answers) -> Iterator[Verdict]:
    """There is memory for every rank, and about as much on every host."""
    seen = answers.read(MEMORY)
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


SHM = Collector(collect.shm, Shm)


@check(SHM)
def shm(answers: Answers) -> Iterator[Verdict]:
    """/dev/shm has room for the buffers of NCCL and of data loaders."""
    for host, found in answers.read(SHM).items():
        level = level_of(found.free, warn_below=SHM_WARN, fail_below=SHM_FAIL)
        if not found.writable:
            cause = "/dev/shm cannot be written to" if found.exists else "there is no /dev/shm"
            yield fail(host, cause, "sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm")
        elif level != "ok":
            left = f"/dev/shm has {size_text(found.free)} left of {size_text(found.total)}"
            cause = f"{left}: NCCL and data loaders put their buffers there"
            remedy = "sudo mount -o remount,size=50% /dev/shm"
            if found.total >= SHM_WARN:
                remedy = "ls -la /dev/shm  # remove what ended processes left"
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


LIMITS = Collector(collect.limits, Limits)


@check(LIMITS)
def limits(answers: Answers) -> Iterator[Verdict]:
    """A session may open enough files, start enough processes, lock memory for InfiniBand, and
    writes no core dumps."""
    ranks = {host: machine.slots or 8 for host, machine in answers.machines.items()}
    # A rank has a connection or two to every other, besides its libraries and data files.
    files = 256 + 4 * sum(ranks.values())
    for host, soft in answers.read(LIMITS).items():
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
            cause = f"memlock {memlock}: InfiniBand needs unlimited"
            yield fail(host, cause, _set_limit("memlock", "unlimited"))
        if soft.core != 0 and not soft.core_pattern.startswith("|"):
            cause = "core: a rank that aborts writes a core dump to the working folder"
            yield warn(host, cause, _set_limit("core", "0"))
        nofile = "unlimited" if soft.nofile is None else soft.nofile
        yield ok(host, f"nofile {nofile}, memlock {memlock}")


def _set_limit(limit: str, value: str) -> str:
    return f"echo '* - {limit} {value}' | sudo tee /etc/security/limits.d/clusterkit-{limit}.conf"
