"""What a person looks at in `clusterkit top`, and what keys do: a list of runs, one run.

A board gives its lines for a screen of some size and takes keys; what needs time or changes a run
it leaves to whoever shows it, as an `Order`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from clusterkit.errors import counted
from clusterkit.output.live import (
    STATUS,
    LiveRun,
    LiveRuns,
    RankView,
    Standstill,
    Usage,
    standstill,
)
from clusterkit.output.logs import LogLine, page
from clusterkit.run.folder import Event, RunFolder
from clusterkit.run.status import RunStatus
from clusterkit.ui.formatting import clock, duration, loss_text, pending_reason
from clusterkit.ui.top import paint
from clusterkit.ui.top.paint import BOLD, DIM, HERE, STYLES, Line, Piece

LOG_LINES = 1000
"""Of a rank's log that are kept to look back at."""
_LOOK_BACK = 16 << 20
"""Bytes in which they are looked for: the terminal waits meanwhile."""


class Order(NamedTuple):
    """What the board's user wants done: ``open``, ``back``, ``quit``, ``cancel``, ``attach`` or
    ``search``, and for which run or text."""

    verb: str
    what: str = ""


class Board:
    """A cursor in a list of rows, a line to type into, a question."""

    keys = ""
    """What is said at the bottom."""

    def __init__(self) -> None:
        self.cursor = 0
        self.typing: str | None = None
        """What is being typed, ``f`` (filter) or ``/`` (search); None: keys are commands."""
        self.typed = ""
        self.filter = ""
        self.question: tuple[str, Order] | None = None
        self.said = ""
        """Stands at the bottom until the next key."""
        self._first = 0  # row at the top
        self._page = 10

    def poll(self) -> bool:
        """Read what is new; whether there is more to read at once."""
        raise NotImplementedError

    def lines(self, width: int, height: int) -> list[Line]:
        """The screen."""
        raise NotImplementedError

    def press(self, key: str, character: str | None = None) -> Order | None:
        """One key, by Textual's name for it, and what it types."""
        self.said = ""
        if key == "ctrl+j":  # Enter, as a terminal gives it that Textual had not taken over yet
            key = "enter"
        if self.question is not None:
            order = self.question[1]
            self.question = None
            return order if character in ("y", "Y") else None
        if self.typing is not None:
            return self._type(key, character)
        return self.command(key)

    def command(self, key: str) -> Order | None:
        """A key that types nothing."""
        step = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -self._page,
                "pagedown": self._page, "home": -(1 << 30), "end": 1 << 30}  # fmt: skip
        if key in step:
            self.move(step[key])
        elif key in ("f", "slash"):
            self.typing, self.typed = key, self.filter if key == "f" else ""
        elif key in ("q", "ctrl+c"):
            return Order("quit")
        return None

    def move(self, by: int) -> None:
        """The cursor, within the rows."""
        self.cursor = max(0, min(self.cursor + by, self.rows() - 1))

    def rows(self) -> int:
        raise NotImplementedError

    def _type(self, key: str, character: str | None) -> Order | None:
        if key == "backspace":
            self.typed = self.typed[:-1]
        elif key in ("enter", "escape"):
            what, self.typing = self.typing, None
            if key == "escape":
                self.filter = "" if what == "f" else self.filter
            elif what != "f":
                return Order("search", self.typed) if self.typed else None
        elif character is not None and character.isprintable():
            self.typed += character
        if self.typing == "f" or key == "enter":
            self.filter = self.typed
            self.cursor = 0
        return None

    def window(self, count: int, height: int) -> range:
        """Which rows of so many are shown."""
        self._page = max(1, height - 1)
        self.cursor = max(0, min(self.cursor, count - 1))
        self._first = max(self.cursor - height + 1, min(self._first, self.cursor))
        self._first = max(0, min(self._first, count - height))
        return range(self._first, min(self._first + height, count))

    def foot(self, width: int) -> Line:
        """The line at the bottom: a question, what is typed, or the keys."""
        if self.question is not None:
            return paint.fitted(((f" {self.question[0]} y/n ", HERE),), width)
        if self.typing is not None:
            word = "filter" if self.typing == "f" else "search"
            return paint.fitted(((f" {word}: ", BOLD), (f"{self.typed}▏", "")), width)
        if self.said:
            return paint.fitted(((f" {paint.clean(self.said)}", BOLD),), width)
        pieces: list[Piece] = []
        for each in self.keys.split("  "):
            key, _, words = each.partition(" ")
            pieces += [(f" {key}", BOLD), (f" {words} ", DIM)]
        return paint.fitted(pieces, width)


