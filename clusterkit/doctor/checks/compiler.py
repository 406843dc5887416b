"""Can DeepSpeed compile its operators, and is no lock in its way?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import HostSubject, Verdict, fail, ok, warn
from clusterkit.doctor.check import Answers, Check, Script
from clusterkit.doctor.driver import text_of

STALE = 600.0
"""Seconds after which a lock is left over; a build takes a minute or two."""


class Lock(Struct):
    """A lock of torch's extension builder."""

    path: str
    age: float


class Seen(Struct):
    """Tools that builds need, by path, and locks; None: not there."""

    compiler: str | None
    ninja: str | None
    nvcc: str | None
    headers: bool
    """Whether Python.h is there."""
    locks: list[Lock]
    building: bool
    """Whether a build runs now."""


def collect(given: dict[str, Any]) -> Any:
    import glob
    import os
    import shutil
    import sys
    import sysconfig
    import time

    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    names = [os.environ.get("CXX", "").split(" ")[0], "c++", "g++"]
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions")
    locks = []
    for pattern in ("*/lock", "*/*/lock"):
        for lock in glob.glob(os.path.join(glob.escape(root), pattern)):
            try:
                locks.append({"path": lock, "age": time.time() - os.stat(lock).st_mtime})
            except OSError:
                continue
    running = {text_of(name).strip() for name in glob.glob("/proc/[0-9]*/comm")}
    headers = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    return {
        "compiler": compiler,
        "ninja": shutil.which("ninja", path=path),
        "nvcc": shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(cuda, "bin")),
        "headers": os.path.exists(headers),
        "locks": locks,
        "building": not running.isdisjoint({"ninja", "cc1plus", "nvcc"}),
    }


COMPILER = Script("compiler", collect, Seen)


def judge(answers: Answers) -> Iterator[Verdict]:
    for host, tools in answers.read(COMPILER).items():
        stale = [lock.path for lock in tools.locks if lock.age > STALE and not tools.building]
        if stale:
            cause = f"a killed build has left {', '.join(stale)}: the next waits for it for ever"
            yield fail(host, cause, shell.join(["rm", *stale]))
        needed = (
            (tools.compiler, "C++ compiler", "g++"),
            (tools.ninja, "ninja", "ninja-build"),
            (tools.headers, "Python.h", "python3-dev"),
        )
        missing = [(what, package) for there, what, package in needed if not there]
        if missing:
            cause = (
                f"no {' and no '.join(what for what, _ in missing)}: DeepSpeed cannot compile its "
                "operators (clusterkit.runtime does without them, other programs may not)"
            )
            mend = shell.join(["sudo", "apt-get", "install", "-y", *(name for _, name in missing)])
            yield warn(host, cause, mend)
        elif answers.subject.needs.device == "cuda" and tools.nvcc is None:
            cause = "no nvcc: DeepSpeed cannot compile operators for the GPU"
            yield warn(host, cause, "sudo apt-get install -y nvidia-cuda-toolkit")
        elif not stale:
            yield ok(host, tools.compiler or "")


def _pointless(subject: HostSubject) -> str | None:
    uses = subject.needs.deepspeed or subject.needs.launcher == "deepspeed"
    return None if uses else "the job does not use DeepSpeed"


CHECK = Check(
    "compiler",
    "A C++ compiler, ninja and Python's headers are there for DeepSpeed, and no lock of a killed "
    "build.",
    judge,
    (COMPILER,),
    quick=False,
    pointless=_pointless,
)
