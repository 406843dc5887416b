"""Are torch, DeepSpeed and what belongs to them there, and the same everywhere?"""

from __future__ import annotations

from clusterkit import shell
from clusterkit.doctor.base import Answers, Check, Finding, Level, Subject, common, read
from clusterkit.doctor.scripts import PACKAGES, Packages

NAME = "packages"
_MUST_AGREE = ("torch", "deepspeed", "nvidia-nccl")
_NONE = "none"


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    wanted = {machine.name: machine.python for machine in subject.hosts}
    right = {host: answer for host, answer in answers.items() if answer.interpreter == wanted[host]}
    findings = [
        Finding(NAME, host, "skip", f"{wanted[host]} does not work")
        for host in answers
        if host not in right
    ]
    seen, unread = read(NAME, PACKAGES, right, subject, Packages)
    findings += unread
    names = dict.fromkeys(name for packages in seen.values() for name in packages.versions)
    usual = {
        name: common(
            {host: packages.versions.get(name, _NONE) for host, packages in seen.items()}, _NONE
        )
        for name in (*names, *_needed(subject))
    }
    for host, packages in seen.items():
        findings += _one(host, packages, subject, usual, wanted[host])
    return findings


def _needed(subject: Subject) -> dict[str, str]:
    """Package to what needs it."""
    needs = subject.needs
    found = {}
    if needs.launcher in ("torchrun", "deepspeed"):
        found["torch"] = f"launcher: {needs.launcher}"
    if needs.launcher == "deepspeed":
        found["deepspeed"] = "launcher: deepspeed"
    elif needs.deepspeed:
        found["deepspeed"] = "the job's deepspeed section"
    return found


def _one(
    host: str, packages: Packages, subject: Subject, usual: dict[str, str], python: str
) -> list[Finding]:
    found = []
    needed = _needed(subject)
    for name, most in usual.items():
        version = packages.versions.get(name, _NONE)
        if version == _NONE and name in needed:
            cause = f"{needed[name]} needs {name}, which {python} does not have"
            found.append(Finding(NAME, host, "fail", cause, _install(python, name, most)))
        elif version != most and most != _NONE:
            level: Level = "fail" if name.startswith(_MUST_AGREE) else "warn"
            cause = f"{name} {version}, but {most} on the other hosts"
            found.append(Finding(NAME, host, level, cause, _install(python, name, most)))
    if found:
        return found
    told = [
        f"{name} {packages.versions[name]}"
        for name in ("torch", "deepspeed", "transformers")
        if name in packages.versions
    ]
    return [Finding(NAME, host, "ok", ", ".join(told))]


def _install(python: str, package: str, version: str) -> str:
    # What stands behind a + says which index it came from; pip finds it where it found the rest.
    pinned = package if version == _NONE else f"{package}=={version.partition('+')[0]}"
    return shell.join([python, "-m", "pip", "install", pinned])


CHECK = Check(
    NAME,
    "torch (and the CUDA it is built for), NCCL, DeepSpeed and transformers are there as the job "
    "needs them, and the same everywhere.",
    judge,
    (PACKAGES,),
)
