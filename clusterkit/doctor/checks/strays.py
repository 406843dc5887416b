"""Do processes of other runs still run there?"""

from __future__ import annotations

from typing import Any

from clusterkit import shell
from clusterkit.doctor.base import Answers, Check, Finding, Script, Subject, read

NAME = "strays"


def collect(given: dict[str, Any]) -> Any:
    import glob
    import os

    mine = os.environ.get("CLUSTERKIT_RUN_ID", "").encode()
    runs: dict[str, list[int]] = {}
    for name in glob.iglob("/proc/[0-9]*/environ"):
        try:
            with open(name, "rb") as file:
                entries = file.read().split(b"\0")
        except OSError:
            continue  # somebody else's, or gone
        for entry in entries:
            key, _, run = entry.partition(b"=")
            if key == b"CLUSTERKIT_RUN_ID" and run and run != mine:
                runs.setdefault(run.decode("utf-8", "replace"), []).append(int(name.split("/")[2]))
    return runs


STRAYS = Script("strays", collect)


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    seen, findings = read(NAME, STRAYS, answers, subject, dict[str, list[int]])
    for host, runs in seen.items():
        for run, pids in sorted(runs.items()):
            number = "1 process" if len(pids) == 1 else f"{len(pids)} processes"
            mend = shell.join(["clusterkit", "cancel", run])
            findings.append(Finding(NAME, host, "warn", f"run {run} has {number} there", mend))
        if not runs:
            findings.append(Finding(NAME, host, "ok", "none"))
    return findings


CHECK = Check(
    NAME,
    "No processes of the same user's other runs are left there.",
    judge,
    (STRAYS,),
)
