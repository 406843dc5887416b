"""Is it an ordinary login, the same user everywhere, without sudo?"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Answers, Check, Finding, Script, Subject, common, read

NAME = "user"


class Seen(Struct):
    """Who runs commands there."""

    user: str
    uid: int
    home: str
    home_there: bool
    home_writable: bool
    sudo: str | None
    """The user who came through sudo, if one did."""


def collect(given: dict[str, Any]) -> Any:
    import os
    import pwd

    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = ""
    home = os.path.expanduser("~")
    return {
        "user": user,
        "uid": uid,
        "home": home,
        "home_there": os.path.isdir(home),
        "home_writable": os.access(home, os.W_OK | os.X_OK),
        "sudo": os.environ.get("SUDO_USER"),
    }


USER = Script("user", collect)


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    seen, findings = read(NAME, USER, answers, subject, Seen)
    usual = common({host: user.uid for host, user in seen.items()}, 0)
    for host, user in seen.items():
        name = user.user or str(user.uid)
        if not user.user:
            cause = f"user number {user.uid} has no name there: torch asks for it"
            findings.append(
                Finding(NAME, host, "fail", cause, f"sudo useradd -u {user.uid} -m NAME")
            )
        elif subject.over_ssh and user.sudo is not None:
            cause = f"commands run as {name} through sudo of {user.sudo}: nothing here needs sudo"
            findings.append(Finding(NAME, host, "warn", cause, "log in as the user of the ranks"))
        elif not user.home_there or not user.home_writable:
            why = "cannot be written to" if user.home_there else "is not there"
            cause = (
                f"the home of {name}, {user.home}, {why}: caches of torch and DeepSpeed lie in it"
            )
            mend = shell.join(["sudo", "install", "-d", "-o", name, user.home])
            findings.append(Finding(NAME, host, "fail", cause, mend))
        elif subject.shared is not None and user.uid != usual:
            cause = f"{name} is number {user.uid}, but {usual} on the other hosts"
            mend = shell.join(["sudo", "usermod", "-u", str(usual), name])
            findings.append(Finding(NAME, host, "fail", f"{cause}: they share a folder", mend))
        else:
            findings.append(Finding(NAME, host, "ok", f"{name}, no sudo"))
    return findings


CHECK = Check(
    NAME,
    "Commands run as an ordinary user with a home, without sudo; with a shared folder, under the "
    "same number everywhere.",
    judge,
    (USER,),
)
