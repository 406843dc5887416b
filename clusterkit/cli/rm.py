"""clusterkit rm"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import complete_run


@click.command("rm", epilog="Example: clusterkit rm last")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, shell_complete=complete_run)
def command(runs: tuple[str, ...]) -> None:
    """Remove the folders of runs that have ended: logs, metrics and checkpoints in them.

    RUN is a run's id, the beginning of one, or `last`.
    """
    chosen = [api.get(name) for name in runs]
    for run in chosen:
        run.delete()
        click.echo(run.id)
