"""clusterkit clusters"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import json_option, print_json, table, verb
from clusterkit.errors import EXIT_FAILURE
from clusterkit.ui.spinner import spinner


@verb("clusters", "clusterkit clusters", "clusterkit clusters --json | jq '.[].name'")
@click.option(
    "--cluster-file",
    "clusters_file",
    metavar="FILE",
    type=click.Path(),
    help="Cluster file. Default: the nearest clusters.yaml, here or in a folder above.",
)
@json_option
def command(clusters_file: str | None, as_json: bool) -> int:  # fmt: skip
    """List the clusters of the cluster file, and which can be reached.

    Each is asked as submit asks it, all at once; nothing is started or changed. The exit code is 1
    if one cannot be used.
    """
    with spinner("asking the clusters"):
        found = api.clusters(clusters_file)
    if as_json:
        print_json(found)
    else:
        rows = [
            (each.name, each.backend, each.nodes, each.gpus, each.error or "can be reached")
            for each in found
        ]
        click.echo(table(rows, ("CLUSTER", "BACKEND", "NODES", "GPUS", "STATE"),
                         drop=("GPUS", "NODES", "BACKEND")))  # fmt: skip
    return EXIT_FAILURE if any(each.error for each in found) else 0
