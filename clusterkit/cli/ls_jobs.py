"""clusterkit ls-jobs"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import catalogue_table, json_option, print_json
from clusterkit.errors import EXIT_BAD_INPUT


@click.command("ls-jobs", epilog="Example: clusterkit ls-jobs --json | jq -r '.[].path'")
@json_option
def command(as_json: bool) -> None:
    """List the job files of this project and what each needs.

    The project's job files lie in the nearest folder jobs/ from here upwards. What a job needs is
    read from its file and its program; nothing is run or probed. A file that cannot be read is an
    error, after all others have been listed.
    """
    found = api.jobs()
    broken = [job for job in found if job.error is not None]
    if as_json:
        print_json(found)
    else:
        if whole := [job for job in found if job.error is None]:
            click.echo(catalogue_table(whole))
    for job in broken:
        click.secho("error: ", fg="red", bold=True, nl=False, err=True)
        click.echo(job.error, err=True)
    if broken:
        raise SystemExit(EXIT_BAD_INPUT)
