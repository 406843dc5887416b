"""clusterkit stack"""

from __future__ import annotations

import sys

import click

from clusterkit import api
from clusterkit.cli.common import json_option, print_json, run_argument, verb
from clusterkit.ui.formatting import terminal_filter


@verb("stack", "clusterkit stack last", "clusterkit stack last --rank 7")
@run_argument
@click.option("--rank", type=click.IntRange(0), metavar="R",
              help="Only this rank, with the traceback of each of its threads.")  # fmt: skip
@json_option
def command(run: str, rank: int | None, as_json: bool) -> int:
    """Show where each rank is, while it goes on: its line of code, and its collective.

    Ranks at the same place are shown together. If ranks wait for another one, that is said first,
    as `clusterkit status` says it of a run that hangs.

    --json prints an object {run text ranks errors}; ranks is a list of {rank node pid at state
    waits trace}. The exit code is 1 if some nodes did not answer.
    """
    found = api.get(run).stack(rank)
    clean = terminal_filter(sys.stdout)
    if as_json:
        print_json(found)
    else:
        click.echo(clean(found.text.replace("; ", "\n")))
        if rank is not None:
            click.echo(clean(f"\n{found.ranks[0].trace.rstrip()}"))
    for error in found.errors:
        click.echo(f"error: {error}", err=True)
    return 1 if found.errors else 0
