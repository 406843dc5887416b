"""The lower part of a run's screen in `clusterkit top`: a log, search results, or events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from clusterkit.lifecycle.live import LiveRun
from clusterkit.run.folder import Event
from clusterkit.run.logs import LogLine, page
from clusterkit.ui.top import paint
from clusterkit.ui.top.paint import Line

LOG_LINES = 1000
"""How many lines of a rank's log are kept for scrolling back."""
_SCAN_BYTES = 16 << 20
"""How much of a log is read to find them: the terminal does not react meanwhile."""


class _Source(NamedTuple):
    """Whose log is shown; ``rank`` None: the whole node's."""

    attempt: int
    node: int
    rank: int | None

    @property
    def title(self) -> str:
        return f"log of node {self.node}" if self.rank is None else f"log of rank {self.rank}"


class LogPane:
    """The log of a rank or node, the lines of a search in it, or the run's events."""

    def __init__(self, live: LiveRun) -> None:
        self.whole_node = False
        self.shows_events = False
        self.matches: list[LogLine] | None = None
        """The lines that a search has found; None: the log is shown."""
        self.back = 0
        """How many lines it is scrolled back."""
        self._pattern = ""
        self._live = live
        self._source: _Source | None = None
        self._log: deque[LogLine] = deque(maxlen=LOG_LINES)
        self._after: int | None = None  # how far the log's file has been read

    def poll(self, selected: tuple[int, int] | None) -> None:
        """Read what is new in the log of the selected node and rank, or of its whole node."""
        source = None
        if selected is not None and self._live.attempt:
            node, rank = selected
            source = _Source(self._live.attempt, node, None if self.whole_node else rank)
        if source != self._source:
            self._source, self._after, self.back = source, None, 0
            self._log.clear()
        if source is None:
            return
        path = self._live.log_path(source.node)
        found = page(path, source.rank, after=self._after, most=LOG_LINES, scan=_SCAN_BYTES)
        self._after = found.after
        if found.skipped:  # these are the last lines, some of which may have been shown
            self._log.clear()
        new = found.parsed(source.node, source.attempt)
        self._log.extend(new)
        if self.back:  # the lines that are looked at do not move
            self.back = min(self.back + len(new), max(0, len(self._log) - 1))

    def search(self, text: str) -> Callable[[], list[LogLine]] | None:
        """Return a function that searches all of the log, for a thread; None: there is no log."""
        if (source := self._source) is None:
            return None
        path = self._live.log_path(source.node)

        def find() -> list[LogLine]:
            found = page(path, source.rank, text, most=LOG_LINES, scan=math.inf)
            return found.parsed(source.node, source.attempt)

        return find

    def show_matches(self, text: str, found: list[LogLine]) -> None:
        """Show the lines that a search for ``text`` has found."""
        self._pattern, self.matches, self.back = text, found, 0

    def scroll(self, lines: int) -> None:
        """Scroll back, or forward if negative."""
        self.back = max(0, min(self.back + lines, len(self._entries()) - 1))

    def body(self, width: int, height: int) -> list[Line]:
        """Return a title and as many of the last lines as fit below it, long ones wrapped."""
        if height < 1:
            return []
        name = (
            "rounds and events" if self.shows_events else (self._source or _Source(0, 0, 0)).title
        )
        if self.matches is not None and not self.shows_events:
            name += f": lines with {self._pattern!r}"
        entries = list(self._entries())
        end = len(entries) - self.back
        count = f"{end} of {len(entries)}" if self.back else str(end)
        shown: list[Line] = []
        room = height - 1
        for entry in reversed(entries[max(0, end - room) : end]):
            lines = self._lines(entry, width, room)
            # Of one that does not fit, the end; but of the newest, its beginning.
            shown = lines[-max(0, room - len(shown)) :] + shown if shown else lines
            if len(shown) >= room:
                break
        return [paint.title(name, count, width), *shown[:room]]

    def _entries(self) -> Sequence[LogLine | Event]:
        if self.shows_events:
            return self._live.events
        return self._log if self.matches is None else self.matches

    def _lines(self, entry: LogLine | Event, width: int, most: int) -> list[Line]:
        if isinstance(entry, LogLine):
            return paint.log_lines(entry, width, most, with_rank=self.whole_node)
        return paint.entry_lines(entry.at, f"attempt {entry.attempt} ", entry.text, "", width, most)
