"""The machine: its system and clock, memory, cores, shared memory, limits, and who else uses it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Level, Verdict, fail, ok, shortened, warn
from clusterkit.doctor.hosts.base import Answer, Answers, check, script
from clusterkit.doctor.hosts.helpers import most_common, size_text
from clusterkit.doctor.hosts.runner import text_of, user_of
from clusterkit.errors import counted


class System(Struct):
    """What programs are built for."""

    machine: str
    kernel: str
    """Major and minor number."""
    system: str
    libc: str


_PARTS: dict[str, tuple[str, Level, str]] = {
    "machine": ("a processor of kind", "fail", "leave the host out, or install the same system"),
    "libc": ("the C library", "warn", "uname -a"),
    "system": ("the system", "warn", "uname -a"),
    "kernel": ("the kernel", "warn", "uname -a"),
}
"""What to call it, how bad a difference is, and what to do about it."""


@script("system", System, in_process=True)
def collect_system(given: dict[str, Any]) -> Any:
    release = {}
    for line in text_of("/etc/os-release").splitlines():
        key, _, value = line.strip().partition("=")
        release[key] = value.strip("\"'")
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        libc = "not glibc"
    return {
        "machine": os.uname().machine,
        "kernel": ".".join(os.uname().release.split(".")[:2]),
        "system": f"{release.get('ID', 'linux')} {release.get('VERSION_ID', '')}".strip(),
        "libc": libc,
    }


@check(collect_system)
def system(answers: Answers) -> Iterator[Verdict]:
    """Processor, system, C library and kernel are the same everywhere."""
    seen = answers.read(collect_system)
    usual = {key: most_common((getattr(each, key) for each in seen.values()), "") for key in _PARTS}
    for host, there in seen.items():
        for key, (what, level, mend) in _PARTS.items():
            if (own := getattr(there, key)) != usual[key]:
                cause = f"{what} {own}, but {usual[key]} on the other hosts"
                yield Verdict(host, level, cause, mend)
        yield ok(host, f"{there.system}, kernel {there.kernel}, {there.machine}")


# ---------------------------------------------------------------- clock

CLOCK_WARN = 0.5
CLOCK_FAIL = 5.0
CLOCK_ELASTIC = 2.0
"""Seconds. Which rank failed first is judged by time, with 2 s before the others are ended; and a
node of an elastic job counts as dead when its last word seems 3 s old."""

Span = tuple[float, float]


def offset(answer: Answer) -> Span | None:
    """The host's clock minus ours, in seconds: the least and the most that it can be.

    The host looked at its clock when it began and when it ended to answer, both after we sent
    and before we received. So the difference lies between ``ended - received`` and
    ``began - sent``: the time that the answer took itself does not count.
    """
    if answer.began is None:
        return None
    last = answer.began if answer.ended is None else answer.ended
    low, high = last - answer.received, answer.began - answer.sent
    return min(low, high), max(low, high)


def agreed(spans: Iterable[Span]) -> float:
    """The offset that most clocks can have; of several the one nearest to our own clock.

    Our own clock has a vote: between two hosts that differ it says which one is wrong.
    """
    voters = [*spans, (0.0, 0.0)]
    candidates = {end for span in voters for end in span}
    return min(
        candidates,
        key=lambda value: (-sum(low <= value <= high for low, high in voters), abs(value)),
    )


@check()
def clock(answers: Answers) -> Iterator[Verdict]:
    """The clocks of all hosts agree."""
    offsets = {host: span for host, answer in answers.of.items() if (span := offset(answer))}
    right = agreed(offsets.values())
    limit = CLOCK_ELASTIC if answers.subject.needs.elastic else CLOCK_FAIL
    for host, (low, high) in offsets.items():
        # How far it is off at least.
        off = max(low - right, 0.0) or min(high - right, 0.0)
        if abs(off) > CLOCK_WARN:
            level: Level = "fail" if abs(off) > limit else "warn"
            cause = f"its clock is at least {_duration(abs(off))} "
            cause += "ahead" if off > 0 else "behind"
            if len(answers.subject.hosts) == 1:
                level = "warn"  # nobody to disagree with but the submitter
            else:
                cause += ": logs of the nodes are merged by time"
            mend = "sudo apt-get install -y chrony && sudo chronyc makestep"
            yield Verdict(host, level, cause, mend)
        yield ok(host, "agrees")


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


# ---------------------------------------------------------------- memory and cores

MEMORY_WARN = 1 << 30
MEMORY_FAIL = 256 << 20
"""Bytes per rank. Importing torch alone takes about 300 MiB."""
_UNLIKE = 0.2
"""Part by which one host's memory may differ from that of the others."""


