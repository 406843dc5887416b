"""Describe one host before a submit: read-only; prints one JSON document.

Standard library only; its text is sent to the host and run there by the job's Python:

    python - '{"workdir": "~/x", "packages": [..], "tools": [..], "gpu_query": [..]}'

``{"port": 20001}`` asks for a free port only, that one if possible. The checks of `clusterkit
doctor` that run on hosts are sent with some of these functions.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PORTS = range(20000, 32000)
"""Below Linux's ephemeral range (32768 and up): no outgoing connection uses such a port."""
NVIDIA_SECONDS = 20
ROOT = "/"


def addresses() -> list[tuple[str, str]]:
    """Return every address but IPv6's link-local ones as (interface, address), IPv4 first."""
    import array
    import fcntl
    import struct

    # netdevice(7). SIOCGIFCONF returns 40 bytes for each address, an interface's first one first.
    room = array.array("B", bytes(40 * 1024))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(room), room.buffer_info()[0])
        size = struct.unpack("iL", fcntl.ioctl(probe.fileno(), 0x8912, request))[0]
    entries = (room[start : start + 40].tobytes() for start in range(0, size, 40))
    found = [
        (entry[:16].partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(entry[20:24]))
        for entry in entries
    ]
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as lines:
        for address, _, _, scope, _, name in map(str.split, lines):
            if scope != "20":  # IPV6_ADDR_LINKLOCAL
                found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))))
    return found


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed for this interpreter."""
    # importlib.metadata would take 30 ms to import, and reads whole documents.
    found: dict[str, str] = {}
    wanted = {name.lower().replace("-", "_"): name for name in packages}
    for folder in sys.path:
        try:
            entries = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for entry in entries:
            stem, _, kind = entry.rpartition(".")
            name = wanted.get(stem.partition("-")[0].lower().replace(".", "_"))
            if name is None or name in found or kind not in ("dist-info", "egg-info"):
                continue
            # A package that is half removed may have no version.
            with contextlib.suppress(OSError, StopIteration):
                inside = "METADATA" if kind == "dist-info" else "PKG-INFO"
                path = os.path.join(folder, entry)
                path = os.path.join(path, inside) if os.path.isdir(path) else path
                with open(path, encoding="utf-8", errors="replace") as lines:
                    version = next(line for line in lines if line.startswith("Version:"))
                if version := version.partition(":")[2].strip():
                    found[name] = version
    return found


def bind_error(port: int) -> OSError | None:
    """Return why no process can listen on a port; None: it is free."""
    # SO_REUSEADDR, as torch's store sets it: the connections of the attempt that has just ended are
    # in TIME_WAIT for a minute. Both families: that store listens on [::] where there is IPv6.
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
                probe.listen(1)
        except OSError as error:
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                return error
    return None


def free_port(wanted: int | None) -> int | None:
    """Return ``wanted`` if it is free, else two free ports' first one; None: none was found."""
    if wanted is not None and bind_error(wanted) is None:
        return wanted
    # At random, so that two submits at the same moment do not get the same port; by the system's
    # generator, because a program that submits may have seeded Python's.
    ports = random.SystemRandom().sample(PORTS, 200)
    return next((port for port in ports if bind_error(port) is bind_error(port + 1) is None), None)


def machine() -> str:
    """Return what all names of one host have in common, and containers of one machine have not."""
    try:
        with open(f"{ROOT}proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink(f'{ROOT}proc/self/ns/net')}"
    except OSError:
        return ""


def gpus(query: Sequence[str]) -> tuple[str, str]:
    """Return nvidia-smi's list, and why it is not to be trusted; both empty: nothing tells of GPUs
    of NVIDIA on this host."""
    if shutil.which(query[0]) is None:
        trace = gpu_trace()
        return "", f"there is no nvidia-smi, but {trace}" if trace else ""
    try:
        done = subprocess.run(
            query, capture_output=True, encoding="utf-8", errors="replace",
            timeout=NVIDIA_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi does not answer within {NVIDIA_SECONDS} s"
    except OSError as error:
        return "", f"nvidia-smi: {error.strerror}"
    lines = (done.stdout + done.stderr).splitlines()
    rows = [line for line in lines if line.partition(",")[0].strip().isdigit()]
    if rows and done.returncode == 0:
        return done.stdout, ""
    said = " ".join(line.strip() for line in lines if line.strip() and line not in rows)
    return done.stdout, f"nvidia-smi exited with {done.returncode}{f': {said}' if said else ''}"


def gpu_trace() -> str:
    """Return what tells that this host has a GPU of NVIDIA; empty: nothing does."""
    if os.path.exists(f"{ROOT}proc/driver/nvidia/version"):
        return "NVIDIA's driver is loaded (/proc/driver/nvidia)"
    if os.path.exists(f"{ROOT}dev/nvidiactl"):
        return "NVIDIA's driver is loaded (/dev/nvidiactl)"
    for device in gpus_on_pci():
        return f"PCI device {os.path.basename(device)} is a GPU of NVIDIA"
    return ""


def gpus_on_pci() -> list[str]:
    """Return the folders of NVIDIA's GPUs, and not of its other devices, in sysfs."""

    def begins(path: str, words: str) -> bool:
        with contextlib.suppress(OSError), open(path) as file:
            return file.read().startswith(words)
        return False

    folders = sorted(glob.glob(f"{ROOT}sys/bus/pci/devices/*"))
    # 0x03: a display controller.
    return [f for f in folders if begins(f"{f}/vendor", "0x10de") and begins(f"{f}/class", "0x03")]


def document(asked: dict[str, Any]) -> dict[str, Any]:
    """Describe this Python and its host.

    Args:
        asked: ``workdir``, ``packages``, ``tools``, ``gpu_query``.
    """
    listed, complaint = gpus(asked["gpu_query"])
    return {
        "workdir": os.path.abspath(os.path.expanduser(asked["workdir"])),
        "writable": os.access(os.path.expanduser(asked["workdir"]), os.W_OK),
        "machine": machine(),
        "python": sys.executable,
        "python_version": list(sys.version_info[:3]),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "interfaces": [{"name": name, "address": address} for name, address in addresses()],
        # "client client-port server server-port": under which of its addresses it was reached.
        "reached_at": (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[2],
        "versions": versions(asked["packages"]),
        "tools": {tool: path for tool in asked["tools"] if (path := shutil.which(tool))},
        "gpus": listed,
        "gpu_complaint": complaint,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


if __name__ == "__main__":
    question = json.loads(sys.argv[1])
    print(free_port(question["port"]) if "port" in question else json.dumps(document(question)))
