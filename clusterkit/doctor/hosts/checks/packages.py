"""The Python of the ranks: interpreter and packages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Level, Verdict, fail, ok, shortened, skip
from clusterkit.doctor.hosts.base import Answers, HostSubject, check, script
from clusterkit.doctor.hosts.helpers import install_packages, most_common
from clusterkit.hosts.host_probe import versions

OLDEST = (3, 11)
_MUST_AGREE = ("torch", "deepspeed", "nvidia-nccl")
_NAMED = ("torch", "deepspeed", "transformers")
_NONE = "none"


class Python(Struct):
    """The interpreter that ran."""

    version: tuple[int, int, int]
    bits: int


@script("python", Python, in_process=True)
def collect_python(given: dict[str, Any]) -> Any:
    return {"version": list(sys.version_info[:3]), "bits": 64 if sys.maxsize > 2**32 else 32}


class Packages(Struct):
    """Packages of the interpreter of the ranks."""

    versions: dict[str, str]
    gone: list[str] = []
    """Those that pip lists and Python does not find."""

    def cuda(self) -> tuple[int, int] | None:
        """Return torch's ``torch.version.cuda``; None: a CPU build, or unknown."""
        texts = [self.versions.get("torch", "").partition("+cu")[2]]
        texts += [v for name, v in self.versions.items() if name.startswith("nvidia-cuda-runtime")]
        for text in texts:
            if found := re.match(r"([0-9]{2})\.?([0-9]+)", text):
                return int(found[1]), int(found[2])
        return None


@script("packages", Packages)
def collect_packages(given: dict[str, Any]) -> Any:
    import importlib.util

    def importable(name: str) -> bool:
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return False
        # A folder without the package's own files has no origin.
        return found is not None and found.origin is not None

    modules = ["torch", "deepspeed", "transformers", "numpy"]
    wanted = [*modules, "cuda-toolkit"]
    for cuda in ("", "-cu11", "-cu12", "-cu13"):
        wanted += [f"nvidia-nccl{cuda}", f"nvidia-cuda-runtime{cuda}"]
    found = versions(wanted)
    gone = [name for name in found if name in modules and not importable(name)]
    return {"versions": found, "gone": gone}


def _needed(subject: HostSubject) -> dict[str, str]:
    """Return the packages that the job needs, each with the reason."""
    needs = subject.needs
    reasons = {}
    if needs.without_torch != "ok":
        by_launcher = needs.launcher in ("torchrun", "deepspeed")
        reasons["torch"] = f"launcher: {needs.launcher}" if by_launcher else "training"
    if needs.launcher == "deepspeed":
        reasons["deepspeed"] = "launcher: deepspeed"
    elif needs.deepspeed:
        reasons["deepspeed"] = "the job's deepspeed section"
    return reasons


def _with_ranks_python(answers: Answers) -> set[str]:
    """Return the hosts on which the interpreter of the ranks answered, and no other."""
    return {
        host
        for host, answer in answers.of.items()
        if answer.began is not None and answer.interpreter == answers.machines[host].python
    }


def _pip_install(python: str, versions: Mapping[str, str], *flags: str) -> str:
    """Return the command that installs packages; ``""``: any version."""
    # The part after + names the index it came from, where pip looks anyway.
    pinned = [
        f"{name}=={version.partition('+')[0]}" if version else name
        for name, version in versions.items()
    ]
    return shell.join([python, "-m", "pip", "install", *flags, *pinned])


def with_cuda(python: str, torch: str) -> str:
    """Return the command that puts the build for CUDA in the place of this version of torch."""
    return _pip_install(python, {"torch": torch}, "--force-reinstall")


