"""Login: whether the host answers, its identity, its login shell, the user of the commands."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Verdict, fail, ok, shortened, skip, warn
from clusterkit.doctor.hosts.base import Answers, check, not_over_ssh, one_host, script
from clusterkit.doctor.hosts.helpers import most_common
from clusterkit.doctor.hosts.runner import run, text_of, user_of

SLOW = 8.0
"""Seconds until a host begins to answer; a failed look-up by sshd takes 10."""
_NO_LOOKUPS = (
    "echo 'UseDNS no' | sudo tee /etc/ssh/sshd_config.d/dns.conf && sudo systemctl reload ssh"
)
_RETURN_EARLY = "sed -i '1i case $- in *i*) ;; *) return ;; esac' ~/.bashrc"


def is_about_host_key(message: str) -> bool:
    return "host key" in message.lower()


@check(unreachable_too=True)
def reachable(answers: Answers) -> Iterator[Verdict]:
    """The host answers, within seconds."""
    for host, answer in answers.of.items():
        error = answer.error
        if error is not None:
            if is_about_host_key(error.message):
                yield skip(host, "its host key was not accepted")
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


# ---------------------------------------------------------------- login shell


class LoginShell(Struct):
    """The user's shell, and what it prints when it runs nothing."""

    shell: str
    output: str


@script("login-shell", LoginShell)
def collect_shell(given: dict[str, Any]) -> Any:
    import subprocess

    try:
        shell = pwd.getpwuid(os.geteuid()).pw_shell or "/bin/sh"
    except KeyError:
        shell = "/bin/sh"
    # bash reads ~/.bashrc if it is started by sshd, which it detects by these two variables.
    env = {**os.environ, "SSH_CLIENT": os.environ.get("SSH_CLIENT", "127.0.0.1 1 22")}
    env.pop("SHLVL", None)
    done = subprocess.run(
        [shell, "-c", "exit 0"], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return {"shell": shell, "output": done.stdout[:4096].decode("utf-8", "replace")}


@check(collect_shell, quick=False, skip_reason=not_over_ssh)
def login_shell(answers: Answers) -> Iterator[Verdict]:
    """The login shell prints nothing when a command runs over SSH."""
    for host, seen in answers.read(collect_shell).items():
        if seen.output.strip():
            cause = (
                f"{seen.shell} prints {shortened(seen.output, 60)!r} for every command over SSH, "
                "which breaks rsync, scp and mpirun"
            )
            yield warn(host, cause, _RETURN_EARLY)
        yield ok(host, f"{seen.shell} is silent")


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


@script("user", User)
def collect_user(given: dict[str, Any]) -> Any:
    uid, home = os.geteuid(), os.path.expanduser("~")
    user = user_of(uid)
    return {
        "user": "" if user == str(uid) else user,
        "uid": uid,
        "home": home,
        "home_exists": os.path.isdir(home),
        "home_writable": os.access(home, os.W_OK | os.X_OK),
        "sudo": os.environ.get("SUDO_USER"),
    }


@check(collect_user)
def user(answers: Answers) -> Iterator[Verdict]:
    """Commands run as an ordinary user with a home, without sudo; with a shared folder, under
    the same number everywhere."""
    seen = answers.read(collect_user)
    usual = most_common((user.uid for user in seen.values()), 0)
    for host, user in seen.items():
        name = user.user or str(user.uid)
        if not user.user:
            cause = f"user number {user.uid} has no name there: torch asks for it"
            yield fail(host, cause, f"sudo useradd -u {user.uid} -m NAME")
        elif answers.subject.over_ssh and user.sudo is not None:
            cause = f"commands run as {name} through sudo of {user.sudo}: nothing here needs sudo"
            yield warn(host, cause, "log in as the user of the ranks")
        elif not user.home_exists or not user.home_writable:
            state = "cannot be written to" if user.home_exists else "is not there"
            cause = (
                f"the home of {name}, {user.home}, {state}: torch and DeepSpeed keep caches in it"
            )
            yield warn(host, cause, shell.join(["sudo", "install", "-d", "-o", name, user.home]))
        elif answers.subject.shared is not None and user.uid != usual:
            cause = f"{name} is number {user.uid}, but {usual} on the other hosts"
            remedy = shell.join(["sudo", "usermod", "-u", str(usual), name])
            yield fail(host, f"{cause}: they share a folder", remedy)
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


@script("logout", Logout)
def collect_logout(given: dict[str, Any]) -> Any:
    done = run(
        "busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1",
        "org.freedesktop.login1.Manager", "KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers",
        seconds=8,
    )  # fmt: skip
    return {"user": user_of(os.geteuid()), "answer": done["stdout"][:4096] if done else ""}


@check(collect_logout, skip_reason=not_over_ssh)
def logout(answers: Answers) -> Iterator[Verdict]:
    """Processes go on when the session that started them ends (logind's KillUserProcesses)."""
    for host, found in answers.read(collect_logout).items():
        kills, *lists = found.answer.splitlines()[:3] or [""]
        only, excluded = (re.findall(r'"([^"]*)"', text) for text in [*lists, "", ""][:2])
        concerned = (not only or found.user in only) and found.user not in excluded
        if kills == "b true" and concerned:
            cause = f"KillUserProcesses=yes: logind ends the runs of {found.user} at its logout"
            yield fail(host, cause, _KEEP)
        yield ok(host, "they go on" if kills else "there is no logind")


# ---------------------------------------------------------------- duplicates


class Identity(Struct):
    """What differs between machines."""

    hostname: str
    boot: str
    """The kernel's id of this boot: the same for all containers of one machine."""
    network: str
    """The network namespace: a different one for each container."""


@script("identity", Identity, in_process=True)
def collect_identity(given: dict[str, Any]) -> Any:
    boot = text_of("/proc/sys/kernel/random/boot_id").strip()
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        boot = network = ""
    return {"hostname": os.uname().nodename, "boot": boot, "network": network}


@check(collect_identity, skip_reason=one_host)
def duplicates(answers: Answers) -> Iterator[Verdict]:
    """Every host is a machine of its own, with a name and an address of its own."""
    machines: dict[tuple[str, str], str] = {}
    hostnames: dict[str, str] = {}
    addresses: dict[str, str] = {}
    for host, identity in answers.read(collect_identity).items():
        key = (identity.boot, identity.network)
        address = answers.machines[host].at
        same_machine = machines.setdefault(key, host) if identity.boot else host
        same_name = hostnames.setdefault(identity.hostname, host)
        same_address = addresses.setdefault(address, host)
        if same_address != host:
            cause = f"has the address {address}, as {same_address} has"
            yield fail(host, cause, "two nodes need two addresses")
        elif same_machine != host:
            cause = f"is the same machine as {same_machine}"
            yield fail(host, cause, f"leave {host} out of the inventory")
        elif same_name != host:
            cause = f"calls itself {identity.hostname}, as {same_name} does"
            remedy = shell.join(["sudo", "hostnamectl", "set-hostname", host])
            # Open MPI takes hosts of one name for one host.
            mpi = answers.subject.needs.launcher == "mpirun"
            yield Verdict(host, "fail" if mpi else "warn", cause, remedy)
        yield ok(host, "a machine of its own")
