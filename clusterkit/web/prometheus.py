"""Exports runs in the text format of Prometheus, for a scrape or node-exporter's textfiles.

Every value is a gauge. What rank 0 reported last of a metric is ``clusterkit_metric_NAME``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from clusterkit.lifecycle.live import LiveRun
from clusterkit.run.folder import RunFolder
from clusterkit.run.status import RunStatus, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_METRIC = "clusterkit_metric_"
_MEANINGS = {
    "clusterkit_run_state": "1 for the state that the run is in, 0 for all others.",
    "clusterkit_run_attempt": "Attempt of the run, from 1.",
    "clusterkit_run_restarts_left": "Restarts that the run has left.",
    "clusterkit_run_exit_code": "Exit code of a run that has ended.",
    "clusterkit_run_started_timestamp_seconds": "When the run was submitted.",
    "clusterkit_run_finished_timestamp_seconds": "When the run ended.",
    "clusterkit_run_hang": "1 while ranks hang.",
    "clusterkit_node_running": "1 while the node runs.",
}


class Reported(NamedTuple):
    """A run's status and the newest values that its rank 0 has reported."""

    status: RunStatus
    metrics: Mapping[str, Any]


def reported(live: LiveRun, status: RunStatus) -> Reported:
    """Return the status and the newest values of a run that has been polled."""
    found = live.reported
    values = {name: series.last for name, series in found.series.items()}
    return Reported(status, values | ({"step": found.step} if values else {}))


def of_run(folder: RunFolder, status: RunStatus) -> str:
    """Return `text` of one run, read from its folder."""
    live = LiveRun(folder)
    live.poll()
    while live.behind:
        live.poll()
    return text([reported(live, status)])


def text(runs: Iterable[Reported]) -> str:
    """Return the samples of all runs, grouped by name as the format requires."""
    families: dict[str, list[str]] = {}
    for run in runs:
        of_run = {"run": run.status.run, "job": run.status.job, "cluster": run.status.cluster}
        taken = set()
        for name, value, more in _samples(run):
            shown = _number(value)
            named = ",".join(
                f'{key}="{str(label).translate(_ESCAPES)}"'
                for key, label in (of_run | more).items()
            )
            # "a b" and "a.b" have one name here: only the first is kept, as no sample may repeat.
            if shown is not None and (name, named) not in taken:
                taken.add((name, named))
                families.setdefault(name, []).append(f"{name}{{{named}}} {shown}\n")
    return "".join(
        f"# HELP {name} {_MEANINGS.get(name, 'Reported by rank 0.')}\n"
        f"# TYPE {name} gauge\n{''.join(samples)}"
        for name, samples in families.items()
    )


def _samples(run: Reported) -> Iterator[tuple[str, object, dict[str, str]]]:
    status = run.status
    for state in State:
        yield "clusterkit_run_state", int(status.state is state), {"state": state.value}
    yield "clusterkit_run_attempt", status.attempt, {}
    yield "clusterkit_run_restarts_left", status.restarts_left, {}
    yield "clusterkit_run_exit_code", status.exit_code, {}
    yield "clusterkit_run_started_timestamp_seconds", status.started_at, {}
    yield "clusterkit_run_finished_timestamp_seconds", status.finished_at, {}
    yield "clusterkit_run_hang", int(any(node.hang for node in status.nodes)), {}
    for node in status.nodes:
        where = {"node": str(node.node), "host": node.host}
        yield "clusterkit_node_running", int(node.state is State.RUNNING), where
    for key, value in run.metrics.items():
        yield _METRIC + re.sub(r"[^a-zA-Z0-9_]", "_", key), value, {}


def _number(value: object) -> str | None:
    """Return a number as Prometheus writes it; None: not a number, or larger than 64 bits hold.

    NaN is exported: alerts on a loss that is NaN need it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        double = float(value)
    except OverflowError:
        return None
    if math.isfinite(double):
        return repr(value)
    return "NaN" if math.isnan(double) else "+Inf" if double > 0 else "-Inf"
