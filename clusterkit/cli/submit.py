"""clusterkit submit"""

from __future__ import annotations

import os
from typing import Any

import click

from clusterkit import api
from clusterkit.cli.common import JobVerb, json_option, plan_options, verb
from clusterkit.cli.following import check_terminal, follow, follow_in_top, handle_interrupt
from clusterkit.ui.spinner import spinner


@verb(
    "submit",
    "clusterkit submit jobs/zero3.yaml --nodes 2",
    "clusterkit submit jobs/ddp.yaml -- --steps 20",
    "clusterkit submit --gpus 2 -- python train.py --steps 100",
    cls=JobVerb,
)
@plan_options
@click.option("-d", "--detach", is_flag=True, help="Return once the run has started.")
@click.option("--top", is_flag=True, help="Follow the run in `clusterkit top`.")
@json_option
def command(job: api.Job, detach: bool, top: bool, as_json: bool, **options: Any) -> int:
    """Start a job and follow it to its end.

    JOB is a job file; the words after -- are more arguments of its program. Without JOB, they are
    the command that every rank runs. Prints the run's id on stdout at once, everything else on
    stderr. The exit code is the run's own. With --json, prints the run's status instead of its id:
    when it has ended, or with --detach when it has started.
    """
    if top:
        if detach:
            raise click.UsageError("--top follows the run, --detach does not.")
        check_terminal()
    with spinner(f"looking at cluster {options['cluster']}"):
        ready = api.prepare(job, **options)
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
        handle_interrupt(run)
        return 0
    return follow_in_top(run, as_json) if top else follow(run, as_json, detach=detach)
