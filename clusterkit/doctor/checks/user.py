"""Is it an ordinary login, the same user everywhere, without sudo?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Verdict, common, fail, ok, warn
from clusterkit.doctor.check import Answers, Check, Script


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


USER = Script("user", collect, Seen)


def judge(answers: Answers) -> Iterator[Verdict]:
    seen = answers.read(USER)
    subject = answers.subject
    usual = common((user.uid for user in seen.values()), 0)
    for host, user in seen.items():
        name = user.user or str(user.uid)
        if not user.user:
            cause = f"user number {user.uid} has no name there: torch asks for it"
            yield fail(host, cause, f"sudo useradd -u {user.uid} -m NAME")
        elif subject.over_ssh and user.sudo is not None:
            cause = f"commands run as {name} through sudo of {user.sudo}: nothing here needs sudo"
            yield warn(host, cause, "log in as the user of the ranks")
        elif not user.home_there or not user.home_writable:
            why = "cannot be written to" if user.home_there else "is not there"
            cause = (
                f"the home of {name}, {user.home}, {why}: caches of torch and DeepSpeed lie in it"
            )
            yield fail(host, cause, shell.join(["sudo", "install", "-d", "-o", name, user.home]))
        elif subject.shared is not None and user.uid != usual:
            cause = f"{name} is number {user.uid}, but {usual} on the other hosts"
            mend = shell.join(["sudo", "usermod", "-u", str(usual), name])
            yield fail(host, f"{cause}: they share a folder", mend)
        else:
            yield ok(host, f"{name}, no sudo")


CHECK = Check(
    "user",
    "Commands run as an ordinary user with a home, without sudo; with a shared folder, under the "
    "same number everywhere.",
    judge,
    (USER,),
)
