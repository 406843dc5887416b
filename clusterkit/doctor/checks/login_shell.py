"""Does the login shell keep silent where nobody logs in by hand?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import Verdict, ok, shortened, warn
from clusterkit.doctor.check import Answers, Check, Script, without_ssh

_RETURN_EARLY = "sed -i '1i case $- in *i*) ;; *) return ;; esac' ~/.bashrc"


class Seen(Struct):
    """What the user's shell prints when it runs nothing."""

    shell: str
    output: str


def collect(given: dict[str, Any]) -> Any:
    import os
    import pwd
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


SHELL = Script("login-shell", collect, Seen)


def judge(answers: Answers) -> Iterator[Verdict]:
    for host, shell in answers.read(SHELL).items():
        if shell.output.strip():
            cause = (
                f"{shell.shell} prints {shortened(shell.output, 60)!r} for every command over SSH, "
                "which breaks rsync, scp and mpirun"
            )
            yield warn(host, cause, _RETURN_EARLY)
        else:
            yield ok(host, f"{shell.shell} is silent")


CHECK = Check(
    "login-shell",
    "The login shell prints nothing when a command runs over SSH.",
    judge,
    (SHELL,),
    quick=False,
    pointless=without_ssh,
)
