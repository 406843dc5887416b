"""clusterkit ls"""

from __future__ import annotations

import time
from typing import Any

import click

from clusterkit import api
from clusterkit.cli.common import (
    STATE_COLOURS,
    cluster_options,
    json_option,
    print_json,
    state_option,
    table,
    verb,
)
from clusterkit.ui.spinner import spinner


@verb("ls", "clusterkit ls --json | jq '.[0].state'", "clusterkit ls --cluster k8s")
@cluster_options("Only runs of this cluster, including those of other people.")
@state_option
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the N newest.")
@json_option
def command(
    cluster: str | None,
    clusters_file: str | None,
    states: tuple[str, ...],
    limit: int | None,
    as_json: bool,
) -> None:
    """List runs, newest first.

    With --cluster, list also the runs that were submitted to it by other people or from other
    machines, if the cluster keeps a record of them, as Kubernetes and Slurm do. The column OF shows
    who submitted a run; `clusterkit attach RUN --cluster NAME` takes one over.
    """
    if cluster is None:
        found: list[Any] = list(api.runs())
    else:
        with spinner(f"asking cluster {cluster}"):
            found = list(api.runs_of(cluster, clusters_file=clusters_file))
    any_run = bool(found)
    found = [run for run in found if not states or run.state in states][:limit]
    if as_json:
        print_json(found)
        return
    if not found:
        none = "no run is in that state" if any_run else "no runs yet: clusterkit submit job.yaml"
        click.echo(none, err=True)
        return
    header = ["RUN", "STATE", "NODES", "CLUSTER", "AGE"]
    rows = [[run.run, run.state, _nodes(run), run.cluster, _age(run.started_at)] for run in found]
    if cluster is not None:
        header.append("OF")
        for row, run in zip(rows, found, strict=True):
            row.append("this machine" if run.here else run.user or "unknown")
    drop = ("CLUSTER", "NODES", "AGE")
    for line in table(rows, header, drop=drop).splitlines():
        state = next((state for state in STATE_COLOURS if f" {state} " in f"{line} "), None)
        if state is None:
            click.echo(line)
        else:
            click.echo(line.replace(state, click.style(state, fg=STATE_COLOURS[state]), 1))


def _nodes(run: Any) -> int | None:
    return len(run.nodes) or getattr(run, "nodes_asked", None)


def _age(moment: float | None) -> str:
    if moment is None:
        return "-"
    seconds = max(0, int(time.time() - moment))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
