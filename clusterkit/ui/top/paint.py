"""Format lines of a screen: styled text cut to a width, titles, curves of Braille dots. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import lru_cache

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.color import ColorSystem
from rich.style import Style

from clusterkit.output.series import Series
from clusterkit.run.logs import LogLine, readable
from clusterkit.ui.formatting import clock, fold, printable

Piece = tuple[str, str]
"""Text, and the name of a Rich style."""
Line = tuple[Piece, ...]
STYLES = {
    "SUCCEEDED": "green", "FAILED": "bold red", "RUNNING": "cyan", "RESTARTING": "yellow",
    "PENDING": "yellow", "CANCELLED": "magenta", "UNKNOWN": "red", "WAITS": "yellow",
    "MISSING": "bold red",
}  # fmt: skip
DIM, BOLD, CURSOR = "dim", "bold", "reverse"
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
"""The bits of a Braille character, by column and, from the bottom, by row."""
_BRAILLE = 0x2800
_COLOURS = ColorSystem.STANDARD
NARROW = 60
"""Columns below which the time of an entry is left out."""
_LABEL = 9
_UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def clean(text: str) -> str:
    """Make a program's output safe to show in one line: no escape sequences, no tabs."""
    return printable(text, colours=False).expandtabs(4)


def fitted(line: Iterable[Piece], width: int) -> Line:
    """Cut or fill up a line to exactly ``width`` columns."""
    found: list[Piece] = []
    room = width
    for text, style in line:
        size = cell_len(text)
        if size > room:
            text, size = set_cell_size(text, room), room
        if text:
            found.append((text, style))
        room -= size
    if room:  # the row under the cursor is marked over its whole width
        found.append((" " * room, CURSOR if found and found[-1][1] == CURSOR else ""))
    return tuple(found)


@lru_cache(maxsize=64)
def style_of(name: str) -> Style:
    """Parse a style by its name; without its colour if NO_COLOR is set."""
    style = Style.parse(name)
    return style.without_color if os.environ.get("NO_COLOR") else style


def ansi(lines: Iterable[Line]) -> str:
    """Format a screen as escape sequences, for a terminal without Textual."""
    texts = (
        "".join(style_of(name).render(text, color_system=_COLOURS) for text, name in line)
        for line in lines
    )
    return "\x1b[H" + "\r\n".join(texts)


def folded(text: str, width: int) -> list[str]:
    """Break text at spaces, and words that are longer than a line within, into lines that fit."""
    return [part for line in fold(text, width) for part in chop_cells(line, width) or [""]]


def wrapped(text: str, width: int, most: int, style: str = "") -> list[Line]:
    """Break text into at most ``most`` lines; an ellipsis says that there is more."""
    lines = folded(f" {clean(' '.join(text.split()))}", max(width, 8))
    if len(lines) > most:
        lines[most - 1] = f"{set_cell_size(lines[most - 1], max(width, 8) - 2).rstrip()} …"
    return [((line, style),) for line in lines[:most]]


def fitting(parts: Iterable[str], room: int) -> str:
    """Join those parts that fit, whole."""
    shown = ""
    for part in parts:
        if cell_len(shown) + 2 + cell_len(part) <= room:
            shown += f"  {part}"
    return shown


def columns(
    header: Sequence[tuple[str, int]],
    rows: Sequence[Sequence[str]],
    width: int,
    drop: Sequence[int],
    left: Sequence[int] = (),
) -> tuple[list[int], list[list[str]]]:
    """Pad cells to columns, so that whole ones fit into the width.

    Args:
        header: each column's name and least width. What the last holds is text, which may be cut.
        rows: the cells.
        drop: the columns that are left out where they do not fit, in this order.
        left: columns aligned to the left, as the last one is.

    Returns:
        The columns that are shown, and the header and rows with only those.
    """
    names = [name for name, _ in header]
    sizes = [
        max(least, *(cell_len(row[at]) for row in (names, *rows)))
        for at, (_, least) in enumerate(header)
    ]
    last = len(header) - 1
    shown, others = list(range(last)), list(drop)
    while others and sum(sizes[at] + 1 for at in shown) > width:
        shown.remove(others.pop(0))
    if sum(sizes[at] + 1 for at in shown) + header[last][1] < width:
        shown.append(last)
        sizes[last] = 0  # not padded

    def padded(at: int, cell: str) -> str:
        gap = " " * (sizes[at] - cell_len(cell))
        return cell + gap if at in left else gap + cell

    return shown, [[padded(at, row[at]) for at in shown] for row in (names, *rows)]


