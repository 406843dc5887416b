"""A metric over the steps of a run, in bounded memory, and thinned to a number of points. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import NamedTuple

MOST_POINTS = 1 << 20
"""Points that a series keeps; of more it keeps the lowest and the highest of every four."""
MOST_METRICS = 64
"""Metrics that are kept of a run: the first that its program reports."""
LARGEST_STEP = 1 << 62
"""Larger steps do not fit into an array and are ignored."""


class Bucket(NamedTuple):
    """Neighbouring points of a series: the first step, and the values' range and last."""

    step: int
    low: float
    high: float
    last: float


class Series:
    """Steps and values, two arrays of one length.

    Steps only rise: one that is reported again, after a restart from a checkpoint, replaces the
    earlier value and all that came after it.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")
        self.replaced = 0
        """Grows whenever earlier points have changed: a reader then starts over."""

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: float, value: float) -> None:
        """Append a point."""
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
        """Keep the lowest and the highest of every four points, in their order."""
        values = self.values
        keep = array("q")
        for start in range(0, len(values), 4):
            four = range(start, min(start + 4, len(values)))
            ends = (min(four, key=values.__getitem__), max(four, key=values.__getitem__))
            keep.extend(sorted(set(ends)))
        self.steps = array("q", (self.steps[each] for each in keep))
        self.values = array("d", (values[each] for each in keep))
        self.replaced += 1

    def downsample(self, columns: int) -> list[Bucket]:
        """Return at most ``columns`` buckets of equal numbers of points; peaks are kept."""
        size = max(1, -(-len(self) // max(1, columns)))
        found = []
        for start in range(0, len(self), size):
            part = self.values[start : start + size]
            found.append(Bucket(self.steps[start], min(part), max(part), part[-1]))
        return found
