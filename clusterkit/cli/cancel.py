"""clusterkit cancel"""

from __future__ import annotations

import time

import click

from clusterkit import api
from clusterkit.cli.common import json_option, print_one_or_all, runs_argument, verb
from clusterkit.errors import EXIT_FAILURE
from clusterkit.ui.spinner import spinner


@verb("cancel", "clusterkit cancel last", acts=True)
@runs_argument
@json_option
def command(runs: tuple[str, ...], as_json: bool) -> int:
    """End runs and everything they started: SIGTERM, then SIGKILL.

    RUN is a run's id, the beginning of one, or `last`. The time between the two signals is the
    cluster's stop_grace. It is safe to cancel a run twice, or one that has ended. A host that does
    not answer is named, and the exit code is 1, as it is whenever a run has not ended; when the
    host answers again, cancel the run again to end its processes there.
    """
    statuses = []
    for run in [api.get(name) for name in runs]:
        with spinner(f"cancelling {run.id}"):
            began = time.time()
            status = run.cancel()
        statuses.append(status)
        if as_json:
            continue
        click.echo(f"{status.run} {status.state}")
        if status.remark:
            click.echo(status.remark, err=True)
        elif status.finished_at is not None and status.finished_at < began:
            at = time.strftime("%H:%M:%S", time.localtime(status.finished_at))
            click.echo(f"it had ended at {at} already", err=True)
        elif not status.state.final:
            click.echo(
                f"the run has not ended; clusterkit cancel {status.run} tries again", err=True
            )
    if as_json:
        print_one_or_all(statuses)
    return EXIT_FAILURE if any(s.remark or not s.state.final for s in statuses) else 0
