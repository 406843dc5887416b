"""clusterkit export"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from clusterkit import api, backends
from clusterkit.cli.common import JobVerb, job_options, rare_options, verb
from clusterkit.files import check_output, write_atomic
from clusterkit.ui.spinner import spinner


class _Export(JobVerb):
    """The form stands before the job."""

    before_job = 1


@verb(
    "export",
    "clusterkit export sbatch jobs/ddp.yaml --nodes 2 > ddp.sh",
    "clusterkit export pytorchjob jobs/zero3.yaml --nodes 4 -o zero3.yaml",
    cls=_Export,
)
@click.argument("form", metavar="FORM", type=click.Choice([*backends.FORMS]))
@job_options
@click.option("-o", "--output", metavar="FILE", type=click.Path(),
              help="Write it to FILE instead of stdout.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing FILE.")
@rare_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    form: str,
    job: api.Job,
    output: str | None,
    force: bool,
    **options: Any,
) -> None:
    """Write a job as one file for another tool: a batch script or a manifest.

    FORM is sbatch, pytorchjob, mpijob, trainjob, jobset or job. Takes a job as submit does. It
    probes nothing unless --cluster is given; comments in the file say what is assumed instead.
    """
    if output is not None:
        check_output(Path(output), force=force)
    if ctx.get_parameter_source("cluster") is click.core.ParameterSource.DEFAULT:
        options["cluster"] = None
    with spinner(f"looking at cluster {options['cluster']}"):
        text = api.plan_as(job, form=form, **options)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_atomic(Path(output), text.encode(), output=True)
        click.echo(output, err=True)
