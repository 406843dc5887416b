"""What doctor says of recorded hosts with GPUs: sound ones pass, sick ones are shown rightly."""

from __future__ import annotations

import os

import msgspec
import pytest

from tests import nvidia_smi
from tests.unit.doctor.conftest import make_answer, make_subject, named

H100 = "NVIDIA H100 80GB HBM3"
LOST = "sudo dmesg | grep 'NVRM: Xid'; sudo reboot  # Xid 79"
FIRST = "0 healthy GPUs, at least 1 needed"
DRIVER: dict[str, tuple[str, str, str]] = {
    "inforom": ("warn", "WARNING: infoROM is corrupted at gpu 0000:5D:00.0; the GPUs work",
                "nvidia-smi -q"),
    "mismatch": ("fail", "Failed to initialize NVML: Driver/library version mismatch",
                 "sudo reboot  # the driver was upgraded"),
    "nodriver": ("fail", "NVIDIA-SMI has failed because it couldn't communicate with", "modprobe"),
    "offbus": ("fail", "Unable to determine the device handle for GPU0000:C1:00.0", LOST),
    "offbus7": ("fail", "Unable to determine the device handle for GPU0000:5D:00.0", LOST),
    "old535": ("fail", "driver 535.183.01 is too old for torch's CUDA 13: 580 is needed",
               "NVIDIA's repository has it"),
    "old570": ("fail", "driver 570.172.08 is too old for torch's CUDA 13: 580 is needed",
               "nvidia-driver-580"),
    "hot525": ("fail", "driver 525.147.05 is too old", "nvidia-driver-580"),
    "perms": ("fail", "Failed to initialize NVML: Insufficient Permissions", "ls -l /dev/nvidia*"),
}  # fmt: skip
"""Level, cause and remedy of ``gpu-driver``; all others pass."""
GPUS: dict[str, tuple[str, str, str]] = {
    "a100mig": ("warn", "GPU 0: MIG is enabled", "-mig 0"),
    "hot": ("warn", "GPU 7: slowed down by heat", "PERFORMANCE"),
    "hot525": ("warn", "GPU 7: slowed down by heat", "PERFORMANCE"),
    "l40sl4": ("warn", "1 x NVIDIA L40S, 1 x NVIDIA L4: the slowest", "CUDA_VISIBLE_DEVICES"),
    "l4l40s": ("warn", "1 x NVIDIA L4, 1 x NVIDIA L40S: the slowest", "CUDA_VISIBLE_DEVICES"),
    "lostrow": ("fail", "GPU 3: [GPU is lost]", LOST),
    "unknownerr": ("fail", "GPU 3: [Unknown Error]", "--gpu-reset -i 3 || sudo reboot"),
    "offbus7": ("warn", "/dev has 8, nvidia-smi lists 7", LOST),
    "mismatch": ("fail", FIRST, ""), "nodriver": ("fail", FIRST, ""),
    "offbus": ("fail", FIRST, ""), "perms": ("fail", FIRST, ""),
}  # fmt: skip
SOUND = {
    "busy": f"4 x {H100}", "crlf": f"2 x {H100}", "gb10": "1 x NVIDIA GB10",
    "gb200x4": "4 x NVIDIA GB200", "h100x2": f"2 x {H100}", "h100x8": f"8 x {H100}",
    "inforom": f"8 x {H100}", "old535": f"8 x {H100}", "old570": f"8 x {H100}",
    "rtx4090x2": "2 x NVIDIA GeForce RTX 4090",
}  # fmt: skip
HOSTS = [path.stem for path in nvidia_smi.ANSWERS.glob("*.txt")] + [*nvidia_smi.ALIKE]


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """What doctor's collector sees on a recorded host."""

    def collect(host: str) -> object:
        nvidia_smi.put_into(tmp_path, host)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        devices = [f"/dev/nvidia{i}" for i in range(8 if host == "offbus7" else 0)]
        monkeypatch.setattr("glob.glob", lambda path: devices if "/dev/" in path else [])
        return msgspec.to_builtins(named("gpus").collectors[0].collect({}))

    return collect


@pytest.mark.parametrize("host", sorted(HOSTS))
def test_doctor_judges_recorded_gpu_host(judged, seen, host):
    packages = {"versions": {"torch": "2.13.0", "nvidia-cuda-runtime": "13.0.96"}}
    answer = make_answer({"nvidia": seen(host), "packages": packages})
    for check, expected in (("gpu-driver", DRIVER), ("gpus", GPUS)):
        told = judged(check, make_subject(1), answer).all("h0")
        level, cause, remedy = expected.get(host, ("ok", "", ""))
        assert {each.level for each in told} == {level}, told
        assert any(cause in each.cause and remedy in (each.remedy or "") for each in told), told
    assert (host in SOUND) is (host not in GPUS)
    assert told[0].cause.startswith(SOUND.get(host, ""))
