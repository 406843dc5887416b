"""clusterkit notify"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import cluster_options


@click.command("notify", epilog="Example: clusterkit notify --cluster lab")
@cluster_options("Entry of the cluster file.", "local")
def command(cluster: str, clusters_file: str | None) -> None:
    """Try out whom a cluster's entry tells when a run ends, fails or starts again.

    Sends the event `test` as `notify` in the entry says, and waits for the answer. Exits with 1
    if it was not taken.
    """
    click.echo(api.notify(cluster, clusters_file), err=True)
