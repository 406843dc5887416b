"""The merged log of a run, and the marked lines in it by which rank 0 reports.

A node's log holds one line per line of output, ``TIME RANK TEXT``; RANK is ``-`` for what
the launcher says. Rank 0 reports in it by marked lines (`clusterkit.marks`).
"""

from __future__ import annotations

import calendar
import heapq
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from typing import Any

from msgspec import Struct

from clusterkit.marks import MARK, parse_mark

POLL_SECONDS = 0.1
BATCH_LINES = 4096
_CHUNK = 1 << 18
# 2026-11-21T20:11:58.123456Z 3 text
_LINE = re.compile(r"^(?:([0-9T:-]{19})\.([0-9]{6})Z (-|[0-9]{1,9}) )?(.*)$", re.MULTILINE)
_TORCH_PREFIX = re.compile(r"\A\[rank\d+\]:(?: |\Z)")


class LogLine(Struct, frozen=True, gc=False):
    """One line of output: Unix time, node rank, rank (None: the launcher), text without newline."""

    time: float
    node: int
    rank: int | None
    text: str
    attempt: int = 1

    @property
    def event(self) -> dict[str, Any] | None:
        """The JSON object of a marked line; None for any other line."""
        return parse_mark(self.text) if self.text.startswith(MARK) else None


def parse_lines(data: bytes, node: int, attempt: int = 1) -> Iterator[LogLine]:
    """The lines of a piece of a node's log that does not end with a newline.

    One of another form becomes the text of a line without a time.
    """
    # One search over all of it: a log may have millions of lines.
    for stamp, micros, rank, text in _LINE.findall(data.decode(errors="replace")):
        second = _unix_second(stamp)
        if second is None:
            whole = f"{stamp}.{micros}Z {rank} {text}" if stamp else text
            yield LogLine(0.0, node, None, whole, attempt)
        else:
            number = None if rank == "-" else int(rank)
            yield LogLine(second + int(micros) / 1e6, node, number, text, attempt)


@lru_cache(maxsize=1024)
def _unix_second(stamp: str) -> int | None:
    # Cached: many lines are written within one second.
    try:
        return calendar.timegm(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


class NodeLog:
    """Reads one node's growing log; ``get(offset, limit)`` gives bytes; None: no log yet."""

    def __init__(self, node: int, attempt: int, get: Callable[[int, int], bytes | None]) -> None:
        self._node = node
        self._attempt = attempt
        self._get = get
        self._offset = 0
        self._rest = b""

    def available(self) -> Iterator[LogLine]:
        """The whole lines that are there by now and were not given before."""
        while data := self._get(self._offset, _CHUNK):
            self._offset += len(data)
            whole, newline, rest = data.rpartition(b"\n")
            if newline:
                whole, self._rest = self._rest + whole, rest
                yield from parse_lines(whole, self._node, self._attempt)
            else:
                self._rest += data

    def remainder(self) -> Iterator[LogLine]:
        """A last line that never got its newline."""
        if self._rest:
            rest, self._rest = self._rest, b""
            yield from parse_lines(rest, self._node, self._attempt)


def merged(
    logs: Sequence[NodeLog], follow: Callable[[], bool] | None = None
) -> Iterator[list[LogLine]]:
    """The lines of several nodes in the order of their times, at most BATCH_LINES at once.

    Args:
        follow: asked when there is nothing new; while it says True, more is waited for.
            None: what is there now, and no more.
    """
    while True:
        more = follow is not None and follow()
        yield from _batches(log.available() for log in logs)
        if not more:
            break
        time.sleep(POLL_SECONDS)
    yield from _batches(log.remainder() for log in logs)


def _batches(parts: Iterable[Iterator[LogLine]]) -> Iterator[list[LogLine]]:
    lines = heapq.merge(*parts, key=attrgetter("time"))
    while batch := list(islice(lines, BATCH_LINES)):
        yield batch


def metrics(lines: Iterable[LogLine]) -> Iterator[dict[str, Any]]:
    """The ``metrics`` events, without the key ``event``.

    A restarted run repeats the steps since its checkpoint; both tellings are given.
    """
    for line in lines:
        event = line.event
        if event is not None and event["event"] == "metrics":
            yield {key: value for key, value in event.items() if key != "event"}


def without_rank(text: str) -> str:
    """A line without the ``[rank3]: `` that torch puts before those of a traceback."""
    return _TORCH_PREFIX.sub("", text, count=1)


def readable(event: dict[str, Any]) -> str:
    """A marked line for people."""
    kind = str(event["event"])
    fields = {key: value for key, value in event.items() if key != "event"}
    if kind == "metrics" and "step" in fields:
        kind = f"step {fields.pop('step')}"
    if kind == "phase" and "name" in fields:
        kind = f"phase {fields.pop('name')}"
        fields.pop("started_at", None)
    return kind + "".join(f"  {key} {_short(value)}" for key, value in fields.items())


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
