"""Are torch, DeepSpeed and what belongs to them there, and the same everywhere?"""

from __future__ import annotations

from clusterkit.doctor.base import Answers, Check, Finding, Level, Subject, common, read
from clusterkit.doctor.scripts import PACKAGES, Packages, needed_packages, pip_install

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
        for name in (*names, *needed_packages(subject))
    }
    for host, packages in seen.items():
        findings += _one(host, packages, subject, usual, wanted[host])
    return findings


def _one(
    host: str, packages: Packages, subject: Subject, usual: dict[str, str], python: str
) -> list[Finding]:
    found = []
    needed = needed_packages(subject)
    for name, most in usual.items():
        version = packages.versions.get(name, _NONE)
        pinned = {name: "" if most == _NONE else most}
        if version == _NONE and name in needed:
            cause = f"{needed[name]} needs {name}, which {python} does not have"
            found.append(Finding(NAME, host, "fail", cause, pip_install(python, pinned)))
        elif name in packages.gone:
            cause = f"pip has a note of {name} {version}, but {python} does not find the package"
            mend = pip_install(python, {name: version}, "--force-reinstall", "--no-deps")
            found.append(Finding(NAME, host, "fail", cause, mend))
        elif version != most and most != _NONE:
            level: Level = "fail" if name.startswith(_MUST_AGREE) else "warn"
            cause = f"{name} {version}, but {most} on the other hosts"
            found.append(Finding(NAME, host, level, cause, pip_install(python, pinned)))
    if found:
        return found
    told = [
        f"{name} {packages.versions[name]}"
        for name in ("torch", "deepspeed", "transformers")
        if name in packages.versions
    ]
    return [Finding(NAME, host, "ok", ", ".join(told))]


CHECK = Check(
    NAME,
    "torch (and the CUDA it is built for), NCCL, DeepSpeed and transformers are there as the job "
    "needs them, where Python finds them, and the same everywhere.",
    judge,
    (PACKAGES,),
)
