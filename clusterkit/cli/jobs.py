"""clusterkit jobs"""

from __future__ import annotations

import click

from clusterkit import api, shell
from clusterkit.cli.common import catalogue_table, json_option, print_json, verb
from clusterkit.errors import EXIT_FAILURE


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from clusterkit.jobfile import examples

    return [name for name in examples.names() if name.startswith(incomplete)]


@verb(
    "jobs",
    "clusterkit jobs --json | jq -r '.[].path'",
    "clusterkit jobs --copy ddp && clusterkit submit jobs/ddp.yaml --gpus 2",
)
@click.option("--examples", is_flag=True, help="List the job files that come with clusterkit.")
@click.option("--copy", "name", metavar="NAME", shell_complete=_complete,
              help="Copy one of these to jobs/.")  # fmt: skip
@json_option
def command(examples: bool, name: str | None, as_json: bool) -> int:
    """List the job files of this project and what each needs, or copy an example here.

    They are read from the nearest folder jobs/, here or in a folder above, and from the folders in
    it. What a job needs is read from its file and its program; nothing is started or probed. Files
    that cannot be read are reported last, and the exit code is 1.

    --copy copies an example with its program and the modules that it imports, and prints their
    paths. An existing file with other contents is not overwritten.
    """
    if name is not None:
        copied = [str(path) for path in api.example(name)]
        if as_json:
            print_json(copied)
        else:
            click.echo("\n".join(copied))
            click.echo(f"to start it: {shell.join(['clusterkit', 'submit', copied[0]])}", err=True)
        return 0
    found = api.examples() if examples else api.jobs()
    broken = [job for job in found if job.error is not None]
    if as_json:
        print_json(found)
    elif readable := [job for job in found if job.error is None]:
        click.echo(catalogue_table(readable))
    for job in broken:
        click.secho("error: ", fg="red", bold=True, nl=False, err=True)
        click.echo(job.error, err=True)
    return EXIT_FAILURE if broken else 0
