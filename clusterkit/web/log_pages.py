"""Pages of a node's log, from its end or around a place, that hold some rank or some words.

The place is the number of a byte in the file, which a browser keeps and gives back: so the server
need not remember who reads what.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from clusterkit.logs import LogLine, parse_lines, readable
from clusterkit.ui.words import printable

LINES = 400
"""Of one page."""
SHOWN = 4000
"""Characters that are shown of a line at first; `line` gives all of it."""
LONGEST = 16 << 20
_CHUNK = 1 << 18
_SCAN = 256 << 20
"""Bytes that are looked at for one page: a word that stands nowhere holds nobody up for long."""
_NEW = 4 << 20
"""Bytes of news; whoever is further behind than that begins at the end again."""


def page(
    path: Path,
    rank: int | None = None,
    search: str = "",
    before: int | None = None,
    after: int | None = None,
) -> dict[str, Any]:
    """Lines of a log: its last ones, those before a place, or those after one.

    Returns:
        ``lines``; ``before`` and ``after``, the places to go on from (``before`` 0: this was its
        beginning); ``skipped``: there was too much after the place, so these are the last ones.
    """
    try:
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            wanted = _Wanted(rank, search)
            if after is not None and after <= size <= after + _NEW:
                return _newer(file.fileno(), after, size, wanted)
            found = _older(file.fileno(), size if before is None else min(before, size), wanted)
    except OSError:  # its node has not started, or writes elsewhere
        size, found = 0, {"lines": [], "before": 0, "after": 0}
    return {**found, "skipped": after is not None and size > 0}


def line(path: Path, at: int) -> str:
    """All of the line that begins at a place."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, at))
            found = next(parse_lines(file.readline(LONGEST).rstrip(b"\n"), 0))
    except OSError:
        return ""
    return _words(found)


class _Wanted:
    def __init__(self, rank: int | None, search: str) -> None:
        name = rb"(?:-|[0-9]+)" if rank is None else str(rank).encode()
        self._head = re.compile(rb"[0-9T:-]{19}\.[0-9]{6}Z " + name + rb" ")
        self._any = rank is None
        self._word = re.compile(re.escape(search.encode()), re.IGNORECASE) if search else None

    def none_in(self, data: bytes) -> bool:
        return self._word is not None and self._word.search(data) is None

    def of(self, data: bytes, begin: int) -> list[tuple[int, bytes]]:
        """The lines that are wanted, with their places; ``data`` is of whole ones."""
        found, at = [], 0
        for text in data.removesuffix(b"\n").split(b"\n") if data else ():
            head = self._head.match(text)
            if (head or self._any) and (
                self._word is None or self._word.search(text, head.end() if head else 0)
            ):
                found.append((begin + at, text))
            at += len(text) + 1
        return found


def _older(file: int, end: int, wanted: _Wanted) -> dict[str, Any]:
    lines: list[tuple[int, bytes]] = []
    chunk, scanned, after, place = _CHUNK, 0, None, end
    while place > 0 and len(lines) < LINES and scanned < _SCAN:
        begin = max(0, place - chunk)
        data = os.pread(file, place - begin, begin)
        scanned += len(data)
        last = data.rfind(b"\n") + 1  # a line that is not whole yet comes with the news
        first = data.find(b"\n") + 1 if begin else 0
        if begin and (not first or first >= last) and chunk < LONGEST:
            chunk *= 2  # one long line
            continue
        after = begin + last if after is None else after
        data, place, chunk = data[first:last], begin + first if first < last else begin, _CHUNK
        if not wanted.none_in(data):
            lines = wanted.of(data, place) + lines
    if len(lines) > LINES:
        lines = lines[-LINES:]
        place = lines[0][0]
    return {"lines": _shown(lines), "before": place, "after": end if after is None else after}


def _newer(file: int, begin: int, size: int, wanted: _Wanted) -> dict[str, Any]:
    data = os.pread(file, size - begin, begin)
    data = data[: data.rfind(b"\n") + 1]
    return {
        "lines": _shown(wanted.of(data, begin)), "before": 0, "after": begin + len(data),
        "skipped": False,
    }  # fmt: skip


def _shown(lines: list[tuple[int, bytes]]) -> list[dict[str, Any]]:
    found = []
    for at, data in lines:
        # Cut first: of a line of megabytes only so much is read, escape sequences and all.
        parsed = next(parse_lines(data[: 4 * SHOWN], 0))
        text = _words(parsed) if len(data) <= 4 * SHOWN else printable(parsed.text, colours=False)
        cut = len(data) if len(text) > SHOWN or len(data) > 4 * SHOWN else 0
        shown = text[:SHOWN] if cut else text
        found.append(
            {"at": at, "time": parsed.time, "rank": parsed.rank, "text": shown, "cut": cut}
        )
    return found


def _words(parsed: LogLine) -> str:
    event = parsed.event
    return printable(parsed.text if event is None else readable(event), colours=False)
