"""A clock that stands still while its process does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from clusterkit.agent import limits


class Awake:
    """Seconds that this process has been running: a pause of it (SIGSTOP, a suspended machine) does
    not count, so that nobody seems to have been silent while it was this process that did not hear.

    A step of GAP_SECONDS or more from one call to the next is such a pause.
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


awake = Awake()
"""By it, the other nodes are silent."""
