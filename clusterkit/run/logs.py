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
import math
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
"""Bytes of a log that a search for one page reads at most."""
_MOST_NEW = 4 << 20
"""Bytes that a page shows after an offset at most; with more, it shows the end of the log."""
_Filter = Callable[[bytes, int], list[tuple[int, bytes]]]
"""Selects from whole lines, given the offset of the first; returns offsets and lines."""
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
"""What precedes the text of a line in a node's log; the group is its rank."""


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
    """Yield the marked lines of all ranks, or of one, among whole lines. Other lines, of which
    there may be millions, are skipped without being parsed."""
    mark = (" " if rank is None else f" {rank} ").encode()
    at = 0
    while (at := data.find(mark + MARK.encode(), at)) >= 0:
        begin, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
        head = HEAD.match(data, begin)
        if head is not None and head.end() == at + len(mark) and head[1] != b"-":
            yield from parse_lines(data[begin:end], node, attempt)
        at = end


def parse_lines(data: bytes, node: int, attempt: int = 1) -> Iterator[LogLine]:
    """Yield the lines of a piece of a node's log that does not end with a newline.

    A line of another form becomes the text of a `LogLine` with time 0.
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


class GrowingFile:
    """Reads what is new at the end of a file: whole lines, in bounded pieces. A file that was
    truncated is read from its beginning again."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = str(path)
        self._offset = offset
        self._torn = offset > 0  # the first line that is read may lack its beginning

    def read(self, limit: int, *, skip: bool = False) -> bytes:
        """Return at most ``limit`` new bytes, ending with a newline; empty: nothing is new. A
        longer line is returned whole, up to LONGEST_LINE.

        Args:
            skip: of more than ``limit`` bytes read the last, not the first.
        """
        try:
            size = os.stat(self._path).st_size
            if size == self._offset:
                return b""
            if size < self._offset:
                self._offset, self._torn = 0, False
            if skip and size - self._offset > limit:
                self._offset, self._torn = size - limit, True
            data = self._bytes(limit)
        except OSError:
            return b""
        end = data.rfind(b"\n") + 1
        if not end:
            if len(data) < limit:
                return b""
            if limit < LONGEST_LINE:
                return self.read(2 * limit)
            self._offset, self._torn = self._offset + limit, True  # its rest is left out as well
            return b""
        begin = data.find(b"\n") + 1 if self._torn else 0
        self._offset, self._torn = self._offset + end, False
        return data[begin:end]

    def read_unfinished(self) -> bytes:
        """Return the last line, which has no newline; empty: there is none."""
        try:
            data = self._bytes(LONGEST_LINE)
        except OSError:
            return b""
        self._offset += len(data)
        return data

    def _bytes(self, limit: int) -> bytes:
        with open(self._path, "rb", buffering=0) as file:
            file.seek(self._offset)
            return file.read(limit)

    @property
    def more(self) -> bool:
        """Whether there is anything new, an unfinished line included."""
        try:
            return os.stat(self._path).st_size > self._offset
        except OSError:
            return False


class NodeLog:
    """Reads the lines of one node's growing log."""

    def __init__(self, path: Path, node: int, attempt: int = 1) -> None:
        self._file, self._node, self._attempt = GrowingFile(path), node, attempt

    def available(self) -> Iterator[LogLine]:
        """Yield the whole lines that are new since the last call."""
        while data := self._file.read(_CHUNK):
            yield from parse_lines(data.removesuffix(b"\n"), self._node, self._attempt)

    def remainder(self) -> Iterator[LogLine]:
        """Yield the last line if it never got its newline."""
        if data := self._file.read_unfinished():
            yield from parse_lines(data.removesuffix(b"\n"), self._node, self._attempt)


def tail(path: Path, node: int, attempt: int, most: int) -> list[LogLine]:
    """Return the lines in the last ``most`` bytes of a node's log."""
    file = GrowingFile(path)
    data = file.read(most, skip=True) + file.read_unfinished()
    return list(parse_lines(data.removesuffix(b"\n"), node, attempt)) if data else []


