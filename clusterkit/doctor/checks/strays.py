"""Do processes of other runs still run there, or somebody else's?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Verdict, ok, shortened, warn
from clusterkit.doctor.check import Answers, Check, Script
from clusterkit.doctor.driver import text_of, user_of

_SHOWN = 4


class Seen(Struct):
    """Processes by run, and launchers by user."""

    runs: dict[str, list[int]]
    others: dict[str, dict[int, str]]
    """User to process id to the words that it was started with."""


def collect(given: dict[str, Any]) -> Any:
    import os

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

    mine = os.environ.get("CLUSTERKIT_RUN_ID", "")
    runs: dict[str, list[int]] = {}
    others: dict[str, dict[int, str]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            uid = os.stat(f"/proc/{name}").st_uid
        except OSError:
            continue  # gone
        if uid != os.geteuid():
            # Everybody may read the words, and nobody else the environment.
            words = text_of(f"/proc/{name}/cmdline").split("\0")
            if launches(words):
                others.setdefault(user_of(uid), {})[int(name)] = " ".join(words)[:200]
            continue
        for entry in text_of(f"/proc/{name}/environ").split("\0"):
            key, _, run = entry.partition("=")
            if key == "CLUSTERKIT_RUN_ID" and run and run != mine:
                runs.setdefault(run, []).append(int(name))
    return {"runs": runs, "others": others}


STRAYS = Script("strays", collect, Seen)


def judge(answers: Answers) -> Iterator[Verdict]:
    for host, there in answers.read(STRAYS).items():
        for run, pids in sorted(there.runs.items()):
            number = "1 process" if len(pids) == 1 else f"{len(pids)} processes"
            mend = shell.join(["clusterkit", "cancel", run])
            yield warn(host, f"run {run} has {number} there", mend)
        for user, launchers in sorted(there.others.items()):
            ranks = [
                f"process {pid}: {shortened(words, 80)}" for pid, words in sorted(launchers.items())
            ]
            more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
            cause = f"{user} has ranks there: {'; '.join(ranks[:_SHOWN])}{more}"
            mend = f"ask {user}, or use the other hosts: {shell.join(['--exclude', host])}"
            yield warn(host, cause, mend)
        if not there.runs and not there.others:
            yield ok(host, "none")


CHECK = Check(
    "strays",
    "No processes of the same user's other runs are left there, and no ranks of another user run.",
    judge,
    (STRAYS,),
)
