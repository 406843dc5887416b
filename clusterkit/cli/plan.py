"""clusterkit plan"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from clusterkit import api, backends
from clusterkit.cli.common import PlanCommand, job_of, json_option, plan_options, prepare_options
from clusterkit.files import write_atomic
from clusterkit.ui.spinner import spinner


@click.command(
    "plan",
    cls=PlanCommand,
    epilog="Examples: clusterkit plan jobs/zero3.yaml --nodes 2;  "
    "clusterkit plan jobs/ddp.yaml --nodes 2 --gpus 8 --as sbatch > ddp.sh",
)
@plan_options
@click.option("-o", "--out", metavar="DIR", type=click.Path(), help="Write the files there.")
@click.option("--as", "form", metavar="FORM", type=click.Choice([*backends.FORMS]),
              help="As one file to hand in: sbatch, pytorchjob, mpijob, trainjob, jobset, job, "
              "compose or ssh.")  # fmt: skip
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    job: str | None,
    out: str | None,
    form: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Print exactly what submit would do, without doing it.

    Takes what submit takes: a job file, and after -- further arguments or a command.
    The cluster is probed (for GPUs, a free port), nothing is written or started. With
    --run-id and --facts of a run that exists, this prints that run's plan again.

    With --as it prints the same job as one file for those who must hand one in: a batch script,
    a manifest, a compose file, a script that uses ssh. Without --cluster nothing is probed then;
    what is assumed stands in comments.
    """
    looking = spinner(f"looking at cluster {options['cluster']}")
    if form is not None:
        if out is not None or as_json:
            raise click.UsageError("--as prints one file: it goes without --out and --json.", ctx)
        given = ctx.get_parameter_source("cluster") is not click.core.ParameterSource.DEFAULT
        if not given:
            options["cluster"] = None
        del options["doctor"]
        with looking:
            text = api.plan_as(form=form, **job_of(ctx, job), **prepare_options(**options))
        click.echo(text, nl=False)
        return
    with looking:
        plan = api.plan(**job_of(ctx, job), **prepare_options(**options))
    if out is not None:
        for file in plan.files:
            below = os.path.relpath(file.path, plan.run_dir)
            write_atomic(Path(out, below), file.content(), file.mode)
        write_atomic(Path(out, "plan.json"), plan.to_json())
        write_atomic(Path(out, "plan.txt"), plan.to_text().encode())
        click.echo(f"{len(plan.files) + 2} files written to {out}", err=True)
    elif as_json:
        click.echo(plan.to_json().decode())
    else:
        click.echo(plan.to_text(), nl=False)
