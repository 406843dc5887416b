"""clusterkit rm"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import runs_argument, verb
from clusterkit.ui.spinner import spinner


@verb("rm", "clusterkit rm last")
@runs_argument
@click.option("--force", is_flag=True, help="Remove it here even if a host does not answer.")
def command(runs: tuple[str, ...], force: bool) -> None:
    """Remove the folders of runs that have ended, here and on their hosts: logs, metrics,
    checkpoints.

    RUN is a run's id, the beginning of one, or `last`. If a host does not answer, the folder here
    is kept, so that `rm` can be repeated later; --force removes it all the same.
    """
    chosen = [api.get(name) for name in runs]
    for run in chosen:
        with spinner(f"removing {run.id}"):
            run.delete(force=force)
        click.echo(run.id)
