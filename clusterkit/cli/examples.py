"""clusterkit examples"""

from __future__ import annotations

import click

from clusterkit import api, shell
from clusterkit.cli.common import catalogue_table, json_option, print_json


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from clusterkit.jobfile import examples

    return [name for name in examples.names() if name.startswith(incomplete)]


@click.command(
    "examples",
    epilog="Examples: clusterkit examples;  clusterkit examples ddp && clusterkit submit "
    "jobs/ddp.yaml --gpus 2",
)
@click.argument("name", required=False, shell_complete=_complete)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """List the job files that come with clusterkit, or copy one here.

    With NAME its job file is copied to jobs/NAME.yaml, with its program and what that imports.
    A file that is there already with other contents is not overwritten. Prints the paths.
    """
    if name is None:
        found = api.examples()
        if as_json:
            print_json(found)
        else:
            click.echo(catalogue_table(found))
        return
    copied = [str(path) for path in api.example(name)]
    if as_json:
        print_json(copied)
        return
    click.echo("\n".join(copied))
    click.echo(f"to start it: {shell.join(['clusterkit', 'submit', copied[0]])}", err=True)
