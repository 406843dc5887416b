"""What a host knows of why its ranks may be slow: what has changed between two looks at it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterkit.agent.processes import processes_of

_TICKS = os.sysconf("SC_CLK_TCK")
_GPU = ("index", "clocks.sm", "clocks.max.sm", "clocks_throttle_reasons.active")
_GPU_REASONS = {0x4: "its power cap", 0x8: "the hardware", 0x20: "heat", 0x40: "heat",
                0x80: "the power supply"}  # fmt: skip
"""Bits of clocks_throttle_reasons.active (nvml.h) by which a GPU is slower than it could be."""


@dataclass(frozen=True)
class Look:
    """A host at one moment; numbers that only grow, but for those of ``now``."""

    at: float  # seconds
    waited: Mapping[int, float] = field(default_factory=dict)
    """By rank, how long its threads have waited for a CPU."""
    others: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """Seconds of processor time of processes that are not the run's, by process id and name."""
    quota: float = 0.0  # seconds for which the cgroup's quota has held its processes back
    swapped: int = 0  # pages read from swap
    heat: int = 0  # how often CPUs were made slower because they were hot
    now: tuple[str, ...] = ()
    """What can be said without another look: CPU and GPU clocks, pressure."""


def words(before: Look, after: Look) -> str:
    """What has gone on between them that makes ranks slow; it may be nothing."""
    seconds = max(after.at - before.at, 1e-3)
    said = []
    if (held := (after.quota - before.quota) / seconds) >= 0.05:
        said.append(f"its CPU quota held its processes back {held:.0%} of the time")
    waits = {
        rank: (waited - before.waited[rank]) / seconds
        for rank, waited in after.waited.items() if rank in before.waited
    }  # fmt: skip
    said += [
        f"rank {rank} waited for a CPU {min(share, 1.0):.0%} of the time"
        for rank, share in sorted(waits.items()) if share >= 0.1
    ]  # fmt: skip
    taken = sorted(
        ((used - before.others.get(who, 0.0)) / seconds, who) for who, used in after.others.items()
    )
    said += [
        f"process {pid} ({name}), which is not the run's, takes {cpus:.1f} CPUs"
        for cpus, (pid, name) in taken[-2:][::-1] if cpus >= 0.2
    ]  # fmt: skip
    if (pages := (after.swapped - before.swapped) / seconds) >= 10:
        said.append(f"it swaps ({pages:.0f} pages read a second)")
    if after.heat > before.heat:
        said.append("its CPUs are throttled because they are hot")
    return "; ".join([*said, *after.now])


def look(ranks: Mapping[int, int], folder: str, gpus: bool) -> Look:
    """The host now.

    Args:
        ranks: their process ids.
        folder: the run's.
        gpus: whether to ask nvidia-smi as well.
    """
    return Look(
        at=time.monotonic(),
        waited={rank: _waited(pid) for rank, pid in ranks.items()},
        others=_others(processes_of(folder)),
        quota=_quota(),
        swapped=_number(_text("/proc/vmstat"), r"^pswpin (\d+)"),
        heat=sum(
            _number(_text(path), r"(\d+)")
            for path in Path("/sys/devices/system/cpu").glob("cpu*/thermal_throttle/core_*count")
        ),
        now=(*_pressure(), *_clocks(), *(throttled(nvidia_smi(_GPU, 5.0)) if gpus else ())),
    )


def _text(path: str | Path) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    return int(found[1]) if found else 0


def _waited(pid: int) -> float:
    """The main thread's time on a run queue (proc(5), schedstat)."""
    fields = _text(f"/proc/{pid}/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) == 3 else 0.0


def _others(ours: Collection[int]) -> dict[tuple[int, str], float]:
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        head, _, rest = _text(f"/proc/{name}/stat").rpartition(")")
        fields = rest.split()
        if len(fields) > 12 and int(name) not in ours and int(name) != os.getpid():
            called = head.partition("(")[2][:15]
            found[int(name), called] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def _quota() -> float:
    """Of this process's cgroup, version 2 or 1."""
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "cpu", "cpu,cpuacct", "cpuacct,cpu"):
            continue
        root = f"/sys/fs/cgroup/{controllers}"
        for folder in (f"{root}{path}", root):
            if text := _text(f"{folder}/cpu.stat"):
                micro = _number(text, r"^throttled_usec (\d+)") / 1e6
                return micro or _number(text, r"^throttled_time (\d+)") / 1e9
    return 0.0


def _pressure() -> list[str]:
    found = []
    for what, name in (("memory", "memory"), ("io", "the disk")):
        tenths = re.search(r"^some avg10=([\d.]+)", _text(f"/proc/pressure/{what}"))
        if tenths and float(tenths[1]) >= 10:
            found.append(
                f"its processes waited for {name} {float(tenths[1]):.0f}% of the last 10 s"
            )
    return found


def _clocks() -> list[str]:
    """Only of CPUs that say both; one that idles is slow as well, so the fastest counts."""
    place = Path("/sys/devices/system/cpu")
    now = [_number(_text(path), r"(\d+)") for path in place.glob("cpu*/cpufreq/scaling_cur_freq")]
    most = [_number(_text(path), r"(\d+)") for path in place.glob("cpu*/cpufreq/cpuinfo_max_freq")]
    if now and most and 0 < max(now) < 0.6 * max(most):
        return [f"its CPUs run at {max(now) / 1e6:.1f} of {max(most) / 1e6:.1f} GHz"]
    return []


def nvidia_smi(columns: Sequence[str], seconds: float) -> str:
    """A line of these columns for each GPU; nothing where it cannot say so within these seconds."""
    words = ["nvidia-smi", f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, capture_output=True, text=True, timeout=seconds).stdout
    return ""


def throttled(table: str) -> list[str]:
    """Of what nvidia-smi says, the GPUs that are slower than they could be, and why."""
    found = []
    for line in table.splitlines():
        with contextlib.suppress(ValueError):
            index, clock, most, reasons = (word.strip() for word in line.split(","))
            bits = int(reasons, 16)
            why = dict.fromkeys(name for bit, name in _GPU_REASONS.items() if bits & bit)
            if why:
                clocks = f"{int(clock)} of {int(most)} MHz"
                found.append(f"GPU {index} is held at {clocks} by {' and '.join(why)}")
    return found
