"""Find the ranks that are slower than the others, from when each entered collectives.

All ranks of synchronous training take the same time for a step, because all wait for the slowest.
The slowest rank is the last to enter each collective. Torch records in every rank when it does
(`rank_state.arrivals`). Node 0 queries the agents every ARRIVALS_SECONDS; ranks send nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from clusterkit.agent import limits
from clusterkit.agent.messages import Decision, ExamineHosts, Note, QueryArrivals
from clusterkit.agent.protocol import Document
from clusterkit.agent.standstill import names_of


class Clock:
    """Bounds of the seconds by which a node's clock is ahead of node 0's: ``least``, ``most``.

    Each query bounds the offset from above, and its answer from below, the closer the faster it was
    delivered. The closest bounds stay valid, except for the drift of the clocks.
    """

    def __init__(self) -> None:
        self.least, self.most, self._at = -math.inf, math.inf, 0.0

    def update(self, asked: float, query_received: float, answered: float, received: float) -> None:
        """Take the times of a query and its answer.

        Args:
            asked, received: when the query was sent and its answer received, by node 0's clock.
            query_received, answered: when the query was received and answered, by the node's.
        """
        least, most = answered - received, query_received - asked
        drift, self._at = abs(received - self._at) * limits.DRIFT, received
        self.least, self.most = max(self.least - drift, least), min(self.most + drift, most)
        if self.least > self.most:  # one of the clocks was set
            self.least, self.most = least, most


class Arrivals(NamedTuple):
    """When a rank entered consecutive collectives of a group, in seconds."""

    group: str
    first: int
    """The number of the first of them."""
    at: Sequence[float]
    """By node 0's clock, within ``error``."""
    error: float


def arrivals_of(record: Document, offset: float, error: float) -> Arrivals:
    """Parse a rank's record; its node's clock is ahead of node 0's by ``offset``."""
    times, moment = [], float(record["since"]) - offset
    for tenth_ms in record["steps"]:
        moment += int(tenth_ms) / 1e4
        times.append(moment)
    return Arrivals(str(record["group"]), int(record["first"]), times, error)


