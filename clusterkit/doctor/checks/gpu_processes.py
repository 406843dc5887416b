"""Does anything else hold the GPUs?"""

from __future__ import annotations

from collections.abc import Iterator

from clusterkit.doctor.base import Process, Verdict, end_processes, ok
from clusterkit.doctor.check import Answers, Check
from clusterkit.doctor.nvidia import NVIDIA, Nvidia, gpus_of, no_gpus_wanted
from clusterkit.errors import counted

FREE_MIB = 1024
"""A GPU that nobody uses holds less: the driver's own part, an idle context."""


def judge(answers: Answers) -> Iterator[Verdict]:
    for host, nvidia in gpus_of(answers).items():
        busy = _busy(nvidia)
        need = answers.machines[host].slots
        if not busy:
            yield ok(host, "none")
            continue
        free = len(nvidia.gpus) - len(busy)
        held = ", ".join(
            f"GPU {gpu['index']} by {_who(nvidia, gpu['uuid'])} ({gpu['memory.used']} MiB)"
            for gpu in busy[:4]
        )
        more = f" and {len(busy) - 4} more" if len(busy) > 4 else ""
        cause = f"{counted(len(busy), 'GPU')} of {len(nvidia.gpus)} in use: {held}{more}"
        enough = free >= (len(nvidia.gpus) if need is None else need)
        yield Verdict(host, "warn" if enough else "fail", cause, _remedy(nvidia))


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
    """Our own runs are cancelled, our own processes killed, the owners of others asked."""
    mine = (owner.run for owner in nvidia.owners.values() if owner.user == nvidia.me)
    if runs := sorted({run for run in mine if run}):
        return "; ".join(f"clusterkit cancel {run}" for run in runs)
    processes = {
        process["pid"]: Process(int(process["pid"]), owner.user, process["process_name"])
        for process in nvidia.processes
        if (owner := nvidia.owners.get(process["pid"])) is not None and owner.user
    }
    return end_processes(processes.values(), nvidia.me) or "sudo fuser -v /dev/nvidia*"


CHECK = Check(
    "gpu-processes",
    "No process left over, or of somebody else, holds the GPUs that the job needs.",
    judge,
    (NVIDIA,),
    pointless=no_gpus_wanted,
)
