"""Tell the outside what a rank is doing: one line of JSON each, behind the mark ``@clusterkit``.

Whatever reads the log can take them from there; clusterkit shows progress, metrics and plots from
``{"event": "metrics", "step": 3, "loss": 1.2, ...}``. Where something else has started the program
and people read its log as it is, each step has a line for them as well.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time


def report(event: str, **fields: object) -> None:
    """Write one line, in one system call so that ranks sharing a pipe cannot mix lines.

    JSON has no NaN or infinity: they are written as null.
    """
    record = {"event": event} | {key: _finite(value) for key, value in fields.items()}
    sys.stdout.flush()
    os.write(1, f"@clusterkit {json.dumps(record, allow_nan=False)}\n".encode())


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Reporter:
    """What rank 0 tells about the run; on the other ranks it keeps silent.

    It also times the phases of the run: one ends, and is reported, where the next begins.
    """

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._by_hand = "CLUSTERKIT_RUN_ID" not in os.environ
        self._phase: str | None = "imports"
        self._started_at = _process_started_at()

    def event(self, event: str, **fields: object) -> None:
        if self._speaks:
            if self._by_hand and event == "metrics":
                print(_readable(fields))
            report(event, **fields)

    def phase(self, name: str | None) -> None:
        """End the running phase and begin the next; None begins none."""
        now = time.time()
        if self._phase is not None:
            seconds = now - self._started_at
            self.event("phase", name=self._phase, started_at=self._started_at, seconds=seconds)
        self._phase, self._started_at = name, now


def _readable(fields: dict[str, object]) -> str:
    shown = (f"{value:.6g}" if isinstance(value, float) else value for value in fields.values())
    return "  ".join(f"{key} {value}" for key, value in zip(fields, shown, strict=True))


def _process_started_at() -> float:
    """In seconds since the epoch (to 10 ms); now, where it cannot be told."""
    now = time.time()
    try:
        with open("/proc/self/stat") as file:
            # The second field is the program's name, which may hold spaces and brackets.
            fields = file.read().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return now - max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return now
