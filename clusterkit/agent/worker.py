"""The agent's threads: one that an exception has ended starts again, and the run says so."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from clusterkit.agent import limits


class Worker:
    """A daemon thread of the agent.

    It has a `threading.Thread` and is none: that class has private names, each Python others,
    which those of a subclass would hide, or be hidden by (3.13 added ``_handle``).

    Args:
        work: runs in the thread. Once it returns, the thread ends. If it raises, it is called
            again, after a pause: its trouble must not become the run's.
        what: this does for the run; a part of the message.
        on_failure: takes that message; called in the thread. Not for each failure: the same one
            again, or more than WORKER_REPORTS, are not reported.
    """

    def __init__(
        self, work: Callable[[], object], what: str, on_failure: Callable[[str], object]
    ) -> None:
        self._work, self._what, self._on_failure = work, what, on_failure
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
        self._reported: list[str] = []

    def start(self) -> None:
        """Start the thread, unless it was started before."""
        if self._thread.ident is None:
            self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, so long at most."""
        self._thread.join(seconds)

    def is_alive(self) -> bool:
        """Return whether the thread was started and has not ended."""
        return self._thread.is_alive()

    def _run(self) -> None:
        pause = limits.WORKER_PAUSE
        while True:
            began = time.monotonic()
            try:
                self._work()
                return
            except Exception as error:
                self._report(error)
            if time.monotonic() - began > limits.WORKER_LONGEST_PAUSE:
                pause = limits.WORKER_PAUSE
            time.sleep(pause)
            pause = min(2 * pause, limits.WORKER_LONGEST_PAUSE)

    def _report(self, error: Exception) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        if text not in self._reported and len(self._reported) < limits.WORKER_REPORTS:
            self._reported.append(text)
            traceback.print_exception(error, file=sys.stderr)  # agent.log
            self._on_failure(
                f"{text[: limits.REASON_LENGTH]}: {self._what} failed on this node and is "
                "restarted; the ranks are not affected. This is a bug in clusterkit: agent.log of "
                "this node has the traceback"
            )
