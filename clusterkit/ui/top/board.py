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
from clusterkit.ui.formatting import duration, left_text, loss_text, pending_reason
from clusterkit.ui.top import paint
from clusterkit.ui.top.log_pane import LogPane
from clusterkit.ui.top.paint import BOLD, CURSOR, DIM, STYLES, Line, Piece

_LISTING_SECONDS = 1.0
"""Time between two readings of all runs, of which there may be thousands."""
_RANKS, _LOG = 4, 4
"""Lines that ranks and log need before there are curves."""
Row = TypeVar("Row")


class Action(NamedTuple):
    """What the app must do: ``open``, ``back``, ``quit``, ``cancel``, ``attach`` or ``search``."""

    verb: str
    argument: str = ""
    """The run, or the text to search for."""


class Key(NamedTuple):
    """A key, and what it does: in a word for the bottom line, and as the list of keys says it."""

    name: str
    effect: str
    help: str


_QUIT = Key("q", "quit", "quit; runs go on")
_MOVE = "move: also j, k, PgUp, PgDn"


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
        self.helps = False
        """Whether the keys are listed, until the next key."""
        self._typed = ""
        self._first = 0  # the row at the top
        self._page = 10  # rows that fit on the screen

    def keys(self) -> list[Key]:
        """Return the keys that do something now, the most important first."""
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
        body = self._help(width) if self.helps else self.body(width, height - 1)
        body = body[: height - 1]
        body += [()] * (height - 1 - len(body))
        return [paint.fitted(line, width) for line in (*body, self._bottom_line(width))]

    def press(self, key: str, character: str | None = None) -> Action | None:
        """Handle a key, by Textual's name for it, and the character that it types."""
        self.message = ""
        if self.helps:
            self.helps = False
            return Action("quit") if key in ("q", "ctrl+c") else None
        if character == "?" and self.question is None and not self.prompt:
            self.helps = True
            return None
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

    def _help(self, width: int) -> list[Line]:
        keys = [*self.keys(), Key("?", "keys", "these keys; any other goes back")]
        wide = max(len(each.name) for each in keys)
        return [paint.title("keys", "", width)] + [
            ((f" {each.name:{wide}}  ", BOLD), (each.help, "")) for each in keys
        ]

    def _bottom_line(self, width: int) -> Line:
        if self.question is not None:
            return ((f" y/n  {self.question[0]} ", CURSOR),)
        if self.prompt:
            return ((f" {self.prompt}: ", BOLD), (f"{self._typed}▏", ""))
        if self.message:
            return ((f" {paint.clean(self.message)}", BOLD),)
        pieces: list[Piece] = [(" ?", BOLD), (" keys ", DIM)]
        room = width - 8
        for key in self.keys():
            if (room := room - len(f" {key.name} {key.effect} ")) < 0:
                break
            pieces += [(f" {key.name}", BOLD), (f" {key.effect} ", DIM)]
        return tuple(pieces)


class RunsBoard(Board[RunStatus]):
    """All runs, newest first."""

    def __init__(self) -> None:
        super().__init__()
        self._live = LiveRuns()
        self._all: list[RunStatus] = []
        self._due = 0.0

    def keys(self) -> list[Key]:
        return [
            _QUIT, Key("↑↓", "run", _MOVE), Key("enter", "open", "open the run"),
            Key("c", "cancel", "cancel the run, after a question"),
            Key("f", "filter", "show only runs with a text"),
        ]  # fmt: skip

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
        texts = []
        for number in visible:
            run = rows[number]
            reason = run.failure.summary if run.failure else pending_reason(run)
            age = duration(time.time() - run.started_at) if run.started_at else ""
            texts.append([
                run.run, run.state, str(len(run.nodes) or "-"), run.cluster, age,
                paint.clean(reason or run.remark or ""),
            ])  # fmt: skip
        header = [("RUN", 3), ("STATE", 10), ("NODES", 5), ("CLUSTER", 7), ("AGE", 4), ("WHAT", 4)]
        columns, (head, *cells) = paint.columns(
            header, texts, width, drop=[3, 2, 4], left=[0, 1, 3]
        )
        found = [paint.title("clusterkit top", self.position(rows), width), _row(head, "", BOLD)]
        if not rows:
            none = "no run matches" if self._all else "no runs yet: clusterkit submit jobs/ddp.yaml"
            found.append(((f" {none}", DIM),))
        for number, row in zip(visible, cells, strict=True):
            style = CURSOR if number == self.cursor else ""
            found.append(_row(row, STYLES[rows[number].state], style, columns.index(1)))
        return found


