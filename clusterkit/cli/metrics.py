"""clusterkit metrics"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import json_option, print_json, run_argument, table, verb

_COLUMNS = ("step", "loss", "eval_loss", "tokens_per_second", "step_seconds", "learning_rate",
            "mfu", "peak_memory")  # fmt: skip


@verb("metrics", "clusterkit metrics last --json | jq '.[-1].loss'")
@run_argument
@json_option
@click.option("--prometheus", is_flag=True,
              help="Print state and newest values in the text format of Prometheus.")  # fmt: skip
def command(run: str, as_json: bool, prometheus: bool) -> None:
    """Show loss, tokens/s and other reported numbers, step by step.

    RUN is a run's id, the beginning of one, or `last`. A program reports numbers by printing lines
    that begin with @clusterkit; see docs/programs.md.
    """
    if prometheus:
        if as_json:
            raise click.UsageError("Give --json or --prometheus, not both.")
        click.echo(api.prometheus(run), nl=False)
        return
    found = api.metrics(run)
    if as_json:
        print_json(found)
        return
    if not found:
        click.echo("this run reported no metrics (docs/programs.md says how to)", err=True)
        return
    columns = [name for name in _COLUMNS if any(name in row for row in found)]
    click.echo(table([[row.get(name) for name in columns] for row in found], columns))
