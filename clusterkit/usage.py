"""Processor time and memory of ranks whose processes run on this machine: the kernel's numbers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_AGAIN_SECONDS = 1.0
"""Between two looks at a process: the kernel counts in hundredths of a second."""


class Usage(NamedTuple):
    """Of one process."""

    memory: int
    """Bytes that are in memory."""
    cpus: float | None = None
    """CPUs that it has kept busy since the look before; None: there was none."""


class Usages:
    """What processes use, by the records that agents keep of them (`clusterkit.agent.identity`)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._boot: str | None = None
        self._seen: dict[int, tuple[float, float, Usage]] = {}

    def of(self, process: Mapping[str, Any]) -> Usage | None:
        """None: it is on another machine, or has ended."""
        if self._boot is None:
            self._boot = _read("/proc/sys/kernel/random/boot_id").strip() or "unknown"
        if process.get("boot_id") != self._boot or not isinstance(process.get("pid"), int):
            return None
        pid, now = int(process["pid"]), self._clock()
        before = self._seen.get(pid)
        if before is not None and now < before[0] + _AGAIN_SECONDS:
            return before[2]
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()  # from the third one on
        if len(fields) < 22 or int(fields[19]) != process.get("start_ticks"):
            self._seen.pop(pid, None)
            return None
        spent = (int(fields[11]) + int(fields[12])) / _TICKS
        cpus = None if before is None else (spent - before[1]) / (now - before[0])
        found = Usage(int(fields[21]) * _PAGE, cpus)
        self._seen[pid] = now, spent, found
        return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
