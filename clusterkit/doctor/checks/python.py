"""Is the interpreter of the ranks there, new enough, and the same everywhere?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Level, Verdict, common, fail, ok, shortened, skip
from clusterkit.doctor.check import Answers, Check, Script
from clusterkit.doctor.checks.packages import (
    PACKAGES,
    needed_packages,
    pip_install,
    with_its_python,
)

OLDEST = (3, 11)


class Seen(Struct):
    """The interpreter that ran."""

    executable: str
    version: tuple[int, int, int]
    bits: int


def collect(given: dict[str, Any]) -> Any:
    import struct
    import sys

    return {
        "executable": sys.executable,
        "version": list(sys.version_info[:3]),
        "bits": 8 * struct.calcsize("P"),
    }


PYTHON = Script("python", collect, Seen, safe=True)


def judge(answers: Answers) -> Iterator[Verdict]:
    packages = _packages(answers)
    working = with_its_python(answers)
    for host, answer in answers.of.items():
        python = answers.machines[host].python
        if answer.error is not None:
            yield skip(host, "it did not answer")
        elif host not in working:
            complaint = shortened(answer.stderr) or "it says nothing"
            yield fail(host, f"{python} does not work: {complaint}", _make(python, packages))
    seen = answers.read(PYTHON, among=working)
    usual = common((python.version for python in seen.values()), (0, 0, 0))
    remedy = _another(f"python{_dotted(max(usual[:2], OLDEST))}", packages)
    for host, there in seen.items():
        python, version = answers.machines[host].python, _dotted(there.version)
        if there.version < OLDEST:
            cause = f"{python} is Python {version}; {_dotted(OLDEST)} or newer is needed"
            yield fail(host, cause, remedy)
        elif there.bits != 64:
            cause = f"{python} is a build for {there.bits} bits: there is no torch for it"
            yield fail(host, cause, remedy)
        elif there.version != usual:
            cause = f"Python {version}, but {_dotted(usual)} on the other hosts"
            level: Level = "warn" if there.version[:2] == usual[:2] else "fail"
            yield Verdict(host, level, cause, remedy)
        else:
            yield ok(host, version)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _packages(answers: Answers) -> dict[str, str]:
    """What a new interpreter has to be given: what the job needs, in the others' versions."""
    seen = answers.read(PACKAGES, among=with_its_python(answers), quiet=True)
    needed = needed_packages(answers.subject)
    found = {
        name: common((there.versions.get(name, "") for there in seen.values()), "")
        for name in dict.fromkeys([*needed, "torch", "deepspeed", "transformers"])
    }
    return {name: version for name, version in found.items() if version or name in needed}


def _make(python: str, packages: dict[str, str]) -> str:
    """Makes an interpreter that is not there, with the packages."""
    folder, _, _ = python.rpartition("/bin/")
    if folder in ("", "/usr", "/usr/local"):
        return _another("python3", packages)
    return _environment("python3", folder, packages)


def _another(base: str, packages: dict[str, str]) -> str:
    """Makes one beside what there is: pip may not write into the system's."""
    place = f"/opt/clusterkit/{base}"
    made = _environment(base, place, packages, "sudo ")
    return (
        f"sudo apt-get install -y {base} {base}-venv && {made}"
        f"  # then python: {place}/bin/python in the cluster entry"
    )


def _environment(base: str, folder: str, packages: dict[str, str], sudo: str = "") -> str:
    made = sudo + shell.join([base, "-m", "venv", folder])
    install = sudo + pip_install(f"{folder}/bin/python", packages)
    return f"{made} && {install}" if packages else made


CHECK = Check(
    "python",
    f"The interpreter of the ranks works, is Python {_dotted(OLDEST)} or newer, and the same "
    "everywhere.",
    judge,
    (PYTHON, PACKAGES),
    silent_too=True,
)
