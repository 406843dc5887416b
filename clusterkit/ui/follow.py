"""The live view of a run: a progress bar over its log, and a summary at its end."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from clusterkit.agent import HANG_NOTE, HANG_OVER, LEFT_NOTE, SLOW_NOTE, SLOW_OVER
from clusterkit.errors import pluralize
from clusterkit.lifecycle.live import Reported
from clusterkit.lifecycle.run import Run
from clusterkit.output import tracebacks
from clusterkit.run.logs import LogLine
from clusterkit.run.status import RunStatus, State
from clusterkit.ui.formatting import (
    duration,
    failure_text,
    fold,
    loss_text,
    pending_reason,
    printable,
    remark_lines,
    source,
    start_text,
)
from clusterkit.ui.spinner import spinner

PLAIN_LINES = 20
"""How many progress lines are printed if stderr is not a terminal."""
_REPORTS = (HANG_NOTE, HANG_OVER, SLOW_NOTE, SLOW_OVER, LEFT_NOTE)
PHASES = ("imports", "rendezvous", "build", "first_step", "training", "ending")


class View(Reported):
    """What the log of a run tells so far; `feed` takes it line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.attempt = 1
        self.last: LogLine | None = None
        """The last line that any rank or launcher printed."""
        self.held: list[LogLine] = []
        """Lines held back since a traceback began; shown at the end if the run succeeds."""

    def feed(self, line: LogLine) -> list[LogLine]:
        """Take one line; return the lines to show at once.

        These are rank 0's output, and the agent's reports on ranks that hang, are slow or do not
        end.
        Tracebacks are held back: most are echoes of another rank's failure, and the summary shows
        the one that matters.
        """
        if line.attempt != self.attempt:
            self.attempt, self.held = line.attempt, []
        event = line.event
        if event is not None:
            self.take(event)
            return []
        if line.text.strip():
            self.last = line
        if line.rank is None and line.text.startswith(_REPORTS):
            return [line]
        if line.rank != 0:
            return []
        if self.held or tracebacks.begins(line.text):
            self.held.append(line)
            return []
        return [line]

    def count(self) -> str:
        """Return the steps done and, if the program reports it, their total: ``3/10``."""
        if self.steps:
            return f"{self.step}/{self.steps}"
        return f"step {self.step}" if self.step else ""

    def describe(self) -> str:
        """Return the newest loss and tokens/s, or if neither is reported, the last line printed."""
        parts = []
        if (loss := self.value("loss")) is not None:
            parts.append(f"loss {loss_text(loss)}")
        if (speed := self.speed()) is not None:
            parts.append(f"{speed:,.0f} tokens/s")
        if not parts and self.last is not None:
            return f"{source(self.last)} {printable(self.last.text, colours=False).strip()}"
        return "  ".join(parts)

    def summary(self, status: RunStatus) -> list[str]:
        """Summarize a run that has ended: result, loss, speed, times, commands to see more."""
        spent = (status.finished_at or time.time()) - (status.started_at or time.time())
        restarts = (
            f" after {pluralize(status.attempt - 1, 'restart')}" if status.attempt > 1 else ""
        )
        lines = [f"{status.run} {status.state} in {duration(spent)}{restarts}"]
        if losses := self.series.get("loss"):
            first, last = (
                f"{loss_text(losses.values[i])} at step {losses.steps[i]}" for i in (0, -1)
            )
            lines.append(f"  loss      {first}, {last}")
        if speeds := self.series.get("tokens_per_second"):
            median = statistics.median(speeds.values)
            lines.append(f"  tokens/s  {median:,.0f} (median of the steps)")
        if self.optimizers:
            total = next(iter(self.optimizers.values()))[1]
            counts = {parameters for parameters, _ in self.optimizers.values()}
            held = " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))
            state = f"each rank holds the state of {held} of {total:,} parameters"
            lines.append(f"  optimizer {state}")
        if times := self._times(status):
            lines.append(f"  time      {times}")
        notes = [status.remark] if status.state.final and status.remark else []
        lines += [f"  note      {line}" for line in (*notes, *remark_lines(status))]
        lines.append(
            f"  next      clusterkit status {status.run}; clusterkit logs {status.run}"
            + (f"; clusterkit metrics {status.run} --plot loss.png" if losses else "")
        )
        return lines

    def _times(self, status: RunStatus) -> str:
        times = {name: self.phases[name] for name in PHASES if name in self.phases}
        if self.program_started_at is not None and status.started_at is not None:
            times = {"set-up": self.program_started_at - status.started_at, **times}
        return ", ".join(f"{name.replace('_', ' ')} {times[name]:.1f} s" for name in times)


