"""A metric over the steps of a run, in bounded memory, and as few points as a screen has columns.

Pure.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import NamedTuple

MOST_POINTS = 1 << 20
"""That a series keeps; beyond them it keeps the lowest and highest of every few."""
MOST_METRICS = 64
"""Kinds of numbers that are kept of what a program reports, in the order in which they came."""
LARGEST_STEP = 1 << 62
"""Any program may report steps: this is what an array takes."""


class Bucket(NamedTuple):
    """Neighbouring points of a series: the first step, and the values' range and last."""

    step: int
    low: float
    high: float
    last: float


class Series:
    """Steps and values, two arrays of one length.

    Steps only rise: one that is reported again, after a restart from a checkpoint, replaces the
    earlier telling and all that came after it.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")
        self.replaced = 0
        """Grows whenever points that were there have changed: a reader begins anew."""

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: float, value: float) -> None:
        """One more point."""
        if not abs(step) < LARGEST_STEP:
            return
        number, steps = int(step), self.steps
        if steps and number <= steps[-1]:
            start = bisect_left(steps, number)
            del steps[start:], self.values[start:]
            self.replaced += 1
        steps.append(number)
        self.values.append(value)
        if len(steps) >= MOST_POINTS:
            self._halve()

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None

    def _halve(self) -> None:
        """Of every four points the lowest and the highest stay, in their order."""
        values = self.values
        keep = array("q")
        for start in range(0, len(values), 4):
            four = range(start, min(start + 4, len(values)))
            ends = (min(four, key=values.__getitem__), max(four, key=values.__getitem__))
            keep.extend(sorted(set(ends)))
        self.steps = array("q", (self.steps[each] for each in keep))
        self.values = array("d", (values[each] for each in keep))
        self.replaced += 1

    def thinned(self, columns: int) -> list[Bucket]:
        """At most ``columns`` buckets of equal numbers of points, none of whose peaks is lost."""
        size = max(1, -(-len(self) // max(1, columns)))
        found = []
        for start in range(0, len(self), size):
            part = self.values[start : start + size]
            found.append(Bucket(self.steps[start], min(part), max(part), part[-1]))
        return found
