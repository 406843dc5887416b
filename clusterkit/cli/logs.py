"""clusterkit logs"""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections import deque
from collections.abc import Iterable

import click
import msgspec

from clusterkit import api
from clusterkit.cli.common import json_option, parse_duration, run_argument, verb
from clusterkit.errors import BadInput, pluralize
from clusterkit.output import tracebacks
from clusterkit.run.folder import Event
from clusterkit.run.logs import LogLine
from clusterkit.ui.formatting import log_text, terminal_filter


def _parse_pattern(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> re.Pattern[str] | None:
    try:
        return None if value is None else re.compile(value)
    except re.error as error:
        raise click.BadParameter(f"{value!r}: {error}", ctx, param) from None


@verb("logs", "clusterkit logs -f last --rank 0", "clusterkit logs last --since 5m --grep Error")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the run ends.")
@click.option("-r", "--rank", type=int, metavar="R", help="Only this rank.")
@click.option("--node", type=int, metavar="N", help="Only this node.")
@click.option(
    "--tail", type=click.IntRange(1), metavar="N", help="Only the last N lines, read from the end."
)
@click.option("--since", metavar="TIME", callback=parse_duration,
              help="Only lines of the last 90 (seconds), 5m or 2h.")  # fmt: skip
@click.option("--attempt", type=click.IntRange(1), metavar="K", help="Only this attempt.")
@click.option("--grep", metavar="REGEX", callback=_parse_pattern,
              help="Only lines in which this regular expression matches.")  # fmt: skip
@click.option("--raw", is_flag=True, help="Print only the text, as the program wrote it.")
@json_option
def command(
    run: str,
    follow: bool,
    rank: int | None,
    node: int | None,
    tail: int | None,
    since: float | None,
    attempt: int | None,
    grep: re.Pattern[str] | None,
    raw: bool,
    as_json: bool,
) -> None:
    """Show the log lines of all nodes and ranks, in order of time.

    RUN is a run's id, the beginning of one, or `last`. --json prints a list of objects
    {time node rank text attempt}; together with --follow, one object per line. --follow also
    prints the run's events (a restart, and the failure before it), on stderr.

    On a terminal a program's colours are shown and its other escape sequences removed; a file or
    pipe gets them unchanged. A carriage return ends a line, a byte that is not UTF-8 is shown as
    U+FFFD, and a line above 64 KiB is split. torchrun's own traceback, which follows every failure
    of a rank, is shown as one line; --raw and --json print all of it.
    """

    def note(event: Event) -> None:
        if follow:
            click.echo(f"note: {event.text}", err=True)

    start = None if since is None else time.time() - since
    found = api.get(run)
    if attempt is not None and not follow and attempt > (last := found.status().attempt):
        raise BadInput(f"--attempt: run {found.id} has {pluralize(last, 'attempt')}")

    def wanted(line: LogLine) -> bool:
        return (
            (start is None or line.time >= start)
            and (attempt is None or line.attempt == attempt)
            and (grep is None or grep.search(line.text) is not None)
        )

    filtered = start is not None or attempt is not None or grep is not None
    if tail is not None and follow:
        raise BadInput("--tail, --follow: only one of them", hint="--follow prints all lines")
    if tail is not None and not filtered:
        batches = iter([found.tail(tail, rank=rank, node=node)])
    else:
        batches = found.log_batches(rank=rank, node=node, follow=follow, note=note)
        if filtered:
            batches = ([line for line in batch if wanted(line)] for batch in batches)
        if tail is not None:
            batches = iter([[*deque(itertools.chain.from_iterable(batches), maxlen=tail)]])
    if as_json and not follow:
        _print_list(batches)
        return
    clean = terminal_filter(sys.stdout)
    # In batches of thousands of lines: one by one, two million lines would take a minute.
    for batch in batches if as_json or raw else tracebacks.collapse_torchrun_reports(batches):
        if as_json:
            text = msgspec.json.Encoder().encode_lines(batch).decode()
        elif raw:
            text = "".join([f"{clean(line.text)}\n" for line in batch])
        else:
            text = "".join([f"{clean(log_text(line))}\n" for line in batch])
        sys.stdout.write(text)
        sys.stdout.flush()


def _print_list(batches: Iterable[list[LogLine]]) -> None:
    """Print lines as `print_json` would, without keeping all of them in memory."""
    before = "[\n"
    for batch in filter(None, batches):
        inside = msgspec.json.format(msgspec.json.encode(batch), indent=2)[2:-2]
        sys.stdout.write(before + inside.decode())
        before = ",\n"
    sys.stdout.write("[]\n" if before == "[\n" else "\n]\n")
