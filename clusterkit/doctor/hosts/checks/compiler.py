"""The tools with which DeepSpeed compiles its operations, for CPUs and for the CUDA of torch."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Verdict, fail, ok, warn
from clusterkit.doctor.hosts.base import Answers, Collector, HostSubject, check
from clusterkit.doctor.hosts.checks.gpus import NVIDIA
from clusterkit.doctor.hosts.checks.packages import PACKAGES, Packages, dotted
from clusterkit.doctor.hosts.collect import packages as collect
from clusterkit.doctor.hosts.helpers import install_packages

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


TOOLS = Collector(collect.compiler, Tools)


def _without_deepspeed(subject: HostSubject) -> str | None:
    uses = subject.needs.deepspeed or subject.needs.launcher == "deepspeed"
    return None if uses else "the job does not use DeepSpeed"


@check(TOOLS, NVIDIA, PACKAGES, quick=False, skip_reason=_without_deepspeed)
def compiler(answers: Answers) -> Iterator[Verdict]:
    """A C++ compiler, ninja, Python's headers and, with GPUs, the nvcc of torch's CUDA are there
    for DeepSpeed, and no lock of a killed build."""
    nvidia, packages = answers.read_silently(NVIDIA), answers.read_silently(PACKAGES)
    device = answers.subject.needs.device
    for host, tools in answers.read(TOOLS).items():
        stale = [lock.path for lock in tools.locks if lock.age > STALE and not tools.building]
        if stale:
            cause = f"a killed build left {', '.join(stale)}: the next build waits for it forever"
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


_WITHOUT = "DeepSpeed cannot compile its operators (other programs than clusterkit's may need them)"


def _wrong_nvcc(tools: Tools, cuda: tuple[int, int] | None) -> str:
    """Return why nvcc cannot compile for torch's CUDA; empty: it can, or nothing is known."""
    if tools.nvcc is None:
        return f"no nvcc: {_WITHOUT}"
    if cuda is None or not tools.release or tools.release == dotted(cuda):
        return ""
    differ = f"{tools.nvcc} is of CUDA {tools.release}, torch of CUDA {dotted(cuda)}"
    if tools.release.partition(".")[0] == str(cuda[0]):
        return f"{differ}: operators that DeepSpeed compiles may fail to build"
    return f"{differ}: {_WITHOUT}"


def _toolkit(python: str, cuda: tuple[int, int] | None, packages: Packages | None) -> str:
    """Return the command that installs the compiler of torch's CUDA, which Debian's
    nvidia-cuda-toolkit is not."""
    python = shell.join([python])
    if cuda is None or cuda[0] < 13:  # earlier wheels have no folder that can be a CUDA_HOME
        which = f"{dotted(cuda)}, torch's" if cuda else "torch.version.cuda"
        return f"# install NVIDIA's CUDA toolkit {which}; CUDA_HOME in the job's env: names it"
    version = packages.versions.get("cuda-toolkit", "") if packages else ""
    wanted = f"cuda-toolkit[nvcc,cccl,profiler]=={version or f'{dotted(cuda)}.*'}"
    packages_of = f"""{python} -c 'import sysconfig; print(sysconfig.get_path("purelib"))'"""
    return (
        f"{python} -m pip install '{wanted}' && "
        f'cd "$({packages_of})/nvidia/cu{cuda[0]}" '
        f"&& ln -sfn lib lib64 && ln -sfn libcudart.so.{cuda[0]} lib/libcudart.so && pwd"
        "  # then CUDA_HOME: that folder, in the job's env:"
    )