def title(text: str, more: str, width: int) -> Line:
    """Format the heading of a part of the screen, with ``more`` at its right end."""
    right = f" {more} " if more else ""
    ruled = "─" * max(0, width - cell_len(text) - cell_len(right) - 4)
    return fitted(((f"─ {text} ", BOLD), (ruled, DIM), (right, DIM), ("─", DIM)), width)


def log_lines(line: LogLine, width: int, most: int, *, with_rank: bool) -> list[Line]:
    """Format a line of a log: time, rank (``-`` is the launcher), text; wrapped if it is long."""
    event = line.event
    text = line.text if event is None else readable(event)
    rank = ("-" if line.rank is None else f"r{line.rank}") if with_rank else ""
    return entry_lines(line.time, rank, text, DIM if event else "", width, most)


def entry_lines(at: float, source: str, text: str, style: str, width: int, most: int) -> list[Line]:
    """Format what was said at a time by a source, on at most ``most`` lines.

    Where there are few columns, the time is left out.
    """
    parts = [clock(at)] if width >= NARROW else []
    head = "".join(f" {part}" for part in (*parts, source) if part) + " "
    room = max(1, width - len(head))
    lines = folded(clean(text)[: room * most], room)[:most]
    return [
        ((head if number == 0 else " " * len(head), DIM), (part, style))
        for number, part in enumerate(lines)
    ]


def short(value: float) -> str:
    """Format a number in at most 8 characters."""
    if value and not 0.001 <= abs(value) < 1e15:
        return f"{value:.1e}"
    for unit, size in _UNITS:
        if abs(value) >= 10 * size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.4g}"


def size_text(count: float) -> str:
    """Format bytes: ``512M``, ``12.3G``."""
    for unit in ("K", "M"):
        count /= 1024
        if count < 1000:
            return f"{count:.0f}{unit}"
    return f"{count / 1024:.1f}G"


def curve(name: str, series: Series | None, width: int, height: int) -> list[Line]:
    """Draw a metric over the steps: a title, then ``height - 1`` lines of dots and its range."""
    room = width - _LABEL - 1
    if not series or height < 2 or room < 4:
        text = "" if series else " nothing reported"
        blank = [fitted((), width)] * max(0, height - 2)
        return [title(name, "", width), fitted(((text, DIM),), width), *blank][:height]
    rows = height - 1
    buckets = series.downsample(2 * room)
    low = min(bucket.low for bucket in buckets)
    high = max(bucket.high for bucket in buckets)
    dots = [[0] * room for _ in range(rows)]
    scale = (4 * rows - 1) / ((high - low) or 1.0)
    spread = (2 * room - 1) / max(1, len(buckets) - 1)
    before: int | None = None
    for number, bucket in enumerate(buckets):
        column = round(number * spread)
        bottom, top = round((bucket.low - low) * scale), round((bucket.high - low) * scale)
        if before is not None:  # no gap to the column before
            bottom, top = min(bottom, before), max(top, before)
        for dot in range(bottom, top + 1):
            dots[rows - 1 - dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
        before = round((bucket.last - low) * scale)
    labels = [""] * rows
    labels[-1] = short(low)
    labels[0] = short(high)
    steps = f"step {series.steps[0]} to {series.steps[-1]}"
    head = title(name, steps, width)
    return [head] + [
        fitted(((f"{label:>{_LABEL}} ", DIM), (_braille(row), "cyan")), width)
        for label, row in zip(labels, dots, strict=True)
    ]


def _braille(row: Iterable[int]) -> str:
    return "".join(chr(_BRAILLE + dots) if dots else " " for dots in row)


def beside(parts: Sequence[Sequence[Line]]) -> list[Line]:
    """Put parts of the screen, all of one height, next to each other."""
    return [tuple(piece for line in row for piece in line) for row in zip(*parts, strict=True)]
