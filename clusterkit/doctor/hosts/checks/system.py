"""The machine: system, clock, memory, cores, shared memory, limits, processes of others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Level, Verdict, fail, ok, shortened, warn
from clusterkit.doctor.hosts.base import Answer, Answers, check, script
from clusterkit.doctor.hosts.helpers import level_of, most_common, size_text
from clusterkit.doctor.hosts.runner import text_of, user_of
from clusterkit.errors import counted


class System(Struct):
    """The platform that programs are built for."""

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
"""Field of `System`: its name in messages, level of a difference, remedy."""


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
    for host, found in seen.items():
        for key, (name, level, remedy) in _PARTS.items():
            if (own := getattr(found, key)) != usual[key]:
                cause = f"{name} {own}, but {usual[key]} on the other hosts"
                yield Verdict(host, level, cause, remedy)
        yield ok(host, f"{found.system}, kernel {found.kernel}, {found.machine}")


# ---------------------------------------------------------------- clock

CLOCK_WARN = 0.5
CLOCK_FAIL = 5.0
CLOCK_ELASTIC = 2.0
"""Seconds. Which rank failed first is decided by time, 2 s before the others are ended; and a node
of an elastic job counts as lost when its last message seems 3 s old."""

Span = tuple[float, float]


def offset(answer: Answer) -> Span | None:
    """Return the least and the most that the host's clock can be ahead of ours, in seconds.

    The host read its clock at the beginning and at the end of its work, both after we sent
    and before we received. So the difference lies between ``ended - received`` and
    ``began - sent``, however long the work took. None: the host did not answer.
    """
    if answer.began is None:
        return None
    last = answer.began if answer.ended is None else answer.ended
    low, high = last - answer.received, answer.began - answer.sent
    return min(low, high), max(low, high)


def agreed(spans: Iterable[Span]) -> float:
    """Return the offset that most clocks can have; of several, the one nearest to our own clock.

    Our own clock has a vote: between two hosts that differ it decides which one is wrong.
    """
    voters = [*spans, (0.0, 0.0)]
    candidates = {end for span in voters for end in span}
    return min(
        candidates,
        key=lambda value: (-sum(low <= value <= high for low, high in voters), abs(value)),
    )


_SET_CLOCK = "sudo apt-get install -y chrony && sudo chronyc makestep"


@check()
def clock(answers: Answers) -> Iterator[Verdict]:
    """The clocks of all hosts agree."""
    offsets = {host: span for host, answer in answers.of.items() if (span := offset(answer))}
    right = agreed(offsets.values())
    limit = CLOCK_ELASTIC if answers.subject.needs.elastic else CLOCK_FAIL
    for host, (low, high) in offsets.items():
        off = max(low - right, 0.0) or min(high - right, 0.0)  # at least
        if abs(off) > CLOCK_WARN:
            cause = (
                f"its clock is at least {_duration(abs(off))} {'ahead' if off > 0 else 'behind'}"
            )
            level: Level = "fail" if abs(off) > limit else "warn"
            if len(answers.subject.hosts) == 1:
                level = "warn"  # it differs from the submitter's clock alone
            else:
                cause += ": logs of the nodes are merged by time"
            yield Verdict(host, level, cause, _SET_CLOCK)
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


class Load(Struct):
    """Cores that a session may use, and the load average of a minute."""

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


# ---------------------------------------------------------------- strays

_SHOWN = 4


class Strays(Struct):
    """Processes of other runs and of other users."""

    runs: dict[str, list[int]]
    """Run id to process ids."""
    others: dict[str, dict[int, str]]
    """User to process id to the command line of a launcher."""


@script("strays", Strays)
def collect_strays(given: dict[str, Any]) -> Any:
    programs = {"torchrun", "deepspeed", "mpirun", "mpiexec", "orted", "prted", "horovodrun"}
    modules = {
        "torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner",
        "deepspeed.launcher.launch", "accelerate.commands.launch",
    }  # fmt: skip

    def is_launcher(words: list[str]) -> bool:
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
            # The command line can be read by everyone, the environment by its user alone.
            words = text_of(f"/proc/{name}/cmdline").split("\0")
            if is_launcher(words):
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
    for host, found in answers.read(collect_strays).items():
        for run, pids in sorted(found.runs.items()):
            number = "1 process" if len(pids) == 1 else f"{len(pids)} processes"
            remedy = shell.join(["clusterkit", "cancel", run])
            yield warn(host, f"run {run} has {number} there", remedy)
        for user, launchers in sorted(found.others.items()):
            ranks = "; ".join(
                f"process {pid}: {shortened(words, 80)}"
                for pid, words in sorted(launchers.items())[:_SHOWN]
            )
            more = f" and {len(launchers) - _SHOWN} more" if len(launchers) > _SHOWN else ""
            cause = f"{user} has ranks there: {ranks}{more}"
            remedy = f"ask {user}, or use the other hosts: {shell.join(['--exclude', host])}"
            yield warn(host, cause, remedy)
        yield ok(host, "none")
