"""Decide what to do about ranks that hang, from their records (`standstill`) and the time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from clusterkit.agent import limits
from clusterkit.agent.messages import Decision, EndHang, Note, QueryRecords
from clusterkit.agent.protocol import Document
from clusterkit.agent.standstill import Finding, compare, median, names_of, places


class Steps(NamedTuple):
    """How often the program has written lines of metrics."""

    last: float = 0.0  # when the newest came
    quiet: float = 0.0  # seconds since the newest
    every: float = 0.0  # seconds from one to the next; 0: unknown
    pace: float = 0.0  # seconds that a step takes


def steps_of(lines: Sequence[tuple[float, object]], now: float) -> Steps:
    """Summarise lines of metrics: when each came, and its ``step_seconds``, if it has them."""
    if not lines:
        return Steps()
    every = median([later - earlier for (earlier, _), (later, _) in itertools.pairwise(lines)])
    seconds_each = [float(seconds) for _, seconds in lines if isinstance(seconds, int | float)]
    pace = median(seconds_each) if seconds_each else every
    return Steps(last=lines[-1][0], quiet=now - lines[-1][0], every=every, pace=pace)


def stall(ranks: Mapping[int, Document], steps: Steps, nodes: Sequence[int], nproc: int) -> Finding:
    """Return the finding that no step completes, where no rank waits for another."""
    named = partial(names_of, nproc=nproc, nodes=nodes)
    return Finding(
        about=("steps", steps.last), seconds=steps.quiet, pace=steps.every, node=0,
        busy=any(record.get("busy") for record in ranks.values()), timeout=0.0,
        text=f"no step completes{places(ranks, ranks, named)}",
    )  # fmt: skip


class Hangs:
    """Decides on node 0 when all nodes are queried, what is reported, and that a round ends.

    Touches neither sockets nor clocks: ``now`` is a moment of a monotonic clock, in seconds.

    Args:
        timeout: seconds after which a standstill ends the round; 0: never; None: only once the
            process group's own timeout is over, which torch failed to end the ranks by.
    """

    def __init__(self, nproc: int, timeout: float | None) -> None:
        self._nproc, self._timeout = nproc, timeout
        self.number = 0  # of the newest query
        self.begin((0,))

    def begin(self, nodes: Sequence[int]) -> None:
        """Begin another round, of these nodes."""
        self._nodes = nodes
        self._waiting: dict[int, float] = {}  # nodes where ranks wait for others; since how long
        self._ranks: dict[int, Document] = {}  # records, of the answers
        self._asked: float | None = None  # when the pending query was sent; None: none is
        self._next = -math.inf  # when the next query may be sent
        self._found: Finding | None = None
        self._since = 0.0  # when that was found first
        self._announced = self._decided = False

    def receive(self, node: int, ranks: Sequence[Document], number: int = 0) -> None:
        """Take records of a node's ranks: one waits, or they answer query ``number``."""
        if number == 0:
            self._waiting[node] = longest(ranks)
        elif number == self.number:
            self._ranks.update((int(each["rank"]), each) for each in ranks)

    def resumed(self, node: int) -> None:
        """Note that no rank of that node waits for another one any more."""
        self._waiting.pop(node, None)

    def tick(self, now: float, steps: Steps) -> list[Decision]:
        """Return what has become due."""
        world = len(self._nodes) * self._nproc
        slow = steps.every > 0 and steps.quiet >= warn_after(steps.every)
        if self._asked is None:
            waits = max(self._waiting.values(), default=0.0) >= warn_after(steps.pace)
            if self._decided:
                return []
            if not (waits or slow):
                return self._end_note()
            if now < self._next:
                return []
            self.number, self._asked, self._ranks = self.number + 1, now, {}
            return [QueryRecords(self.number)]
        answer = limits.STILL_AGAIN_SECONDS + limits.ANSWER_SECONDS
        if len(self._ranks) < world and now - self._asked < answer:
            return []
        self._asked = None
        found = compare(self._ranks, self._nodes, self._nproc, steps.pace)
        if found is None and slow:
            found = stall(self._ranks, steps, self._nodes, self._nproc)
        self._next = now + max(limits.STILL_AGAIN_SECONDS, found.seconds / 10 if found else 0.0)
        if found is None:
            self._waiting.clear()  # nodes of ranks that still wait report again
            return self._end_note()
        return self._judge(found, now)

    def _judge(self, found: Finding, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        if self._found is None or found.about != self._found.about:
            decisions, self._since = self._end_note(), now
        self._found = found
        wait = warn_after(found.pace, found.busy or not found.pace)
        if not self._announced and found.seconds >= wait:
            self._announced = True
            decisions = [Note("hang", found.text)]
        limit = self._limit(found)
        # Seconds by a clock that leaps are not all of it.
        if found.seconds >= limit and now - self._since >= limit - 2 * wait:
            self._decided = True
            text = f"no progress for {found.seconds:.0f} s: {found.text}"
            decisions.append(EndHang(found.node, text))
        elif limit > found.seconds:
            self._next = min(self._next, now + limit - found.seconds)
        return decisions

    def _end_note(self) -> list[Decision]:
        announced, self._announced, self._found = self._announced, False, None
        return [Note("hang")] if announced else []

    def _limit(self, found: Finding) -> float:
        if self._timeout is not None:
            return self._timeout or math.inf
        # Long work on one rank is no hang: only whoever wrote the program knows how long it takes.
        return found.timeout + limits.TIMEOUT_GRACE if found.timeout else math.inf


def longest(ranks: Iterable[Document]) -> float:
    """Return the longest time that one of these ranks has waited for others; 0: none waits."""
    return max((wait[3] for each in ranks for wait in each.get("waits", ())), default=0.0)


def warn_after(pace: float, more: bool = False) -> float:
    """Return the seconds of a standstill after which it is reported, where a step takes ``pace``.

    Args:
        more: allow for a first step, a checkpoint or an evaluation.
    """
    seconds = max(limits.STILL_SECONDS, limits.STILL_STEPS * pace)
    return max(seconds, limits.STILL_FIRST_SECONDS) if more else seconds
