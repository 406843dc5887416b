"""The two screens of `clusterkit top`, without a terminal: the list of runs, and one run.

A board reads what is new (`poll`), handles keys (`press`) and formats itself for a screen of any
size (`lines`). What takes time or changes a run is not done here: `press` returns an `Action`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from clusterkit.errors import pluralize
from clusterkit.lifecycle.live import LiveRun, LiveRuns, RankView, Usage, standstill
from clusterkit.run.folder import RunFolder
from clusterkit.run.status import RunStatus
from clusterkit.ui.formatting import duration, loss_text, pending_reason
from clusterkit.ui.top import paint
from clusterkit.ui.top.log_pane import LogPane
from clusterkit.ui.top.paint import BOLD, CURSOR, DIM, STYLES, Line, Piece

_LISTING_SECONDS = 1.0
"""Time between two readings of all runs, of which there may be thousands."""
Row = TypeVar("Row")


class Action(NamedTuple):
    """What the app must do: ``open``, ``back``, ``quit``, ``cancel``, ``attach`` or ``search``."""

    verb: str
    argument: str = ""
    """The run, or the text to search for."""


class Board(Generic[Row]):
    """Rows with a cursor and a filter; below them a prompt, a question, a message or the keys."""

    def __init__(self) -> None:
        self.cursor = 0
        self.filter = ""
        self.prompt = ""
        """``filter`` or ``search`` while its text is typed; empty while keys are commands."""
        self.question: tuple[str, Action] | None = None
        """What must be answered with y or n, and the action on y."""
        self.message = ""
        """Shown in the bottom line until the next key."""
        self._typed = ""
        self._first = 0  # the row at the top
        self._page = 10  # rows that fit on the screen

    def keys(self) -> str:
        """Return the keys and what they do, for the bottom line: ``q quit  c cancel``."""
        raise NotImplementedError

    def poll(self) -> bool:
        """Read what is new. Returns whether there is more to read at once."""
        raise NotImplementedError

    def rows(self) -> Sequence[Row]:
        """Return the rows that match the filter."""
        raise NotImplementedError

    def body(self, width: int, height: int) -> list[Line]:
        """Return the screen without its bottom line; lines are cut or filled up later."""
        raise NotImplementedError

    def selected(self) -> Row | None:
        """Return the row under the cursor; None if there are no rows."""
        rows = self.rows()
        return rows[min(self.cursor, len(rows) - 1)] if rows else None

    def lines(self, width: int, height: int) -> list[Line]:
        """Return the screen: ``height`` lines of ``width`` columns."""
        body = self.body(width, height - 1)[: height - 1]
        body += [()] * (height - 1 - len(body))
        return [paint.fitted(line, width) for line in (*body, self._bottom_line())]

    def press(self, key: str, character: str | None = None) -> Action | None:
        """Handle a key, by Textual's name for it, and the character that it types."""
        self.message = ""
        if key == "ctrl+j":  # Enter in a terminal that Textual has not configured yet
            key = "enter"
        if self.question is not None:
            action = self.question[1]
            self.question = None
            return action if character in ("y", "Y") else None
        return self._type(key, character) if self.prompt else self.command(key)

    def command(self, key: str) -> Action | None:
        """Handle a key while no text is typed."""
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -self._page,
                 "pagedown": self._page, "home": -(1 << 30), "end": 1 << 30}  # fmt: skip
        if key in steps:
            self.move(steps[key])
        elif key == "f":
            self.prompt, self._typed = "filter", self.filter
        elif key in ("q", "ctrl+c"):
            return Action("quit")
        return None

    def move(self, rows: int) -> None:
        """Move the cursor, but not beyond the first or the last row."""
        self.cursor = max(0, min(self.cursor + rows, len(self.rows()) - 1))

    def ask_cancel(self, run: str) -> None:
        """Ask whether to cancel a run."""
        self.question = f"Cancel {run} and end everything it started?", Action("cancel", run)

    def visible(self, rows: Sequence[Row], height: int) -> range:
        """Return the numbers of the rows that fit in ``height`` lines, the cursor's among them."""
        self._page = max(1, height - 1)
        self.cursor = max(0, min(self.cursor, len(rows) - 1))
        self._first = max(self.cursor - height + 1, min(self._first, self.cursor))
        self._first = max(0, min(self._first, len(rows) - height))
        return range(self._first, min(self._first + height, len(rows)))

    def position(self, rows: Sequence[Row]) -> str:
        """Describe where the cursor is: ``3 of 8``."""
        return f"{self.cursor + 1 if rows else 0} of {len(rows)}"

    def _type(self, key: str, character: str | None) -> Action | None:
        prompt = self.prompt
        if key == "backspace":
            self._typed = self._typed[:-1]
        elif key == "escape":
            self.prompt = self._typed = ""
        elif key == "enter":
            self.prompt = ""
        elif character is not None and character.isprintable():
            self._typed += character
        if prompt == "filter":
            self.filter, self.cursor = self._typed, 0
        elif key == "enter" and self._typed:
            return Action("search", self._typed)
        return None

    def _bottom_line(self) -> Line:
        if self.question is not None:
            return ((f" {self.question[0]} y/n ", CURSOR),)
        if self.prompt:
            return ((f" {self.prompt}: ", BOLD), (f"{self._typed}▏", ""))
        if self.message:
            return ((f" {paint.clean(self.message)}", BOLD),)
        pieces: list[Piece] = []
        for each in self.keys().split("  "):
            key, _, effect = each.partition(" ")
            pieces += [(f" {key}", BOLD), (f" {effect} ", DIM)]
        return tuple(pieces)


