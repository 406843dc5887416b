"""The merged log of a run, and the marked lines in it by which rank 0 reports.

A node's log holds one line per line of output, ``TIME RANK TEXT``; RANK is ``-`` for what
the launcher says. Rank 0 reports in it by marked lines (`clusterkit.marks`).
"""

from __future__ import annotations

import calendar
import heapq
import mmap
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from msgspec import Struct

from clusterkit.files import size_of
from clusterkit.marks import MARK, parse_mark

POLL_SECONDS = 0.1
BATCH_LINES = 4096
_CHUNK = 1 << 18
_TAIL_MOST = 16 << 20
"""How far back from the end of a log `LogTail` looks for lines."""
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


class GrowingFile:
    """What is new at the end of a file: whole lines, in bounded pieces; one that was cut is read
    from its beginning again."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = str(path)
        self._offset = offset
        self._torn = offset > 0  # the first line that is read may lack its beginning

    def read(self, limit: int, *, skip: bool = False) -> bytes:
        """At most ``limit`` new bytes, ending with a newline; empty: nothing new.

        Args:
            skip: where there are more, the last of them, not the first.
        """
        try:
            size = os.stat(self._path).st_size
            if size == self._offset:
                return b""
            if size < self._offset:
                self._offset, self._torn = 0, False
            if skip and size - self._offset > limit:
                self._offset, self._torn = size - limit, True
            with open(self._path, "rb", buffering=0) as file:
                file.seek(self._offset)
                data = file.read(limit)
        except OSError:
            return b""
        end = data.rfind(b"\n") + 1
        if not end:
            if len(data) == limit:  # of one line longer than that the rest is left out as well
                self._offset, self._torn = self._offset + limit, True
            return b""
        begin = data.find(b"\n") + 1 if self._torn else 0
        self._offset, self._torn = self._offset + end, False
        return data[begin:end]

    @property
    def more(self) -> bool:
        """Whether there is anything new, an unfinished line included."""
        try:
            return os.stat(self._path).st_size > self._offset
        except OSError:
            return False


class LogTail:
    """The newest lines of one node's log, and then those that come.

    Args:
        rank: its lines alone; ``-``: the launcher's; None: all.
        lines: how many of the newest to begin with. They are looked for in the last 16 MiB.
    """

    def __init__(
        self, path: Path, node: int, attempt: int, rank: int | str | None = None, lines: int = 500
    ) -> None:
        self._node, self._attempt = node, attempt
        self._word = None if rank is None else b" %s " % str(rank).encode()
        self._file = GrowingFile(path)
        self._first: deque[LogLine] = deque(maxlen=lines)
        size, back = size_of(path), _CHUNK
        while True:
            self._file = GrowingFile(path, max(0, size - back))
            self._first.clear()
            while data := self._file.read(_TAIL_MOST):
                self._first.extend(self._lines(data))
            if len(self._first) == lines or back >= min(size, _TAIL_MOST):
                break
            back *= 8

    def read(self) -> list[LogLine]:
        """What was not given before, a piece at a time."""
        found = [*self._first]
        self._first.clear()
        found += self._lines(self._file.read(_CHUNK, skip=True))
        return found

    def _lines(self, data: bytes) -> Iterator[LogLine]:
        if self._word is not None:
            at = len("2026-11-21T20:11:58.123456Z")
            lines = data.split(b"\n")
            data = b"\n".join([line for line in lines if line.startswith(self._word, at)])
        data = data.removesuffix(b"\n")
        return parse_lines(data, self._node, self._attempt) if data else iter(())


def search(
    path: Path, node: int, attempt: int, text: str, rank: int | None = None, most: int = 1000
) -> list[LogLine]:
    """The last ``most`` lines of a node's log that hold ``text``, whatever its case."""
    found: deque[LogLine] = deque(maxlen=most)
    word = re.compile(re.escape(text.encode()), re.IGNORECASE)
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            done = 0
            for match in word.finditer(data):
                if match.start() < done:
                    continue  # in the line that was found last
                begin = data.rfind(b"\n", 0, match.start()) + 1
                end = data.find(b"\n", match.end())
                done = len(data) if end < 0 else end
                for line in parse_lines(data[begin:done], node, attempt):
                    if (
                        rank is None or line.rank == rank
                    ) and text.casefold() in line.text.casefold():
                        found.append(line)
    except (OSError, ValueError):  # there is none, or nothing in it
        return []
    return list(found)


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