def shares(ranks: Mapping[int, Arrivals], judged: Mapping[str, int]) -> dict[int, float]:
    """Return, by rank, the share of the time in which most others of its group waited for it.

    Only collectives count that were not ``judged`` before (the newest number, by group), and a
    group only if all of its ranks have entered enough of them. The longest quarter of the waits for
    a rank does not count: a checkpoint, or anything else that happened once, may have caused them.
    """
    groups: dict[str, dict[int, Arrivals]] = defaultdict(dict)
    for rank, each in ranks.items():
        groups[each.group][rank] = each
    found: dict[int, float] = {}
    for group, members in groups.items():
        first = max(judged.get(group, 0) + 1, *(each.first for each in members.values()))
        last = newest(members.values())
        if len(members) < 2 or last - first + 1 < limits.ARRIVALS_LEAST:
            continue
        columns = [
            {rank: each.at[number - each.first] for rank, each in members.items()}
            for number in range(first, last + 1)
        ]
        seconds = max(columns[-1].values()) - min(columns[0].values())
        slack = 2 * max(each.error for each in members.values()) + limits.LATE_SECONDS
        for rank in members:
            waits = sorted(_merged([_wait(column, rank, slack) for column in columns]))
            lost = sum(waits[: 3 * len(waits) // 4])
            found[rank] = lost / seconds if seconds > 0 else 0.0
    return found


def newest(members: Iterable[Arrivals]) -> int:
    """Return the number of the last collective that all of them have entered."""
    return min(each.first + len(each.at) - 1 for each in members)


def _wait(column: Mapping[int, float], rank: int, slack: float) -> tuple[float, float]:
    """Return the start and end of the time in which most others certainly waited for this rank."""
    others = sorted(at for other, at in column.items() if other != rank)
    return others[(len(others) - 1) // 2] + slack, column[rank]


def _merged(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return the length of each span after merging those that overlap; empty ones are dropped."""
    lengths: list[float] = []
    end = 0.0
    for begin, until in sorted(span for span in spans if span[1] > span[0]):
        if lengths and begin <= end:
            lengths[-1] += max(0.0, until - end)
        else:
            lengths.append(until - begin)
        end = max(end, until)
    return lengths


def slow(found: Mapping[int, float]) -> tuple[int, ...]:
    """Return the ranks that delay the others, by their `shares`; none where that is not clear.

    If more than half are that slow, the others are fast; a rank just below SLOW_SHARE shows that
    times vary.
    """
    ranks = tuple(sorted(rank for rank, share in found.items() if share >= limits.SLOW_SHARE))
    between = any(limits.SLOW_SHARE / 2 <= share < limits.SLOW_SHARE for share in found.values())
    return () if between or 2 * len(ranks) > len(found) else ranks


class Stragglers:
    """Decides on node 0 when all nodes are queried, and what is reported.

    Touches neither sockets nor clocks: ``now`` is a moment of a monotonic clock, in seconds.
    """

    def __init__(self, nproc: int) -> None:
        self._nproc = nproc
        self._clocks: dict[int, Clock] = defaultdict(Clock)
        self._number = 0  # of the newest query
        self.begin((0,), 0.0)

    def begin(self, nodes: Sequence[int], now: float) -> None:
        """Begin another round, of these nodes."""
        self._nodes, self._world = nodes, len(nodes) * self._nproc
        self._clocks.clear()  # a node may have another number
        self._next = now + limits.ARRIVALS_SECONDS
        self._asked: float | None = None  # when the pending query was sent; None: none is
        self._ranks: dict[int, Arrivals] = {}
        self._causes: dict[int, str] = {}  # why hosts of suspects may be slow, by node
        self._judged: dict[str, int] = {}
        self._suspects: tuple[int, ...] = ()  # slow ranks of the newest judgement
        self._announced: tuple[int, ...] = ()  # slow ranks that were reported to the user
        self._alike = 0  # judgements in a row with the same suspects

    def receive(self, node: int, answer: Document) -> None:
        """Take a node's answer: its ranks' records; from other nodes also the arguments of
        `Clock.update`."""
        offset = error = 0.0
        if node:
            clock = self._clocks[node]
            names = ("asked", "query_received", "answered", "received")
            clock.update(*(float(answer[name]) for name in names))
            offset, error = (clock.most + clock.least) / 2, (clock.most - clock.least) / 2
        if answer["number"] != self._number:
            return
        for record in answer["records"]:
            if "steps" in record:
                self._ranks[int(record["rank"])] = arrivals_of(record, offset, max(0.0, error))
        if answer["causes"]:
            self._causes[node] = str(answer["causes"])

    def tick(self, now: float) -> list[Decision]:
        """Return what has become due."""
        if self._asked is not None:
            if len(self._ranks) < self._world and now - self._asked < limits.PEER_SECONDS:
                return []
            self._asked = None
            return self._judge(now)
        if now < self._next or self._world == 1:
            return []
        self._asked, self._next = now, now + limits.ARRIVALS_SECONDS
        self._number += 1
        self._ranks, self._causes = {}, {}
        return [QueryArrivals(self._number)]

    def _judge(self, now: float) -> list[Decision]:
        found = shares(self._ranks, self._judged)
        if not found:
            return []  # too few new collectives
        for rank in found:
            group = self._ranks[rank].group
            members = [each for each in self._ranks.values() if each.group == group]
            self._judged[group] = newest(members)
        ranks = slow(found)
        same = set(self._suspects) == set(ranks) or bool({*self._announced} & {*ranks})
        self._alike = self._alike + 1 if same else 1
        self._suspects = ranks
        if self._announced:
            if {*self._announced} & {*ranks} or self._alike < 2:
                return []
            self._announced = ()
            return [Note("slow")]
        if not ranks:
            return []
        if self._alike < limits.SLOW_REPORTS:
            self._next = now + limits.ARRIVALS_SECONDS / 3
            return [ExamineHosts(ranks)] if self._alike == 1 else []
        self._announced = ranks
        return [Note("slow", self._describe(ranks, min(found[rank] for rank in ranks)))]

    def _describe(self, ranks: Sequence[int], share: float) -> str:
        is_, it = ("is", "it") if len(ranks) == 1 else ("are", "them")
        text = (
            f"{names_of(ranks, self._nproc, self._nodes)} {is_} slower than the others, which wait "
            f"for {it} at least {share:.0%} of the time"
        )
        places = sorted({rank // self._nproc for rank in ranks} & self._causes.keys())
        known = [f"node {self._nodes[place]}: {self._causes[place]}" for place in places]
        return "; ".join([text, *known])
