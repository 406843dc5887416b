"""Which ranks are slower than the others: when each came to collectives in, words out.

All ranks of synchronous training take the same time for a step, because all wait for the slowest.
The slowest rank is the last to enter each collective. Torch records in every rank when it does
(`rank_state.arrivals`). Node 0 asks the agents every ARRIVALS_SECONDS; ranks send nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from clusterkit.agent import limits
from clusterkit.agent.hangs import names_of
from clusterkit.agent.protocol import Document


class Clock:
    """How far a node's clock is ahead of node 0's: by at least ``least`` and at most ``most``.

    A question that came at once to ``most``, or an answer to ``least``, holds for the later ones
    too, but for what the clocks drift.
    """

    def __init__(self) -> None:
        self.least, self.most, self._at = -math.inf, math.inf, 0.0

    def update(self, asked: float, heard: float, said: float, came: float) -> None:
        """Take the times of a question and its answer.

        Args:
            asked, came: when the question was sent and its answer came, by node 0's clock.
            heard, said: when the question came and its answer was sent, by the node's.
        """
        drift, self._at = abs(came - self._at) * limits.DRIFT, came
        self.least, self.most = (
            max(self.least - drift, said - came),
            min(self.most + drift, heard - asked),
        )
        if self.least > self.most:  # one of them was set
            self.least, self.most = said - came, heard - asked


class Arrivals(NamedTuple):
    """When a rank came to collectives of a group that follow each other, in seconds."""

    group: str
    first: int
    """The number of the first of them."""
    at: Sequence[float]
    """By node 0's clock, within ``error``."""
    error: float


def arrivals_of(record: Document, offset: float, error: float) -> Arrivals:
    """Return what a rank's record holds; its node's clock is ahead of node 0's by ``offset``."""
    times, moment = [], float(record["since"]) - offset
    for tenth_ms in record["steps"]:
        moment += int(tenth_ms) / 1e4
        times.append(moment)
    return Arrivals(str(record["group"]), int(record["first"]), times, error)


def shares(ranks: Mapping[int, Arrivals], judged: Mapping[str, int]) -> dict[int, float]:
    """Return, by rank, the share of the time in which most others of its group waited for it.

    Only collectives count that were not ``judged`` before (the newest number, by group), and a
    group only if all of its ranks have come to enough of them. The longest quarter of the waits for
    a rank does not count: they may have been for a checkpoint, or for whatever else came once.
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
    """Return the last collective that all of them have come to."""
    return min(each.first + len(each.at) - 1 for each in members)


def _wait(column: Mapping[int, float], rank: int, slack: float) -> tuple[float, float]:
    """Return from when to when most others surely waited for this rank."""
    others = sorted(at for other, at in column.items() if other != rank)
    return others[(len(others) - 1) // 2] + slack, column[rank]


def _merged(spans: Sequence[tuple[float, float]]) -> list[float]:
    """How long each is of those that do not overlap any more; those that end first are none."""
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
    """The ranks that hold the others up; none where that is not clear.

    More than half of the ranks are not slow, the others are fast; and whoever is in between shows
    that times vary.
    """
    ranks = tuple(sorted(rank for rank, share in found.items() if share >= limits.SLOW_SHARE))
    between = any(limits.SLOW_SHARE / 2 <= share < limits.SLOW_SHARE for share in found.values())
    return () if between or 2 * len(ranks) > len(found) else ranks


class Stragglers:
    """Decides on node 0 when all nodes are asked, and what is reported.

    Touches neither sockets nor clocks: ``now`` is a moment of a monotonic clock, in seconds.
    """

    def __init__(self, nproc: int) -> None:
        self._nproc = nproc
        self._clocks: dict[int, Clock] = defaultdict(Clock)
        self.number = 0  # of the newest question
        self.suspects: tuple[int, ...] = ()
        """Those of the newest judgement. What their nodes know is what has changed since."""
        self.begin((0,), 0.0)

    def begin(self, nodes: Sequence[int], now: float) -> None:
        """Begin another round, of these nodes."""
        self._nodes, self._world = nodes, len(nodes) * self._nproc
        self._clocks.clear()  # a node may have another number
        self._next = now + limits.ARRIVALS_SECONDS
        self._asked: float | None = None  # when all were asked who have not all answered yet
        self._ranks: dict[int, Arrivals] = {}
        self._knows: dict[int, str] = {}  # what nodes of suspects say of themselves, by node
        self._judged: dict[str, int] = {}
        self._announced: tuple[int, ...] = ()
        self._alike = 0  # judgements in a row that say the same
        self.suspects = ()

    def receive(self, node: int, answer: Document) -> None:
        """Take a node's answer: its ranks' records; of other nodes also the times that
        `Clock.update` takes."""
        offset = error = 0.0
        if node:
            clock = self._clocks[node]
            clock.update(*(float(answer[key]) for key in ("asked", "heard", "said", "came")))
            offset, error = (clock.most + clock.least) / 2, (clock.most - clock.least) / 2
        if answer["report"] != self.number:
            return
        for record in answer["stands"]:
            if "steps" in record:
                self._ranks[int(record["rank"])] = arrivals_of(record, offset, max(0.0, error))
        if answer.get("knows"):
            self._knows[node] = str(answer["knows"])

    def tick(self, now: float) -> list[tuple[str, str]]:
        """Return what is to be done, with a text.

        ``report``: ask all nodes; ``look``: have the hosts of suspects look at themselves;
        ``slow``: show the text, or without one that no rank is slow any more.
        """
        if self._asked is not None:
            if len(self._ranks) < self._world and now - self._asked < limits.PEER_SECONDS:
                return []
            self._asked = None
            return self._judge(now)
        if now < self._next or self._world == 1:
            return []
        self._asked, self._next = now, now + limits.ARRIVALS_SECONDS
        self.number += 1
        self._ranks, self._knows = {}, {}
        return [("report", "")]

    def _judge(self, now: float) -> list[tuple[str, str]]:
        found = shares(self._ranks, self._judged)
        if not found:
            return []  # too little has come since
        for rank in found:
            group = self._ranks[rank].group
            members = [each for each in self._ranks.values() if each.group == group]
            self._judged[group] = newest(members)
        ranks = slow(found)
        same = set(self.suspects) == set(ranks) or bool({*self._announced} & {*ranks})
        self._alike = self._alike + 1 if same else 1
        self.suspects = ranks
        if self._announced:
            if {*self._announced} & {*ranks} or self._alike < 2:
                return []
            self._announced = ()
            return [("slow", "")]
        if not ranks:
            return []
        if self._alike < limits.SLOW_REPORTS:
            self._next = now + limits.ARRIVALS_SECONDS / 3
            return [("look", "")] if self._alike == 1 else []
        self._announced = ranks
        return [("slow", self._describe(ranks, min(found[rank] for rank in ranks)))]

    def _describe(self, ranks: Sequence[int], share: float) -> str:
        is_, it = ("is", "it") if len(ranks) == 1 else ("are", "them")
        text = (
            f"{names_of(ranks, self._nproc, self._nodes)} {is_} slower than the others, which wait "
            f"for {it} at least {share:.0%} of the time"
        )
        places = sorted({rank // self._nproc for rank in ranks} & self._knows.keys())
        known = [f"node {self._nodes[place]}: {self._knows[place]}" for place in places]
        return "; ".join([text, *known])
