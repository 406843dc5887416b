"""The tools with which DeepSpeed compiles its operations, for CPUs and for the CUDA of torch."""

from __future__ import annotations

import glob
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Verdict, fail, ok, warn
from clusterkit.doctor.hosts.base import Answers, HostSubject, check, script
from clusterkit.doctor.hosts.checks.gpus import collect_nvidia
from clusterkit.doctor.hosts.checks.packages import Packages, collect_packages
from clusterkit.doctor.hosts.helpers import install_packages
from clusterkit.doctor.hosts.runner import run, text_of

STALE = 600.0
"""Seconds after which a lock is stale; a build takes a minute or two."""


class Lock(Struct):
    """A lock of torch's extension builder."""

    path: str
    age: float


class Tools(Struct):
    """What builds need: paths of tools, None where one is missing; and locks of builds."""

    compiler: str | None
    ninja: str | None
    nvcc: str | None
    """Where torch looks for it."""
    headers: bool
    """Whether Python.h is there."""
    locks: list[Lock]
    building: bool
    """Whether a build is running."""
    release: str = ""
    """The CUDA of nvcc: ``13.0``."""


@script("compiler", Tools)
def collect_tools(given: dict[str, Any]) -> Any:
    import shutil
    import sysconfig

    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    names = [os.environ.get("CXX", "").split(" ")[0], "c++", "g++"]
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    # As torch and DeepSpeed do (torch/utils/cpp_extension.py, _find_cuda_home).
    home = given["cuda_home"] or os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not home:
        on_path = shutil.which("nvcc")
        home = os.path.dirname(os.path.dirname(on_path)) if on_path else "/usr/local/cuda"
    nvcc = shutil.which(os.path.join(home, "bin", "nvcc"))
    said = run(nvcc, "--version") if nvcc else None
    release = re.search(r"release ([0-9]+\.[0-9]+)", said["stdout"]) if said else None
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
        "nvcc": nvcc,
        "release": release[1] if release else "",
        "headers": os.path.exists(headers),
        "locks": locks,
        "building": not running.isdisjoint({"ninja", "cc1plus", "nvcc"}),
    }


def _without_deepspeed(subject: HostSubject) -> str | None:
    uses = subject.needs.deepspeed or subject.needs.launcher == "deepspeed"
    return None if uses else "the job does not use DeepSpeed"


@check(collect_tools, collect_nvidia, collect_packages, quick=False, skip_reason=_without_deepspeed)
def compiler(answers: Answers) -> Iterator[Verdict]:
    """A C++ compiler, ninja, Python's headers and, with GPUs, the nvcc of torch's CUDA are there
    for DeepSpeed, and no lock of a killed build."""
    # Apart, because other checks have the verdicts on what cannot be read.
    others = Answers(answers.subject, answers.of)
    nvidia, packages = others.read(collect_nvidia), others.read(collect_packages)
    device = answers.subject.needs.device
    for host, tools in answers.read(collect_tools).items():
        stale = [lock.path for lock in tools.locks if lock.age > STALE and not tools.building]
        if stale:
            cause = f"a killed build has left {', '.join(stale)}: the next waits for it for ever"
            yield fail(host, cause, shell.join(["rm", *stale]))
        needed = (
            (tools.compiler, "C++ compiler", "g++"),
            (tools.ninja, "ninja", "ninja-build"),
            (tools.headers, "Python.h", "python3-dev"),
        )
        missing = {tool: package for found, tool, package in needed if not found}
        has_gpus = device == "auto" and host in nvidia and bool(nvidia[host].gpus)
        cuda = found.cuda() if (found := packages.get(host)) else None
        if missing:
            cause = f"no {' and no '.join(missing)}: {_WITHOUT}"
            installer = answers.of[host].installer
            yield warn(host, cause, install_packages(installer, missing.values()))
        elif (device == "cuda" or has_gpus) and (cause := _wrong_nvcc(tools, cuda)):
            remedy = _toolkit(answers.machines[host].python, cuda, found)
            yield warn(host, cause, remedy)
        yield ok(host, tools.compiler or "")


_WITHOUT = (
    "DeepSpeed cannot compile its operators (the jobs here do without them, other programs may not)"
)


def _wrong_nvcc(tools: Tools, cuda: tuple[int, int] | None) -> str:
    """Return why nvcc cannot compile for torch's CUDA; empty: it can, or nothing is known."""
    if tools.nvcc is None:
        return f"no nvcc: {_WITHOUT}"
    if cuda is None or not tools.release or tools.release == _dotted(cuda):
        return ""
    differ = f"{tools.nvcc} is of CUDA {tools.release}, torch of CUDA {_dotted(cuda)}"
    if tools.release.partition(".")[0] == str(cuda[0]):
        return f"{differ}: operators that DeepSpeed compiles with it may not build"
    return f"{differ}: {_WITHOUT}"


def _dotted(cuda: tuple[int, int]) -> str:
    return ".".join(map(str, cuda))


def _toolkit(python: str, cuda: tuple[int, int] | None, packages: Packages | None) -> str:
    """Return the command that installs the compiler of torch's CUDA, which Debian's
    nvidia-cuda-toolkit is not."""
    python = shell.join([python])
    if cuda is None or cuda[0] < 13:  # earlier wheels have no folder that can be a CUDA_HOME
        which = f"{_dotted(cuda)}, torch's" if cuda else "torch.version.cuda"
        return f"# install NVIDIA's CUDA toolkit {which}; CUDA_HOME in the job's env: names it"
    version = packages.versions.get("cuda-toolkit", "") if packages else ""
    wanted = f"cuda-toolkit[nvcc,cccl,profiler]=={version or f'{_dotted(cuda)}.*'}"
    packages_of = f"""{python} -c 'import sysconfig; print(sysconfig.get_path("purelib"))'"""
    return (
        f"{python} -m pip install '{wanted}' && "
        f'cd "$({packages_of})/nvidia/cu{cuda[0]}" '
        f"&& ln -sfn lib lib64 && ln -sfn libcudart.so.{cuda[0]} lib/libcudart.so && pwd"
        "  # then CUDA_HOME: that folder, in the job's env:"
    )
