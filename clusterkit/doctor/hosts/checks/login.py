"""The way in: does the host answer, who is it, and as whom do commands run there?"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Verdict, fail, ok, shortened, skip, warn
from clusterkit.doctor.hosts.base import Answers, check, not_over_ssh, one_host, script
from clusterkit.doctor.hosts.helpers import most_common
from clusterkit.doctor.hosts.runner import text_of, user_of

SLOW = 8.0
"""Seconds until a host begins to answer; a look-up that fails takes 10."""
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
            stuck = "did not end" in error.message
            look = f"does a mount hang? ssh {host} cat /proc/mounts" if stuck else None
            yield fail(host, error.message, error.hint or look)
            continue
        spent = answer.received - answer.sent
        if answer.began is not None and answer.ended is not None:
            spent -= answer.ended - answer.began
        if spent > SLOW:
            mend = _NO_LOOKUPS if answers.subject.over_ssh else None
            yield warn(host, f"took more than {SLOW:g} s to answer", mend)
        yield ok(host)


@check(unreachable_too=True, skip_reason=not_over_ssh)
def host_key(answers: Answers) -> Iterator[Verdict]:
    """The key that proves who the host is stands in known_hosts and has not changed."""
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
    """What the user's shell prints when it runs nothing."""

    shell: str
    output: str


@script("login-shell", LoginShell)
def collect_shell(given: dict[str, Any]) -> Any:
    import subprocess

    try:
        shell = pwd.getpwuid(os.geteuid()).pw_shell or "/bin/sh"
    except KeyError:
        shell = "/bin/sh"
    # bash reads ~/.bashrc for a command of sshd's, which it knows by these two.
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
    """Who runs commands there."""

    user: str
    uid: int
    home: str
    home_there: bool
    home_writable: bool
    sudo: str | None
    """The user who came through sudo, if one did."""


@script("user", User)
def collect_user(given: dict[str, Any]) -> Any:
    uid, home = os.geteuid(), os.path.expanduser("~")
    user = user_of(uid)
    return {
        "user": "" if user == str(uid) else user,
        "uid": uid,
        "home": home,
        "home_there": os.path.isdir(home),
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
        elif not user.home_there or not user.home_writable:
            why = "cannot be written to" if user.home_there else "is not there"
            cause = (
                f"the home of {name}, {user.home}, {why}: caches of torch and DeepSpeed lie in it"
            )
            yield fail(host, cause, shell.join(["sudo", "install", "-d", "-o", name, user.home]))
        elif answers.subject.shared is not None and user.uid != usual:
            cause = f"{name} is number {user.uid}, but {usual} on the other hosts"
            mend = shell.join(["sudo", "usermod", "-u", str(usual), name])
            yield fail(host, f"{cause}: they share a folder", mend)
        yield ok(host, f"{name}, no sudo")


# ---------------------------------------------------------------- identity


class Identity(Struct):
    """What tells machines apart."""

    hostname: str
    boot: str
    """The kernel's id of this boot: the same for all containers of one machine."""
    network: str
    """The network namespace: another one for each of them."""


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
            mend = shell.join(["sudo", "hostnamectl", "set-hostname", host])
            # Open MPI takes hosts of one name for one host.
            mpi = answers.subject.needs.launcher == "mpirun"
            yield Verdict(host, "fail" if mpi else "warn", cause, mend)
        yield ok(host, "a machine of its own")
