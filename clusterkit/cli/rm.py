"""clusterkit rm"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import runs_argument
from clusterkit.ui.spinner import spinner


@click.command("rm", epilog="Example: clusterkit rm last")
@runs_argument
@click.option("--force", is_flag=True, help="Also where a host does not answer.")
def command(runs: tuple[str, ...], force: bool) -> None:
    """Remove the folders of runs that have ended: logs, metrics and checkpoints in them, here
    and on the run's hosts.

    RUN is a run's id, the beginning of one, or `last`. Where a host does not answer, the run
    stays, so that it can be removed there later; --force removes it here all the same.
    """
    chosen = [api.get(name) for name in runs]
    for run in chosen:
        with spinner(f"removing {run.id}"):
            run.delete(force=force)
        click.echo(run.id)
