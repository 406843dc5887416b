"""clusterkit rm"""

from __future__ import annotations

import sys
import time

import click

from clusterkit import api
from clusterkit.cli.common import complete_run, parse_duration, state_option, verb
from clusterkit.errors import BadInput, pluralize
from clusterkit.run.status import RunStatus
from clusterkit.ui.spinner import spinner


@verb("rm", "clusterkit rm last", "clusterkit rm --older-than 30d --state FAILED", acts=True)
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=complete_run)
@click.option("--older-than", metavar="TIME", callback=parse_duration,
              help="Runs that ended so long ago, 12h or 30d, instead of RUN.")  # fmt: skip
@state_option
@click.option("-y", "--yes", is_flag=True, help="Do not ask before runs are removed by age or "
              "state.")  # fmt: skip
@click.option("--force", is_flag=True, help="Remove it here even if a host does not answer.")
def command(
    runs: tuple[str, ...], older_than: float | None, states: tuple[str, ...], yes: bool, force: bool
) -> None:
    """Remove the folders of runs that have ended, here and on their hosts: logs, metrics,
    checkpoints.

    RUN is a run's id, the beginning of one, or `last`. --older-than and --state choose runs of this
    machine instead; a terminal is asked first, and without a terminal --yes is needed. If a host
    does not answer, the folder here is kept, so that `rm` can be repeated later; --force removes it
    all the same.
    """
    by_filter = older_than is not None or bool(states)
    if by_filter == bool(runs):
        raise click.UsageError("Give runs, or --older-than and --state.")
    chosen = list({run.id: run for run in map(api.get, runs)}.values())
    if by_filter:
        chosen = [
            api.get(status.run)
            for status in api.runs()
            if _has_ended(status, older_than or 0.0) and (not states or status.state in states)
        ]
        if not chosen:
            click.echo("no run matches", err=True)
        elif not yes:
            if not sys.stdin.isatty():
                raise BadInput(f"{pluralize(len(chosen), 'run')} to remove", hint="add --yes")
            names = " ".join(run.id for run in chosen)
            click.confirm(f"remove {len(chosen)} runs: {names}?", abort=True, err=True)
    for run in chosen:
        with spinner(f"removing {run.id}"):
            run.delete(force=force)
        click.echo(run.id)


def _has_ended(status: RunStatus, seconds: float) -> bool:
    ended = status.finished_at
    return status.state.final and ended is not None and ended <= time.time() - seconds
