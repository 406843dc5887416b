"""clusterkit status"""

from __future__ import annotations

import sys
import textwrap
import time

import click

from clusterkit import api
from clusterkit.cli.common import (
    STATE_COLOURS,
    json_option,
    print_one_or_all,
    runs_argument,
    table,
    terminal_width,
    verb,
)
from clusterkit.run.status import RunStatus
from clusterkit.ui.formatting import (
    failure_text,
    fold,
    goodput_text,
    remark_lines,
    terminal_filter,
)

SHORT = 10.0
"""Seconds below which a run is all start, and its share of training says nothing."""


@verb("status", "clusterkit status last")
@runs_argument
@json_option
def command(runs: tuple[str, ...], as_json: bool) -> None:
    """Show the state of runs and of their nodes, and why they failed.

    RUN is a run's id, the beginning of one, or `last`. --json prints an object for one run, a list
    for several.
    """
    found = [api.get(name) for name in runs]
    statuses = [run.with_goodput(run.status()) for run in found]
    if as_json:
        print_one_or_all(statuses)
        return
    for run, status in zip(found, statuses, strict=True):
        _show(run, status)


def _show(run: api.Run, status: RunStatus) -> None:
    clean = terminal_filter(sys.stdout)
    click.echo(f"{status.run}  ", nl=False)
    click.secho(status.state, fg=STATE_COLOURS[status.state], bold=True)
    seconds = 0.0
    if status.started_at is not None:
        seconds = (status.finished_at or time.time()) - status.started_at
        _print(
            f"  job {status.job} on {status.cluster} ({status.backend}), "
            f"attempt {status.attempt}, {seconds:.1f} s"
        )
    if status.nodes:
        rows = [
            (node.node, node.host, node.state, node.exit_code,
             f"{node.reason or ''}{_until(node.until)}")
            for node in status.nodes
        ]  # fmt: skip
        header = ("NODE", "HOST", "STATE", "EXIT", "WHY")
        nodes = table(rows, header, drop=("HOST", "EXIT"), indent=2)
        click.echo(textwrap.indent(nodes, "  "))
    if status.attempts:
        header = ("ATTEMPT", "ENDED", "LAST STEP", "STEPS LOST", "WHY")
        attempts = [
            (
                earlier.attempt,
                time.strftime("%H:%M:%S", time.localtime(earlier.finished_at)),
                earlier.last_step,
                earlier.steps_lost,
                earlier.failure.line if earlier.failure else "",
            )
            for earlier in status.attempts
        ]
        text = table(attempts, header, drop=("ENDED", "STEPS LOST", "LAST STEP"), indent=2)
        click.echo(textwrap.indent(clean(text), "  "))
    if status.goodput is not None and seconds >= SHORT:
        _print(f"  {goodput_text(status.goodput)}")
    for line in remark_lines(status):
        _print(f"  {clean(line)}")
    for event in run.events():
        _print(f"  {time.strftime('%H:%M:%S', time.localtime(event.at))} {clean(event.text)}")
    if status.remark:
        _print(f"  {clean(status.remark)}")
    if status.failure is not None:
        _print(clean(failure_text(status)))


def _print(text: str) -> None:
    for line in text.split("\n"):
        click.echo("\n".join(fold(line, terminal_width())))


def _until(moment: float | None) -> str:
    return f" (until {time.strftime('%H:%M:%S', time.localtime(moment))})" if moment else ""
