"""clusterkit warm"""

from __future__ import annotations

import time
from typing import Literal

import click

from clusterkit import api
from clusterkit.cli.common import json_option, print_json, table, verb


@verb("warm", "clusterkit warm on --idle 30m")
@click.argument("action", type=click.Choice(["on", "off", "status"]), default="status")
@click.option("--idle", default="10m", show_default=True, metavar="TIME",
              help="With `on`: how long the process waits for the next run.")  # fmt: skip
@json_option
def command(action: Literal["on", "off", "status"], idle: str, as_json: bool) -> None:
    """Keep imported modules in memory, so that the next run on this machine starts faster.

    After `on`, the fork server of a local run (the process that has imported torch and the
    program's other modules, and from which the ranks are forked) stays when the run ends. The next
    run of the same program, interpreter and environment is forked from it without importing again,
    unless an imported file has changed on disk. It uses no GPU and ends after --idle without a run;
    `off` ends it at once. `status`, the default, lists the processes that wait.
    """
    found = api.warm(action, idle)
    if as_json:
        print_json(found)
        return
    click.echo(f"on, for {found.idle_seconds:g} s after a run" if found.idle_seconds else "off")
    if found.servers:
        rows = [
            [server.pid, server.program, server.python, f"{server.memory_mib} MiB",
             f"{time.time() - server.used_at:.0f} s ago"]
            for server in found.servers
        ]  # fmt: skip
        click.echo(table(rows, ["PID", "PROGRAM", "PYTHON", "MEMORY", "USED"]))
