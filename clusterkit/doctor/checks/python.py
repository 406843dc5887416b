"""Is the interpreter of the ranks there, new enough, and the same everywhere?"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Answers, Check, Finding, Script, Subject, common, read, shortened

NAME = "python"
OLDEST = (3, 11)
_SYSTEM = "sudo apt-get install -y python3 python3-venv"


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
    for host, answer in answers.items():
        if answer.error is not None:
            findings.append(Finding(NAME, host, "skip", "it did not answer"))
        elif answer.began is None or answer.interpreter != wanted[host]:
            said = shortened(answer.stderr) or "it says nothing"
            cause = f"{wanted[host]} does not work: {said}"
            findings.append(Finding(NAME, host, "fail", cause, _make(wanted[host])))
        else:
            working[host] = answer
    seen, unread = read(NAME, PYTHON, working, subject, Seen)
    findings += unread
    usual = common({host: python.version for host, python in seen.items()}, (0, 0, 0))
    for host, python in seen.items():
        version = ".".join(map(str, python.version))
        remedy = _another(max(usual[:2], OLDEST))
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


def _another(version: tuple[int, ...]) -> str:
    name = f"python{version[0]}.{version[1]}"
    return f"sudo apt-get install -y {name} {name}-venv  # then name it in the cluster entry"


def _make(python: str) -> str:
    folder, _, _ = python.rpartition("/bin/")
    return _SYSTEM if folder in ("", "/usr") else shell.join(["python3", "-m", "venv", folder])


CHECK = Check(
    NAME,
    f"The interpreter of the ranks works, is Python {OLDEST[0]}.{OLDEST[1]} or newer, and the same "
    "everywhere.",
    judge,
    (PYTHON,),
    silent_too=True,
)
