"""clusterkit attach"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import cluster_options, json_option, print_json, run_argument
from clusterkit.cli.following import follow
from clusterkit.ui.spinner import spinner


@click.command(
    "attach",
    epilog="Examples: clusterkit attach last;  clusterkit attach ddp-1122 --cluster k8s",
)
@run_argument
@cluster_options("Where the run is, if another machine has submitted it.")
@click.option("-d", "--detach", is_flag=True, help="Return as soon as its supervisor runs.")
@json_option
def command(
    run: str, cluster: str | None, clusters_file: str | None, detach: bool, as_json: bool
) -> int:
    """Follow a run to its end, as submit does.

    A run goes on by itself. When its supervisor process is gone (the machine was switched off, the
    process killed), nobody starts lost nodes again or records how the run ends: attach starts a new
    supervisor. A run that has ended meanwhile is started again if it failed and has restarts left.
    Ctrl-C asks: detach or cancel.

    With --cluster it takes up a run that was submitted from another machine or folder, where the
    cluster keeps a record of it (Kubernetes): it becomes a run of this machine, its logs are read
    from the beginning, and status, logs, metrics and cancel work. Its former supervisor stops.
    """
    watched = cluster is None and api.get(run).watched
    with spinner(f"asking cluster {cluster}" if cluster else "attaching"):
        found = api.attach(run, cluster=cluster, clusters_file=clusters_file)
    if watched:
        click.echo(f"note: {found.id} already has a supervisor", err=True)
    if detach:
        if as_json:
            print_json(found.status())
        else:
            click.echo(found.id)
        return 0
    return follow(found, as_json)
