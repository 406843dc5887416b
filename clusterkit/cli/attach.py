"""clusterkit attach"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import cluster_options, json_option, print_json, run_argument, verb
from clusterkit.cli.following import follow
from clusterkit.ui.spinner import spinner


@verb("attach", "clusterkit attach last", "clusterkit attach ddp-1122 --cluster k8s", acts=True)
@run_argument
@cluster_options("Where the run is, if it was submitted from another machine.")
@click.option("-d", "--detach", is_flag=True, help="Return once the supervisor runs.")
@json_option
def command(
    run: str, cluster: str | None, clusters_file: str | None, detach: bool, as_json: bool
) -> int:
    """Follow a run to its end, as submit does, and start its supervisor if that is gone.

    A run does not need its supervisor, a process on the machine that submitted it. But when that
    process is gone (killed, or the machine was switched off), lost nodes are not started again and
    the run's end is not recorded: attach starts a new one. If the run has failed meanwhile and has
    restarts left, it is started again. Ctrl-C asks whether to detach or to cancel.

    With --cluster, take over a run that was submitted from another machine or folder, if the
    cluster keeps a record of it (Kubernetes and Slurm do): it becomes a run of this machine, its
    logs are read from the beginning, and status, logs, metrics and cancel work. Its former
    supervisor stops.
    """
    watched = cluster is None and api.get(run).supervised
    with spinner(f"asking cluster {cluster}" if cluster else "attaching"):
        found = api.attach(run, cluster=cluster, clusters_file=clusters_file)
    if watched:
        click.echo(f"note: {found.id} already has a supervisor", err=True)
    if detach:
        status = found.status()
        if status.state.final and not found.supervised:
            click.echo(
                f"note: {found.id} has ended ({status.state}): nothing is left to do", err=True
            )
        if as_json:
            print_json(status)
        else:
            click.echo(found.id)
        return 0
    return follow(found, as_json)
