"""clusterkit attach"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import json_option, print_json, run_argument
from clusterkit.cli.following import follow, interrupted
from clusterkit.errors import EXIT_FAILURE
from clusterkit.status import State


@click.command("attach", epilog="Example: clusterkit attach last")
@run_argument
@json_option
def command(run: str, as_json: bool) -> int:
    """Follow a run to its end, as submit does.

    A run goes on by itself, but when the process that watches over it is gone (its machine was
    switched off, it was killed), nobody restarts it or ends the other nodes when one fails:
    attach starts that process again. Ctrl-C asks: detach or cancel.
    """
    found = api.attach(run)
    try:
        status = follow(found)
    except KeyboardInterrupt:
        status = interrupted(found)
    if as_json:
        print_json(status)
    if status.state is State.UNKNOWN:
        click.echo(status.remark, err=True)
        return EXIT_FAILURE
    return status.exit_code or 0
