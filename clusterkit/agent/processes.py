"""Identify processes, find out whether they live, and end them."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from clusterkit.agent.protocol import Document

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def start_ticks(pid: int) -> int | None:
    """Return when a living process started, in clock ticks since boot; None: gone, or a zombie.

    With the boot id this tells a process from a later one of the same number (proc(5),
    /proc/pid/stat fields 3 and 22).
    """
    return process_start(_stat(pid))


def process_start(stat: bytes | None) -> int | None:
    """Return the start time in the contents of ``/proc/PID/stat``; None: no process, a zombie."""
    fields = _fields(stat)
    return None if len(fields) < 20 or fields[0] in (b"Z", b"X") else int(fields[19])


def _stat(pid: int) -> bytes | None:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None


def _fields(stat: bytes | None) -> list[bytes]:
    """Split it from the third field, the state, on; the second is a name that may hold anything."""
    return (stat or b"").rpartition(b")")[2].split()


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def identity(pid: int) -> Document:
    """Return what must be recorded of a process to end it, and no other, later."""
    return {"pid": pid, "start_ticks": start_ticks(pid), "boot_id": boot_id()}


def is_alive(recorded: Document) -> bool:
    """Return whether the very process that `identity` described still runs."""
    ticks = recorded.get("start_ticks")
    return (
        ticks is not None
        and recorded.get("boot_id") == boot_id()
        and start_ticks(int(recorded["pid"])) == ticks
    )


def _fields_of(recorded: Document) -> list[bytes] | None:
    stat = _stat(recorded["pid"])
    if stat is None or process_start(stat) != recorded.get("start_ticks"):
        return None
    return _fields(stat)


def is_stopped(recorded: Document) -> bool | None:
    """Return whether a recorded process is stopped (SIGSTOP); None: it has ended."""
    fields = _fields_of(recorded)
    return None if fields is None else fields[0] == b"T"


def load(recorded: Document) -> tuple[float, int] | None:
    """Return a recorded process's CPU time in seconds and memory in bytes; None: it has ended."""
    if (fields := _fields_of(recorded)) is None:
        return None
    return (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[21]) * _PAGE


class Process(NamedTuple):
    """A living process."""

    parent: int
    group: int
    started: int
    """As of `start_ticks`."""
    blocked: bool
    """Whether it is in state D: it waits for a device or a file system, and cannot be killed."""
    name: str


def process_table() -> dict[int, Process]:
    """Return all living processes, by their ids."""
    found = {}
    for pid in _all_pids():
        stat = _stat(pid)
        if (started := process_start(stat)) is not None:
            fields, name = _fields(stat), (stat or b"").partition(b"(")[2].rpartition(b")")[0]
            found[pid] = Process(
                int(fields[1]), int(fields[2]), started, fields[0] == b"D",
                name.decode(errors="replace"),
            )  # fmt: skip
    return found


def descendants(*roots: int) -> list[int]:
    """Return the living processes below these, parents first."""
    children: dict[int, list[int]] = {}
    for pid, each in process_table().items():
        children.setdefault(each.parent, []).append(pid)
    found = list(roots)
    for pid in found:
        found += children.pop(pid, [])
    return found[len(roots) :]


def processes_of(folder: str) -> list[int]:
    """Return the living processes that were started with this run's folder in their environment.

    The folder's name is used by this run alone, and every process of the run inherits it:
    this finds the ones that lost their parent before they were recorded.
    """
    return processes_with({f"CLUSTERKIT_RUN_DIR={folder}"})


def processes_with(settings: Collection[str]) -> list[int]:
    """Return the living processes with one of these ``NAME=VALUE`` in their environment, but not
    the caller nor what that was started by."""
    marks = {os.fsencode(each) for each in settings}
    spared = {os.getpid(), *ancestors(os.getpid())}
    found = []
    for pid in _all_pids():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ours = pid not in spared and not marks.isdisjoint(environment)
            if ours and start_ticks(pid) is not None:
                found.append(pid)
    return found


def command_line(pid: int) -> list[str]:
    """Return the words of its command; empty: it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return words.decode(errors="replace").rstrip("\0").split("\0")


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1 and (fields := _fields(_stat(pid))):
        pid = int(fields[1])
        yield pid


def send(pids: Iterable[int], signum: int) -> None:
    """Signal those of the processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def descendants_except(kept: Collection[int] = ()) -> list[int]:
    """Return every descendant of this process and of those ``kept``, without the latter."""
    return [pid for pid in descendants(os.getpid(), *kept) if pid not in kept]


def wait_gone(pids: Iterable[int], seconds: float) -> None:
    """Wait until all of them have ended, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for pid in pids:
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                stack.callback(os.close, handle)
                selector.register(handle, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for key, _ in ready:
                selector.unregister(key.fileobj)


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since boot."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
