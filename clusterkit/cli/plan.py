"""clusterkit plan"""

from __future__ import annotations

from typing import Any

import click

from clusterkit import api
from clusterkit.cli.common import (
    JobVerb,
    doctor_option,
    job_options,
    json_option,
    rare_options,
    verb,
)
from clusterkit.errors import BadInput
from clusterkit.ui.spinner import spinner


@verb(
    "plan",
    "clusterkit plan jobs/zero3.yaml --nodes 2",
    "clusterkit plan jobs/ddp.yaml -o ddp-plan",
    cls=JobVerb,
)
@job_options
@click.option("--files", is_flag=True, help="Print the contents of all files, too.")
@click.option("-o", "--output", metavar="DIR", type=click.Path(), help="Write all files to DIR.")
@click.option("--as", "form", metavar="FORM", hidden=True, help="Now `clusterkit export FORM`.")
@doctor_option
@json_option
@rare_options
def command(
    job: api.Job, files: bool, output: str | None, form: str | None, as_json: bool, **options: Any
) -> None:
    """Print exactly what submit would do, without doing it.

    Takes the same arguments as submit: a job file, and after -- more arguments of its program; or
    a command after --. The cluster is probed (for GPUs, a free port), but nothing is written or
    started. With --run-id and --facts of an existing run, that run's plan is printed again.

    Prints the summary, each value with its source, the names of the files, what each node runs and
    the steps; --files prints the files as well.
    """
    if form is not None:
        raise BadInput("plan --as has a new name", f"clusterkit export {form}")
    probing = spinner(f"looking at cluster {options['cluster']}")
    if output is not None:
        with probing:
            count = api.write_plan(job, output, **options)
        click.echo(f"{count} files written to {output}", err=True)
        return
    with probing:
        plan = api.plan(job, **options)
    if as_json:
        click.echo(plan.to_json().decode())
    else:
        click.echo(plan.to_text(files=files), nl=False)