# ---------------------------------------------------------------- the interpreter


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@check(collect_python, collect_packages, unreachable_too=True)
def python(answers: Answers) -> Iterator[Verdict]:
    """The interpreter of the ranks works, is Python 3.11 or newer, and the same everywhere."""
    packages = _packages_to_install(answers)
    working = _with_ranks_python(answers)
    for host, answer in answers.of.items():
        python = answers.machines[host].python
        if answer.error is not None:
            yield skip(host, "it did not answer")
        elif host not in working:
            complaint = shortened(answer.stderr) or "no output"
            remedy = _make(python, packages, answer.installer)
            yield fail(host, f"{python} does not work: {complaint}", remedy)
    seen = answers.read(collect_python, hosts=working)
    usual = most_common((python.version for python in seen.values()), (0, 0, 0))
    base = f"python{_dotted(max(usual[:2], OLDEST))}"
    for host, found in seen.items():
        remedy = _install(base, packages, answers.of[host].installer)
        python, version = answers.machines[host].python, _dotted(found.version)
        if found.version < OLDEST:
            cause = f"{python} is Python {version}; {_dotted(OLDEST)} or newer is needed"
            yield fail(host, cause, remedy)
        elif found.bits != 64:
            cause = f"{python} is a build for {found.bits} bits: there is no torch for it"
            yield fail(host, cause, remedy)
        elif found.version != usual:
            cause = f"Python {version}, but {_dotted(usual)} on the other hosts"
            level: Level = "warn" if found.version[:2] == usual[:2] else "fail"
            yield Verdict(host, level, cause, remedy)
        yield ok(host, version)


def _packages_to_install(answers: Answers) -> dict[str, str]:
    """Return the packages that a new interpreter needs, in the versions of the other hosts."""
    # Apart, because the check `packages` has the verdicts on what cannot be read.
    others = Answers(answers.subject, answers.of)
    seen = others.read(collect_packages, hosts=_with_ranks_python(answers))
    needed = _needed(answers.subject)
    found = {
        name: most_common((each.versions.get(name, "") for each in seen.values()), "")
        for name in dict.fromkeys([*needed, *_NAMED])
    }
    return {name: version for name, version in found.items() if version or name in needed}


def _make(python: str, packages: dict[str, str], installer: str) -> str:
    """Return the command that makes an interpreter that is missing, with the packages."""
    folder, _, _ = python.rpartition("/bin/")
    if folder in ("", "/usr", "/usr/local"):
        return _install("python3", packages, installer)
    return _environment("python3", folder, packages)


def _install(base: str, packages: dict[str, str], installer: str) -> str:
    """Return the command that installs a Python and makes an environment of it; pip may not write
    into the system's."""
    folder = f"/opt/clusterkit/{base}"
    make = _environment(base, folder, packages, "sudo ")
    return (
        f"{install_packages(installer, [base, f'{base}-venv'])} && {make}"
        f"  # then python: {folder}/bin/python in the cluster entry"
    )


def _environment(base: str, folder: str, packages: dict[str, str], sudo: str = "") -> str:
    make = sudo + shell.join([base, "-m", "venv", folder])
    install = sudo + _pip_install(f"{folder}/bin/python", packages)
    return f"{make} && {install}" if packages else make


# ---------------------------------------------------------------- packages


@check(collect_packages)
def packages(answers: Answers) -> Iterator[Verdict]:
    """torch (and the CUDA it is built for), NCCL, DeepSpeed and transformers are there as the
    job needs them, where Python finds them, and the same everywhere."""
    working = _with_ranks_python(answers)
    for host in answers.of:
        if host not in working:
            yield skip(host, f"{answers.machines[host].python} does not work")
    seen = answers.read(collect_packages, hosts=working)
    needed = _needed(answers.subject)
    names = dict.fromkeys(name for packages in seen.values() for name in packages.versions)
    usual = {
        name: most_common((packages.versions.get(name, _NONE) for packages in seen.values()), _NONE)
        for name in (*names, *needed)
    }
    for host, found in seen.items():
        python = answers.machines[host].python
        for name, most in usual.items():
            version = found.versions.get(name, _NONE)
            install = _pip_install(python, {name: "" if most == _NONE else most})
            if version == _NONE and name in needed:
                cause = f"{needed[name]} needs {name}, which {python} does not have"
                level = answers.subject.needs.without_torch if name == "torch" else "fail"
                yield Verdict(host, level, cause, install)
            elif name in found.gone:
                cause = f"pip lists {name} {version}, but {python} does not find the package"
                remedy = _pip_install(python, {name: version}, "--force-reinstall", "--no-deps")
                yield fail(host, cause, remedy)
            elif version != most and most != _NONE:
                level = "fail" if name.startswith(_MUST_AGREE) else "warn"
                cause = f"{name} {version}, but {most} on the other hosts"
                yield Verdict(host, level, cause, install)
        named = [f"{name} {found.versions[name]}" for name in _NAMED if name in found.versions]
        yield ok(host, ", ".join(named))