class RunsBoard(Board):
    """All runs, newest first."""

    keys = "q quit  ↑↓ run  enter open  f filter  c cancel"

    def __init__(self) -> None:
        super().__init__()
        self._live = LiveRuns()
        self._all: list[RunStatus] = []
        self._due = 0.0

    def poll(self) -> bool:
        if time.monotonic() >= self._due:  # there may be thousands
            self._due = time.monotonic() + 1.0
            self._all = self._live.poll()
        return False

    def _shown(self) -> list[RunStatus]:
        word = self.filter.casefold()
        return [
            one for one in self._all
            if not word or word in f"{one.run} {one.state} {one.cluster}".casefold()
        ]  # fmt: skip

    def rows(self) -> int:
        return len(self._shown())

    def command(self, key: str) -> Order | None:
        shown = self._shown()
        if shown and key in ("enter", "right"):
            return Order("open", shown[self.cursor].run)
        if shown and key == "c":
            run = shown[self.cursor].run
            self.question = f"Cancel {run} and end everything it started?", Order("cancel", run)
            return None
        if key == "escape":
            self.filter = ""
            return None
        return super().command("f" if key == "slash" else key)  # there is no log to search

    def lines(self, width: int, height: int) -> list[Line]:
        shown = self._shown()
        window = self.window(len(shown), height - 3)
        wide = max((len(one.run) for one in shown[window.start : window.stop]), default=3)
        counts = f"{self.cursor + 1 if shown else 0} of {len(shown)}"
        found = [paint.title("clusterkit top", counts, width)]
        head = f" {'RUN':{wide}}  {'STATE':10}  NODES  {'CLUSTER':10}  {'STARTED':8}  WHAT"
        found.append(paint.fitted(((head, BOLD),), width))
        if not shown:
            none = "no run matches" if self._all else "no runs yet: clusterkit submit jobs/ddp.yaml"
            found.append(paint.fitted(((f" {none}", DIM),), width))
        for number in window:
            one = shown[number]
            here = HERE if number == self.cursor else ""
            what = one.remark or (one.failure.summary if one.failure else pending_reason(one)) or ""
            ago = f"{duration(time.time() - one.started_at):>8}" if one.started_at else " " * 8
            pieces = [
                (f" {one.run:{wide}}  ", here), (f"{one.state:10}", here or STYLES[one.state]),
                (f"  {len(one.nodes) or '-':>5}  {one.cluster:10.10}  {ago}  ", here),
                (paint.clean(what), here),
            ]  # fmt: skip
            found.append(paint.fitted(pieces, width))
        found += [paint.fitted((), width)] * (height - 1 - len(found))
        return [*found[: height - 1], self.foot(width)]


