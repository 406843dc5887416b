"""Are there as many healthy GPUs as the job needs?"""

from __future__ import annotations

import re
from collections.abc import Mapping

from clusterkit.doctor.base import (
    Answers,
    Check,
    Finding,
    Level,
    Subject,
    common,
    shortened,
)
from clusterkit.doctor.scripts import NVIDIA, Nvidia, gpus_of, no_gpus_wanted
from clusterkit.errors import counted

NAME = "gpus"

_SLOWED = {0x08: "hardware slowdown", 0x40: "heat", 0x80: "its power supply"}
"""Bits of clocks_event_reasons.active that mean trouble (nvml.h, nvmlClocksEventReasons)."""
_SERIOUS = {48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140}
"""Xid numbers that speak of the hardware or the driver, not of a program's mistake (NVIDIA,
"XID Errors")."""
_SICK = ("[gpu requires reset]", "[unknown error]", "err!", "[gpu is lost]")


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    seen, findings = gpus_of(NAME, answers, subject)
    wanted = {machine.name: machine.slots for machine in subject.hosts}
    healthy = {}
    for host, nvidia in seen.items():
        faults = [fault for gpu in nvidia.gpus for fault in _faults(host, gpu)]
        faults += _kernel(host, nvidia)
        sick = {fault.cause.split(":")[0] for fault in faults if fault.level == "fail"}
        healthy[host] = len(nvidia.gpus) - len(sick)
        findings += faults
    most = max(healthy.values(), default=0)
    kinds = {host: _kind(nvidia) for host, nvidia in seen.items() if nvidia.gpus}
    usual = common(kinds, "")
    for host, nvidia in seen.items():
        there = healthy[host]
        need = wanted[host]
        if there < (1 if need is None else need):
            cause = f"{counted(there, 'healthy GPU')}, {need or 'at least 1'} needed"
            if nvidia.devices > len(nvidia.gpus):
                cause += f"; /dev has {nvidia.devices}, nvidia-smi lists {len(nvidia.gpus)}"
            findings.append(Finding(NAME, host, "fail", cause, "nvidia-smi"))
        elif need is None and there < most:
            cause = f"{counted(there, 'healthy GPU')}, but {most} on other hosts"
            findings.append(Finding(NAME, host, "warn", cause, "nvidia-smi"))
        elif kinds[host] != usual:
            cause = f"{kinds[host]}, but {usual} on the other hosts: the slowest sets the pace"
            findings.append(Finding(NAME, host, "warn", cause, "nvidia-smi -L"))
        elif not any(finding.host == host for finding in findings):
            findings.append(Finding(NAME, host, "ok", f"{there} x {kinds[host]}"))
    return findings


def _kind(nvidia: Nvidia) -> str:
    return ", ".join(dict.fromkeys(gpu["name"] for gpu in nvidia.gpus))


def _faults(host: str, gpu: Mapping[str, str]) -> list[Finding]:
    """What is wrong with one GPU; every cause begins with which one it is."""
    which = f"GPU {gpu['index']}"
    reset = f"sudo nvidia-smi --gpu-reset -i {gpu['index']}"
    sick = [cell for cell in gpu.values() if cell.lower() in _SICK]
    if sick or not gpu["memory.total"].isdecimal():
        said = sick[0] if sick else f"memory {gpu.get('memory.total')}"
        return [Finding(NAME, host, "fail", f"{which}: {said}", f"{reset} || sudo reboot")]
    found: list[tuple[Level, str, str]] = []
    errors = gpu.get("ecc.errors.uncorrected.volatile.total", "")
    if errors.isdecimal() and int(errors):
        found.append(
            ("fail", f"{counted(int(errors), 'memory error')} that could not be corrected", reset)
        )
    if gpu.get("retired_pages.pending", "").lower() == "yes":
        found.append(("fail", "broken memory pages wait to be retired", reset))
    if gpu.get("compute_mode", "").lower() == "prohibited":
        found.append(
            ("fail", "computing is prohibited", f"sudo nvidia-smi -i {gpu['index']} -c DEFAULT")
        )
    if gpu.get("mig.mode.current", "").lower() == "enabled":
        found.append((
            "warn", "it is divided (MIG): NCCL cannot connect the parts",
            f"sudo nvidia-smi -i {gpu['index']} -mig 0",
        ))  # fmt: skip
    reasons = gpu.get("clocks_event_reasons.active", gpu.get("clocks_throttle_reasons.active", ""))
    if re.fullmatch(r"0x[0-9a-fA-F]+", reasons):
        slowed = [word for bit, word in _SLOWED.items() if int(reasons, 16) & bit]
        if slowed:
            found.append(
                ("warn", f"slowed down by {' and '.join(slowed)}", "nvidia-smi -q -d PERFORMANCE")
            )
    return [Finding(NAME, host, level, f"{which}: {cause}", mend) for level, cause, mend in found]


def _kernel(host: str, nvidia: Nvidia) -> list[Finding]:
    """Errors of the hardware that the kernel has logged since it started."""
    serious = []
    for line in nvidia.xids:
        match = re.search(r"NVRM: Xid \(([^)]*)\): (\d+)", line)
        if match is not None and int(match[2]) in _SERIOUS:
            serious.append((match[2], line))
    if not serious:
        return []
    numbers = ", ".join(dict.fromkeys(number for number, _ in serious))
    last = shortened(serious[-1][1])
    cause = f"the kernel has logged Xid {numbers}: {last}"
    return [Finding(NAME, host, "warn", cause, "sudo dmesg -T | grep NVRM")]


CHECK = Check(
    NAME,
    "There are as many GPUs as the job needs, of one kind, without memory errors, throttling or "
    "errors in the kernel's log.",
    judge,
    (NVIDIA,),
    pointless=no_gpus_wanted,
)
