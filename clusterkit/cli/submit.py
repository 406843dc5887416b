"""clusterkit submit"""

from __future__ import annotations

from typing import Any

from clusterkit import api
from clusterkit.cli.common import (
    JobVerb,
    doctor_option,
    follow_options,
    job_options,
    json_option,
    rare_options,
    verb,
)
from clusterkit.cli.following import start
from clusterkit.ui.spinner import spinner


@verb(
    "submit",
    "clusterkit submit jobs/zero3.yaml --nodes 2",
    "clusterkit submit jobs/ddp.yaml -- --steps 20",
    "clusterkit submit --gpus 2 -- python train.py --steps 100",
    cls=JobVerb,
    acts=True,
)
@job_options
@follow_options
@doctor_option
@json_option
@rare_options
def command(job: api.Job, detach: bool, top: bool, as_json: bool, **options: Any) -> int:
    """Start a job and follow it to its end.

    JOB is a job file; the words after -- are more arguments of its program. Without JOB, they are
    the command that every rank runs. Prints the run's id on stdout at once, everything else on
    stderr. The exit code is the run's own. With --json, prints the run's status instead of its id:
    when it has ended, or with --detach when it has started.
    """
    with spinner(f"looking at cluster {options['cluster']}"):
        ready = api.prepare(job, **options)
    return start(ready, as_json, detach=detach, top=top)