class RunBoard(Board):
    """One run: how it stands, curves, its ranks, and the log of the rank under the cursor."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.live = LiveRun(folder)
        self.found: list[LogLine] | None = None
        """Lines of a search, in place of the log."""
        self.searched = ""
        self._zoomed = self._whole_node = self._events = False
        self._back = 0  # lines that the log is scrolled back
        self._log: deque[LogLine] = deque(maxlen=LOG_LINES)
        self._after: int | None = None  # the place in its file up to which it has been read
        self._log_of: tuple[object, ...] = ()
        self._order: list[tuple[int, int]] = []
        self._known: set[tuple[int, int]] = set()
        self._still: Standstill | None = None

    @property
    def keys(self) -> str:  # type: ignore[override]
        esc = "esc back" if self._zoomed or self.found is not None else "esc runs"
        attach = "  a attach" if self.live.stale else ""
        if self._zoomed:
            return f"q quit  {esc}  ↑↓ scroll  n node/rank  e events  / search"
        return (f"q quit  {esc}  ↑↓ rank  enter log  n node/rank  e events  f filter  / search"
                f"  c cancel{attach}")  # fmt: skip

    # -- reading -----------------------------------------------------------

    def poll(self) -> bool:
        news = self.live.poll()
        if STATUS in news or not self._order:
            self._still = standstill(self.live.status)
        if self.live.ranks.keys() != self._known:
            self._known = set(self.live.ranks)
            self._order = sorted(self._known)
        chosen = self.chosen()
        of = (self.live.attempt, chosen, self._whole_node)
        if of != self._log_of:
            self._log_of = of
            self._log.clear()
            self._back = 0
            self._after = None
        if chosen is not None and self.live.attempt:
            node, rank = chosen
            path = self.live.log_path(node)
            found = page(path, self.only(rank), after=self._after, most=LOG_LINES, scan=_LOOK_BACK)
            self._after = found.after
            if found.skipped:  # the last lines, of which some may have been shown
                self._log.clear()
            new = found.parsed(node, self.live.attempt)
            self._log.extend(new)
            if self._back:
                self._back = min(self._back + len(new), max(0, len(self._log) - 1))
        return self.live.behind

    def chosen(self) -> tuple[int, int] | None:
        """Node and rank under the cursor."""
        shown = self._shown()
        return shown[min(self.cursor, len(shown) - 1)] if shown else None

    def only(self, rank: int) -> int | None:
        """Whose lines of a node's log are shown; None: all of them."""
        return None if self._whole_node else rank

    def _shown(self) -> Sequence[tuple[int, int]]:
        word = self.filter.casefold()
        if not word:
            return self._order
        return [key for key in self._order if word in self._words(*key).casefold()]

    def _words(self, node: int, rank: int) -> str:
        """What a filter looks at."""
        last = self.live.ranks[node, rank].last
        host = self.live.nodes[node].host if node in self.live.nodes else ""
        text = "" if last is None else last.text
        return f"node {node} {host} rank {rank} {self._state(node, rank)} {text}"

    def _state(self, node: int, rank: int) -> str:
        still = self._still
        if still is not None and not self.live.status.state.final:
            if rank in still.missing:
                return "MISSING"
            if rank in still.waiting:
                return "WAITS"
        return self.live.state(node, rank)

    def rows(self) -> int:
        return len(self._shown())

    # -- keys --------------------------------------------------------------

    def command(self, key: str) -> Order | None:
        run = self.live.folder.run_id
        if key == "escape":
            if self.found is not None:
                self.found = None
            elif self._zoomed:
                self._zoomed = False
            elif self.filter:
                self.filter = ""
            else:
                return Order("back")
        elif key == "enter":
            self._zoomed = not self._zoomed
        elif key == "n":
            self._whole_node = not self._whole_node
        elif key == "e":
            self._events = not self._events
        elif key == "c" and not self.live.status.state.final:
            self.question = f"Cancel {run} and end everything it started?", Order("cancel", run)
        elif key == "a" and self.live.stale:
            self.question = f"Start another supervisor for {run}?", Order("attach", run)
        else:
            return super().command(key)
        self._back = 0
        return None

    def move(self, by: int) -> None:
        if self._zoomed:
            self._back = max(0, min(self._back - by, self._log_size() - 1))
        else:
            super().move(by)

    def _log_size(self) -> int:
        return len(self.live.events if self._events else self._log if self.found is None
                   else self.found)  # fmt: skip

    # -- lines -------------------------------------------------------------

    def lines(self, width: int, height: int) -> list[Line]:
        found = [paint.fitted(line, width) for line in (*self._head(), *self._notes(width))]
        if not self._zoomed:
            found += self._curves(width, min(12, max(4, height // 5)))
            left = height - 1 - len(found)
            rows = max(1, min(len(self._order), left // 2 if left < 40 else 2 * left // 3))
            found += self._ranks(width, rows)
        found = found[: max(0, height - 3)]
        found += self._bottom(width, height - 1 - len(found))
        return [*found[: height - 1], self.foot(width)]

    def _head(self) -> list[Line]:
        live, status = self.live, self.live.status
        spent = (status.finished_at or time.time()) - (status.started_at or time.time())
        ranks = f", {counted(len(live.ranks), 'rank')}" if live.ranks else ""
        nodes = counted(len(status.nodes), "node") if status.nodes else "- nodes"
        where = f"{status.cluster}: {nodes}{ranks}"
        parts = [where, duration(max(0.0, spent))]
        if status.attempt > 1:
            parts.append(f"attempt {status.attempt}")
        if status.restarts_left:
            parts.append(f"{counted(status.restarts_left, 'restart')} left")
        first = ((f" {status.run} ", BOLD), (status.state, STYLES[status.state]),
                 ("  " + "  ".join(parts), ""))  # fmt: skip
        told = live.reported
        words = ["no step yet"]
        if told.step or told.steps:
            words = [f"step {told.step}/{told.steps}" if told.steps else f"step {told.step}"]
        if (loss := told.value("loss")) is not None:
            words.append(f"loss {loss_text(loss)}")
        if (speed := told.speed()) is not None:
            words.append(f"{speed:,.0f} tokens/s")
        if (pace := told.speed("step_seconds")) is not None:
            words.append(f"{pace:.3g} s a step")
        left = None if status.state.final or self._still is not None else told.time_left()
        if left is not None:
            words.append(f"{duration(left)} left")
        if (memory := told.value("peak_memory")) is not None:
            words.append(f"peak {paint.size_text(memory)}")
        if (mfu := told.value("mfu")) is not None:
            words.append(f"mfu {mfu:.0%}")
        return [first, (("  ".join([" ", *words]).replace("   ", " ", 1), ""),)]

    def _notes(self, width: int) -> list[Line]:
        """What a person should know now: who waits for whom, who is slow, why it failed."""
        status, found = self.live.status, []
        if self._still is not None:
            found += paint.wrapped(f"stands still: {self._still.text}", width, 3, "bold yellow")
        for node in status.nodes:
            if node.slow:
                found += paint.wrapped(f"slow: {node.slow}", width, 2, "yellow")
        if status.failure is not None and self._still is None:
            failure = status.failure
            words = f"{failure.blame}: {failure.summary}"
            found += paint.wrapped(words, width, 2, "bold red")
        if (reason := pending_reason(status)) is not None:
            found += paint.wrapped(f"waits: {reason}", width, 1, "yellow")
        if self.live.stale:
            found += paint.wrapped(status.remark or "its supervisor is gone", width, 2, "yellow")
        return found

    def _curves(self, width: int, height: int) -> list[Line]:
        series = self.live.reported.series
        if not series:
            return []
        names = ["loss", "tokens_per_second", "step_seconds", "gradient_norm"]
        shown = [name for name in names if name in series] or list(series)[:2]
        shown = shown[: max(1, min(len(shown), width // 38))]
        wide = width // len(shown)
        widths = [wide] * (len(shown) - 1) + [width - wide * (len(shown) - 1)]
        return paint.beside([
            paint.curve(name.replace("tokens_per_second", "tokens/s"), series[name], room, height)
            for name, room in zip(shown, widths, strict=True)
        ])  # fmt: skip

    def _ranks(self, width: int, rows: int) -> list[Line]:
        shown = self._shown()
        window = self.window(len(shown), rows)
        filtered = f" with {self.filter!r}" if self.filter else ""
        counts = f"{self.cursor + 1 if shown else 0} of {len(shown)}{filtered}"
        found = [paint.title("ranks", counts, width)]
        views = [self.live.ranks[key] for key in shown[window.start : window.stop]]
        uses = [view.usage for view in views]
        columns = "  CPUS   MEM" if any(uses) else ""
        if any(use.gpu is not None for use in uses if use is not None):
            columns += "  GPU    MEM"
        head = f" {'NODE':>4} {'RANK':>5} {'STATE':10} {'STEP':>8} {'S/STEP':>7} {'QUIET':>6}"
        head += f"{columns}  LAST"
        found.append(paint.fitted(((head, BOLD),), width))
        now = self.live.status.finished_at or time.time()
        for number, view, use in zip(window, views, uses, strict=True):
            here = HERE if number == self.cursor else ""
            row = self._row(view, here, now, f"{_usage_text(use):{len(columns)}}")
            found.append(paint.fitted(row, width))
        return found

    def _row(self, view: RankView, here: str, now: float, use: str) -> Line:
        rank = view.rank or 0
        state, last, heard = self._state(view.node, rank), view.last, view.heard_at
        step = "" if view.step is None else str(view.step)
        pace = "" if view.step_seconds is None else f"{view.step_seconds:.3g}"
        quiet = "" if heard is None else _brief(now - heard)
        return (
            (f" {view.node:>4} {rank:>5} ", here), (f"{state:10}", here or STYLES.get(state, "")),
            (f" {step:>8} {pace:>7} {quiet:>6}{use}  ", here),
            ("" if last is None else paint.clean(last.text), here),
        )  # fmt: skip

    def _event(self, event: Event) -> Line:
        when = f"{clock(event.at)} attempt {event.attempt}  "
        return ((when, DIM), (paint.clean(event.text), ""))

    def _bottom(self, width: int, height: int) -> list[Line]:
        if height < 1:
            return []
        if self._events:
            name = "rounds and events"
            lines = [self._event(one) for one in self.live.events]
        else:
            chosen = self.chosen()
            node, rank = chosen if chosen is not None else (0, 0)
            name = f"log of node {node}" if self._whole_node else f"log of rank {rank}"
            source: Sequence[LogLine] = list(self._log)
            if self.found is not None:
                name, source = f"{name}: lines with {self.searched!r}", self.found
            end = len(source) - self._back
            begin = max(0, end - height)
            lines = [paint.log_line(one, whole_node=self._whole_node) for one in source[begin:end]]
        count = self._log_size()
        more = f"{count - self._back} of {count}" if self._back else str(count)
        if self._events:
            lines = lines[: len(lines) - self._back]
        shown = lines[-(height - 1) :] if height > 1 else []
        blank = [paint.fitted((), width)] * (height - 1 - len(shown))
        return [paint.title(name, more, width),
                *(paint.fitted(((" ", ""), *line), width) for line in shown), *blank]  # fmt: skip


def _usage_text(usage: Usage | None) -> str:
    """CPUs and memory, and the same of its GPU, in columns."""
    if usage is None:
        return ""
    cpus = "" if usage.cpus is None else f"{usage.cpus:.1f}"
    gpu = "" if usage.gpu is None else f"{usage.gpu:>4}%{paint.size_text(usage.gpu_memory or 0):>7}"
    return f"{cpus:>6}{paint.size_text(usage.memory):>6}{gpu}"


def _brief(seconds: float) -> str:
    """``0s``, ``59s``, ``12m``, ``3h``."""
    whole = max(0, int(seconds))
    return (
        f"{whole}s" if whole < 100 else f"{whole // 60}m" if whole < 6000 else f"{whole // 3600}h"
    )
