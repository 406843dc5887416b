"""Is the interpreter of the ranks there, new enough, and the same everywhere?"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Answers, Check, Finding, Script, Subject, common, read, shortened
from clusterkit.doctor.scripts import PACKAGES, Packages, needed_packages, pip_install

NAME = "python"
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


PYTHON = Script("python", collect, safe=True)


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    wanted = {machine.name: machine.python for machine in subject.hosts}
    findings = []
    working = {}
    packages = _packages(answers, subject)
    for host, answer in answers.items():
        if answer.error is not None:
            findings.append(Finding(NAME, host, "skip", "it did not answer"))
        elif answer.began is None or answer.interpreter != wanted[host]:
            said = shortened(answer.stderr) or "it says nothing"
            cause = f"{wanted[host]} does not work: {said}"
            remedy = _make(wanted[host], packages)
            findings.append(Finding(NAME, host, "fail", cause, remedy))
        else:
            working[host] = answer
    seen, unread = read(NAME, PYTHON, working, subject, Seen)
    findings += unread
    usual = common({host: python.version for host, python in seen.items()}, (0, 0, 0))
    for host, python in seen.items():
        version = ".".join(map(str, python.version))
        other = ".".join(map(str, max(usual[:2], OLDEST)))
        remedy = _another(f"python{other}", packages)
        if python.version < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            cause = f"{wanted[host]} is Python {version}; {oldest} or newer is needed"
            findings.append(Finding(NAME, host, "fail", cause, remedy))
        elif python.bits != 64:
            cause = f"{wanted[host]} is a build for {python.bits} bits: there is no torch for it"
            findings.append(Finding(NAME, host, "fail", cause, remedy))
        elif python.version[:2] != usual[:2]:
            most = ".".join(map(str, usual))
            cause = f"Python {version}, but {most} on the other hosts"
            findings.append(Finding(NAME, host, "fail", cause, remedy))
        elif python.version != usual:
            most = ".".join(map(str, usual))
            cause = f"Python {version}, but {most} on the other hosts"
            findings.append(Finding(NAME, host, "warn", cause, remedy))
        else:
            findings.append(Finding(NAME, host, "ok", version))
    return findings


def _packages(answers: Answers, subject: Subject) -> dict[str, str]:
    """What a new interpreter has to be given: what the job needs, in the others' versions."""
    wanted = {machine.name: machine.python for machine in subject.hosts}
    right = {host: answer for host, answer in answers.items() if answer.interpreter == wanted[host]}
    seen, _ = read(NAME, PACKAGES, right, subject, Packages)
    names = [*needed_packages(subject), "torch", "deepspeed", "transformers"]
    found = {
        name: common({host: there.versions.get(name, "") for host, there in seen.items()}, "")
        for name in dict.fromkeys(names)
    }
    return {
        name: version
        for name, version in found.items()
        if version or name in needed_packages(subject)
    }


def _make(python: str, packages: dict[str, str]) -> str:
    """Makes an interpreter that is not there, with the packages."""
    folder, _, _ = python.rpartition("/bin/")
    if folder in ("", "/usr", "/usr/local"):
        return _another("python3", packages)
    return _environment("python3", folder, packages)


def _another(base: str, packages: dict[str, str]) -> str:
    """Makes one beside what there is: pip may not write into the system's."""
    place = f"/opt/clusterkit/{base}"
    made = _environment(base, place, packages, "sudo")
    return (
        f"sudo apt-get install -y {base} {base}-venv && {made}"
        f"  # then python: {place}/bin/python in the cluster entry"
    )


def _environment(base: str, folder: str, packages: dict[str, str], *sudo: str) -> str:
    steps = [shell.join([*sudo, base, "-m", "venv", folder])]
    if packages:
        install = pip_install(f"{folder}/bin/python", packages)
        steps.append(shell.join(sudo) + " " + install if sudo else install)
    return " && ".join(steps)


CHECK = Check(
    NAME,
    f"The interpreter of the ranks works, is Python {OLDEST[0]}.{OLDEST[1]} or newer, and the same "
    "everywhere.",
    judge,
    (PYTHON, PACKAGES),
    silent_too=True,
)
