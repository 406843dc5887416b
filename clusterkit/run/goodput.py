"""Goodput: how a run spent its time, and how far each attempt came, by what rank 0 reported.

Pure but for `with_goodput`. Reads the marked lines ``start`` (``first_step``: the step from which
the attempt resumed) and ``metrics`` (``step``).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from clusterkit.run.folder import Rank0, RunFolder
from clusterkit.run.logs import is_number
from clusterkit.run.status import AttemptStatus, Goodput, RunStatus

Marks = Sequence[tuple[float, dict[str, Any]]]
"""Times and objects of one attempt's marked lines."""


def with_goodput(folder: RunFolder, status: RunStatus, now: float) -> RunStatus:
    """Return the status with ``goodput``, and with the steps of its ``attempts``."""
    every: list[list[tuple[float, dict[str, Any]]]] = [[] for _ in range(status.attempt)]
    for line in Rank0(folder).read(status.attempt):
        if (event := line.event) is not None:
            every[line.attempt - 1].append((line.time, event))
    began = status.started_at or now
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        began = float(json.loads((folder.node_dir(1, 0) / "started.json").read_bytes())["at"])
    ended = status.finished_at or now
    return msgspec.structs.replace(
        status, attempts=_attempts(status.attempts, every),
        goodput=account(every, status.started_at or began, began, ended),
    )  # fmt: skip


def _step(event: dict[str, Any], kind: str, key: str) -> int | None:
    value = event.get(key) if event["event"] == kind else None
    return int(value) if is_number(value) else None  # type: ignore[arg-type]


def _resumed_at(attempt: Marks) -> int | None:
    """Return the step from which an attempt started; None if it reported none."""
    for _, event in attempt:
        if (first := _step(event, "start", "first_step")) is not None:
            return first
        if (step := _step(event, "metrics", "step")) is not None:
            return step - 1
    return None


def _last_step(attempt: Marks) -> int | None:
    steps = (_step(event, "metrics", "step") for _, event in reversed(attempt))
    return next((step for step in steps if step is not None), None)


def _attempts(known: Sequence[AttemptStatus], every: Sequence[Marks]) -> tuple[AttemptStatus, ...]:
    found = []
    for one in known:
        last = _last_step(every[one.attempt - 1]) if one.attempt <= len(every) else None
        later = (_resumed_at(marks) for marks in every[one.attempt :])
        resumed = next((step for step in later if step is not None), None)
        lost = None if last is None or resumed is None else max(0, last - resumed)
        found.append(msgspec.structs.replace(one, last_step=last, steps_lost=lost))
    return tuple(found)


def account(every: Sequence[Marks], submitted: float, began: float, ended: float) -> Goodput | None:
    """Return how the time was spent; None if no step was reported.

    Args:
        every: the marked lines of all attempts, in order.
        submitted: Unix time, as are the next two.
        began: when the first node started.
        ended: when the run ended, or now.
    """
    spent = dict.fromkeys(("training", "waiting", "start", "restart", "again", "end"), 0.0)
    spent["waiting"] = max(0.0, began - submitted)
    furthest: int | None = None
    last, setup = max(began, submitted), "start"  # last: up to when time is accounted for
    for attempt in every:
        stepping = False  # whether it has reached its first step
        for moment, event in attempt:
            step = _step(event, "metrics", "step")
            if step is None and event["event"] != "start":
                continue
            again = step is not None and furthest is not None and step <= furthest
            kind = "again" if again else "training"
            spent[kind if stepping else setup] += max(0.0, moment - last)
            last, setup, stepping = max(last, moment), "restart", True
            if step is not None:
                furthest = max(step, furthest or step)
    if furthest is None:
        return None
    spent["end"] = max(0.0, ended - last)
    return Goodput(share=spent["training"] / max(sum(spent.values()), 1e-9), **spent)