class RunsBoard(Board[RunStatus]):
    """All runs, newest first."""

    def __init__(self) -> None:
        super().__init__()
        self._live = LiveRuns()
        self._all: list[RunStatus] = []
        self._due = 0.0

    def keys(self) -> str:
        return "q quit  ↑↓ run  enter open  f filter  c cancel"

    def poll(self) -> bool:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _LISTING_SECONDS
            self._all = self._live.poll()
        return False

    def rows(self) -> list[RunStatus]:
        text = self.filter.casefold()
        return [
            run for run in self._all if text in f"{run.run} {run.state} {run.cluster}".casefold()
        ]

    def command(self, key: str) -> Action | None:
        run = self.selected()
        if run is not None and key in ("enter", "right"):
            return Action("open", run.run)
        if run is not None and key == "c":
            self.ask_cancel(run.run)
        elif key == "escape":
            self.filter = ""
        else:  # there is no log to search, so `/` filters
            return super().command("f" if key == "slash" else key)
        return None

    def body(self, width: int, height: int) -> list[Line]:
        rows = self.rows()
        visible = self.visible(rows, height - 2)
        wide = max((len(rows[number].run) for number in visible), default=3)
        head = f" {'RUN':{wide}}  {'STATE':10}  NODES  {'CLUSTER':10}  {'AGE':8}  WHAT"
        found = [paint.title("clusterkit top", self.position(rows), width), ((head, BOLD),)]
        if not rows:
            none = "no run matches" if self._all else "no runs yet: clusterkit submit jobs/ddp.yaml"
            found.append(((f" {none}", DIM),))
        for number in visible:
            run, style = rows[number], CURSOR if number == self.cursor else ""
            reason = run.failure.summary if run.failure else pending_reason(run)
            ago = duration(time.time() - run.started_at) if run.started_at else ""
            found.append((
                (f" {run.run:{wide}}  ", style), (f"{run.state:10}", style or STYLES[run.state]),
                (f"  {len(run.nodes) or '-':>5}  {run.cluster:10.10}  {ago:>8}  ", style),
                (paint.clean(run.remark or reason or ""), style),
            ))  # fmt: skip
        return found


