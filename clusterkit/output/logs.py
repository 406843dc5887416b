"""The logs of a run: their lines, merged and by page, and the marked lines in them.

A node's log holds one line per line of output, ``TIME RANK TEXT``; RANK is ``-`` for the launcher.

A marked line is ``@clusterkit`` and a JSON object with a key ``event``: ``start``, ``phase``,
``metrics``, ``checkpoint``, ``resumed``, ``optimizer``, ``end``, or those of
`clusterkit.runtime.bandwidth`. Any program can print them. Ranks report so because every backend
has logs; mostly rank 0 does.
"""

from __future__ import annotations

import calendar
import heapq
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

MARK = "@clusterkit "
"""What a marked line begins with."""
POLL_SECONDS = 0.1
BATCH_LINES = 4096
_CHUNK = 1 << 18
LONGEST_LINE = 16 << 20
PAGE_SCAN = 256 << 20
"""Bytes that are looked at for one page: a word that stands nowhere holds nobody up for long."""
_NEWS = 4 << 20
"""Bytes after a place; whoever is further behind than that begins at the end again."""
_Wanted = Callable[[bytes, int], list[tuple[int, bytes]]]
"""Which of some lines, that begin at a place of a log; with their places."""
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


HEAD = re.compile(rb"[0-9T:-]{19}\.[0-9]{6}Z (-|[0-9]{1,9}) ")
"""Before the text of a line in a node's log; holds who said it."""


def parse_mark(text: str) -> dict[str, Any] | None:
    """Return the object of a marked line; None for any other line, also a torn one."""
    if not text.startswith(MARK):
        return None
    document = text[len(MARK) :]
    try:
        event = msgspec.json.decode(document)
    except msgspec.DecodeError:
        try:
            event = json.loads(document)  # accepts NaN, which programs print
        except ValueError:
            return None
    return event if isinstance(event, dict) and "event" in event else None


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a finite number below 1e300; true and false are none."""
    return type(value) in (int, float) and -1e300 < value < 1e300


def marked(data: bytes, node: int, attempt: int = 1, rank: int | None = None) -> Iterator[LogLine]:
    """The marked lines of ranks, or of one, among whole lines. The others, of which there may be
    millions, are passed over without being read."""
    mark = (" " if rank is None else f" {rank} ").encode()
    at = 0
    while (at := data.find(mark + MARK.encode(), at)) >= 0:
        begin, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
        head = HEAD.match(data, begin)
        if head is not None and head.end() == at + len(mark) and head[1] != b"-":
            yield from parse_lines(data[begin:end], node, attempt)
        at = end


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


class Page(Struct, frozen=True):
    """Whole lines of a node's log, each with the number of its first byte, its place."""

    lines: list[tuple[int, bytes]] = []
    before: int = 0
    """Where to go on backwards; 0: this was the log's beginning."""
    after: int = 0
    """Where to go on."""
    skipped: bool = False
    """There was too much after the place that was asked for: these are the last lines."""

    def parsed(self, node: int, attempt: int) -> list[LogLine]:
        text = b"\n".join([text for _, text in self.lines])
        return list(parse_lines(text, node, attempt)) if self.lines else []


def page(
    path: Path,
    rank: int | None = None,
    search: str = "",
    before: int | None = None,
    after: int | None = None,
    *,
    most: int,
    scan: float = PAGE_SCAN,
) -> Page:
    """Lines of a log: its last ones, those before a place, or all those after one.

    Args:
        rank: its lines alone; None: all.
        search: only lines whose text holds this, whatever its case; a blank finds JSON's
            punctuation, too.
        most: how many at most, but for those after a place.
        scan: how many bytes are looked at.
    """
    try:
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            wanted = _wanted(rank, search)
            if after is not None and after <= size <= after + _NEWS:
                data = os.pread(file.fileno(), size - after, after)
                data = data[: data.rfind(b"\n") + 1]
                return Page(wanted(data, after), 0, after + len(data))
            end = size if before is None else min(before, size)
            found = _older(file.fileno(), end, wanted, most, scan)
    except OSError:  # its node has not started, or writes elsewhere
        return Page()
    return msgspec.structs.replace(found, skipped=after is not None and size > 0)


def _wanted(rank: int | None, search: str) -> _Wanted:
    """Finds the lines of a rank that hold a word among whole lines that begin at a place."""
    name = rb"(?:-|[0-9]+)" if rank is None else str(rank).encode()
    header = re.compile(rb"[0-9T:-]{19}\.[0-9]{6}Z " + name + rb" ")
    # Where a marked line is shown with blanks, it has JSON between the words. One pattern for all
    # blanks in a row: several would be tried in every way that there is.
    words = re.split(rb'[":,]* [ ":,]*', search.encode())
    pattern = rb'[ ":,]+'.join(map(re.escape, words))
    word = re.compile(pattern, re.IGNORECASE) if search else None

    def find(data: bytes, at: int) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        if not data or (word is not None and word.search(data) is None):
            return found
        for text in data.removesuffix(b"\n").split(b"\n"):
            head = header.match(text)
            inside = word is None or word.search(text, head.end() if head else 0)
            if (head or rank is None) and inside:
                found.append((at, text))
            at += len(text) + 1
        return found

    return find


def _older(file: int, end: int, wanted: _Wanted, most: int, scan: float) -> Page:
    lines: list[tuple[int, bytes]] = []
    chunk, scanned, after, place = _CHUNK, 0, None, end
    while place > 0 and len(lines) < most and scanned < scan:
        begin = max(0, place - chunk)
        data = os.pread(file, place - begin, begin)
        scanned += len(data)
        last = data.rfind(b"\n") + 1  # a line that is not whole yet comes with the news
        first = data.find(b"\n") + 1 if begin else 0
        if begin and (not first or first >= last) and chunk < LONGEST_LINE:
            chunk *= 2  # one long line
            continue
        after = begin + last if after is None else after
        data, place, chunk = data[first:last], begin + first if first < last else begin, _CHUNK
        lines = wanted(data, place) + lines
    if len(lines) > most:
        lines = lines[-most:]
        place = lines[0][0]
    return Page(lines, place, end if after is None else after)


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
