"""Does anything else hold the GPUs?"""

from __future__ import annotations

from clusterkit.doctor.base import Answers, Check, Finding, Level, Subject
from clusterkit.doctor.scripts import NVIDIA, Nvidia, gpus_of, no_gpus_wanted
from clusterkit.errors import counted

NAME = "gpu-processes"
FREE_MIB = 1024
"""A GPU that nobody uses holds less: the driver's own part, an idle context."""


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    seen, findings = gpus_of(NAME, answers, subject)
    wanted = {machine.name: machine.slots for machine in subject.hosts}
    for host, nvidia in seen.items():
        busy = _busy(nvidia)
        need = wanted[host]
        if not busy:
            findings.append(Finding(NAME, host, "ok", "none"))
            continue
        free = len(nvidia.gpus) - len(busy)
        level: Level = "fail" if free < (len(nvidia.gpus) if need is None else need) else "warn"
        held = ", ".join(
            f"GPU {gpu['index']} by {_who(nvidia, gpu['uuid'])} ({gpu['memory.used']} MiB)"
            for gpu in busy[:4]
        )
        more = f" and {len(busy) - 4} more" if len(busy) > 4 else ""
        cause = f"{counted(len(busy), 'GPU')} of {len(nvidia.gpus)} in use: {held}{more}"
        findings.append(Finding(NAME, host, level, cause, _remedy(nvidia)))
    return findings


def _busy(nvidia: Nvidia) -> list[dict[str, str]]:
    with_process = {process["gpu_uuid"] for process in nvidia.processes}
    return [
        gpu
        for gpu in nvidia.gpus
        if gpu["uuid"] in with_process
        or (gpu["memory.used"].isdecimal() and int(gpu["memory.used"]) > FREE_MIB)
    ]


def _who(nvidia: Nvidia, uuid: str) -> str:
    names = []
    for process in nvidia.processes:
        if process["gpu_uuid"] == uuid:
            owner = nvidia.owners.get(process["pid"])
            of = f" of {owner.user}" if owner and owner.user else ""
            names.append(f"{process['process_name']} (process {process['pid']}{of})")
    return ", ".join(names) or "a process that cannot be seen from here"


def _remedy(nvidia: Nvidia) -> str:
    runs = {owner.run for owner in nvidia.owners.values() if owner.run}
    if runs:
        return "; ".join(f"clusterkit cancel {run}" for run in sorted(runs))
    pids = list(dict.fromkeys(process["pid"] for process in nvidia.processes))
    return f"kill {' '.join(pids)}" if pids else "sudo fuser -v /dev/nvidia*"


CHECK = Check(
    NAME,
    "No process left over, or of somebody else, holds the GPUs that the job needs.",
    judge,
    (NVIDIA,),
    pointless=no_gpus_wanted,
)
