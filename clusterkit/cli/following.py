"""Following a run from a terminal, and what Ctrl-C means meanwhile."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable

import click

from clusterkit import api
from clusterkit.cli.common import print_json
from clusterkit.errors import EXIT_FAILURE, EXIT_INTERRUPTED, BadInput, Unavailable
from clusterkit.run.status import RunStatus, State
from clusterkit.ui.formatting import failure_text, pending_reason, start_text
from clusterkit.ui.spinner import spinner

QUEUE_SECONDS = 3.0
"""How long nodes wait before it is said that they do."""


def follow(run: api.Run, as_json: bool, *, detach: bool = False) -> int:
    """Show a run until it ends, or with ``detach`` wait until it has started; its exit code."""
    try:
        from clusterkit.ui import follow  # a moment in which Ctrl-C may come, too

        if detach:
            with spinner(start_text()) as shown:
                status = run.wait(until=_Started(shown.update))
        else:
            status = follow.follow(run)
    except KeyboardInterrupt:
        status = interrupted(run)
    if as_json:
        print_json(status)
    if detach and not status.state.final:
        reason = pending_reason(status)
        how = "has started" if reason is None else f"waits ({reason})"
        click.echo(f"{run.id} {how}; clusterkit logs -f {run.id} follows it", err=True)
    if status.state is State.UNKNOWN:
        click.echo(status.remark, err=True)
        return EXIT_FAILURE
    return status.exit_code or 0


class _Started:
    """Whether every node of a run runs, or it is known for some seconds why not."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._since: float | None = None
        self._say = say

    def __call__(self, status: RunStatus) -> bool:
        reason = pending_reason(status)
        self._say(start_text(reason))
        if reason is None:
            self._since = None
            return bool(status.nodes) and all(n.state is not State.PENDING for n in status.nodes)
        self._since = self._since or time.monotonic()
        return time.monotonic() > self._since + QUEUE_SECONDS


def interrupted(run: api.Run) -> RunStatus:
    """Ctrl-C: ask, where somebody can answer; otherwise, or when it comes again, cancel."""
    if sys.stdin and sys.stdin.isatty() and sys.stderr.isatty():
        try:
            answer = click.prompt(
                f"\n{run.id} still runs: detach from it, or cancel it?",
                type=click.Choice(["detach", "cancel", "d", "c"]),
                show_choices=False, default="detach", err=True,
            )  # fmt: skip
        except (click.Abort, KeyboardInterrupt):
            answer = "cancel"
        if answer.startswith("d"):
            click.echo(f"clusterkit logs -f {run.id} follows it again", err=True)
            return run.status()
    click.echo(f"cancelling {run.id}", err=True)
    run.cancel()
    sys.exit(EXIT_INTERRUPTED)


def check_terminal() -> None:
    """Whether there is what a live view needs.

    Raises:
        Unavailable: Textual is not installed.
        BadInput: this is no terminal.
    """
    if importlib.util.find_spec("textual") is None:
        raise Unavailable("top needs Textual", "pip install 'clusterkit[top]'")
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise BadInput("top needs a terminal", hint="clusterkit logs -f RUN follows a run without")


def show(run: str | None) -> None:
    """`clusterkit top`, until somebody leaves it; ``run`` None: of all runs."""
    from clusterkit.run import folder as run_folder
    from clusterkit.ui.top.board import RunBoard, RunsBoard
    from clusterkit.ui.top.paint import ansi

    first = RunsBoard() if run is None else RunBoard(run_folder.find(run))
    first.poll()
    size = os.get_terminal_size(sys.stderr.fileno())
    # Textual takes longer to import than all the rest: meanwhile there is something to look at.
    print("\x1b[?1049h", ansi(first.lines(*size)), sep="", end="", file=sys.stderr, flush=True)
    try:
        from clusterkit.ui.top.app import Top

        Top(first).run()
    finally:
        print("\x1b[?1049l", end="", file=sys.stderr, flush=True)


def watch(run: api.Run, as_json: bool) -> int:
    """Show a new run so, and say how it stands when its user leaves; its exit code."""
    show(run.id)
    status = run.status()
    if as_json:
        print_json(status)
    goes_on = "" if status.state.final else f"; clusterkit logs -f {run.id} follows it"
    click.echo(f"{run.id} {status.state}{goes_on}", err=True)
    if status.failure is not None:
        click.echo(failure_text(status), err=True)
    return status.exit_code or 0
