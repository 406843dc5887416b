"""Whether and when all ranks start again after one failed."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from clusterkit.agent import limits
from clusterkit.agent.protocol import Document


class Retries:
    """Of a run: how many there are, how many were used, and what they are not used for.

    Args:
        restarts: how many there are.
        retry_on: only after a rank's exit with one of these codes; empty: with any.
    """

    def __init__(self, restarts: int, retry_on: Collection[int] = ()) -> None:
        self.restarts, self.used = restarts, 0
        self._retry_on = frozenset(retry_on)
        self._errors: set[str] = set()  # of the round before
        self._in_a_row = 0  # rounds that failed soon

    @property
    def left(self) -> bool:
        return self.used < self.restarts

    def pause(self, lasted: float) -> float:
        """Seconds from the failure of a round that lasted so long to the next one."""
        if lasted > limits.SOON_SECONDS:
            self._in_a_row = 0
        return min(2.0 ** (self._in_a_row - 1), limits.LONGEST_PAUSE) if self._in_a_row else 0.0

    @property
    def next(self) -> str:
        """The next one, by name."""
        return f"restart {self.used + 1} of {self.restarts}"

    def use(self) -> str:
        """Use one; its name."""
        name = self.next
        self.used += 1
        self._in_a_row += 1
        return name

    def refusal(self, failures: Iterable[Document], step: int | None) -> str | None:
        """Why none is used after a round in which ranks failed so (`failure.Words.failure`) when
        they had come to that step; None: one may be."""
        own = [failure for failure in failures if not failure["echo"]]
        at = "" if step is None else f" at step {step}"
        # What ended without an exception was ended by something that may not come again.
        errors = {f"{one['error']}{at}" for one in own if all(each["error"] for each in own)}
        same, self._errors = errors & self._errors, errors
        if same:
            return f"failed twice in the same way: {min(same)}; not restarted again"
        if own and self._retry_on and self._retry_on.isdisjoint(one["code"] for one in own):
            return f"exit code {own[0]['code']} is none of retry_on; not restarted"
        return None
