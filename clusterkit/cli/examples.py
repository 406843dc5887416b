"""clusterkit examples"""

from __future__ import annotations

import click

from clusterkit import api, shell
from clusterkit.cli.common import catalogue_table, json_option, print_json, verb


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from clusterkit.jobfile import examples

    return [name for name in examples.names() if name.startswith(incomplete)]


@verb(
    "examples",
    "clusterkit examples",
    "clusterkit examples ddp && clusterkit submit jobs/ddp.yaml --gpus 2",
)
@click.argument("name", required=False, shell_complete=_complete)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """List the job files that come with clusterkit, or copy one into this folder.

    NAME copies a job file to jobs/NAME.yaml, with its program and the modules that it imports, and
    prints their paths. An existing file with other contents is not overwritten.
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
