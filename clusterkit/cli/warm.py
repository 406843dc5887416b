"""clusterkit warm"""

from __future__ import annotations

import time
from typing import Literal

import click

from clusterkit import api
from clusterkit.cli.common import json_option, print_json, table


@click.command("warm", epilog="Example: clusterkit warm on --idle 30m")
@click.argument("action", type=click.Choice(["on", "off", "status"]), default="status")
@click.option("--idle", default="10m", show_default=True, metavar="TIME",
              help="With `on`: how long it waits for another run.")  # fmt: skip
@json_option
def command(action: Literal["on", "off", "status"], idle: str, as_json: bool) -> None:
    """Keep what a run has imported in memory, for the next run on this machine.

    From `on` until `off` the fork server of a local run stays when the run has ended. The next run
    of the same program, interpreter and environment starts from it without an import, unless
    anything that it has imported has changed on disk. It ends by itself when it has been idle for
    --idle, and holds no GPU. `off` ends it at once.
    """
    found = api.warm(action, idle)
    if as_json:
        print_json(found)
        return
    click.echo(f"on, for {found.idle_seconds:g} s after a run" if found.idle_seconds else "off")
    if found.servers:
        rows = [
            [each.pid, each.program, each.python, f"{each.memory_mib} MiB",
             f"{time.time() - each.used_at:.0f} s ago"]
            for each in found.servers
        ]  # fmt: skip
        click.echo(table(rows, ["PID", "PROGRAM", "PYTHON", "MEMORY", "USED"]))
