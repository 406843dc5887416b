"""clusterkit logs"""

from __future__ import annotations

import click
import msgspec

from clusterkit import api, tracebacks
from clusterkit.cli.common import json_option, print_json, run_argument
from clusterkit.runs import Event
from clusterkit.ui.words import log_text


@click.command("logs", epilog="Example: clusterkit logs -f last --rank 0")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Wait for more until the run ends.")
@click.option("-r", "--rank", type=int, metavar="R", help="Only this rank.")
@click.option("-n", "--node", type=int, metavar="N", help="Only this node.")
@click.option("--raw", is_flag=True, help="The text alone, as the program wrote it.")
@json_option
def command(
    run: str, follow: bool, rank: int | None, node: int | None, raw: bool, as_json: bool
) -> None:
    """Lines of all nodes and ranks, in order of time.

    RUN is a run's id, the beginning of one, or `last`. With --json a list of objects
    {time node rank text attempt}; with --follow as well, one object per line. With --follow,
    what happened beside the program (a restart, and what failed before it) goes to stderr.

    torchrun's own traceback, which follows every failure of a rank, is shown as one line; --raw
    and --json give all of it.
    """

    def note(event: Event) -> None:
        if follow:
            click.echo(f"note: {event.text}", err=True)

    lines = api.log_lines(run, rank=rank, node=node, follow=follow, note=note)
    if as_json and not follow:
        print_json(list(lines))
        return
    for line in lines if as_json or raw else tracebacks.folded(lines):
        if as_json:
            click.echo(msgspec.json.encode(line).decode())
        else:
            click.echo(line.text if raw else log_text(line))