class Memory(Struct):
    """Bytes; ``limit`` is that of the control group, if it has one."""

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
    for host, there in seen.items():
        available = min(there.available, totals[host])
        share = available / (answers.machines[host].slots or 1)
        free = f"{size_text(available)} of {size_text(totals[host])} available"
        if share < MEMORY_WARN:
            cause = f"{free}: {size_text(share)} for each rank"
            mend = "ps -eo pid,user,rss,args --sort=-rss | head"
            yield Verdict(host, "fail" if share < MEMORY_FAIL else "warn", cause, mend)
        elif abs(totals[host] - usual) > _UNLIKE * usual:
            cause = f"{size_text(totals[host])} of memory, but {size_text(usual)} on other hosts"
            yield warn(host, cause, "free -h")
        yield ok(host, free)


class Load(Struct):
    """Cores that a session may use, and processes that wanted one, on average of a minute."""

    cpus: int
    load: float


@script("load", Load, in_process=True)
def collect_load(given: dict[str, Any]) -> Any:
    return {"cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}


@check(collect_load)
def load(answers: Answers) -> Iterator[Verdict]:
    """There is a core for every rank, and nothing else keeps them busy."""
    seen = answers.read(collect_load)
    usual = most_common((load.cpus for load in seen.values()), 0)
    for host, load in seen.items():
        ranks, cores = answers.machines[host].slots or 1, counted(load.cpus, "core")
        if load.load > max(2, load.cpus):
            busy = "ps -eo pid,user,pcpu,args --sort=-pcpu | head"
            yield warn(host, f"load {load.load:.0f} on {cores}: others use it", busy)
        elif load.cpus < ranks:
            yield warn(host, f"{ranks} ranks share {cores}", "nproc")
        elif load.cpus != usual:
            yield warn(host, f"{cores}, but {usual} on other hosts", "nproc")
        yield ok(host, cores)


# ---------------------------------------------------------------- shared memory

SHM_WARN = 1 << 30
SHM_FAIL = 64 << 20


class Shm(Struct):
    """/dev/shm, in bytes; all zero where there is none."""

    there: bool
    writable: bool
    free: int
    total: int


@script("shm", Shm, in_process=True)
def collect_shm(given: dict[str, Any]) -> Any:
    path = "/dev/shm"
    if not os.path.isdir(path):
        return {"there": False, "writable": False, "free": 0, "total": 0}
    disk = os.statvfs(path)
    return {
        "there": True,
        "writable": os.access(path, os.W_OK | os.X_OK),
        "free": disk.f_bavail * disk.f_frsize,
        "total": disk.f_blocks * disk.f_frsize,
    }


@check(collect_shm)
def shm(answers: Answers) -> Iterator[Verdict]:
    """/dev/shm has room for the buffers of NCCL and of data loaders."""
    for host, there in answers.read(collect_shm).items():
        if not there.there or not there.writable:
            cause = "/dev/shm cannot be written to" if there.there else "there is no /dev/shm"
            yield fail(host, cause, "sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm")
        elif there.free < SHM_WARN:
            left = f"/dev/shm has {size_text(there.free)} left of {size_text(there.total)}"
            cause = f"{left}: NCCL and data loaders put their buffers there"
            mend = "sudo mount -o remount,size=50% /dev/shm"
            if there.total >= SHM_WARN:
                mend = "ls -la /dev/shm  # rm what dead processes left"
            yield Verdict(host, "fail" if there.free < SHM_FAIL else "warn", cause, mend)
        yield ok(host, f"{size_text(there.free)} free")


# ---------------------------------------------------------------- limits

NOFILE = 4096
NPROC = 4096


class Limits(Struct):
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
            cause, mend = f"nofile {soft.nofile}, {files} needed", _set("nofile", "1048576")
            yield Verdict(host, "fail" if soft.nofile < files else "warn", cause, mend)
        # torch starts several pools of as many threads as there are cores, in every rank.
        threads = ranks[host] * (64 + 2 * min(soft.cpus, 64))
        if not soft.root and soft.nproc is not None and soft.nproc < max(threads, NPROC):
            cause, mend = f"nproc {soft.nproc}, about {threads} needed", _set("nproc", "unlimited")
            yield Verdict(host, "fail" if soft.nproc < threads else "warn", cause, mend)
        memlock = "unlimited" if soft.memlock is None else f"{soft.memlock // 1024} KiB"
        if soft.infiniband and soft.memlock is not None:
            cause = f"memlock {memlock}: InfiniBand needs it unlimited"
            yield fail(host, cause, _set("memlock", "unlimited"))
        if soft.core != 0 and not soft.core_pattern.startswith("|"):
            cause = "core: a rank that aborts writes all its memory to the working folder"
            yield warn(host, cause, _set("core", "0"))
        nofile = "unlimited" if soft.nofile is None else soft.nofile
        yield ok(host, f"nofile {nofile}, memlock {memlock}")


def _set(limit: str, value: str) -> str:
    line = f"* - {limit} {value}"
    return f"echo '{line}' | sudo tee /etc/security/limits.d/clusterkit-{limit}.conf"


# ---------------------------------------------------------------- who else uses it

_SHOWN = 4


class Strays(Struct):
    """Processes by run, and launchers by user."""

    runs: dict[str, list[int]]
    others: dict[str, dict[int, str]]
    """User to process id to the words that it was started with."""


@script("strays", Strays)
def collect_strays(given: dict[str, Any]) -> Any:
    programs = {"torchrun", "deepspeed", "mpirun", "mpiexec", "orted", "prted", "horovodrun"}
    modules = {
        "torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner",
        "deepspeed.launcher.launch", "accelerate.commands.launch",
    }  # fmt: skip

    def launches(words: list[str]) -> bool:
        name, rest = os.path.basename(words[0]), words[1:]
        if not name.startswith("python"):
            return name in programs
        if "-m" in rest[:6]:
            return not modules.isdisjoint(rest[rest.index("-m") + 1 :][:1])
        script = os.path.basename(next((word for word in rest if word[:1] != "-"), ""))
        # agent.pyz is ours, of a run that another user submitted.
        return script in programs or (script == "agent.pyz" and "--nproc" in rest)

    mine = os.environ.get("CLUSTERKIT_RUN_ID", "")
    runs: dict[str, list[int]] = {}
    others: dict[str, dict[int, str]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            uid = os.stat(f"/proc/{name}").st_uid
        except OSError:
            continue  # gone
        if uid != os.geteuid():
            # Everybody may read the words, and nobody else the environment.
            words = text_of(f"/proc/{name}/cmdline").split("\0")
            if launches(words):
                others.setdefault(user_of(uid), {})[int(name)] = " ".join(words)[:200]
            continue
        for entry in text_of(f"/proc/{name}/environ").split("\0"):
            key, _, run = entry.partition("=")
            if key == "CLUSTERKIT_RUN_ID" and run and run != mine:
                runs.setdefault(run, []).append(int(name))
    return {"runs": runs, "others": others}


@check(collect_strays)
def strays(answers: Answers) -> Iterator[Verdict]:
    """No processes of the same user's other runs are left there, and no ranks of another user
    run."""
    for host, there in answers.read(collect_strays).items():
        for run, pids in sorted(there.runs.items()):
            number = "1 process" if len(pids) == 1 else f"{len(pids)} processes"
            mend = shell.join(["clusterkit", "cancel", run])
            yield warn(host, f"run {run} has {number} there", mend)
        for user, launchers in sorted(there.others.items()):
            ranks = [
                f"process {pid}: {shortened(words, 80)}" for pid, words in sorted(launchers.items())
            ]
            more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
            cause = f"{user} has ranks there: {'; '.join(ranks[:_SHOWN])}{more}"
            mend = f"ask {user}, or use the other hosts: {shell.join(['--exclude', host])}"
            yield warn(host, cause, mend)
        yield ok(host, "none")
