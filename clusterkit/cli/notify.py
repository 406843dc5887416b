"""clusterkit notify"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import cluster_options


@click.command("notify", epilog="Example: clusterkit notify --cluster lab")
@cluster_options("Entry of the cluster file.", "local")
def command(cluster: str, clusters_file: str | None) -> None:
    """Send a test notification.

    `notify` in a cluster's entry names a command or an address that is notified when a run ends,
    fails or starts again. This sends it the event `test` and waits for the answer; exit code 1 if
    it was not taken.
    """
    click.echo(api.notify(cluster, clusters_file), err=True)
