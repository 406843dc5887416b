"""clusterkit wait"""

from __future__ import annotations

import time

import click

from clusterkit import api
from clusterkit.cli.common import json_option, parse_duration, print_one_or_all, runs_argument, verb
from clusterkit.errors import EXIT_FAILURE, EXIT_TIMEOUT, RunNotOver
from clusterkit.ui.formatting import failure_text, prose
from clusterkit.ui.spinner import spinner


@verb(
    "wait",
    "clusterkit wait last && ./evaluate.sh",
    "clusterkit wait ddp-1 zero3-1 --timeout 2h",
    acts=True,
)
@runs_argument
@click.option("--timeout", metavar="TIME", callback=parse_duration,
              help="Wait at most so long: 90, 5m, 2h.")  # fmt: skip
@json_option
def command(runs: tuple[str, ...], timeout: float | None, as_json: bool) -> int:
    """Wait until runs have ended, and exit with the exit code of the first in the list that failed.

    RUN is a run's id, the beginning of one, or `last`. Prints each run's id and state when it has
    ended. The exit code is 124 if --timeout is over before; the runs continue.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    ended, code = [], 0
    for run in [api.get(name) for name in runs]:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            with spinner(f"waiting for {run.id}"):
                status = run.wait(left)
        except RunNotOver:
            status, code = run.status(), code or EXIT_TIMEOUT
            click.echo(f"run {run.id} is {status.state} after {timeout:g} s", err=True)
        else:
            code = code or (status.exit_code or 0 if status.state.final else EXIT_FAILURE)
        ended.append(status)
        if not as_json:
            click.echo(f"{status.run} {status.state}")
            if text := failure_text(status) or status.remark:
                click.echo(prose(text), err=True)
    if as_json:
        print_one_or_all(ended)
    return code
