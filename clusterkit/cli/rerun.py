"""clusterkit rerun"""

from __future__ import annotations

from typing import Any

from clusterkit import api
from clusterkit.cli.common import (
    TrailingVerb,
    doctor_option,
    follow_options,
    gpus_option,
    json_option,
    nodes_option,
    run_argument,
    set_option,
    verb,
)
from clusterkit.cli.following import start
from clusterkit.ui.spinner import spinner


class _Rerun(TrailingVerb):
    trailing_metavar = "ARGS..."


@verb(
    "rerun",
    "clusterkit rerun last",
    "clusterkit rerun ddp-1121 --set batch.micro=4 -- --lr 1e-4",
    cls=_Rerun,
    acts=True,
)
@run_argument
@nodes_option
@gpus_option
@set_option
@follow_options
@doctor_option
@json_option
def command(
    run: str, trailing: list[str], detach: bool, top: bool, as_json: bool, **options: Any
) -> int:
    """Start the job of a run again, as a new run: same job, cluster and arguments.

    RUN is a run's id, the beginning of one, or `last`. The job and the cluster's entry are those
    that the run has recorded, the project is as it is now. --set and the words after -- change the
    job as for submit. The new run shares no checkpoint with the old one unless the job names a
    folder for them.
    """
    old = api.get(run)
    with spinner(f"looking at the cluster of {old.id}"):
        ready = api.prepare_again(old, more_args=trailing, **options)
    return start(ready, as_json, detach=detach, top=top)
