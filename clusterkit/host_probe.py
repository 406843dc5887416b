"""Looks at one host before a submit; read-only, prints one JSON document.

Standard library only; its text is sent to the host and run there by the job's Python:

    python - '{"workdir": "~/x", "packages": [..], "tools": [..], "gpu_query": [..]}'
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_SIOCGIFADDR = 0x8915
NVIDIA_SECONDS = 20


def interfaces() -> list[dict[str, str]]:
    """Name and IPv4 address of the interfaces that have one (netdevice(7))."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("16s16x8x", name.encode()[:15]))
            try:
                fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            address = socket.inet_ntoa(bytes(request[20:24]))
            found.append({"name": name, "address": address})
    return found


def versions(packages: Sequence[str]) -> dict[str, str]:
    """What is installed for this interpreter."""
    # As importlib.metadata finds them, which takes 30 ms to import and to read whole documents.
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
            # Half a package may have no version, or none that can be read.
            with contextlib.suppress(OSError, StopIteration):
                inside = "METADATA" if kind == "dist-info" else "PKG-INFO"
                path = os.path.join(folder, entry)
                path = os.path.join(path, inside) if os.path.isdir(path) else path
                with open(path, encoding="utf-8", errors="replace") as lines:
                    version = next(line for line in lines if line.startswith("Version:"))
                if version := version.partition(":")[2].strip():
                    found[name] = version
    return found


def gpus(query: Sequence[str]) -> str:
    """nvidia-smi's list; empty where there is no such tool, or it does not answer."""
    if shutil.which(query[0]) is None:
        return ""
    try:
        done = subprocess.run(
            query, capture_output=True, encoding="utf-8", errors="replace",
            timeout=NVIDIA_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def document(asked: dict[str, Any]) -> dict[str, Any]:
    """What this Python and its host have.

    Args:
        asked: ``workdir``, ``packages``, ``tools``, ``gpu_query``.
    """
    return {
        "workdir": os.path.abspath(os.path.expanduser(asked["workdir"])),
        "writable": os.access(os.path.expanduser(asked["workdir"]), os.W_OK),
        "python": sys.executable,
        "python_version": list(sys.version_info[:3]),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "interfaces": interfaces(),
        # "client client-port server server-port": under which of its addresses it was reached.
        "reached_at": (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[2],
        "versions": versions(asked["packages"]),
        "tools": {tool: path for tool in asked["tools"] if (path := shutil.which(tool))},
        "gpus": gpus(asked["gpu_query"]),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


if __name__ == "__main__":
    print(json.dumps(document(json.loads(sys.argv[1]))))
