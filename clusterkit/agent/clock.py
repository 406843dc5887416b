"""A clock that stops while its process is paused."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable

from clusterkit.agent import limits


class PauseAwareClock:
    """A clock of the seconds that this process has been running, without pauses.

    After a pause (SIGSTOP, a suspended machine) the other nodes would seem to have been silent,
    although this process was not receiving. GAP_SECONDS or more between two calls count as a pause.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last = clock()
        self._awake = 0.0

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            if now - self._last < limits.GAP_SECONDS:
                self._awake += now - self._last
            self._last = now
            return self._awake


awake = PauseAwareClock()
"""The clock by which the silence of other nodes is measured."""


def ready(
    selector: selectors.BaseSelector, seconds: float
) -> list[tuple[selectors.SelectorKey, int]]:
    """Return what ``selector.select`` does, also after a pause.

    If the time was up in the pause, that returns nothing at first, although messages and signals
    are there (PEP 475): another node would seem to have been silent, a child to run on.
    """
    return selector.select(seconds) or selector.select(0)
