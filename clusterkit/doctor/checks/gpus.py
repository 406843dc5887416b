"""Are there as many healthy GPUs as the job needs?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from clusterkit.doctor.base import Verdict, common, fail, ok, shortened, warn
from clusterkit.doctor.check import Answers, Check
from clusterkit.doctor.nvidia import NVIDIA, Nvidia, gpus_of, no_gpus_wanted
from clusterkit.errors import counted

_SLOWED = {0x08: "hardware slowdown", 0x40: "heat", 0x80: "its power supply"}
"""Bits of clocks_event_reasons.active that mean trouble (nvml.h, nvmlClocksEventReasons)."""
_SERIOUS = {48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140}
"""Xid numbers that speak of the hardware or the driver, not of a program's mistake (NVIDIA,
"XID Errors")."""
_SICK = ("[gpu requires reset]", "[unknown error]", "err!", "[gpu is lost]")


def judge(answers: Answers) -> Iterator[Verdict]:
    seen = gpus_of(answers)
    faults = {}
    healthy = {}
    for host, nvidia in seen.items():
        by_gpu = [list(_faults(host, gpu)) for gpu in nvidia.gpus]
        faults[host] = [*(fault for found in by_gpu for fault in found), *_kernel(host, nvidia)]
        sick = [found for found in by_gpu if any(fault.level == "fail" for fault in found)]
        healthy[host] = len(nvidia.gpus) - len(sick)
        yield from faults[host]
    most = max(healthy.values(), default=0)
    kinds = {host: _kind(nvidia) for host, nvidia in seen.items() if nvidia.gpus}
    usual = common(kinds.values(), "")
    for host, nvidia in seen.items():
        there = healthy[host]
        need = answers.machines[host].slots
        if there < (1 if need is None else need):
            cause = f"{counted(there, 'healthy GPU')}, {need or 'at least 1'} needed"
            if nvidia.devices > len(nvidia.gpus):
                cause += f"; /dev has {nvidia.devices}, nvidia-smi lists {len(nvidia.gpus)}"
            yield fail(host, cause, "nvidia-smi")
        elif need is None and there < most:
            cause = f"{counted(there, 'healthy GPU')}, but {most} on other hosts"
            yield warn(host, cause, "nvidia-smi")
        elif kinds[host] != usual:
            cause = f"{kinds[host]}, but {usual} on the other hosts: the slowest sets the pace"
            yield warn(host, cause, "nvidia-smi -L")
        elif not faults[host]:
            yield ok(host, f"{there} x {kinds[host]}")


def _kind(nvidia: Nvidia) -> str:
    return ", ".join(dict.fromkeys(gpu["name"] for gpu in nvidia.gpus))


def _faults(host: str, gpu: Mapping[str, str]) -> Iterator[Verdict]:
    """What is wrong with one GPU."""
    number = gpu["index"]
    which = f"GPU {number}"
    reset = f"sudo nvidia-smi --gpu-reset -i {number}"
    sick = [cell for cell in gpu.values() if cell.lower() in _SICK]
    if sick or not gpu["memory.total"].isdecimal():
        state = sick[0] if sick else f"memory {gpu.get('memory.total')}"
        yield fail(host, f"{which}: {state}", f"{reset} || sudo reboot")
        return
    errors = gpu.get("ecc.errors.uncorrected.volatile.total", "")
    if errors.isdecimal() and int(errors):
        found = counted(int(errors), "memory error")
        yield fail(host, f"{which}: {found} that could not be corrected", reset)
    if gpu.get("retired_pages.pending", "").lower() == "yes":
        yield fail(host, f"{which}: broken memory pages wait to be retired", reset)
    if gpu.get("compute_mode", "").lower() == "prohibited":
        mend = f"sudo nvidia-smi -i {number} -c DEFAULT"
        yield fail(host, f"{which}: computing is prohibited", mend)
    if gpu.get("mig.mode.current", "").lower() == "enabled":
        cause = f"{which}: it is divided (MIG): NCCL cannot connect the parts"
        yield warn(host, cause, f"sudo nvidia-smi -i {number} -mig 0")
    reasons = gpu.get("clocks_event_reasons.active", gpu.get("clocks_throttle_reasons.active", ""))
    if re.fullmatch(r"0x[0-9a-fA-F]+", reasons):
        slowed = [word for bit, word in _SLOWED.items() if int(reasons, 16) & bit]
        if slowed:
            cause = f"{which}: slowed down by {' and '.join(slowed)}"
            yield warn(host, cause, "nvidia-smi -q -d PERFORMANCE")


def _kernel(host: str, nvidia: Nvidia) -> list[Verdict]:
    """Errors of the hardware that the kernel has logged since it started."""
    serious = []
    for line in nvidia.xids:
        match = re.search(r"NVRM: Xid \(([^)]*)\): (\d+)", line)
        if match is not None and int(match[2]) in _SERIOUS:
            serious.append((match[2], line))
    if not serious:
        return []
    numbers = ", ".join(dict.fromkeys(number for number, _ in serious))
    cause = f"the kernel has logged Xid {numbers}: {shortened(serious[-1][1])}"
    return [warn(host, cause, "sudo dmesg -T | grep NVRM")]


CHECK = Check(
    "gpus",
    "There are as many GPUs as the job needs, of one kind, without memory errors, throttling or "
    "errors in the kernel's log.",
    judge,
    (NVIDIA,),
    pointless=no_gpus_wanted,
)
