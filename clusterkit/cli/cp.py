"""clusterkit cp"""

from __future__ import annotations

import sys

import click

from clusterkit import api
from clusterkit.cli.common import verb


@verb(
    "cp",
    "clusterkit cp last:checkpoints/step-100/model.pt .",
    "clusterkit cp fixed.yaml last:/data/conf.yaml --node 1",
)
@click.argument("source")
@click.argument("dest")
@click.option("--node", type=click.IntRange(0), metavar="N",
              help="Of or to this node. Default: 0.")  # fmt: skip
def command(source: str, dest: str, node: int | None) -> None:
    """Copy a file from a node of a run, or to it.

    One of SOURCE and DEST is RUN:PATH; a relative PATH starts at the run's folder on the node. The
    file appears at its goal once all of it is there. Hosts over SSH, and this machine, have a run's
    files after its end as well.
    """
    shown = sys.stderr.isatty()

    def progress(done: int, size: int) -> None:
        if shown:
            share = 100 * done // size if size else 100
            click.echo(f"\r{share:3} % of {size / 1e6:.1f} MB", nl=False, err=True)

    try:
        api.cp(source, dest, node=node, progress=progress)
    finally:
        if shown:
            click.echo(err=True)
