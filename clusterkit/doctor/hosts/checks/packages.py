"""The Python of the ranks: interpreter and packages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Level, Verdict, fail, ok, shortened, skip
from clusterkit.doctor.hosts.base import Answers, Collector, HostSubject, check
from clusterkit.doctor.hosts.collect import packages as collect
from clusterkit.doctor.hosts.helpers import install_packages, most_common

OLDEST = (3, 11)
_MUST_AGREE = ("torch", "deepspeed", "nvidia-nccl")
_NAMED = ("torch", "deepspeed", "transformers")
_NONE = "none"


class Python(Struct):
    """The interpreter that ran."""

    version: tuple[int, int, int]
    bits: int


PYTHON = Collector(collect.python, Python)


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


PACKAGES = Collector(collect.packages, Packages, site_packages=True)


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


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@check(PYTHON, PACKAGES, unreachable_too=True)
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
    seen = answers.read(PYTHON, working)
    usual = most_common((python.version for python in seen.values()), (0, 0, 0))
    base = f"python{dotted(max(usual[:2], OLDEST))}"
    for host, found in seen.items():
        remedy = _install(base, packages, answers.of[host].installer)
        python, version = answers.machines[host].python, dotted(found.version)
        if found.version < OLDEST:
            cause = f"{python} is Python {version}; {dotted(OLDEST)} or newer is needed"
            yield fail(host, cause, remedy)
        elif found.bits != 64:
            cause = f"{python} is a {found.bits}-bit build: torch has none for it"
            yield fail(host, cause, remedy)
        elif found.version != usual:
            cause = f"Python {version}, but {dotted(usual)} on the other hosts"
            level: Level = "warn" if found.version[:2] == usual[:2] else "fail"
            yield Verdict(host, level, cause, remedy)
        yield ok(host, version)


def _packages_to_install(answers: Answers) -> dict[str, str]:
    """Return the packages that a new interpreter needs, in the versions of the other hosts."""
    seen = answers.read_silently(PACKAGES, _with_ranks_python(answers))
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


@check(PACKAGES)
def packages(answers: Answers) -> Iterator[Verdict]:
    """torch (and the CUDA it is built for), NCCL, DeepSpeed and transformers are there as the
    job needs them, where Python finds them, and the same everywhere."""
    working = _with_ranks_python(answers)
    for host in answers.of:
        if host not in working:
            yield skip(host, f"{answers.machines[host].python} does not work")
    seen = answers.read(PACKAGES, working)
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
                cause = f"pip lists {name} {version}, but {python} cannot import it"
                remedy = _pip_install(python, {name: version}, "--force-reinstall", "--no-deps")
                yield fail(host, cause, remedy)
            elif version != most and most != _NONE:
                level = "fail" if name.startswith(_MUST_AGREE) else "warn"
                cause = f"{name} {version}, but {most} on the other hosts"
                yield Verdict(host, level, cause, install)
        named = [f"{name} {found.versions[name]}" for name in _NAMED if name in found.versions]
        yield ok(host, ", ".join(named))
