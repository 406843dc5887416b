"""The system: platform, memory, limits of a session, its user and its end."""

from __future__ import annotations

import os
import resource
from typing import Any

from clusterkit.doctor.hosts.collect import run, text_of, user_of


def system(context: dict[str, Any]) -> dict[str, Any]:
    release = {}
    for line in text_of("/etc/os-release").splitlines():
        key, _, value = line.strip().partition("=")
        release[key] = value.strip("\"'")
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        libc = "not glibc"
    return {
        "machine": os.uname().machine,
        "kernel": ".".join(os.uname().release.split(".")[:2]),
        "system": f"{release.get('ID', 'linux')} {release.get('VERSION_ID', '')}".strip(),
        "libc": libc,
    }


def user(context: dict[str, Any]) -> dict[str, Any]:
    uid, home = os.geteuid(), os.path.expanduser("~")
    name = user_of(uid)
    return {
        "user": "" if name == str(uid) else name,
        "uid": uid,
        "home": home,
        "home_exists": os.path.isdir(home),
        "home_writable": os.access(home, os.W_OK | os.X_OK),
        "sudo": os.environ.get("SUDO_USER"),
    }


def logout(context: dict[str, Any]) -> dict[str, Any]:
    done = run(
        "busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1",
        "org.freedesktop.login1.Manager", "KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers",
        seconds=8,
    )  # fmt: skip
    return {"user": user_of(os.geteuid()), "answer": done["stdout"][:4096] if done else ""}


def memory(context: dict[str, Any]) -> dict[str, Any]:
    values = {}
    for line in text_of("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if rest.split()[:1] and rest.split()[0].isdigit():
            values[name] = int(rest.split()[0]) * 1024
    limit = None
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = text_of(f"/sys/fs/cgroup/{name}").strip()
        if text.isdigit() and int(text) < values["MemTotal"]:
            limit = int(text)
    # Kernels before 3.14 have no MemAvailable.
    available = values.get("MemAvailable", values["MemFree"] + values.get("Cached", 0))
    return {"total": values["MemTotal"], "available": available, "limit": limit}


def shm(context: dict[str, Any]) -> dict[str, Any]:
    path = "/dev/shm"
    if not os.path.isdir(path):
        return {"exists": False, "writable": False, "free": 0, "total": 0}
    disk = os.statvfs(path)
    return {
        "exists": True,
        "writable": os.access(path, os.W_OK | os.X_OK),
        "free": disk.f_bavail * disk.f_frsize,
        "total": disk.f_blocks * disk.f_frsize,
    }


def limits(context: dict[str, Any]) -> dict[str, Any]:
    def soft(which: int) -> int | None:
        value = resource.getrlimit(which)[0]
        return None if value == resource.RLIM_INFINITY else value

    try:
        infiniband = bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        infiniband = False
    return {
        "nofile": soft(resource.RLIMIT_NOFILE),
        "nproc": soft(resource.RLIMIT_NPROC),
        "memlock": soft(resource.RLIMIT_MEMLOCK),
        "core": soft(resource.RLIMIT_CORE),
        "root": os.geteuid() == 0,
        "infiniband": infiniband,
        "core_pattern": text_of("/proc/sys/kernel/core_pattern").strip(),
        "cpus": os.cpu_count() or 1,
    }
