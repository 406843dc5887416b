"""Is there room on the disks that a run writes to?"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import (
    Answers,
    Check,
    Finding,
    Level,
    Script,
    Subject,
    read,
    size,
    worst,
)

NAME = "disk"
WARN_BYTES = 5 << 30
FAIL_BYTES = 500 << 20
WARN_INODES = 50_000
FAIL_INODES = 1_000


class Disk(Struct):
    """One file system, by a folder on it."""

    path: str
    free: int
    total: int
    inodes_free: int
    inodes: int
    """0 where the file system makes them as it needs them."""
    read_only: bool


def collect(given: dict[str, Any]) -> Any:
    import os

    folders = [given["workdir"], os.environ.get("TMPDIR") or "/tmp", "~/.cache"]
    if given["shared"]:
        folders.append(given["shared"])
    disks = {}
    for folder in folders:
        path = os.path.abspath(os.path.expanduser(folder))
        while not os.path.exists(path) and path != "/":
            path = os.path.dirname(path)
        device = os.stat(path).st_dev
        if device in disks:
            continue
        disk = os.statvfs(path)
        disks[device] = {
            "path": path,
            "free": disk.f_bavail * disk.f_frsize,
            "total": disk.f_blocks * disk.f_frsize,
            "inodes_free": disk.f_favail,
            "inodes": disk.f_files,
            "read_only": bool(disk.f_flag & os.ST_RDONLY),
        }
    return list(disks.values())


DISKS = Script("disks", collect)


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    seen, findings = read(NAME, DISKS, answers, subject, list[Disk])
    for host, disks in seen.items():
        found = [fault for disk in disks if (fault := _fault(host, disk)) is not None]
        told = ", ".join(f"{disk.path} {size(disk.free)}" for disk in disks)
        findings += found or [Finding(NAME, host, "ok", f"free: {told}")]
    return findings


def _fault(host: str, disk: Disk) -> Finding | None:
    look = shell.join(["df", "-h", disk.path])
    if disk.read_only:
        remount = f"{shell.join(['findmnt', '--target', disk.path])}; sudo dmesg | tail"
        return Finding(NAME, host, "fail", f"{disk.path} is mounted read-only", remount)
    if disk.total == 0:  # a file system without a size of its own
        return None
    bytes_level: Level = (
        "fail" if disk.free < FAIL_BYTES else "warn" if disk.free < WARN_BYTES else "ok"
    )
    inodes_level: Level = "ok"
    if disk.inodes:
        few = disk.inodes_free
        inodes_level = "fail" if few < FAIL_INODES else "warn" if few < WARN_INODES else "ok"
    level = worst((bytes_level, inodes_level))
    if level == "ok":
        return None
    if bytes_level == level:
        cause = f"{disk.path} has {size(disk.free)} left of {size(disk.total)}"
        mend = f"{look}; {shell.join(['du', '-xsh', disk.path])}"
    else:
        cause = f"{disk.path} has room for {disk.inodes_free} more files (inodes)"
        mend = shell.join(["df", "-i", disk.path])
    return Finding(NAME, host, level, cause, mend)


def _level(left: int, warn: int, fail: int) -> Level:
    return "fail" if left < fail else "warn" if left < warn else "ok"


CHECK = Check(
    NAME,
    "The disks of the working folder, /tmp and the home have room, for bytes and for files.",
    judge,
    (DISKS,),
)
