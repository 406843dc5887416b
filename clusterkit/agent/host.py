"""Find out why the ranks of a host may be slow, from two samples of it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterkit.agent.files import read_text
from clusterkit.agent.processes import processes_of

_TICKS = os.sysconf("SC_CLK_TCK")
_GPU = ("index", "clocks.sm", "clocks.max.sm")
_GPU_REASONS_NAMES = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The second is the name before driver 535. A query with an unknown name has no rows at all."""
_GPU_REASONS = {0x4: "SW power cap", 0x8: "HW slowdown", 0x20: "SW thermal slowdown",
                0x40: "HW thermal slowdown", 0x80: "HW power brake slowdown"}  # fmt: skip
"""Bits of clocks_event_reasons.active (nvml.h) for which a GPU is slower than it could be."""

_NCCL_NETWORK = ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_HCA", "NCCL_NET_PLUGIN")


@dataclass(frozen=True)
class Sample:
    """Counters of a host at one moment; they only grow, except ``now``."""

    at: float  # seconds
    waited: Mapping[int, float] = field(default_factory=dict)
    """Seconds that each rank's main thread has waited for a CPU."""
    others: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """CPU seconds of the processes outside the run, by process id and name."""
    throttled: float = 0.0  # seconds for which the cgroup's CPU quota has throttled its processes
    swapped: int = 0  # pages read from swap
    overheated: int = 0  # how often CPUs were throttled because they were hot
    now: tuple[str, ...] = ()
    """Descriptions that need no second sample: CPU and GPU clocks, pressure."""


def describe(before: Sample, after: Sample) -> str:
    """Describe what has slowed ranks between two samples; empty: nothing did."""
    seconds = max(after.at - before.at, 1e-3)
    found = []
    if (share := (after.throttled - before.throttled) / seconds) >= 0.05:
        found.append(f"CPU quota: its processes were throttled {share:.0%} of the time")
    for rank, waited in sorted(after.waited.items()):
        if (share := (waited - before.waited.get(rank, waited)) / seconds) >= 0.1:
            found.append(f"rank {rank} waited for a CPU {min(share, 1.0):.0%} of the time")
    busiest = sorted(
        ((used - before.others.get(process, 0.0)) / seconds, process)
        for process, used in after.others.items()
    )
    found += [
        f"process {pid} ({name}), not part of the run, uses {cpus:.1f} CPUs"
        for cpus, (pid, name) in busiest[-2:][::-1] if cpus >= 0.2
    ]  # fmt: skip
    if (pages := (after.swapped - before.swapped) / seconds) >= 10:
        found.append(f"swapping: {pages:.0f} pages/s read from swap")
    if after.overheated > before.overheated:
        found.append("thermal throttling: its CPUs are too hot")
    return "; ".join([*found, *after.now])


def sample(ranks: Mapping[int, int], folder: str, gpus: bool) -> Sample:
    """Return a sample of this host.

    Args:
        ranks: the process id of each rank.
        folder: the run's.
        gpus: whether to query nvidia-smi as well.
    """
    return Sample(
        at=time.monotonic(),
        waited={rank: _waited(pid) for rank, pid in ranks.items()},
        others=_others(processes_of(folder)),
        throttled=_throttled_seconds(),
        swapped=_number(read_text("/proc/vmstat"), r"^pswpin (\d+)"),
        overheated=sum(_cpu_numbers("thermal_throttle/core_*count")),
        now=(*_pressure(), *_cpu_clocks(), *(_gpu_clocks() if gpus else ())),
    )


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    return int(found[1]) if found else 0


def _cpu_numbers(files: str) -> list[int]:
    """Return the number in each of these files of each CPU."""
    paths = Path("/sys/devices/system/cpu").glob(f"cpu*/{files}")
    return [_number(read_text(path), r"(\d+)") for path in paths]


