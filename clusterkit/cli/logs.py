"""clusterkit logs"""

from __future__ import annotations

import heapq
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, groupby, islice
from operator import itemgetter
from queue import Empty, Queue

import click
import msgspec

from clusterkit import api
from clusterkit.cli.common import json_option, parse_duration, runs_argument, verb
from clusterkit.errors import BadInput, pluralize
from clusterkit.output import tracebacks
from clusterkit.run.folder import Event
from clusterkit.run.logs import BATCH_LINES, POLL_SECONDS, LogLine, readable
from clusterkit.ui.formatting import log_text, terminal_filter

_Batches = Iterator[tuple[str, list[LogLine]]]
"""Lines, and the run that they are of."""
_MOST_WAITING = 100_000
"""How many new lines of several runs are sorted at once."""


def _parse_pattern(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> re.Pattern[str] | None:
    try:
        return None if value is None else re.compile(value)
    except re.error as error:
        raise click.BadParameter(f"{value!r}: {error}", ctx, param) from None


@verb(
    "logs",
    "clusterkit logs -f last --rank 0",
    "clusterkit logs last --since 5m --grep Error",
    "clusterkit logs -f ddp-1 ddp-2",
)
@runs_argument
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
    runs: tuple[str, ...],
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

    RUN is a run's id, the beginning of one, or `last`. Of several runs, each line begins with its
    run, and they are in order of time together. --json prints a list of objects {time node rank
    text attempt}, of several runs with `run` as well; together with --follow, one object per line.
    --follow also prints the run's events (a restart, and the failure before it), on stderr.

    On a terminal a program's colours are shown and its other escape sequences removed; a file or
    pipe gets them unchanged. A carriage return ends a line, a byte that is not UTF-8 is shown as
    U+FFFD, and a line above 64 KiB is split. torchrun's own traceback, which follows every failure
    of a rank, is shown as one line; --raw and --json print all of it. --grep matches what the
    program wrote, and a marked line also as it is shown.
    """
    start = None if since is None else time.time() - since
    found = list({run.id: run for run in map(api.get, runs)}.values())
    several = len(found) > 1
    if attempt is not None and not follow:
        for run in found:
            if attempt > (last := run.status().attempt):
                raise BadInput(f"--attempt: run {run.id} has {pluralize(last, 'attempt')}")
    if tail is not None and follow:
        raise BadInput("--tail, --follow: only one of them", hint="--follow prints all lines")
    filtered = start is not None or attempt is not None or grep is not None

    def wanted(line: LogLine) -> bool:
        return (
            (start is None or line.time >= start)
            and (attempt is None or line.attempt == attempt)
            and (grep is None or _matches(grep, line))
        )

    def batches_of(run: api.Run) -> Iterator[list[LogLine]]:
        def note(event: Event) -> None:
            if follow:
                of = f"{run.id}: " if several else ""
                click.echo(f"note: {of}{event.text}", err=True)

        if tail is not None and not filtered:
            batches = iter([run.tail(tail, rank=rank, node=node)])
        else:
            batches = run.log_batches(rank=rank, node=node, follow=follow, note=note)
            if filtered:
                batches = ([line for line in batch if wanted(line)] for batch in batches)
            if tail is not None:
                batches = iter([[*deque(chain.from_iterable(batches), maxlen=tail)]])
        return batches if as_json or raw else tracebacks.collapse_torchrun_reports(batches)

    streams = {run.id: batches_of(run) for run in found}
    merged: _Batches
    if not several:
        merged = ((found[0].id, batch) for batch in streams[found[0].id])
    elif follow:
        merged = _followed(streams)
    else:
        merged = _merged(streams, tail)
    if as_json and not follow:
        _print_list(_objects(name, batch, several) for name, batch in merged)
        return
    clean = terminal_filter(sys.stdout)
    # In batches of thousands of lines: one by one, two million lines would take a minute.
    for name, batch in merged:
        if as_json:
            text = msgspec.json.Encoder().encode_lines(_objects(name, batch, several)).decode()
        elif raw:
            text = "".join([f"{clean(line.text)}\n" for line in batch])
        else:
            of = f"{name} " if several else ""
            text = "".join([f"{of}{clean(log_text(line))}\n" for line in batch])
        sys.stdout.write(text)
        sys.stdout.flush()


def _matches(pattern: re.Pattern[str], line: LogLine) -> bool:
    if pattern.search(line.text) is not None:
        return True
    event = line.event
    return event is not None and pattern.search(readable(event)) is not None


def _merged(streams: Mapping[str, Iterator[list[LogLine]]], tail: int | None) -> _Batches:
    """Yield the lines of several runs in the order of their times; the last ``tail`` of them."""

    def of(name: str) -> Iterator[tuple[str, LogLine]]:
        return ((name, line) for batch in streams[name] for line in batch)

    lines: Iterable[tuple[str, LogLine]]
    lines = heapq.merge(*map(of, streams), key=lambda pair: pair[1].time)
    return _grouped(lines if tail is None else deque(lines, maxlen=tail))


def _grouped(lines: Iterable[tuple[str, LogLine]]) -> _Batches:
    for name, group in groupby(lines, key=itemgetter(0)):
        while batch := [line for _, line in islice(group, BATCH_LINES)]:
            yield name, batch


def _followed(streams: Mapping[str, Iterator[list[LogLine]]]) -> _Batches:
    """Yield the lines of several runs as they come; those that come together in order of time."""
    queue: Queue[tuple[str, list[LogLine] | BaseException | None]] = Queue(64)

    def read(name: str) -> None:
        end = None
        try:
            for batch in streams[name]:
                queue.put((name, batch))
        except BaseException as error:
            end = error
        queue.put((name, end))

    for name in streams:
        threading.Thread(target=read, args=(name,), name=f"logs {name}", daemon=True).start()
    left, waiting = set(streams), list[tuple[str, LogLine]]()
    while left:
        try:
            name, batch = queue.get(timeout=POLL_SECONDS if waiting else None)
        except Empty:
            batch = []
        if isinstance(batch, BaseException):
            raise batch
        if batch is None:
            left.discard(name)
        else:
            waiting += [(name, line) for line in batch]
        if waiting and (not batch or len(waiting) > _MOST_WAITING):
            yield from _grouped(sorted(waiting, key=lambda pair: pair[1].time))
            waiting.clear()


def _objects(name: str, batch: list[LogLine], several: bool) -> list[object]:
    if not several:
        return [*batch]
    return [{"run": name, **msgspec.to_builtins(line)} for line in batch]


def _print_list(batches: Iterable[list[object]]) -> None:
    """Print lines as `print_json` would, without keeping all of them in memory."""
    before = "[\n"
    for batch in filter(None, batches):
        inside = msgspec.json.format(msgspec.json.encode(batch), indent=2)[2:-2]
        sys.stdout.write(before + inside.decode())
        before = ",\n"
    sys.stdout.write("[]\n" if before == "[\n" else "\n]\n")
