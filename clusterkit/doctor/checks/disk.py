"""Is there room on the disks that a run writes to?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Level, Verdict, fail, ok, size, worst
from clusterkit.doctor.check import Answers, Check, Script

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


DISKS = Script("disks", collect, list[Disk])


def judge(answers: Answers) -> Iterator[Verdict]:
    for host, disks in answers.read(DISKS).items():
        faults = [fault for disk in disks if (fault := _fault(host, disk)) is not None]
        free = ", ".join(f"{disk.path} {size(disk.free)}" for disk in disks)
        yield from faults or [ok(host, f"free: {free}")]


def _fault(host: str, disk: Disk) -> Verdict | None:
    if disk.read_only:
        mend = f"{shell.join(['findmnt', '--target', disk.path])}; sudo dmesg | tail"
        return fail(host, f"{disk.path} is mounted read-only", mend)
    if disk.total == 0:  # a file system without a size of its own
        return None
    space = _level(disk.free, WARN_BYTES, FAIL_BYTES)
    files = _level(disk.inodes_free, WARN_INODES, FAIL_INODES) if disk.inodes else "ok"
    level = worst((space, files))
    if level == "ok":
        return None
    if space == level:
        cause = f"{disk.path} has {size(disk.free)} left of {size(disk.total)}"
        mend = f"{shell.join(['df', '-h', disk.path])}; {shell.join(['du', '-xsh', disk.path])}"
    else:
        cause = f"{disk.path} has room for {disk.inodes_free} more files (inodes)"
        mend = shell.join(["df", "-i", disk.path])
    return Verdict(host, level, cause, mend)


def _level(left: int, warn: int, fail: int) -> Level:
    return "fail" if left < fail else "warn" if left < warn else "ok"


CHECK = Check(
    "disk",
    "The disks of the working folder, /tmp and the home have room, for bytes and for files.",
    judge,
    (DISKS,),
)
