"""A board in a terminal, with Textual: polled five times a second, repainting changed lines only.

Textual's own widgets are not used: the first screen is painted before Textual is imported, which
takes longer than all the rest, and the board's lines serve both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from rich.segment import Segment
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from clusterkit.errors import ClusterkitError
from clusterkit.lifecycle.run import get
from clusterkit.run.find import find_run
from clusterkit.ui.top.board import Action, Board, RunBoard, RunsBoard
from clusterkit.ui.top.paint import Line, style_of

POLL_SECONDS = 0.2
REFRESH_SECONDS = 2.0
"""Time between two questions to the backend about a run without a supervisor."""
SCROLL_LINES = 3
T = TypeVar("T")


class Surface(Widget, can_focus=True):
    """A widget that shows lines."""

    DEFAULT_CSS = "Surface { width: 100%; height: 100%; background: transparent; }"

    class Resized(Message):
        """The widget has another size."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Line] = []

    def paint(self, lines: list[Line]) -> None:
        """Show lines, and refresh only those that differ from the ones before."""
        before, self._lines = self._lines, lines
        if len(before) != len(lines):
            self.refresh()
            return
        width = self.size.width
        if changed := [y for y, line in enumerate(lines) if line != before[y]]:
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def on_resize(self) -> None:
        self.post_message(self.Resized())

    def render_lines(self, crop: Region) -> list[Strip]:
        # The base class also applies borders, padding and tints, of which there are none: that
        # would be half of the load.
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
    """Shows a board and carries out its actions."""

    CSS = "Screen { background: ansi_default; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [Binding("ctrl+c", "quit", show=False, priority=True)]  # noqa: RUF012

    def __init__(self, first: Board[Any]) -> None:
        super().__init__(ansi_color=True)
        self.board = first
        self.surface = Surface()
        self._list = first if isinstance(first, RunsBoard) else None
        self._refreshed = 0.0

    def compose(self) -> ComposeResult:
        yield self.surface

    def on_mount(self) -> None:
        self.surface.focus()
        self.set_interval(POLL_SECONDS, self.poll)

    def on_surface_resized(self) -> None:
        self.poll()

    def poll(self) -> None:
        """Read what is new, and show it."""
        if self.board.poll():
            self.call_later(self.poll)
        live = self.board.live if isinstance(self.board, RunBoard) else None
        if live is not None and live.stale and time.monotonic() > self._refreshed + REFRESH_SECONDS:
            self._refreshed = time.monotonic()
            self._in_thread(live.refresh, lambda _: None)
        self.show()

    def show(self) -> None:
        """Paint the board."""
        width, height = self.surface.size
        if width and height:
            self.surface.paint(self.board.lines(width, height))

    def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        if (action := self.board.press(event.key, event.character)) is not None:
            self.carry_out(action)
        self.poll()

    def on_mouse_scroll_down(self) -> None:
        self.board.move(SCROLL_LINES)
        self.show()

    def on_mouse_scroll_up(self) -> None:
        self.board.move(-SCROLL_LINES)
        self.show()

    def carry_out(self, action: Action) -> None:
        """Do what the board asks for."""
        verb, argument = action
        if verb == "quit":
            self.exit()
        elif verb == "open":
            try:
                self.board = RunBoard(find_run(argument))
            except ClusterkitError as error:  # removed since the list was read
                self.board.message = error.message
        elif verb == "back":
            self.board = self._list = self._list or RunsBoard()
        elif verb == "cancel":
            self.board.message = f"cancelling {argument}"
            self._in_thread(lambda: get(argument).cancel(),
                            lambda status: f"{status.run} {status.state}")  # fmt: skip
        elif verb == "attach":
            self._in_thread(lambda: get(argument).attach(),
                            lambda _: f"{argument} has a supervisor again")  # fmt: skip
        elif isinstance(self.board, RunBoard) and (find := self.board.log.search(argument)):
            self._in_thread(find, partial(self.board.log.show_matches, argument))

    def _in_thread(self, work: Callable[[], T], then: Callable[[T], str | None]) -> None:
        """Run ``work`` in a thread, ``then`` in this one; show its message, or the error's."""
        board = self.board

        def finish(result: T) -> None:
            board.message = then(result) or board.message
            self.show()

        def fail(error: ClusterkitError) -> None:
            board.message = error.message
            self.show()

        def run() -> None:
            try:
                result = work()
            except ClusterkitError as error:
                self.call_from_thread(fail, error)
            else:
                self.call_from_thread(finish, result)

        self.run_worker(run, thread=True)
