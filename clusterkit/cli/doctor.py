"""clusterkit doctor"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from clusterkit import api
from clusterkit.cli.common import (
    cluster_options,
    gpus_option,
    host_options,
    json_option,
    print_json,
    set_option,
    table,
    verb,
)
from clusterkit.doctor import Progress, every_check
from clusterkit.doctor.base import Level
from clusterkit.doctor.report import ranges
from clusterkit.errors import EXIT_FAILURE
from clusterkit.ui.spinner import spinner

_COLOURS: dict[Level, dict[str, Any]] = {
    "ok": {"fg": "green"},
    "warn": {"fg": "yellow"},
    "fail": {"fg": "red", "bold": True},
    "skip": {"dim": True},
}


def _complete_check(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    done, comma, last = incomplete.rpartition(",")
    names = dict.fromkeys(check.name for checks in every_check().values() for check in checks)
    return [f"{done}{comma}{name}" for name in names if name.startswith(last)]


@verb(
    "doctor",
    "clusterkit doctor --cluster lab",
    "clusterkit doctor jobs/zero3.yaml --cluster lab --only port,head-port",
)
@click.argument("job", required=False, type=click.Path())
@cluster_options("Cluster to check: an entry of the cluster file.", "local")
@click.option(
    "-n", "--nodes", metavar="N|MIN:MAX", help="Check only as many hosts as this many nodes need."
)
@gpus_option
@set_option
@host_options
@click.option("--quick", is_flag=True, help="Only the quick checks that submit also runs.")
@click.option("--only", metavar="CHECK,...", shell_complete=_complete_check,
              help="Only these checks.")  # fmt: skip
@click.option("--list", "list_checks", is_flag=True, help="List the checks and exit.")
@click.option("--notify", is_flag=True,
              help="Send the cluster's test notification instead.")  # fmt: skip
@json_option
def command(
    job: str | None,
    only: str | None,
    list_checks: bool,
    notify: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Check every host of a cluster before one bad host wastes a night.

    Connects to all hosts at once and changes nothing on them; for a Kubernetes cluster it asks the
    API server about the cluster and its nodes. Prints a table of checks and hosts, and for every
    fault the cause and the command that fixes it. With JOB, a job file, the hosts are compared
    with what that job needs, otherwise with what most jobs need. The exit code is 1 if a check
    fails; a warning is not a failure.

    --notify sends the event `test` to what `notify` in the cluster's entry names, a command or a
    URL, and waits for the answer.
    """
    if notify:
        click.echo(api.notify(options["cluster"], options["clusters_file"]), err=True)
        return 0
    if list_checks:
        _list(as_json)
        return 0
    names = None if only is None else [name for word in only.split(",") if (name := word.strip())]
    with _progress() as progress:
        report = api.doctor(job, only=names, progress=progress, **options)
    if as_json:
        print_json(report.document())
    else:
        width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100
        click.echo(report.table(
            width=width, style=lambda text, level: click.style(text, **_COLOURS[level])
        ))  # fmt: skip
    return 0 if report.ok else EXIT_FAILURE


def _list(as_json: bool) -> None:
    found = [(of, check) for of, checks in every_check().items() for check in checks]
    if as_json:
        print_json(
            [{"name": c.name, "of": of, "quick": c.quick, "purpose": c.purpose} for of, c in found]
        )
    else:
        rows = [(c.name, of, "quick" if c.quick else "", c.purpose) for of, c in found]
        click.echo(table(rows, ("CHECK", "OF", "", "WHAT IT LOOKS AT"), drop=("", "OF")))


def _phase_text(phase: int, waiting: Sequence[str], visited: Sequence[str]) -> str:
    """Describe a phase: on which hosts, and which of them have not answered yet."""
    if not waiting:
        return "evaluating"
    verb = {1: "looking at", 2: "connecting"}.get(phase, "cleaning up on")
    left = f", waiting for {ranges(waiting)}" if len(waiting) < len(visited) else ""
    return f"{verb} {ranges(visited)}{left}"


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """Show on stderr which hosts have not answered, if it takes longer than a second."""
    visited: dict[int, Sequence[str]] = {}
    with spinner("looking", plain=True) as shown:

        def progress(phase: int, waiting: Sequence[str]) -> None:
            # The first call of a phase names all its hosts.
            shown.update(_phase_text(phase, waiting, visited.setdefault(phase, waiting)))

        yield progress
