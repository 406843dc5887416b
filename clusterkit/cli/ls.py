"""clusterkit ls"""

from __future__ import annotations

import time

import click

from clusterkit import api
from clusterkit.cli.common import STATE_COLOURS, json_option, print_json, table


@click.command("ls", epilog="Example: clusterkit ls --json | jq '.[0].state'")
@json_option
def command(as_json: bool) -> None:
    """List runs, newest first."""
    found = api.runs()
    if as_json:
        print_json(found)
        return
    if not found:
        click.echo("no runs yet: clusterkit submit jobs/ddp.yaml", err=True)
        return
    rows = [
        (run.run, run.state, str(len(run.nodes) or "-"), run.cluster, _ago(run.started_at))
        for run in found
    ]
    for line in table(rows, ("RUN", "STATE", "NODES", "CLUSTER", "STARTED")).splitlines():
        state = next((state for state in STATE_COLOURS if f" {state} " in f"{line} "), None)
        if state is None:
            click.echo(line)
        else:
            click.echo(line.replace(state, click.style(state, fg=STATE_COLOURS[state]), 1))


def _ago(moment: float | None) -> str:
    if moment is None:
        return "-"
    seconds = max(0, int(time.time() - moment))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"
