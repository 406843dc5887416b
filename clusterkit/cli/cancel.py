"""clusterkit cancel"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import json_option, print_json, run_argument, verb
from clusterkit.errors import EXIT_UNAVAILABLE
from clusterkit.ui.spinner import spinner


@verb("cancel", "clusterkit cancel last")
@run_argument
@json_option
def command(run: str, as_json: bool) -> int:
    """End a run and everything it started: SIGTERM, then SIGKILL.

    RUN is a run's id, the beginning of one, or `last`. The time between the two signals is the
    cluster's stop_grace. It is safe to cancel a run twice, or one that has ended. A host that does
    not answer is named, and the exit code is 3, as it is whenever the run has not ended; when the
    host answers again, cancel the run again to end its processes there.
    """
    with spinner("cancelling"):
        status = api.cancel(run)
    if as_json:
        print_json(status)
    else:
        click.echo(f"{status.run} {status.state}")
        if status.remark:
            click.echo(status.remark, err=True)
        elif not status.state.final:
            click.echo(
                f"the run has not ended; clusterkit cancel {status.run} tries again", err=True
            )
    return EXIT_UNAVAILABLE if status.remark or not status.state.final else 0
