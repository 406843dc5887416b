"""clusterkit shell"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import run_argument, verb


@verb("shell", "clusterkit shell last --node 3")
@run_argument
@click.option("--node", type=click.IntRange(0), metavar="N", help="On this node. Default: 0.")
@click.option("--rank", type=click.IntRange(0), metavar="R",
              help="On this rank's node, with its environment.")  # fmt: skip
def command(run: str, node: int | None, rank: int | None) -> int:
    """Open a shell beside the ranks of a run.

    As `clusterkit exec -t` with your shell on that machine or in that container.
    """
    return api.get(run).exec_here([], node=node, rank=rank, terminal=True)
