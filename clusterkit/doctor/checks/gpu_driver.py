"""Does the NVIDIA driver work, is it the same everywhere, and new enough for torch's CUDA?"""

from __future__ import annotations

from collections.abc import Iterator

from clusterkit.doctor.base import Verdict, common, fail, ok, warn
from clusterkit.doctor.check import Answers, Check
from clusterkit.doctor.checks.packages import PACKAGES, Packages
from clusterkit.doctor.nvidia import NVIDIA, Nvidia, gpus_of, no_gpus_wanted

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major version to the oldest driver branch that runs it (NVIDIA, "CUDA Compatibility",
minor version compatibility)."""

_REMEDIES = (
    ("version mismatch", "sudo reboot  # the driver was upgraded while it was loaded"),
    ("couldn't communicate", "sudo modprobe nvidia || sudo dkms autoinstall"),
    ("insufficient permissions", "ls -l /dev/nvidia*  # and who is in group video or render"),
    ("unknown error", "restart the container: its access to the GPUs was lost"),
    ("no devices were found", "lspci -d 10de:  # then sudo dmesg | grep NVRM"),
    ("lost", "sudo reboot"),
    ("device handle", "sudo reboot"),
    ("did not end", "sudo dmesg | grep NVRM; sudo reboot"),
)


def judge(answers: Answers) -> Iterator[Verdict]:
    seen = gpus_of(answers)
    versions = {
        host: nvidia.gpus[0]["driver_version"] for host, nvidia in seen.items() if nvidia.gpus
    }
    packages = answers.read(PACKAGES, quiet=True)
    usual = common(versions.values(), "")
    for host, nvidia in seen.items():
        yield _one(host, nvidia, versions.get(host), usual, packages.get(host))


def _one(
    host: str, nvidia: Nvidia, version: str | None, usual: str, packages: Packages | None
) -> Verdict:
    install = "sudo apt-get install -y nvidia-driver"
    if nvidia.query is None:
        cause = "there is no nvidia-smi"
        if nvidia.devices:
            cause += f", though /dev has {nvidia.devices} GPUs"
        return fail(host, cause, f"{install} nvidia-smi")
    complaint = nvidia.complaint
    if complaint is not None:
        known = (mend for words, mend in _REMEDIES if words in complaint.lower())
        return fail(host, complaint, next(known, "nvidia-smi"))
    if version is None:
        return fail(host, "nvidia-smi lists no GPU", "lspci -d 10de:")
    cuda = packages.cuda() if packages is not None else None
    branch = version.partition(".")[0]
    oldest = OLDEST_DRIVER.get(cuda or 0)
    if oldest is not None and branch.isdecimal() and int(branch) < oldest:
        cause = f"driver {version} is too old for torch's CUDA {cuda}: {oldest} is needed"
        return fail(host, cause, f"{install}-{oldest}")
    if version != usual:
        cause = f"driver {version}, but {usual} on the other hosts"
        return warn(host, cause, f"{install}-{usual.partition('.')[0]}")
    return ok(host, version)


CHECK = Check(
    "gpu-driver",
    "The NVIDIA driver works, is the same everywhere and new enough for the CUDA of torch.",
    judge,
    (NVIDIA, PACKAGES),
    pointless=no_gpus_wanted,
)
