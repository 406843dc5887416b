"""What a submit makes of recorded answers of nvidia-smi: GPUs, or an error with its own words."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from clusterkit.backends.placing import device_of, gpu_env
from clusterkit.errors import BadInput
from clusterkit.hosts import host_probe
from clusterkit.hosts.gpus import GPU_QUERY, names, read_gpus
from clusterkit.spec import JobSpec

ANSWERS = Path(__file__).parents[1] / "data" / "gpu"
H100 = "NVIDIA H100 80GB HBM3"
GOOD = {
    "a100mig": None, "busy": f"4 x {H100}", "crlf": f"2 x {H100}", "gb10": "1 x NVIDIA GB10",
    "gb200x4": "4 x NVIDIA GB200", "h100x2": f"2 x {H100}", "h100x8": f"8 x {H100}",
    "inforom": f"8 x {H100}; nvidia-smi exited with 14: WARNING: infoROM is corrupted at gpu "
               "0000:5D:00.0",
    "l40sl4": "1 x NVIDIA L40S, 1 x NVIDIA L4", "l4l40s": "1 x NVIDIA L4, 1 x NVIDIA L40S",
    "old535": f"8 x {H100}", "old570": f"8 x {H100}", "rtx4090x2": "2 x NVIDIA GeForce RTX 4090",
}  # fmt: skip
"""What the plan says of hosts that can be used; None: it is refused, as the others are."""
BAD = {
    "a100mig": "GPU 0 is divided by MIG: CUDA_VISIBLE_DEVICES=MIG-UUID, as",
    "lostrow": "GPU 3: [GPU is lost]",
    "mismatch": "nvidia-smi exited with 18: Failed to initialize NVML: Driver/library version "
                "mismatch NVML library version: 580.95",
    "nodriver": "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
    "offbus": "nvidia-smi exited with 255: Unable to determine the device handle for "
              "GPU0000:C1:00.0: Unknown Error",
    "offbus7": "nvidia-smi exited with 15: Unable to determine the device handle for "
               "GPU0000:5D:00.0: GPU is lost.",
    "perms": "nvidia-smi exited with 4: Failed to initialize NVML: Insufficient Permissions",
    "unknownerr": "GPU 3: [Unknown Error]",
}  # fmt: skip


@pytest.fixture
def host(tmp_path, monkeypatch, make_facts):
    """Return the facts of a host with this answer."""

    def make(name: str, visible: str | None = None):
        tools = tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        code = (ANSWERS / f"{name}.txt").read_text().rsplit("exit ", 1)[1]
        script = f"#!/bin/sh\nsed '$d' {ANSWERS / name}.txt\nexit {code}"
        (tools / "nvidia-smi").write_text(script)
        (tools / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
        found = read_gpus(*host_probe.gpus(GPU_QUERY), visible)
        return msgspec.structs.replace(
            make_facts(gpus=0).hosts[0], gpus=found.gpus, gpu_trouble=found.trouble,
            gpu_remark=found.remark,
        )  # fmt: skip

    return make


def job(**fields) -> JobSpec:
    return JobSpec(name="x", program="x.py", **fields)


def test_every_recorded_answer_is_tested():
    assert {path.stem for path in ANSWERS.glob("*.txt")} == GOOD.keys() | BAD.keys()


@pytest.mark.parametrize("name", [name for name, said in GOOD.items() if said])
def test_device_of_names_usable_gpus(name, host):
    assert device_of(job(), [host(name)]) == ("cuda", GOOD[name])


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_unusable_gpus_are_refused_instead_of_cpu_fallback(name, device, host):
    with pytest.raises(BadInput) as error:
        device_of(job(device=device), [host(name)])
    assert BAD[name] in error.value.message
    assert error.value.message.startswith(f"device: {device}")
    assert "device=cpu" in (error.value.hint or "") or device == "cuda"


def test_explicit_device_or_gpu_count_overrides_gpu_trouble(host):
    assert device_of(job(device="cpu"), [host("nodriver")])[0] == "cpu"
    left = host("offbus7")
    assert len(left.gpus) == 7
    assert device_of(job(gpus_per_node=7), [left])[0] == "cuda"
    with pytest.raises(BadInput, match="--gpus 7 trains on the others") as error:
        device_of(job(), [left])
    assert "GPU is lost" in error.value.message or error.value.hint


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_torch_without_cuda_is_refused_where_gpus_are(device, host):
    cpu_build = msgspec.structs.replace(host("h100x8"), versions={"torch": "2.13.0+cpu"})
    with pytest.raises(BadInput, match=rf"device: {device}: torch 2.13.0\+cpu of .* without CUDA"):
        device_of(job(device=device), [cpu_build])
    assert device_of(job(device="cpu"), [cpu_build])[0] == "cpu"
    without_torch = JobSpec(name="x", command=("nvidia-smi",), device=device)
    assert device_of(without_torch, [cpu_build])[0] == "cuda"


def test_gpu_without_own_memory_is_counted(host):
    assert [gpu.memory_mib for gpu in host("gb10").gpus] == [0]


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_select_cpu(visible, host):
    found = host("h100x8", visible)
    assert device_of(job(), [found]) == ("cpu", "no GPU found")
    assert device_of(job(), [host("nodriver", visible)])[0] == "cpu"


@pytest.mark.parametrize("visible", ["8", "0,0", "GPU-0000000", "x", "GPU-ffff"])
def test_visible_devices_that_name_no_gpu_are_refused(visible, host):
    with pytest.raises(BadInput, match=f"CUDA_VISIBLE_DEVICES={visible} names no GPU of this host"):
        device_of(job(), [host("h100x8", visible)])


def test_trouble_of_invisible_gpu_is_ignored(host):
    assert device_of(job(), [host("lostrow", "0,1")]) == ("cuda", f"2 x {H100}")


def test_each_mig_slice_takes_one_rank(host):
    two = host("a100mig", "MIG-aa,MIG-bb")
    assert names(gpu.name for gpu in two.gpus) == "2 x MIG slice"
    assert gpu_env(two, "cuda", 1, 1)["CUDA_VISIBLE_DEVICES"] == "MIG-bb"
    with pytest.raises(BadInput, match="2 ranks cannot share MIG slices: NCCL"):
        gpu_env(two, "cuda", 0, 2)


def test_gpu_env_follows_nvidia_smi_order_and_hides_gpus_on_cpu(host):
    cards = host("l4l40s")
    assert gpu_env(cards, "cuda", 1, 1) == {
        "CUDA_VISIBLE_DEVICES": "1", "CLUSTERKIT_GPUS": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }  # fmt: skip
    assert gpu_env(cards, "cpu", 0, 1) == {"CUDA_VISIBLE_DEVICES": ""}
    assert gpu_env(host("nodriver"), "cpu", 0, 1) == {"CUDA_VISIBLE_DEVICES": ""}
    assert gpu_env(host("h100x8", ""), "cpu", 0, 1) == {}


@pytest.mark.parametrize(
    ("traces", "said"),
    [
        ((), ""),
        (("proc/driver/nvidia/version",), "there is no nvidia-smi, but NVIDIA's driver is loaded"),
        (("dev/nvidiactl",), "there is no nvidia-smi, but NVIDIA's driver is loaded (/dev/nvid"),
        (("pci",), "there is no nvidia-smi, but PCI device 0000:01:00.0 is a GPU of NVIDIA"),
    ],
)
def test_probe_detects_gpu_traces_without_nvidia_smi(traces, said, tmp_path, monkeypatch):
    folder = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text("0x10de\n")
    (folder / "class").write_text("0x030200\n" if "pci" in traces else "0x040300\n")  # audio
    for trace in traces:
        (tmp_path / trace).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / trace).touch()
    monkeypatch.setattr(host_probe, "ROOT", f"{tmp_path}/")
    monkeypatch.setenv("PATH", "")
    listed, complaint = host_probe.gpus(GPU_QUERY)
    assert listed == ""
    assert complaint.startswith(said)
    assert bool(complaint) == bool(said)
