"""clusterkit plot"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import runs_argument, verb
from clusterkit.ui.spinner import spinner


@verb("plot", "clusterkit plot ddp-1121 zero3-1121 -o loss.png")
@runs_argument
@click.option("-o", "--output", default="loss.png", show_default=True, type=click.Path(),
              help="File to write: .png, .svg or .pdf.")  # fmt: skip
def command(runs: tuple[str, ...], output: str) -> None:
    """Draw loss and tokens/s over the steps, of one or several runs.

    RUN is a run's id, the beginning of one, or `last`.
    """
    with spinner(f"drawing {output}"):
        drawn = api.plot(runs, output)
    click.echo(drawn)
