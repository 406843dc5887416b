"""clusterkit notify"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import cluster_options, verb


@verb("notify", "clusterkit notify --cluster lab")
@cluster_options("Whose `notify` to use: an entry of the cluster file.", "local")
def command(cluster: str, clusters_file: str | None) -> None:
    """Send a test notification.

    `notify` in a cluster's entry names a command or a URL that is notified when a run ends, fails
    or restarts. This verb sends it the event `test` and waits for the answer. The exit code is 1
    if the notification was not accepted.
    """
    click.echo(api.notify(cluster, clusters_file), err=True)
