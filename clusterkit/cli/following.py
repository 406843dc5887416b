"""Follow a run from a terminal, and handle Ctrl-C meanwhile."""

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
from clusterkit.ui.formatting import failure_text, pending_reason, prose, start_text
from clusterkit.ui.spinner import spinner

QUEUE_SECONDS = 3.0
"""How long nodes may be pending for a known reason before `submit --detach` returns."""


def start(ready: api.Prepared, as_json: bool, *, detach: bool, top: bool) -> int:
    """Start a prepared run and follow it, here or in `top`; return its exit code."""
    if top:
        if detach:
            raise click.UsageError("--top follows the run, --detach does not.")
        check_terminal()
    for note in ready.plan.notes:
        if not note.name:
            click.echo(prose(f"note: {note}"), err=True)
    if outer := os.environ.get("CLUSTERKIT_RUN_ID"):
        click.echo(prose(f"note: inside run {outer}: this one ends with it"), err=True)
    run = None
    try:
        with spinner("copying the project" if ready.plan.trees else "starting") as shown:
            run = api.launch(ready, shown.report_sent)
        if not as_json:
            click.echo(run.id)
    except KeyboardInterrupt:
        if run is None:
            raise
        handle_interrupt(run)
        return 0
    return follow_in_top(run, as_json) if top else follow(run, as_json, detach=detach)


def follow(run: api.Run, as_json: bool, *, detach: bool = False) -> int:
    """Show a run until it ends, or with ``detach`` wait until it has started.

    Returns:
        The run's exit code.
    """
    try:
        from clusterkit.ui import follow  # here, as Ctrl-C may come during this import, too

        if detach:
            with spinner(start_text()) as shown:
                status = run.wait(until=_started(shown.update))
        else:
            status = follow.follow(run)
    except KeyboardInterrupt:
        status = handle_interrupt(run)
    if as_json:
        print_json(status)
    if detach and not status.state.final:
        reason = pending_reason(status)
        progress = "has started" if reason is None else f"waits ({reason})"
        click.echo(prose(f"{run.id} {progress}; clusterkit logs -f {run.id} follows it"), err=True)
    elif detach and (text := failure_text(status) or status.remark):
        click.echo(prose(f"{run.id} {status.state}\n{text}"), err=True)
    if status.state is State.UNKNOWN:
        click.echo(prose(status.remark or ""), err=True)
        return EXIT_FAILURE
    return status.exit_code or 0


def _started(show: Callable[[str], None]) -> Callable[[RunStatus], bool]:
    """Return a function that tells whether every node runs, or why not is known for some time."""
    since: float | None = None

    def started(status: RunStatus) -> bool:
        nonlocal since
        reason = pending_reason(status)
        show(start_text(reason))
        if reason is None:
            since = None
            return bool(status.nodes) and all(n.state is not State.PENDING for n in status.nodes)
        since = since or time.monotonic()
        return time.monotonic() > since + QUEUE_SECONDS

    return started


def handle_interrupt(run: api.Run) -> RunStatus:
    """Ask on Ctrl-C whether to detach; without a terminal, or on a second Ctrl-C, cancel the run.

    Returns only if the user detaches.
    """
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
            click.echo(prose(f"clusterkit logs -f {run.id} follows it again"), err=True)
            return run.status()
    click.echo(prose(f"cancelling {run.id}"), err=True)
    run.cancel()
    sys.exit(EXIT_INTERRUPTED)


def check_terminal() -> None:
    """Check that `clusterkit top` can be shown.

    Raises:
        Unavailable: Textual is not installed.
        BadInput: stdin or stderr is not a terminal.
    """
    if importlib.util.find_spec("textual") is None:
        raise Unavailable("top needs Textual", "pip install 'clusterkit[top]'")
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise BadInput("top needs a terminal", hint="clusterkit logs -f RUN follows a run without")


def show_top(run: str | None) -> None:
    """Show `clusterkit top` until the user quits; ``run`` None: the list of all runs."""
    from clusterkit.run.find import find_run
    from clusterkit.ui.top.board import RunBoard, RunsBoard
    from clusterkit.ui.top.paint import ansi

    first = RunsBoard() if run is None else RunBoard(find_run(run))
    first.poll()
    size = os.get_terminal_size(sys.stderr.fileno())
    # Painted at once, as the import of Textual takes longer than all the rest.
    print("\x1b[?1049h", ansi(first.lines(*size)), sep="", end="", file=sys.stderr, flush=True)
    try:
        from clusterkit.ui.top.app import Top

        Top(first).run()
    finally:
        print("\x1b[?1049l", end="", file=sys.stderr, flush=True)


def follow_in_top(run: api.Run, as_json: bool) -> int:
    """Show a new run in `clusterkit top`, and its state when the user quits.

    Returns:
        The run's exit code, 0 if it still runs.
    """
    show_top(run.id)
    status = run.status()
    if as_json:
        print_json(status)
    hint = "" if status.state.final else f"; clusterkit logs -f {run.id} follows it"
    click.echo(prose(f"{run.id} {status.state}{hint}"), err=True)
    if status.failure is not None:
        click.echo(prose(failure_text(status)), err=True)
    return status.exit_code or 0