class RunBoard(Board[tuple[int, int]]):
    """One run: its state, curves, ranks, and the log of the rank under the cursor.

    A row is a node and a rank.
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.live = LiveRun(folder)
        self.log = LogPane(self.live)
        self._zoomed = False  # the log takes the whole screen
        self._ranks: list[tuple[int, int]] = []
        self._standstill = standstill(self.live.status)

    def keys(self) -> str:
        escape = "esc back" if self._zoomed or self.log.matches is not None else "esc runs"
        if self._zoomed:
            return f"q quit  {escape}  ↑↓ scroll  n node/rank  e events  / search"
        attach = "  a attach" if self.live.stale else ""
        return (f"q quit  {escape}  ↑↓ rank  enter log  n node/rank  e events  f filter  / search"
                f"  c cancel{attach}")  # fmt: skip

    # -- reading -----------------------------------------------------------

    def poll(self) -> bool:
        self.live.poll()
        self._standstill = standstill(self.live.status)
        self._ranks = sorted(self.live.ranks)
        self.log.poll(self.selected())
        return self.live.behind

    def rows(self) -> list[tuple[int, int]]:
        text = self.filter.casefold()
        if not text:
            return self._ranks
        return [key for key in self._ranks if text in self._filter_text(*key).casefold()]

    def _filter_text(self, node: int, rank: int) -> str:
        last = self.live.ranks[node, rank].last
        host = self.live.nodes[node].host if node in self.live.nodes else ""
        text = "" if last is None else last.text
        return f"node {node} {host} rank {rank} {self._state(node, rank)} {text}"

    def _state(self, node: int, rank: int) -> str:
        hang = self._standstill
        if hang is not None and not self.live.status.state.final:
            if rank in hang.missing:
                return "MISSING"
            if rank in hang.waiting:
                return "WAITS"
        return self.live.state(node, rank)

    # -- keys --------------------------------------------------------------

    def command(self, key: str) -> Action | None:
        run = self.live.folder.run_id
        if key == "escape":
            if self.log.matches is not None:
                self.log.matches = None
            elif self._zoomed:
                self._zoomed = False
            elif self.filter:
                self.filter = ""
            else:
                return Action("back")
        elif key == "enter":
            self._zoomed = not self._zoomed
        elif key == "n":
            self.log.whole_node = not self.log.whole_node
        elif key == "e":
            self.log.shows_events = not self.log.shows_events
        elif key == "slash":
            self.prompt, self._typed = "search", ""
        elif key == "c" and not self.live.status.state.final:
            self.ask_cancel(run)
        elif key == "a" and self.live.stale:
            self.question = f"Start another supervisor for {run}?", Action("attach", run)
        else:
            return super().command(key)
        self.log.back = 0
        return None

    def move(self, rows: int) -> None:
        if self._zoomed:
            self.log.scroll(-rows)
        else:
            super().move(rows)

    # -- lines -------------------------------------------------------------

    def body(self, width: int, height: int) -> list[Line]:
        found = [self._state_line(), self._numbers_line(), *self._notes(width)]
        if not self._zoomed:
            found += self._curves(width, min(12, max(4, (height + 1) // 5)))
            left = height - len(found)
            rows = max(1, min(len(self._ranks), left // 2 if left < 40 else 2 * left // 3))
            found += self._rank_table(width, rows)
        found = found[: max(0, height - 2)]
        return found + self.log.body(width, height - len(found))

    def _state_line(self) -> Line:
        status, ranks = self.live.status, len(self.live.ranks)
        spent = (status.finished_at or time.time()) - (status.started_at or time.time())
        size = pluralize(len(status.nodes), "node") if status.nodes else "- nodes"
        if ranks:
            size += f", {pluralize(ranks, 'rank')}"
        parts = [f"{status.cluster}: {size}", duration(max(0.0, spent))]
        if status.attempt > 1:
            parts.append(f"attempt {status.attempt}")
        if status.restarts_left:
            parts.append(f"{pluralize(status.restarts_left, 'restart')} left")
        state = (status.state, STYLES[status.state])
        return ((f" {status.run} ", BOLD), state, (f"  {'  '.join(parts)}", ""))

    def _numbers_line(self) -> Line:
        reported = self.live.reported
        parts = ["no step yet"]
        if reported.step or reported.steps:
            parts = [f"step {reported.step}{f'/{reported.steps}' if reported.steps else ''}"]
        if (loss := reported.value("loss")) is not None:
            parts.append(f"loss {loss_text(loss)}")
        if (speed := reported.speed()) is not None:
            parts.append(f"{speed:,.0f} tokens/s")
        if (pace := reported.speed("step_seconds")) is not None:
            parts.append(f"{pace:.3g} s a step")
        stopped = self.live.status.state.final or self._standstill is not None
        if not stopped and (left := reported.time_left()) is not None:
            parts.append(f"{duration(left)} left")
        if (memory := reported.value("peak_memory")) is not None:
            parts.append(f"peak {paint.size_text(memory)}")
        if (mfu := reported.value("mfu")) is not None:
            parts.append(f"mfu {mfu:.0%}")
        return ((f" {'  '.join(parts)}", ""),)

    def _notes(self, width: int) -> list[Line]:
        """Which ranks hang or are slow, why the run failed, why it has not started."""
        status, found = self.live.status, []
        if self._standstill is not None:
            text = f"hang: {self._standstill.text}"
            found += paint.wrapped(text, width, 3, "bold yellow")
        for node in status.nodes:
            if node.slow:
                found += paint.wrapped(f"slow: {node.slow}", width, 2, "yellow")
        if status.failure is not None and self._standstill is None:
            text = f"{status.failure.headline}: {status.failure.summary}"
            found += paint.wrapped(text, width, 2, "bold red")
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

    def _rank_table(self, width: int, height: int) -> list[Line]:
        rows = self.rows()
        visible = self.visible(rows, height)
        views = [self.live.ranks[rows[number]] for number in visible]
        usages = [view.usage for view in views]
        columns = "  CPUS   MEM" if any(usages) else ""
        if any(usage.gpu is not None for usage in usages if usage is not None):
            columns += "  GPU    MEM"
        head = f" {'NODE':>4} {'RANK':>5} {'STATE':10} {'STEP':>8} {'S/STEP':>7} {'QUIET':>6}"
        filtered = f" with {self.filter!r}" if self.filter else ""
        title = paint.title("ranks", self.position(rows) + filtered, width)
        return [title, ((f"{head}{columns}  LAST", BOLD),), *(
            self._rank_line(
                view,
                CURSOR if number == self.cursor else "",
                f"{_usage_text(usage):{len(columns)}}",
            )
            for number, view, usage in zip(visible, views, usages, strict=True)
        )]  # fmt: skip

    def _rank_line(self, view: RankView, style: str, usage: str) -> Line:
        rank = view.rank or 0
        state, last, heard = self._state(view.node, rank), view.last, view.printed_at
        step = "" if view.step is None else str(view.step)
        pace = "" if view.step_seconds is None else f"{view.step_seconds:.3g}"
        now = self.live.status.finished_at or time.time()
        quiet = "" if heard is None else _short_duration(now - heard)
        return (
            (f" {view.node:>4} {rank:>5} ", style), (f"{state:10}", style or STYLES.get(state, "")),
            (f" {step:>8} {pace:>7} {quiet:>6}{usage}  ", style),
            ("" if last is None else paint.clean(last.text), style),
        )  # fmt: skip


def _usage_text(usage: Usage | None) -> str:
    """Format CPUs, memory, and those of the GPU, in columns."""
    if usage is None:
        return ""
    cpus = "" if usage.cpus is None else f"{usage.cpus:.1f}"
    gpu = "" if usage.gpu is None else f"{usage.gpu:>4}%{paint.size_text(usage.gpu_memory or 0):>7}"
    return f"{cpus:>6}{paint.size_text(usage.memory):>6}{gpu}"


def _short_duration(seconds: float) -> str:
    """Format as ``0s``, ``59s``, ``12m`` or ``3h``."""
    whole = max(0, int(seconds))
    if whole < 100:
        return f"{whole}s"
    return f"{whole // 60}m" if whole < 6000 else f"{whole // 3600}h"
