"""Is /dev/shm there and big enough?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import Verdict, fail, ok, size
from clusterkit.doctor.check import Answers, Check, Script

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


SHM = Script("shm", collect, Seen, safe=True)


def judge(answers: Answers) -> Iterator[Verdict]:
    for host, shm in answers.read(SHM).items():
        if not shm.there or not shm.writable:
            cause = "there is no /dev/shm" if not shm.there else "/dev/shm cannot be written to"
            yield fail(host, cause, "sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm")
        elif shm.free < WARN_BYTES:
            left = f"/dev/shm has {size(shm.free)} left of {size(shm.total)}"
            cause = f"{left}: NCCL and data loaders put their buffers there"
            if shm.total >= WARN_BYTES:
                mend = "ls -la /dev/shm  # rm what dead processes left"
            else:
                mend = "sudo mount -o remount,size=50% /dev/shm"
            yield Verdict(host, "fail" if shm.free < FAIL_BYTES else "warn", cause, mend)
        else:
            yield ok(host, f"{size(shm.free)} free")


CHECK = Check(
    "shm", "/dev/shm has room for the buffers of NCCL and of data loaders.", judge, (SHM,)
)
