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
from typing import Any

from msgspec import Struct

from clusterkit.marks import parse_mark

POLL_SECONDS = 0.1
_CHUNK = 1 << 20
# 2026-11-21T20:11:58.123456Z 3 text
_LINE = re.compile(r"(?s)([0-9T:-]{19})\.([0-9]{6})Z (-|[0-9]{1,9}) (.*)\Z")
_TORCH_PREFIX = re.compile(r"\A\[rank\d+\]:(?: |\Z)")


class LogLine(Struct, frozen=True):
    """One line of output: Unix time, node rank, rank (None: the launcher), text without newline."""

    time: float
    node: int
    rank: int | None
    text: str
    attempt: int = 1

    @property
    def event(self) -> dict[str, Any] | None:
        """The JSON object of a marked line; None for any other line."""
        return parse_mark(self.text)


def parse_line(raw: bytes, node: int, attempt: int = 1) -> LogLine:
    """One line of a node's log; one of another form becomes the text of a line without a time."""
    text = raw.decode(errors="replace")
    match = _LINE.match(text)
    second = _unix_second(match[1]) if match else None
    if match is None or second is None:
        return LogLine(0.0, node, None, text, attempt)
    rank = None if match[3] == "-" else int(match[3])
    return LogLine(second + int(match[2]) / 1e6, node, rank, match[4], attempt)


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
        self._last = (b"", 0.0)

    def available(self) -> Iterator[LogLine]:
        """The whole lines that are there by now and were not given before."""
        while data := self._get(self._offset, _CHUNK):
            self._offset += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for raw in lines:
                yield parse_line(raw, self._node, self._attempt)

    def remainder(self) -> Iterator[LogLine]:
        """A last line that never got its newline."""
        if self._rest:
            rest, self._rest = self._rest, b""
            yield parse_line(rest, self._node, self._attempt)


def merged(logs: Sequence[NodeLog], follow: Callable[[], bool] | None = None) -> Iterator[LogLine]:
    """The lines of several nodes in the order of their times.

    Args:
        follow: asked when there is nothing new; while it says True, more is waited for.
            None: what is there now, and no more.
    """
    while True:
        more = follow is not None and follow()
        yield from heapq.merge(*(log.available() for log in logs), key=_time)
        if not more:
            break
        time.sleep(POLL_SECONDS)
    yield from heapq.merge(*(log.remainder() for log in logs), key=_time)


def _time(line: LogLine) -> float:
    return line.time


def selected(
    lines: Iterable[LogLine], *, rank: int | None = None, node: int | None = None
) -> Iterator[LogLine]:
    """Only the lines of one rank, of one node, or of both."""
    for line in lines:
        if (rank is None or line.rank == rank) and (node is None or line.node == node):
            yield line


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
