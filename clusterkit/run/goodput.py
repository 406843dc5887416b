"""Where a run's time went, and what each of its attempts came to: from what rank 0 reported.

Pure but for `with_goodput`. The marked lines that count are ``start`` (``first_step``: the step
that the attempt resumed from) and ``metrics`` (``step``).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from clusterkit.output.logs import is_number
from clusterkit.run.folder import Rank0, RunFolder
from clusterkit.run.status import AttemptStatus, Goodput, RunStatus

Marks = Sequence[tuple[float, dict[str, Any]]]
"""Of one attempt: when rank 0 reported what."""


def with_goodput(folder: RunFolder, status: RunStatus, now: float) -> RunStatus:
    """The status with what its attempts came to, and where the time went."""
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
    """The step that it began from, if it says so or took one."""
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
        last, lost = None, None
        if one.attempt <= len(every):
            last = _last_step(every[one.attempt - 1])
        later = (_resumed_at(marks) for marks in every[one.attempt :])
        resumed = next((step for step in later if step is not None), None)
        if last is not None and resumed is not None:
            lost = max(0, last - resumed)
        found.append(msgspec.structs.replace(one, last_step=last, steps_lost=lost))
    return tuple(found)


def account(every: Sequence[Marks], submitted: float, began: float, ended: float) -> Goodput | None:
    """Where the time went; None where no step was reported.

    Args:
        every: all attempts, in order.
        submitted, began, ended: when the run was, when its first node started, when it ended.
    """
    spent = dict.fromkeys(("training", "waiting", "start", "restart", "again", "end"), 0.0)
    spent["waiting"] = max(0.0, began - submitted)
    furthest: int | None = None
    last, setting_up = max(began, submitted), "start"  # up to when time is accounted for
    for attempt in every:
        going = False  # whether it has come to its first step
        for moment, event in attempt:
            step = _step(event, "metrics", "step")
            if step is None and event["event"] != "start":
                continue
            again = step is not None and furthest is not None and step <= furthest
            kind = "again" if again else "training"
            spent[kind if going else setting_up] += max(0.0, moment - last)
            last, setting_up, going = max(last, moment), "restart", True
            if step is not None:
                furthest = max(step, furthest or step)
    if furthest is None:
        return None
    spent["end"] = max(0.0, ended - last)
    return Goodput(share=spent["training"] / max(sum(spent.values()), 1e-9), **spent)
