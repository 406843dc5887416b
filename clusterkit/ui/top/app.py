"""A board in a terminal, by Textual: looks five times a second, paints the lines that change."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from rich.segment import Segment
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from clusterkit import api
from clusterkit.errors import ClusterkitError
from clusterkit.output import logs
from clusterkit.run import folder as run_folder
from clusterkit.ui.top.board import LOG_LINES, Board, Order, RunBoard, RunsBoard
from clusterkit.ui.top.paint import Line, style_of

PERIOD = 0.2
"""Seconds between two looks."""
REFRESH_SECONDS = 2.0
"""Between two questions to the backend about a run that nobody watches."""
T = TypeVar("T")


class Surface(Widget, can_focus=True):
    """Lines, as they were given last."""

    DEFAULT_CSS = "Surface { width: 100%; height: 100%; background: transparent; }"

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Line] = []

    def paint(self, lines: list[Line]) -> None:
        """Show these; those that were there already cost nothing."""
        before, self._lines = self._lines, lines
        if len(before) != len(lines):
            self.refresh()
            return
        width = self.size.width
        changed = [y for y, line in enumerate(lines) if line != before[y]]
        if changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    class Sized(Message):
        """It has another size."""

    def on_resize(self) -> None:
        self.post_message(self.Sized())

    def render_lines(self, crop: Region) -> list[Strip]:
        # Past borders, padding and tints, which there are none of: half of what a look costs.
        strips = (self.render_line(y) for y in range(crop.y, crop.bottom))
        if (crop.x, crop.right) == (0, self.size.width):
            return list(strips)
        return [strip.crop(crop.x, crop.right) for strip in strips]

    def render_line(self, y: int) -> Strip:
        if y >= len(self._lines):
            return Strip.blank(self.size.width)
        line = self._lines[y]
        return Strip([Segment(text, style_of(name)) for text, name in line], self.size.width)


class Top(App[None]):
    """Shows a board."""

    CSS = "Screen { background: ansi_default; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [Binding("ctrl+c", "quit", show=False, priority=True)]  # noqa: RUF012

    def __init__(self, first: Board) -> None:
        super().__init__(ansi_color=True)
        self.board = first
        self.surface = Surface()
        self._list = first if isinstance(first, RunsBoard) else None
        self._asked = 0.0

    def compose(self) -> ComposeResult:
        yield self.surface

    def on_mount(self) -> None:
        self.surface.focus()
        self.set_interval(PERIOD, self.look)

    def on_surface_sized(self) -> None:
        self.look()

    def look(self) -> None:
        """Read what is new, and show it."""
        if self.board.poll():
            self.call_later(self.look)
        live = self.board.live if isinstance(self.board, RunBoard) else None
        if live is not None and live.stale and time.monotonic() > self._asked + REFRESH_SECONDS:
            self._asked = time.monotonic()
            self._aside(live.refresh, lambda found: None)
        self.show()

    def show(self) -> None:
        """Paint the board."""
        width, height = self.surface.size
        if width and height:
            self.surface.paint(self.board.lines(width, height))

    def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        self.obey(self.board.press(event.key, event.character))
        self.look()

    def on_mouse_scroll_down(self) -> None:
        self.board.move(3)
        self.show()

    def on_mouse_scroll_up(self) -> None:
        self.board.move(-3)
        self.show()

    def obey(self, order: Order | None) -> None:
        """Do what the board's user wants."""
        if order is None:
            return
        if order.verb == "quit":
            self.exit()
        elif order.verb == "open":
            try:
                self.board = RunBoard(run_folder.find(order.what))
            except ClusterkitError as error:  # removed since the list was made
                self.board.said = error.message
        elif order.verb == "back":
            self.board = self._list = self._list or RunsBoard()
        elif order.verb == "cancel":
            self.board.said = f"cancelling {order.what}"
            self._aside(partial(api.cancel, order.what),
                        lambda status: f"{status.run} {status.state}")  # fmt: skip
        elif order.verb == "attach":
            self._aside(partial(api.attach, order.what),
                        lambda run: f"{run.id} has a supervisor again")  # fmt: skip
        elif order.verb == "search":
            self._search(order.what)

    def _search(self, text: str) -> None:
        shown = self.board
        if not isinstance(shown, RunBoard) or (chosen := shown.chosen()) is None:
            return
        node, rank = chosen
        attempt = shown.live.attempt
        look = partial(logs.page, shown.live.log_path(node), shown.only(rank), text,
                       most=LOG_LINES, scan=math.inf)  # fmt: skip

        def take(found: logs.Page) -> None:
            shown.found, shown.searched = found.parsed(node, attempt), text

        self._aside(look, take)

    def _aside(self, work: Callable[[], T], then: Callable[[T], str | None]) -> None:
        """Do what takes its time in a thread, and then say what came of it."""
        shown = self.board

        def finish(said: Callable[[], str | None]) -> None:
            shown.said = said() or shown.said
            self.show()

        def run() -> None:
            try:
                found = work()
            except ClusterkitError as error:
                message = error.message
                self.call_from_thread(finish, lambda: message)
            else:
                self.call_from_thread(finish, lambda: then(found))

        self.run_worker(run, thread=True)
