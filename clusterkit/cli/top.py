"""clusterkit top"""

from __future__ import annotations

import click

from clusterkit.cli.common import complete_run
from clusterkit.cli.following import check_terminal, show


@click.command("top", epilog="Examples: clusterkit top;  clusterkit top last")
@click.argument("run", metavar="[RUN]", required=False, shell_complete=complete_run)
def command(run: str | None) -> None:
    """Watch runs in the terminal: ranks, curves, rounds, logs.

    RUN is a run's id, the beginning of one, or `last`; without it, a list of all runs to choose
    from. Keys stand at the bottom; q leaves, and the run goes on. All that is shown comes from the
    run's folder here: nodes open no port for it.
    """
    check_terminal()
    show(run)
