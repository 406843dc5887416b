"""Pages of a node's log, for the browser: the last lines, earlier or newer ones, or a search.

A position is a byte offset in the file, which the browser keeps and sends back: the server does
not remember what each browser has read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from clusterkit.run import logs
from clusterkit.run.logs import LONGEST_LINE, LogLine, parse_lines, readable
from clusterkit.ui.formatting import printable

LINES = 400
"""Most lines of a page."""
SHOWN = 4000
"""Most characters of a line on a page; `line` returns all of it."""


def page(path: Path, **options: Any) -> dict[str, Any]:
    """Return a page of a log as JSON; options as for `clusterkit.run.logs.page`."""
    found = logs.page(path, **options, most=LINES)
    return {**msgspec.structs.asdict(found), "lines": [_line(*line) for line in found.lines]}


def line(path: Path, at: int) -> str:
    """Return the whole text of the line that begins at an offset; empty if there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, at))
            found = next(parse_lines(file.readline(LONGEST_LINE).rstrip(b"\n"), 0))
    except OSError:
        return ""
    return _text(found)


def _line(at: int, data: bytes) -> dict[str, Any]:
    # Cut before it is parsed: escape sequences are not searched for in megabytes.
    parsed = next(parse_lines(data[: 4 * SHOWN], 0))
    whole = len(data) <= 4 * SHOWN
    text = _text(parsed) if whole else printable(parsed.text, colours=False)
    cut = 0 if whole and len(text) <= SHOWN else len(data)
    return {
        "at": at, "time": parsed.time, "rank": parsed.rank, "text": text[:SHOWN], "cut": cut,
    }  # fmt: skip


def _text(parsed: LogLine) -> str:
    event = parsed.event
    return printable(parsed.text if event is None else readable(event), colours=False)
