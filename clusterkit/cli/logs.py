"""clusterkit logs"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click
import msgspec

from clusterkit import api
from clusterkit.cli.common import json_option, run_argument
from clusterkit.output import tracebacks
from clusterkit.output.logs import LogLine
from clusterkit.run.folder import Event
from clusterkit.ui.formatting import log_text, terminal_filter


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
    """Show the log lines of all nodes and ranks, in order of time.

    RUN is a run's id, the beginning of one, or `last`. With --json a list of objects
    {time node rank text attempt}; with --follow as well, one object per line. With --follow,
    what happened beside the program (a restart, and what failed before it) goes to stderr.

    A terminal gets a program's colours, but no other escape sequences; a file or pipe gets all as
    it was written. torchrun's own traceback, which follows every failure of a rank, is shown as
    one line; --raw and --json give all of it.
    """

    def note(event: Event) -> None:
        if follow:
            click.echo(f"note: {event.text}", err=True)

    batches = api.get(run).log_batches(rank=rank, node=node, follow=follow, note=note)
    if as_json and not follow:
        _print_list(batches)
        return
    shown = terminal_filter(sys.stdout)
    # Thousands of lines at once: written one by one, two million would take a minute.
    for batch in batches if as_json or raw else tracebacks.folded(batches):
        if as_json:
            text = msgspec.json.Encoder().encode_lines(batch).decode()
        elif raw:
            text = "".join([f"{shown(line.text)}\n" for line in batch])
        else:
            text = "".join([f"{shown(log_text(line))}\n" for line in batch])
        sys.stdout.write(text)
        sys.stdout.flush()


def _print_list(batches: Iterable[list[LogLine]]) -> None:
    """As `clusterkit.cli.common.print_json` would print all lines, without holding them all."""
    before = "[\n"
    for batch in filter(None, batches):
        inside = msgspec.json.format(msgspec.json.encode(batch), indent=2)[2:-2]
        sys.stdout.write(before + inside.decode())
        before = ",\n"
    sys.stdout.write("[]\n" if before == "[\n" else "\n]\n")
