"""Telling the outside what a rank is doing, by marked lines on its standard output.

`clusterkit.marks` says what they are. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time

from clusterkit.marks import MARK


def report(event: str, **fields: object) -> None:
    """Write one marked line, in one system call so that ranks sharing a pipe cannot mix lines.

    Numbers keep their full precision. JSON has no NaN or infinity: they are written as null.
    """
    record = {"event": event} | {key: _finite(value) for key, value in fields.items()}
    sys.stdout.flush()
    os.write(1, f"{MARK}{json.dumps(record, allow_nan=False)}\n".encode())


def process_started_at() -> float:
    """When this process started, in seconds since the epoch (to 10 ms); now, if it cannot tell."""
    now = time.time()
    try:
        with open("/proc/self/stat") as file:
            # The second field is the program's name, which may hold spaces and brackets.
            fields = file.read().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - max(age, 0.0)


class Reporter:
    """What rank 0 tells about the run; on the other ranks it keeps silent.

    It also times the phases of the run: one ends, and is reported, where the next begins.

    Args:
        speaks: whether this is rank 0.
        phase: the phase that has been running since the process started.
    """

    def __init__(self, *, speaks: bool, phase: str = "imports") -> None:
        self._speaks = speaks
        self._phase: str | None = phase
        self._started_at = process_started_at()

    def event(self, event: str, **fields: object) -> None:
        """Report an event."""
        if self._speaks:
            report(event, **fields)

    def phase(self, name: str | None) -> None:
        """End the running phase and begin the next; None begins none."""
        now = time.time()
        if self._phase is not None:
            seconds = now - self._started_at
            self.event("phase", name=self._phase, started_at=self._started_at, seconds=seconds)
        self._phase, self._started_at = name, now


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
