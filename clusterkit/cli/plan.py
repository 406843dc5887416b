"""clusterkit plan"""

from __future__ import annotations

from typing import Any

import click

from clusterkit import api, backends
from clusterkit.cli.common import JobVerb, json_option, plan_options, verb
from clusterkit.ui.spinner import spinner


@verb(
    "plan",
    "clusterkit plan jobs/zero3.yaml --nodes 2",
    "clusterkit plan jobs/ddp.yaml --nodes 2 --gpus 8 --as sbatch > ddp.sh",
    cls=JobVerb,
)
@plan_options
@click.option("-o", "--out", metavar="DIR", type=click.Path(), help="Write all files to DIR.")
@click.option("--as", "form", metavar="FORM", type=click.Choice([*backends.FORMS]),
              help="Print the job as one file for another tool: sbatch, pytorchjob, mpijob, "
              "trainjob, jobset, job, compose or ssh.")  # fmt: skip
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    job: api.Job,
    out: str | None,
    form: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Print exactly what submit would do, without doing it.

    Takes the same arguments as submit: a job file, and after -- more arguments of its program; or
    a command after --. The cluster is probed (for GPUs, a free port), but nothing is written or
    started. With --run-id and --facts of an existing run, that run's plan is printed again.

    --as prints the job as one file for other tools: a batch script or a manifest. It probes nothing
    unless --cluster is given; comments in the file say what is assumed instead.
    """
    probing = spinner(f"looking at cluster {options['cluster']}")
    if form is not None:
        if out is not None or as_json:
            raise click.UsageError("--as prints one file: it goes without --out and --json.")
        if ctx.get_parameter_source("cluster") is click.core.ParameterSource.DEFAULT:
            options["cluster"] = None
        del options["doctor"]
        with probing:
            text = api.plan_as(job, form=form, **options)
        click.echo(text, nl=False)
        return
    if out is not None:
        with probing:
            count = api.write_plan(job, out, **options)
        click.echo(f"{count} files written to {out}", err=True)
        return
    with probing:
        plan = api.plan(job, **options)
    if as_json:
        click.echo(plan.to_json().decode())
    else:
        click.echo(plan.to_text(), nl=False)
