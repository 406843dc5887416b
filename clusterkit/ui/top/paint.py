"""Lines of a screen: pieces of text with their styles, cut to a width; curves of dots. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import lru_cache

from rich.cells import cell_len, set_cell_size
from rich.color import ColorSystem
from rich.style import Style

from clusterkit.output.logs import LogLine
from clusterkit.output.series import Series
from clusterkit.ui.formatting import clock, printable

Piece = tuple[str, str]
"""Text, and a style as Rich names it."""
Line = tuple[Piece, ...]
STYLES = {
    "SUCCEEDED": "green", "FAILED": "bold red", "RUNNING": "cyan", "RESTARTING": "yellow",
    "PENDING": "yellow", "CANCELLED": "magenta", "UNKNOWN": "red", "WAITS": "yellow",
    "MISSING": "bold red",
}  # fmt: skip
DIM, BOLD, HERE = "dim", "bold", "reverse"
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
"""Of a Braille character, by column and, from below, by row."""
_BRAILLE = 0x2800
_COLOURS = ColorSystem.STANDARD
_LABEL = 9
_FULL = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def clean(text: str) -> str:
    """A program's words as one line that moves no cursor."""
    return printable(text, colours=False).expandtabs(4)


def fitted(line: Iterable[Piece], width: int) -> Line:
    """Exactly ``width`` columns of it."""
    found: list[Piece] = []
    room = width
    for text, style in line:
        size = len(text) if text.isascii() else cell_len(text)
        if size > room:
            text = text[:room] if text.isascii() else set_cell_size(text, room)
            size = room
        if text:
            found.append((text, style))
        room -= size
    if room:  # the row under the cursor is marked in all of its width
        found.append((" " * room, HERE if found and found[-1][1] == HERE else ""))
    return tuple(found)


@lru_cache(maxsize=64)
def style_of(name: str) -> Style:
    """A piece's style; where NO_COLOR is set, without its colour."""
    style = Style.parse(name)
    return style.without_color if os.environ.get("NO_COLOR") else style


def ansi(lines: Iterable[Line]) -> str:
    """Lines for a terminal, from its upper left corner on."""
    texts = (
        "".join(style_of(name).render(text, color_system=_COLOURS) for text, name in line)
        for line in lines
    )
    return "\x1b[H" + "\r\n".join(texts)


def wrapped(text: str, width: int, most: int, style: str = "") -> list[Line]:
    """Text over several lines, ``most`` of them."""
    import textwrap

    lines = textwrap.wrap(
        clean(text), max(width - 1, 8), initial_indent=" ", subsequent_indent="   "
    )
    return [((line, style),) for line in lines[:most]]


def title(text: str, more: str, width: int) -> Line:
    """The line above a part of the screen."""
    right = f" {more} " if more else ""
    ruled = "─" * max(0, width - cell_len(text) - cell_len(right) - 4)
    return fitted(((f"─ {text} ", BOLD), (ruled, DIM), (right, DIM), ("─", DIM)), width)


def log_line(line: LogLine, *, whole_node: bool) -> Line:
    """One line of a log; of a whole node's also whose it is."""
    from clusterkit.output.logs import readable

    who = f" {'-' if line.rank is None else f'r{line.rank}'}" if whole_node else ""
    event = line.event
    text = line.text if event is None else readable(event)
    return ((f"{clock(line.time)}{who} ", DIM), (clean(text), DIM if event else ""))


def short(value: float) -> str:
    """A number in 8 characters at most."""
    if value and not 0.001 <= abs(value) < 1e15:
        return f"{value:.1e}"
    for unit, size in reversed(_FULL.items()):
        if abs(value) >= 10 * size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.4g}"


def size_text(count: float) -> str:
    """Bytes: ``512M``, ``12.3G``."""
    for unit in ("K", "M"):
        count /= 1024
        if count < 1000:
            return f"{count:.0f}{unit}"
    return f"{count / 1024:.1f}G"


def curve(name: str, series: Series | None, width: int, height: int) -> list[Line]:
    """A metric over the steps: a title, then ``height - 1`` lines of dots with their range."""
    room = width - _LABEL - 1
    if not series or height < 2 or room < 4:
        said = "" if series else "nothing reported"
        blank = [fitted((), width)] * max(0, height - 2)
        return [title(name, "", width), fitted(((f" {said}", DIM),), width), *blank][:height]
    rows = height - 1
    buckets = series.thinned(2 * room)
    low = min(bucket.low for bucket in buckets)
    high = max(bucket.high for bucket in buckets)
    dots = [[0] * room for _ in range(rows)]
    scale = (4 * rows - 1) / ((high - low) or 1.0)
    spread = (2 * room - 1) / max(1, len(buckets) - 1)
    before: int | None = None
    for number, bucket in enumerate(buckets):
        column = round(number * spread)
        bottom, top = round((bucket.low - low) * scale), round((bucket.high - low) * scale)
        if before is not None:  # neighbours touch
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
        fitted(((f"{label:>{_LABEL}} ", DIM), ("".join(map(_braille, row)), "cyan")), width)
        for label, row in zip(labels, dots, strict=True)
    ]


def _braille(dots: int) -> str:
    return chr(_BRAILLE + dots) if dots else " "


def beside(parts: Sequence[Sequence[Line]]) -> list[Line]:
    """Parts of the screen next to each other, each as high as the first."""
    return [tuple(piece for line in row for piece in line) for row in zip(*parts, strict=True)]
