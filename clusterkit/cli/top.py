"""clusterkit top"""

from __future__ import annotations

import click

from clusterkit.cli.common import complete_run, verb
from clusterkit.cli.following import check_terminal, show_top


@verb("top", "clusterkit top", "clusterkit top last")
@click.argument("run", metavar="[RUN]", required=False, shell_complete=complete_run)
def command(run: str | None) -> None:
    """Watch runs in the terminal: ranks, curves, rounds, logs.

    RUN is a run's id, the beginning of one, or `last`; without it, all runs are listed to choose
    from. The bottom line shows the keys; q quits, and the run continues. Everything is read from
    the run's folder on this machine: nodes open no port for it.
    """
    check_terminal()
    show_top(run)
