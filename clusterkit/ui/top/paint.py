"""Format lines of a screen: styled text cut to a width, titles, curves of Braille dots. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from textwrap import wrap

from rich.cells import cell_len, set_cell_size
from rich.color import ColorSystem
from rich.style import Style

from clusterkit.output.series import Series
from clusterkit.run.logs import LogLine, readable
from clusterkit.ui.formatting import clock, printable

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


def wrapped(text: str, width: int, most: int, style: str = "") -> list[Line]:
    """Break text into at most ``most`` lines."""
    lines = wrap(clean(text), max(width - 1, 8), initial_indent=" ", subsequent_indent="   ")
    return [((line, style),) for line in lines[:most]]


def title(text: str, more: str, width: int) -> Line:
    """Format the heading of a part of the screen, with ``more`` at its right end."""
    right = f" {more} " if more else ""
    ruled = "─" * max(0, width - cell_len(text) - cell_len(right) - 4)
    return fitted(((f"─ {text} ", BOLD), (ruled, DIM), (right, DIM), ("─", DIM)), width)


def log_line(line: LogLine, *, with_rank: bool) -> Line:
    """Format a line of a log: time, rank (``-`` is the launcher), text."""
    rank = f" {'-' if line.rank is None else f'r{line.rank}'}" if with_rank else ""
    event = line.event
    text = line.text if event is None else readable(event)
    return ((f" {clock(line.time)}{rank} ", DIM), (clean(text), DIM if event else ""))


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
    head = title(f"{name} {short(series.values[-1])}", steps, width)
    return [head] + [
        fitted(((f"{label:>{_LABEL}} ", DIM), (_braille(row), "cyan")), width)
        for label, row in zip(labels, dots, strict=True)
    ]


def _braille(row: Iterable[int]) -> str:
    return "".join(chr(_BRAILLE + dots) if dots else " " for dots in row)


def beside(parts: Sequence[Sequence[Line]]) -> list[Line]:
    """Put parts of the screen, all of one height, next to each other."""
    return [tuple(piece for line in row for piece in line) for row in zip(*parts, strict=True)]
