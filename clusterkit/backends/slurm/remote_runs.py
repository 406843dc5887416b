"""Lists the runs in Slurm's queue, whoever submitted them; ended ones stay for some minutes.

A job is taken for a run if its name is NAME and its folder is ``.../runs/NAME``.
"""

from __future__ import annotations

import posixpath
import re

from clusterkit.backends.base import RemoteRun
from clusterkit.backends.slurm.probe import host_of
from clusterkit.backends.slurm.queue import STATES, query
from clusterkit.cluster import SlurmCluster
from clusterkit.errors import RunFolderError, RunNotFound
from clusterkit.run.status import State
from clusterkit.shell import quote
from clusterkit.transport import Transport

FORM = "%i|%T|%u|%D|%V|%e|%j|%Z"
"""Format of `squeue`: id, state, user, nodes, submission, end, name, folder."""
_STAMP = re.compile(r"-\d{10}-[0-9a-z]{4}\Z")


def listing(cluster: SlurmCluster, transport: Transport) -> list[RemoteRun]:
    """Implement `clusterkit.backends.base.SupportsRemoteRuns.listing`."""
    argv = ("squeue", "--noheader", "--states=all", f"--format={FORM}")
    # Times in seconds: other formats depend on the login node's time zone and the user's settings.
    env = {"SLURM_TIME_FORMAT": "%s"}
    return parse(query(transport, host_of(cluster), *argv, env=env))


def parse(text: str) -> list[RemoteRun]:
    """Return the runs in the output of `squeue`, newest first; other jobs are ignored."""
    rows = [line.split("|", 7) for line in text.splitlines()]
    jobs = sorted((int(row[0]), row) for row in rows if len(row) == 8 and row[0].isdigit())
    found = {}
    for number, (_, state, user, nodes, submitted, end, run, folder) in jobs:
        above, below = posixpath.split(folder.rstrip("/"))
        if below == run and posixpath.basename(above) == "runs":
            ours = STATES.get(state, State.UNKNOWN)
            home = posixpath.dirname(above)
            found[run] = RemoteRun(  # the newest of several jobs of one run
                run=run,
                job=_STAMP.sub("", run),
                state=ours,
                kind=f"job {number}",
                attach=f"`CLUSTERKIT_HOME={quote(home)} clusterkit attach {run}` there",
                pods=int(nodes) if nodes.isdigit() else None,
                user=user or None,
                started_at=_seconds(submitted),
                finished_at=_seconds(end) if ours.final else None,
            )
    return list(found.values())[::-1]


def refuse(run: str, cluster: SlurmCluster, transport: Transport) -> Exception:
    """Return the error for attaching to a run whose folder is on another machine.

    That machine's supervisor may restart the run; a second supervisor would start it twice.
    """
    runs = listing(cluster, transport)
    if (found := next((each for each in runs if each.run.startswith(run)), None)) is None:
        return RunNotFound(f"run {run!r} is unknown to Slurm", hint="it forgets those that ended")
    return RunFolderError(
        f"run {found.run}: it was submitted elsewhere, where its folder is", hint=found.attach
    )


def _seconds(text: str) -> float | None:
    return float(text) if text.isdigit() else None