def _waited(pid: int) -> float:
    """The main thread's time on a run queue (proc(5), schedstat)."""
    fields = read_text(f"/proc/{pid}/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) == 3 else 0.0


def _others(ours: Collection[int]) -> dict[tuple[int, str], float]:
    """Return ``others`` of a `Sample`: without this process and ``ours``."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        head, _, rest = read_text(f"/proc/{name}/stat").rpartition(")")
        fields = rest.split()
        if len(fields) > 12 and int(name) not in ours and int(name) != os.getpid():
            command = head.partition("(")[2][:15]
            found[int(name), command] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def _throttled_seconds() -> float:
    """Return for how long this process's cgroup, version 2 or 1, has been throttled."""
    for line in read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "cpu", "cpu,cpuacct", "cpuacct,cpu"):
            continue
        root = f"/sys/fs/cgroup/{controllers}"
        for folder in (f"{root}{path}", root):
            if text := read_text(f"{folder}/cpu.stat"):
                micro = _number(text, r"^throttled_usec (\d+)") / 1e6
                return micro or _number(text, r"^throttled_time (\d+)") / 1e9
    return 0.0


def _pressure() -> list[str]:
    found = []
    for resource, name in (("memory", "memory"), ("io", "I/O")):
        average = re.search(r"^some avg10=([\d.]+)", read_text(f"/proc/pressure/{resource}"))
        percent = float(average[1]) if average else 0.0
        if percent >= 10:
            found.append(f"{name} pressure: its processes waited {percent:.0f}% of the last 10 s")
    return found


def _cpu_clocks() -> list[str]:
    # An idle CPU is slow as well, so the fastest counts.
    now = max(_cpu_numbers("cpufreq/scaling_cur_freq"), default=0)
    most = max(_cpu_numbers("cpufreq/cpuinfo_max_freq"), default=0)
    if 0 < now < 0.6 * most:
        return [f"CPU frequency: {now / 1e6:.1f} of {most / 1e6:.1f} GHz"]
    return []


def unused_infiniband(root: str = "/") -> str:
    """Return the remark on a run whose NCCL sends over TCP; empty: this host has nothing faster."""
    folders = Path(root, "sys/class/infiniband").glob("*/ports/*")
    active = sorted(
        folder.parents[1].name
        for folder in folders
        if "ACTIVE" in read_text(folder / "state")
        and "InfiniBand" in read_text(folder / "link_layer")
    )
    if not active:
        return ""
    asked = [f"{name}={os.environ[name]}" for name in _NCCL_NETWORK if name in os.environ]
    if not any(Path(root, "dev/infiniband").glob("uverbs*")):
        remedy = "no /dev/infiniband/uverbs* here: pass the device to the container"
    elif asked:
        remedy = f"{' '.join(asked)} is set"
    else:
        remedy = "apt-get install ibverbs-providers where the ranks run; NCCL's lines with NET/IB"
    ports = f"InfiniBand is active on {', '.join(active)}"
    return f"NET/Socket: NCCL sends over TCP, although {ports}: {remedy}"


def has_gpus() -> bool:
    """Return whether NVIDIA's driver serves this host; WSL2 reaches it by a device of its own."""
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")


def nvidia_smi(columns: Sequence[str], seconds: float) -> str:
    """Return a line of these columns for each GPU; empty if nvidia-smi fails or takes longer."""
    command = ["nvidia-smi", f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds).stdout
    return ""


def _gpu_clocks() -> list[str]:
    table = ""
    for reasons in _GPU_REASONS_NAMES:
        table = nvidia_smi((*_GPU, reasons), 5.0)
        if "not a valid field" not in table:
            break
    return gpu_clocks(table)


def gpu_clocks(table: str) -> list[str]:
    """Describe the GPUs in nvidia-smi's table that are throttled, and why."""
    found = []
    for line in table.splitlines():
        with contextlib.suppress(ValueError):
            index, clock, most, reasons = (cell.strip() for cell in line.split(","))
            bits = int(reasons, 16)
            why = [name for bit, name in _GPU_REASONS.items() if bits & bit]
            if why:
                clocks = f"{int(clock)} of {int(most)} MHz"
                found.append(f"GPU {index} throttled to {clocks}: {', '.join(why)}")
    return found
