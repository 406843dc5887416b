"""clusterkit metrics"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import json_option, print_json, runs_argument, table, verb
from clusterkit.ui.spinner import spinner

_COLUMNS = ("step", "loss", "eval_loss", "tokens_per_second", "step_seconds", "learning_rate",
            "mfu", "peak_memory")  # fmt: skip


@verb(
    "metrics",
    "clusterkit metrics last --json | jq '.[-1].loss'",
    "clusterkit metrics ddp-1121 zero3-1121 --plot loss.png",
)
@runs_argument
@json_option
@click.option("--prometheus", is_flag=True,
              help="Print state and newest values in the text format of Prometheus.")  # fmt: skip
@click.option("--plot", metavar="FILE", type=click.Path(),
              help="Draw loss and tokens/s of the runs: .png, .svg or .pdf.")  # fmt: skip
def command(runs: tuple[str, ...], as_json: bool, prometheus: bool, plot: str | None) -> None:
    """Show loss, tokens/s and other reported numbers, step by step.

    RUN is a run's id, the beginning of one, or `last`. A program reports numbers by printing lines
    that begin with @clusterkit; see docs/programs.md. Several runs need --plot, which draws them on
    one chart.
    """
    if [as_json, prometheus, plot is not None].count(True) > 1:
        raise click.UsageError("Give one of --json, --prometheus and --plot.")
    if plot is not None:
        with spinner(f"drawing {plot}"):
            drawn = api.plot(runs, plot)
        click.echo(drawn)
        return
    if len(runs) > 1:
        raise click.UsageError("Several runs need --plot FILE.")
    (run,) = runs
    if prometheus:
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
