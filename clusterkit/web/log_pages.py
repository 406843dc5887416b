"""Pages of a node's log, from its end or around a place, that hold some rank or some words.

The place is the number of a byte in the file, which a browser keeps and gives back: so the server
need not remember who reads what.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from clusterkit.output import logs
from clusterkit.output.logs import LONGEST_LINE, LogLine, parse_lines, readable
from clusterkit.ui.formatting import printable

LINES = 400
"""Of one page."""
SHOWN = 4000
"""Characters that are shown of a line at first; `line` gives all of it."""


def page(path: Path, **which: Any) -> dict[str, Any]:
    """`clusterkit.output.logs.page` of which lines, as they are shown."""
    found = logs.page(path, **which, most=LINES)
    return {**msgspec.structs.asdict(found), "lines": _shown(found.lines)}


def line(path: Path, at: int) -> str:
    """All of the line that begins at a place."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, at))
            found = next(parse_lines(file.readline(LONGEST_LINE).rstrip(b"\n"), 0))
    except OSError:
        return ""
    return _words(found)


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
