"""Following a run from a terminal, and what Ctrl-C means meanwhile."""

from __future__ import annotations

import sys

import click

from clusterkit import api
from clusterkit.errors import EXIT_INTERRUPTED
from clusterkit.status import RunStatus


def follow(run: api.Run) -> RunStatus:
    """Show a run until it ends."""
    from clusterkit.ui import follow

    return follow.follow(run)


def interrupted(run: api.Run) -> RunStatus:
    """Ctrl-C: ask, where somebody can answer; otherwise, or when it comes again, cancel."""
    if sys.stdin and sys.stdin.isatty() and sys.stderr.isatty():
        try:
            answer = click.prompt(
                f"\n{run.id} still runs: detach from it, or cancel it?",
                type=click.Choice(["detach", "cancel", "d", "c"]),
                show_choices=False, default="detach", err=True,
            )  # fmt: skip
        except (click.Abort, KeyboardInterrupt):
            answer = "cancel"
        if answer.startswith("d"):
            click.echo(f"clusterkit logs -f {run.id} follows it again", err=True)
            return run.status()
    click.echo(f"cancelling {run.id}", err=True)
    run.cancel()
    sys.exit(EXIT_INTERRUPTED)
