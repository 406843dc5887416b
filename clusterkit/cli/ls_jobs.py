"""clusterkit ls-jobs"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import catalogue_table, json_option, print_json, verb
from clusterkit.errors import EXIT_BAD_INPUT


@verb("ls-jobs", "clusterkit ls-jobs --json | jq -r '.[].path'")
@json_option
def command(as_json: bool) -> None:
    """List the job files of this project and what each needs.

    They are read from the nearest folder jobs/, here or in a folder above. What a job needs is
    read from its file and its program; nothing is started or probed. Files that cannot be read are
    reported last, and the exit code is 2.
    """
    found = api.jobs()
    broken = [job for job in found if job.error is not None]
    if as_json:
        print_json(found)
    elif readable := [job for job in found if job.error is None]:
        click.echo(catalogue_table(readable))
    for job in broken:
        click.secho("error: ", fg="red", bold=True, nl=False, err=True)
        click.echo(job.error, err=True)
    if broken:
        raise SystemExit(EXIT_BAD_INPUT)
