"""Is /dev/shm there and big enough?"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import Answers, Check, Finding, Level, Script, Subject, read, size

NAME = "shm"
WARN_BYTES = 1 << 30
FAIL_BYTES = 64 << 20


class Seen(Struct):
    """/dev/shm; all zero where there is none."""

    there: bool
    writable: bool
    free: int
    total: int


def collect(given: dict[str, Any]) -> Any:
    import os

    path = "/dev/shm"
    if not os.path.isdir(path):
        return {"there": False, "writable": False, "free": 0, "total": 0}
    disk = os.statvfs(path)
    return {
        "there": True,
        "writable": os.access(path, os.W_OK | os.X_OK),
        "free": disk.f_bavail * disk.f_frsize,
        "total": disk.f_blocks * disk.f_frsize,
    }


SHM = Script("shm", collect, safe=True)


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    seen, findings = read(NAME, SHM, answers, subject, Seen)
    for host, shm in seen.items():
        bigger = "sudo mount -o remount,size=50% /dev/shm"
        if not shm.there or not shm.writable:
            cause = "there is no /dev/shm" if not shm.there else "/dev/shm cannot be written to"
            mend = "sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
            findings.append(Finding(NAME, host, "fail", cause, mend))
        elif shm.free < WARN_BYTES:
            level: Level = "fail" if shm.free < FAIL_BYTES else "warn"
            cause = (
                f"/dev/shm has {size(shm.free)} left of {size(shm.total)}: "
                "NCCL and data loaders put their buffers there"
            )
            full = shm.total >= WARN_BYTES
            mend = "ls -la /dev/shm  # rm what dead processes left" if full else bigger
            findings.append(Finding(NAME, host, level, cause, mend))
        else:
            findings.append(Finding(NAME, host, "ok", f"{size(shm.free)} free"))
    return findings


CHECK = Check(NAME, "/dev/shm has room for the buffers of NCCL and of data loaders.", judge, (SHM,))
