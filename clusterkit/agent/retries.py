"""Decide whether and when all ranks start again after one failed."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from clusterkit.agent import limits
from clusterkit.agent.protocol import Document


class Retries:
    """The restarts of a run: how many are left, and which failures they are not used for.

    Args:
        restarts: how many the run has.
        retry_on: exit codes of ranks to restart after; empty: after any.
    """

    def __init__(self, restarts: int, retry_on: Collection[int] = ()) -> None:
        self.restarts, self.used = restarts, 0
        self._retry_on = frozenset(retry_on)
        self._errors: set[str] = set()  # of the last round
        self._in_a_row = 0  # restarts since a round lasted SOON_SECONDS
        self._lost = 0  # rounds in a row that a lost node ended within FREE_SECONDS

    @property
    def left(self) -> bool:
        return self.used < self.restarts

    def pause(self, lasted: float) -> float:
        """Return the seconds until the next round, after one that failed after ``lasted``."""
        if lasted > limits.SOON_SECONDS:
            self._in_a_row = 0
        return _pause(self._in_a_row)

    def lost(self, lasted: float) -> float | None:
        """Return the seconds until the next round, after one of ``lasted`` seconds that a lost node
        has ended; None: that happened so often in a row that it counts as a failure."""
        self._lost = self._lost + 1 if lasted < limits.FREE_SECONDS else 0
        return None if self._lost > limits.FREE_RESTARTS else _pause(self._lost - 2)

    @property
    def next(self) -> str:
        """The name of the next restart, for messages."""
        return f"restart {self.used + 1} of {self.restarts}"

    def use(self) -> str:
        """Use a restart; return its name."""
        name = self.next
        self.used += 1
        self._in_a_row += 1
        return name

    def reason_not_to_restart(
        self, failures: Iterable[Document], step: int | None, lasted: float = 0.0
    ) -> str | None:
        """Return why no restart may be used after this round; None: one may.

        Args:
            failures: of its ranks, as of `RankOutput.failure`.
            step: the last that they reported; None: none.
            lasted: how many seconds the round has.
        """
        own = [failure for failure in failures if not failure["echo"]]
        at = "" if step is None else f" at step {step}"
        start = step is None and lasted < limits.START_SECONDS
        ways = {f"{failure['error']}{at}" if failure["error"] else self._words(failure, start)
                for failure in own}  # fmt: skip
        # A rank that ended without a word may not fail in the same way again.
        errors = set() if "" in ways else ways
        same, self._errors = errors & self._errors, errors
        if same:
            return f"failed twice with the same error: {min(same)}; not restarted again"
        if own and self._retry_on and self._retry_on.isdisjoint(failure["code"] for failure in own):
            return f"exit code {own[0]['code']} is not in retry_on; not restarted"
        return None

    def _words(self, failure: Document, start: bool) -> str:
        """Return how a start has failed without an exception, as of arguments that are wrong."""
        words, code = failure.get("words"), failure["code"]
        known = start and words and code not in self._retry_on
        return f"exit code {code}: {words}" if known else ""


def _pause(in_a_row: int) -> float:
    return min(2.0 ** min(in_a_row - 1, 9), limits.LONGEST_PAUSE) if in_a_row > 0 else 0.0
