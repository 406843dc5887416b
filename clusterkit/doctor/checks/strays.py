"""Do processes of other runs still run there, or somebody else's?"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Answers, Check, Finding, Script, Subject, read, shortened

NAME = "strays"
_SHOWN = 4


class Seen(Struct):
    """Processes by run, and launchers by user."""

    runs: dict[str, list[int]]
    others: dict[str, dict[int, str]]
    """User to process id to the words that it was started with."""


def collect(given: dict[str, Any]) -> Any:
    import os
    import pwd

    programs = {"torchrun", "deepspeed", "mpirun", "mpiexec", "orted", "prted", "horovodrun"}
    modules = {
        "torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner",
        "deepspeed.launcher.launch", "accelerate.commands.launch",
    }  # fmt: skip

    def launches(words: list[str]) -> bool:
        name, rest = os.path.basename(words[0]), words[1:]
        if not name.startswith("python"):
            return name in programs
        if "-m" in rest[:6]:
            return not modules.isdisjoint(rest[rest.index("-m") + 1 :][:1])
        script = os.path.basename(next((word for word in rest if word[:1] != "-"), ""))
        # agent.pyz is ours, of a run that another user submitted.
        return script in programs or (script == "agent.pyz" and "--nproc" in rest)

    mine = os.environ.get("CLUSTERKIT_RUN_ID", "").encode()
    runs: dict[str, list[int]] = {}
    others: dict[str, dict[int, str]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            uid = os.stat(f"/proc/{name}").st_uid
            if uid != os.geteuid():
                # Everybody may read the words, and nobody else the environment.
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    words = file.read(65536).decode("utf-8", "replace").split("\0")
                if launches(words):
                    try:
                        user = pwd.getpwuid(uid).pw_name
                    except KeyError:
                        user = str(uid)
                    others.setdefault(user, {})[int(name)] = " ".join(words)[:200]
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                entries = file.read().split(b"\0")
        except OSError:
            continue  # gone
        for entry in entries:
            key, _, run = entry.partition(b"=")
            if key == b"CLUSTERKIT_RUN_ID" and run and run != mine:
                runs.setdefault(run.decode("utf-8", "replace"), []).append(int(name))
    return {"runs": runs, "others": others}


STRAYS = Script("strays", collect)


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    seen, findings = read(NAME, STRAYS, answers, subject, Seen)
    for host, there in seen.items():
        for run, pids in sorted(there.runs.items()):
            number = "1 process" if len(pids) == 1 else f"{len(pids)} processes"
            mend = shell.join(["clusterkit", "cancel", run])
            findings.append(Finding(NAME, host, "warn", f"run {run} has {number} there", mend))
        for user, launchers in sorted(there.others.items()):
            told = [
                f"process {pid}: {shortened(words, 80)}" for pid, words in sorted(launchers.items())
            ]
            more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
            cause = f"{user} has ranks there: {'; '.join(told[:_SHOWN])}{more}"
            mend = f"ask {user}, or use the other hosts: {shell.join(['--exclude', host])}"
            findings.append(Finding(NAME, host, "warn", cause, mend))
        if not there.runs and not there.others:
            findings.append(Finding(NAME, host, "ok", "none"))
    return findings


CHECK = Check(
    NAME,
    "No processes of the same user's other runs are left there, and no ranks of another user run.",
    judge,
    (STRAYS,),
)