def merged(
    logs: Sequence[NodeLog], follow: Callable[[], bool] | None = None
) -> Iterator[list[LogLine]]:
    """Yield the lines of several nodes in the order of their times, at most BATCH_LINES at once.

    Args:
        follow: called when nothing is new; while it returns True, more is waited for. None: the
            lines that exist now.
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


class Page(Struct, frozen=True):
    """Whole lines of a node's log, each with its offset in bytes."""

    lines: list[tuple[int, bytes]] = []
    before: int = 0
    """Offset before which the previous page ends; 0: the log begins with this page."""
    after: int = 0
    """Offset at which the next page begins."""
    skipped: bool = False
    """Whether lines after the requested offset were left out: these are the last of them."""

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
    """Return lines of a log: the last ones, those before an offset, or all those after one.

    Args:
        rank: only its lines; None: all.
        search: only lines whose text contains this, in any case; a blank also matches JSON's
            punctuation.
        most: how many lines at most, but with ``after``.
        scan: how many bytes to read at most.
    """
    try:
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            select = _filter(rank, search)
            if after is not None and after <= size <= after + _MOST_NEW:
                data = os.pread(file.fileno(), size - after, after)
                data = data[: data.rfind(b"\n") + 1]
                return Page(select(data, after), 0, after + len(data))
            end = size if before is None else min(before, size)
            found = _page_before(file.fileno(), end, select, most, scan)
    except OSError:  # its node has not started, or its log is not on this machine
        return Page()
    return msgspec.structs.replace(found, skipped=after is not None and size > 0)


def _filter(rank: int | None, search: str) -> _Filter:
    name = rb"(?:-|[0-9]+)" if rank is None else str(rank).encode()
    header = re.compile(rb"[0-9T:-]{19}\.[0-9]{6}Z " + name + rb" ")
    # Where a marked line is shown with blanks, it has JSON between the words. One pattern matches
    # all blanks in a row: several would be tried in all combinations.
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


def _page_before(file: int, end: int, select: _Filter, most: int, scan: float) -> Page:
    lines: list[tuple[int, bytes]] = []
    chunk, scanned, after, offset = _CHUNK, 0, None, end
    while offset > 0 and len(lines) < most and scanned < scan:
        begin = max(0, offset - chunk)
        data = os.pread(file, offset - begin, begin)
        scanned += len(data)
        last = data.rfind(b"\n") + 1  # a line that is not whole yet is on the next page
        first = data.find(b"\n") + 1 if begin else 0
        if begin and (not first or first >= last) and chunk < LONGEST_LINE:
            chunk *= 2  # one long line
            continue
        after = begin + last if after is None else after
        data, offset, chunk = data[first:last], begin + first if first < last else begin, _CHUNK
        lines = select(data, offset) + lines
    if len(lines) > most:
        lines = lines[-most:]
        offset = lines[0][0]
    return Page(lines, offset, end if after is None else after)


def last_lines(
    path: Path, node: int, attempt: int, most: int, rank: int | None = None
) -> list[LogLine]:
    """Return the last lines of a node's log, or of one rank in it, also one without newline."""
    found = page(path, rank, most=most, scan=math.inf)
    unfinished = GrowingFile(path, found.after).read_unfinished()
    rest = parse_lines(unfinished, node, attempt) if unfinished else ()
    return [*found.parsed(node, attempt), *(x for x in rest if rank in (None, x.rank))]


def without_rank(text: str) -> str:
    """Return a line without the ``[rank3]: `` that torch writes before those of a traceback."""
    return _TORCH_PREFIX.sub("", text, count=1)


def readable(event: dict[str, Any]) -> str:
    """Return the object of a marked line as text for people: ``step 3  loss 0.5``."""
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
