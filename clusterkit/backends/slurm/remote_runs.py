"""Runs that Slurm knows of, whoever submitted them: those of the last minutes that have ended, too.

A job whose folder is ``.../runs/NAME`` and whose name is NAME is a run: nothing else marks it.
"""

from __future__ import annotations

import posixpath
import re

from clusterkit.backends.base import RemoteRun
from clusterkit.backends.slurm.probe import host_of
from clusterkit.backends.slurm.queue import STATES, ask
from clusterkit.cluster import SlurmCluster
from clusterkit.errors import RunFolderError, RunNotFound
from clusterkit.run.status import State
from clusterkit.shell import quote
from clusterkit.transport import Transport

FORM = "%i|%T|%u|%D|%V|%e|%j|%Z"
"""Of `squeue`: id, state, user, nodes, submission, end, name, folder."""
_STAMP = re.compile(r"-\d{10}-[0-9a-z]{4}\Z")


def listing(cluster: SlurmCluster, transport: Transport) -> list[RemoteRun]:
    """As `clusterkit.backends.base.SupportsRemoteRuns.listing`."""
    argv = ("squeue", "--noheader", "--states=all", f"--format={FORM}")
    # Times in seconds: others are those of the login node's time zone, or as its user likes them.
    env = {"SLURM_TIME_FORMAT": "%s"}
    return parse(ask(transport, host_of(cluster), *argv, env=env))


def parse(text: str) -> list[RemoteRun]:
    """The runs in an answer of `squeue`, newest first; other jobs are passed over."""
    rows = [line.split("|", 7) for line in text.splitlines()]
    jobs = sorted((int(row[0]), row) for row in rows if len(row) == 8 and row[0].isdigit())
    found = {}
    for number, (_, state, user, nodes, submitted, end, run, folder) in jobs:
        above, below = posixpath.split(folder.rstrip("/"))
        if below == run and posixpath.basename(above) == "runs":
            means = STATES.get(state, State.UNKNOWN)
            home = posixpath.dirname(above)
            found[run] = RemoteRun(  # of several jobs of one run the newest
                run=run,
                job=_STAMP.sub("", run),
                state=means,
                kind=f"job {number}",
                attach=f"`CLUSTERKIT_HOME={quote(home)} clusterkit attach {run}` there",
                pods=int(nodes) if nodes.isdigit() else None,
                user=user or None,
                started_at=_seconds(submitted),
                finished_at=_seconds(end) if means.final else None,
            )
    return list(found.values())[::-1]


def refuse(run: str, cluster: SlurmCluster, transport: Transport) -> Exception:
    """Why a run of another folder cannot be taken up here: who submitted it may start it again, and
    two who do would start it twice."""
    runs = listing(cluster, transport)
    if (found := next((each for each in runs if each.run.startswith(run)), None)) is None:
        return RunNotFound(f"run {run!r} is unknown to Slurm", hint="it forgets those that ended")
    return RunFolderError(
        f"run {found.run}: it was submitted elsewhere, where its folder is", hint=found.attach
    )


def _seconds(text: str) -> float | None:
    return float(text) if text.isdigit() else None
