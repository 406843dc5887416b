"""GPUs: what nvidia-smi, dcgmi and the kernel tell of them, and what connects them."""

from __future__ import annotations

import glob
import os
import re
from typing import Any

from clusterkit.doctor.hosts.collect import run, text_of, user_of
from clusterkit.hosts import host_probe


def nvidia(context: dict[str, Any]) -> dict[str, Any]:
    devices = len(glob.glob("/dev/nvidia[0-9]*"))
    found = _query_gpus()
    pci = _on_pci()
    apps = remapped = None
    owners: dict[str, Any] = {}
    if found is not None and re.search(r"^[0-9]+,", found["stdout"], re.MULTILINE):
        # Ampere and newer GPUs remap rows of memory; older ones retire pages.
        remapped = _query(
            "remapped-rows", "gpu_uuid", "remapped_rows.pending", "remapped_rows.failure"
        )
        apps = _query("compute-apps", "pid", "process_name", "gpu_uuid", "used_memory")
        owners = _owners(apps["stdout"] if apps else "")
    # Many systems do not let users run dmesg, but let some of them read the journal.
    log = ""
    for reader in (["dmesg"], ["journalctl", "-k", "-b", "-q", "--no-pager"]):
        if not (devices or found or pci):
            break
        done = run(*reader)
        if done is not None and done["exit_code"] == 0:
            log = log or done["stdout"]
    xids = [line[-300:] for line in log.splitlines() if "NVRM: Xid" in line][-20:]
    return {
        "devices": devices, "pci": pci, "query": found, "apps": apps, "owners": owners,
        "remapped": remapped, "xids": xids, "log": bool(log), "user": user_of(os.geteuid()),
    }  # fmt: skip


def _query(kind: str, *fields: str) -> dict[str, Any] | None:
    found = run("nvidia-smi", f"--query-{kind}={','.join(fields)}", "--format=csv,nounits")
    if found is not None:
        found["stdout"] = found["stdout"][:65536]
    return found


def _query_gpus() -> dict[str, Any] | None:
    always = ["index", "uuid", "name", "memory.total", "memory.used", "driver_version"]
    health = [
        "ecc.errors.uncorrected.volatile.total", "retired_pages.pending", "mig.mode.current",
        "compute_mode",
    ]  # fmt: skip
    reasons, older = "clocks_event_reasons.active", "clocks_throttle_reasons.active"
    found = None
    # A query with one name that the driver does not know fails; before 535 names were different.
    for more in ([reasons, "fabric.state", "fabric.status"], [reasons], [older], None):
        found = _query("gpu", *always, *([] if more is None else health + more))
        if found is None or "not a valid field" not in found["stdout"] + found["stderr"]:
            break
    return found


def _on_pci() -> list[str]:
    """Return the addresses of NVIDIA's GPUs, without those that another driver has."""
    found = []
    for device in host_probe.gpus_on_pci():
        driver = os.path.basename(os.path.realpath(f"{device}/driver"))
        address = os.path.basename(device)
        bound = f"{host_probe.ROOT}proc/driver/nvidia/gpus/{address}"
        # A container sees the GPUs of its whole host there, and its own alone below /proc. vfio-pci
        # has given one to a virtual machine.
        if driver == "driver" or (driver == "nvidia" and os.path.exists(bound)):
            found.append(address)
    return found


def _owners(apps: str) -> dict[str, Any]:
    """Return the user and the run of each process that nvidia-smi lists."""
    owners: dict[str, Any] = {}
    for line in apps.splitlines():
        pid = line.split(",")[0].strip()
        if not pid.isdigit():
            continue
        owners[pid] = {}
        try:
            owners[pid]["user"] = user_of(os.stat(f"/proc/{pid}").st_uid)
        except OSError:
            continue  # it has ended, or is in another process namespace
        for entry in text_of(f"/proc/{pid}/environ").split("\0"):
            if entry.startswith("CLUSTERKIT_RUN_ID="):
                owners[pid]["run"] = entry.partition("=")[2]
    return owners


def gpu_diagnosis(context: dict[str, Any]) -> dict[str, Any]:
    return {"command": run("dcgmi", "diag", "-r", "1", "-j", seconds=40)}


def fabric(context: dict[str, Any]) -> dict[str, Any]:
    root = host_probe.ROOT
    ports = {}
    for folder in glob.glob(f"{root}sys/class/infiniband/*/ports/*"):
        words = [text_of(f"{folder}/{name}").strip() for name in ("state", "phys_state", "rate")]
        state, physical, rate = words
        if text_of(f"{folder}/link_layer").strip() == "InfiniBand":
            device, _, number = folder.split("/")[-3:]
            ports[f"{device}/{number}"] = {
                "state": state.partition(": ")[2], "physical": physical.partition(": ")[2],
                "rate": rate,
            }  # fmt: skip
    version = text_of(f"{root}proc/driver/nvidia/version")
    kernel = [int(number) for number in re.findall(r"\d+", os.uname().release)[:2]]
    # dmabuf needs the open kernel modules; NCCL looks at the kernel's version as well.
    dmabuf = "Open Kernel Module" in version and kernel >= [5, 12]
    modules = [f"{root}sys/module/{name}" for name in ("nvidia_peermem", "nv_peer_mem")]
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(\.\d+)?)\s", version)
    switches = [
        device for device in glob.glob(f"{root}sys/bus/pci/devices/*")
        if text_of(f"{device}/vendor").startswith("0x10de")
        and text_of(f"{device}/class").startswith("0x0680")  # a bridge
    ]  # fmt: skip
    active = run("systemctl", "is-active", "nvidia-fabricmanager") if switches else None
    return {
        "ports": ports, "gpus": len(host_probe.gpus_on_pci()), "driver": found[1] if found else "",
        "direct": dmabuf or any(os.path.isdir(module) for module in modules),
        "switches": len(switches), "active": active["stdout"].strip() if active else "",
        "manager": run("nv-fabricmanager", "--version") if switches else None,
    }  # fmt: skip
