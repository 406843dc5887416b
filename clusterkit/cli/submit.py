"""clusterkit submit"""

from __future__ import annotations

import os
from typing import Any

import click

from clusterkit import api
from clusterkit.cli.common import PlanCommand, job_of, json_option, plan_options, prepare_options
from clusterkit.cli.following import check_terminal, follow, interrupted, watch
from clusterkit.ui.spinner import spinner


@click.command(
    "submit",
    cls=PlanCommand,
    epilog="Examples: clusterkit submit jobs/zero3.yaml --nodes 2;  "
    "clusterkit submit jobs/ddp.yaml -- --steps 20;  "
    "clusterkit submit --gpus 2 -- python train.py --steps 100",
)
@plan_options
@click.option("-d", "--detach", is_flag=True, help="Return when the run has started.")
@click.option("--top", is_flag=True, help="Follow it as `clusterkit top` shows it.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, /, job: str | None, detach: bool, top: bool, as_json: bool, **options: Any
) -> int:
    """Start a job and follow it to its end.

    JOB is a job file; what follows -- are further arguments of its program. Without JOB it is
    a command of its own, which every rank runs. The run's id is printed on stdout at once;
    everything else goes to stderr. Exits with the run's own exit code. With --json, prints the
    run's status as JSON instead of the id: when it has started (--detach), or when it has ended.
    """
    if top:
        if detach:
            raise click.UsageError("--top follows the run, --detach does not.", ctx)
        check_terminal()
    with spinner(f"looking at cluster {options['cluster']}"):
        ready = api.prepare(**job_of(ctx, job), **prepare_options(**options))
    for note in ready.plan.notes:
        if not note.name:
            click.echo(f"note: {note}", err=True)
    if outer := os.environ.get("CLUSTERKIT_RUN_ID"):
        click.echo(f"note: inside run {outer}: this one ends with it", err=True)
    run = None
    try:
        with spinner("copying the project" if ready.plan.trees else "starting") as shown:
            run = api.launch(ready, shown.report_sent)
        if not as_json:
            click.echo(run.id)
    except KeyboardInterrupt:
        if run is None:
            raise
        interrupted(run)
        return 0
    return watch(run, as_json) if top else follow(run, as_json, detach=detach)
