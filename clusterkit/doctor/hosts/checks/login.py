"""Login: whether the host answers, its identity, the user of the commands."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Verdict, fail, ok, skip, warn
from clusterkit.doctor.hosts.base import Answers, Collector, check, not_over_ssh
from clusterkit.doctor.hosts.collect import system as collect
from clusterkit.doctor.hosts.helpers import most_common

SLOW = 8.0
"""Seconds until a host begins to answer; a failed look-up by sshd takes 10."""
_NO_LOOKUPS = (
    "echo 'UseDNS no' | sudo tee /etc/ssh/sshd_config.d/dns.conf && sudo systemctl reload ssh"
)


def is_about_host_key(message: str) -> bool:
    return "host key" in message.lower()


@check(unreachable_too=True)
def reachable(answers: Answers) -> Iterator[Verdict]:
    """The host answers, within seconds."""
    for host, answer in answers.of.items():
        error = answer.error
        if error is not None:
            if is_about_host_key(error.message):
                yield skip(host, "host key verification failed")
                continue
            timed_out = "did not end" in error.message
            remedy = f"does a mount hang? ssh {host} cat /proc/mounts" if timed_out else None
            yield fail(host, error.message, error.hint or remedy)
            continue
        delay = answer.received - answer.sent
        if answer.began is not None and answer.ended is not None:
            delay -= answer.ended - answer.began
        if delay > SLOW:
            remedy = _NO_LOOKUPS if answers.subject.over_ssh else None
            yield warn(host, f"took more than {SLOW:g} s to answer", remedy)
        yield ok(host)


@check(unreachable_too=True, skip_reason=not_over_ssh)
def host_key(answers: Answers) -> Iterator[Verdict]:
    """The host's key is in known_hosts and has not changed."""
    for host, answer in answers.of.items():
        error = answer.error
        if error is None:
            yield ok(host, "known")
        elif is_about_host_key(error.message):
            yield fail(host, error.message, error.hint)
        else:
            yield skip(host, "it did not answer")


# ---------------------------------------------------------------- user


class User(Struct):
    """The user who runs commands."""

    user: str
    """Empty: the number has no name."""
    uid: int
    home: str
    home_exists: bool
    home_writable: bool
    sudo: str | None
    """The user who called sudo, if one did."""


USER = Collector(collect.user, User)


@check(USER)
def user(answers: Answers) -> Iterator[Verdict]:
    """Commands run as an ordinary user with a home, without sudo; with a shared folder, under
    the same number everywhere."""
    seen = answers.read(USER)
    usual = most_common((user.uid for user in seen.values()), 0)
    for host, user in seen.items():
        name = user.user or str(user.uid)
        if not user.user:
            cause = f"uid {user.uid} has no passwd entry; torch asks for its name"
            yield fail(host, cause, f"sudo useradd -u {user.uid} -m NAME")
        elif answers.subject.over_ssh and user.sudo is not None:
            cause = f"commands run as {name} through sudo by {user.sudo}, which is not needed"
            yield warn(host, cause, "log in as the user of the ranks")
        elif not user.home_exists or not user.home_writable:
            state = "cannot be written to" if user.home_exists else "is not there"
            cause = (
                f"the home of {name}, {user.home}, {state}: torch and DeepSpeed keep caches in it"
            )
            yield warn(host, cause, shell.join(["sudo", "install", "-d", "-o", name, user.home]))
        elif answers.subject.shared is not None and user.uid != usual:
            cause = f"{name} has uid {user.uid}, but {usual} on the other hosts"
            remedy = shell.join(["sudo", "usermod", "-u", str(usual), name])
            yield fail(host, f"{cause}, and the hosts share a folder", remedy)
        yield ok(host, f"{name}, no sudo")


# ---------------------------------------------------------------- the end of a session

_KEEP = (
    "printf '[Login]\\nKillUserProcesses=no\\n' | sudo install -D -m 644 /dev/stdin "
    "/etc/systemd/logind.conf.d/clusterkit.conf && sudo systemctl restart systemd-logind"
)


class Logout(Struct):
    """What logind does with the processes of a session that has ended."""

    user: str
    answer: str
    """Its properties KillUserProcesses, KillOnlyUsers and KillExcludeUsers, as busctl prints them;
    empty: there is no logind."""


LOGOUT = Collector(collect.logout, Logout)


@check(LOGOUT, skip_reason=not_over_ssh)
def logout(answers: Answers) -> Iterator[Verdict]:
    """Processes go on when the session that started them ends (logind's KillUserProcesses)."""
    for host, found in answers.read(LOGOUT).items():
        kills, *lists = found.answer.splitlines()[:3] or [""]
        only, excluded = (re.findall(r'"([^"]*)"', text) for text in [*lists, "", ""][:2])
        concerned = (not only or found.user in only) and found.user not in excluded
        if kills == "b true" and concerned:
            cause = f"KillUserProcesses=yes: systemd-logind ends the runs of {found.user} at logout"
            yield fail(host, cause, _KEEP)
        yield ok(host, "they go on" if kills else "there is no logind")