def _row(cells: Sequence[str], state: str, style: str, at: int | None = None) -> Line:
    """Return a row of a table; ``at`` is the column of the state, which has a style of its own."""
    return tuple(
        (f" {cell}", (style or state) if number == at else style)
        for number, cell in enumerate(cells)
    )


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

    def keys(self) -> list[Key]:
        inner = self._zoomed or self.log.matches is not None
        keys = [_QUIT, Key("esc", "back" if inner else "runs", "go back, up to the list of runs")]
        if self._zoomed:
            keys += [Key("↑↓", "scroll", _MOVE)]
        else:
            keys += [Key("↑↓", "rank", _MOVE), Key("enter", "log", "show the log alone")]
            if not self.live.status.state.final:
                keys += [Key("c", "cancel", "cancel the run, after a question")]
            if self.live.stale:
                keys += [Key("a", "attach", "start another supervisor")]
        keys += [
            Key("n", "node/rank", "log of the node, or of the rank"),
            Key("e", "events", "restarts and events, or the log"),
            Key("/", "search", "search the log"),
        ]
        return keys if self._zoomed else [*keys, Key("f", "filter", "only ranks with a text")]

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
        found = [
            self._state_line(width),
            self._numbers_line(width),
            *self._notes(width, 3 if height >= 16 else 2),
        ]
        if not self._zoomed:
            curves = self._curves(width, min(12, max(4, (height + 1) // 5)))
            # Ranks and log come first.
            if height - len(found) - len(curves) >= min(len(self._ranks), _RANKS) + 2 + _LOG:
                found += curves
            left = height - len(found)
            rows = max(1, min(len(self._ranks), left // 2 if left < 40 else 2 * left // 3))
            found += self._rank_table(width, rows)
        found = found[: max(0, height - 2)]
        return found + self.log.body(width, height - len(found))

    def _state_line(self, width: int) -> Line:
        status, ranks = self.live.status, len(self.live.ranks)
        spent = (status.finished_at or time.time()) - (status.started_at or time.time())
        size = pluralize(len(status.nodes), "node") if status.nodes else "- nodes"
        if ranks:
            size += f", {pluralize(ranks, 'rank')}"
        parts = [duration(max(0.0, spent)), f"{status.cluster}: {size}"]
        if status.attempt > 1:
            parts.append(f"attempt {status.attempt}")
        if status.restarts_left:
            parts.append(f"{pluralize(status.restarts_left, 'restart')} left")
        state = (status.state, STYLES[status.state])
        room = width - len(f" {status.run} {status.state}")
        return ((f" {status.run} ", BOLD), state, (paint.fitting(parts, room), ""))

    def _numbers_line(self, width: int) -> Line:
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
        return ((paint.fitting(parts, width + 1)[1:], ""),)

    def _notes(self, width: int, most: int) -> list[Line]:
        """Which ranks hang or are slow, why the run failed, why it has not started."""
        status, found = self.live.status, []
        if self._standstill is not None:
            text = f"hang: {self._standstill.text}"
            found += paint.wrapped(text, width, most, "bold yellow")
        if left := left_text(status):
            found += paint.wrapped(left, width, most, "bold yellow")
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
        texts = [self._rank_cells(view) for view in views]
        header = [
            ("NODE", 4), ("RANK", 5), ("STATE", 10), ("STEP", 8), ("S/STEP", 7), ("QUIET", 6),
            ("CPUS", 5), ("MEM", 5), ("GPU", 4), ("MEM", 6), (" LAST", 4),
        ]  # fmt: skip
        usage = range(6, 10)
        without = [at for at in usage if not any(cells[at] for cells in texts)]
        kept = [at for at in range(len(header)) if at not in without]
        drop = [kept.index(at) for at in (9, 8, 7, 6, 4, 0, 3, 5) if at in kept]
        columns, (head, *rest) = paint.columns(
            [header[at] for at in kept], [[cells[at] for at in kept] for cells in texts],
            width, drop, left=[kept.index(2)],
        )  # fmt: skip
        state = columns.index(kept.index(2))
        filtered = f" with {self.filter!r}" if self.filter else ""
        found = [paint.title("ranks", self.position(rows) + filtered, width), _row(head, "", BOLD)]
        for number, cells, shown in zip(visible, texts, rest, strict=True):
            style = CURSOR if number == self.cursor else ""
            found.append(_row(shown, STYLES.get(cells[2], ""), style, state))
        return found

    def _rank_cells(self, view: RankView) -> list[str]:
        rank, usage = view.rank or 0, view.usage
        last, heard, pace = view.last, view.printed_at, view.step_seconds
        now = self.live.status.finished_at or time.time()
        return [
            str(view.node), str(rank), self._state(view.node, rank),
            "" if view.step is None else str(view.step),
            "" if pace is None else f"{pace:.3g}",
            "" if heard is None else _short_duration(now - heard),
            *_usage_cells(usage),
            "" if last is None else f" {paint.clean(last.text)}",
        ]  # fmt: skip


def _usage_cells(usage: Usage | None) -> list[str]:
    """Format CPUs, memory, and those of the GPU."""
    if usage is None:
        return ["", "", "", ""]
    cpus = "" if usage.cpus is None else f"{usage.cpus:.1f}"
    gpu = ["", ""]
    if usage.gpu is not None:
        gpu = [f"{usage.gpu}%", paint.size_text(usage.gpu_memory or 0)]
    return [cpus, paint.size_text(usage.memory), *gpu]


def _short_duration(seconds: float) -> str:
    """Format as ``0s``, ``59s``, ``12m`` or ``3h``."""
    whole = max(0, int(seconds))
    if whole < 100:
        return f"{whole}s"
    return f"{whole // 60}m" if whole < 6000 else f"{whole // 3600}h"