def follow(run: Run, console: Console | None = None) -> RunStatus:
    """Show a run's progress on stderr until it ends, then its summary; return its status."""
    # Not rich's is_terminal for our own, which FORCE_COLOR turns on for any file.
    live = sys.stderr.isatty() if console is None else console.is_terminal
    console = console or Console(stderr=True, highlight=False)
    view = View()
    printed: str | None = None

    def started(status: RunStatus) -> bool:
        nonlocal printed
        reason = pending_reason(status)
        shown.update(start_text(reason))
        if reason is not None and reason != printed and not live:
            printed = reason
            _print(console, start_text(reason))
        return status.state is not State.PENDING

    with spinner(start_text()) as shown:
        run.wait(until=started)
    lines = run.logs(follow=True, note=lambda event: _print(console, f"note: {event.text}"))
    if live:
        _live(view, lines, console)
    else:
        _plain(view, lines, console)
    status = run.status()
    if status.state is State.SUCCEEDED:
        for late in view.held:
            _show(console, late)
    if status.failure is not None:
        _print(console, failure_text(status), "red")
    for text in view.summary(status):
        _print(console, text)
    return status


class _Clock(ProgressColumn):
    """The time left, or if that is unknown, the time so far."""

    def render(self, task: Task) -> Text:
        left = task.fields["left"]
        if (left := task.time_remaining if left is None else left) is not None:
            return Text(f"{duration(left)} left", style="progress.remaining")
        return Text(duration(task.elapsed or 0.0), style="progress.elapsed")


def _live(view: View, lines: Iterable[LogLine], console: Console) -> None:
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    text = TextColumn("{task.description}", markup=False, table_column=rest)
    count = TextColumn("{task.fields[count]}", markup=False)
    columns = (SpinnerColumn(), BarColumn(20), count, _Clock(), text)
    with Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("starting", total=None, count="", left=None)
        for line in lines:
            for shown in view.feed(line):
                _show(console, shown)
            bar.update(
                task, completed=view.step, total=view.steps, count=view.count(),
                left=view.time_left(), description=view.describe() or "starting",
            )  # fmt: skip


def _plain(view: View, lines: Iterable[LogLine], console: Console) -> None:
    printed = 0  # the step of the last progress line
    since = time.monotonic()
    for line in lines:
        for shown in view.feed(line):
            _show(console, shown)
        losses = view.series.get("loss")
        if losses and view.step != printed and view.steps:
            every = max(1, view.steps // PLAIN_LINES)
            if view.step // every > printed // every or view.step == view.steps:
                if (left := view.time_left()) is None:
                    done = max(1, view.step - view.first_step)
                    left = (time.monotonic() - since) / done * (view.steps - view.step)
                _print(console, f"step {view.count()}  {view.describe()}  {duration(left)} left")
                printed = view.step
        elif not losses:
            since = time.monotonic()


def _show(console: Console, line: LogLine) -> None:
    _write(console, f"{source(line)} {line.text}")


def _print(console: Console, text: str, style: str | None = None) -> None:
    if console.is_terminal:
        lines = text.split("\n")
        text = "\n".join(part for line in lines for part in fold(line, console.width))
    _write(console, text, style)


def _write(console: Console, text: str, style: str | None = None) -> None:
    if console.is_terminal:
        # No markup, no emoji codes, but the program's own colours.
        console.print(Text.from_ansi(printable(text), style=style or ""), soft_wrap=True)
    else:
        console.file.write(f"{text}\n")
