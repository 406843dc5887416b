"""Find ranks that hang, and decide what to do, from records of ranks and the time.

A rank's record (`rank_state.record`) is a JSON object:

* ``rank``; ``at``: where its Python is, ``train.py:44 in load()``, or None
* ``state``: ``stopped``, ``ended``, or empty; ``busy``: whether it writes a checkpoint or evaluates
* ``last``: of each process group by name, the number of the newest collective it has entered
* ``waits``: those it has entered that are not complete: group, number, name, since how many
  seconds, how often one like it comes (seconds; 0: it never came before), and the timeout of its
  process group (seconds; 0: unknown)

Only numbers of one group are compared. Gloo does not report the ranks of a group: they are those
that have ever entered a collective of it, and of the default group (``WORLD``) all.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from clusterkit.agent import limits
from clusterkit.agent.messages import Decision, EndHang, Note, QueryRecords
from clusterkit.agent.protocol import Document

WORLD = "world"
"""The name, in records, of the group of all ranks."""


class Finding(NamedTuple):
    """A standstill of ranks, and its cause."""

    about: object
    """The same as long as it is the same standstill."""
    seconds: float
    pace: float
    """Seconds that a step takes; 0: unknown."""
    node: int
    """The node of the first rank that did not come."""
    busy: bool
    """Whether a missing rank writes a checkpoint or evaluates."""
    timeout: float
    """Of the process group that is waited in, in seconds; 0: unknown, or no rank waits."""
    text: str


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


def compare(
    ranks: Mapping[int, Document], nodes: Sequence[int], nproc: int, pace: float
) -> Finding | None:
    """Return which ranks did not come to a collective that others wait in; None: nobody waits.

    Args:
        ranks: their records.
        nodes: with ``nproc`` ranks each, by the numbers that messages use.
        pace: seconds that a step takes; 0: unknown.
    """
    named = partial(names_of, nproc=nproc, nodes=nodes)
    waiting: dict[tuple[str, int], dict[int, tuple[str, float, float, float]]] = defaultdict(dict)
    for rank, record in ranks.items():
        for group, number, name, seconds, every, timeout in record.get("waits", ()):
            waiting[group, number][rank] = name, seconds, every, timeout
    found = []
    for (group, number), waits in waiting.items():
        members = range(len(nodes) * nproc) if group == WORLD else [
            rank for rank, record in ranks.items() if group in record.get("last", {})
        ]  # fmt: skip
        missing = [
            rank for rank in members
            if rank not in ranks or ranks[rank].get("last", {}).get(group, 0) < number
        ]  # fmt: skip
        # A rank that waits for another one is seldom the cause.
        cause = [rank for rank in missing if not ranks.get(rank, {}).get("waits")]
        seconds = max(seconds for _, seconds, _, _ in waits.values())
        like = min(
            median([every for _, _, every, _ in waits.values() if every]), limits.LONGEST_PACE
        )
        busy = any(ranks[rank].get("busy") for rank in (cause or missing or waits) if rank in ranks)
        found.append(
            (not cause, not missing, -seconds, group, number, Finding(
                about=(group, number, tuple(missing)), seconds=seconds, pace=pace or like,
                node=min(cause or missing or waits) // nproc, busy=busy,
                timeout=max(timeout for _, _, _, timeout in waits.values()),
                text=_describe(ranks, waits, group, number, cause or missing, named),
            ))
        )  # fmt: skip
    return min(found, key=lambda each: each[:5])[5] if found else None


def stall(ranks: Mapping[int, Document], steps: Steps, nodes: Sequence[int], nproc: int) -> Finding:
    """Return the finding that no step is made, where no rank waits for another."""
    named = partial(names_of, nproc=nproc, nodes=nodes)
    return Finding(
        about=("steps", steps.last), seconds=steps.quiet, pace=steps.every, node=0,
        busy=any(record.get("busy") for record in ranks.values()), timeout=0.0,
        text=f"no step is made{_places(ranks, ranks, named)}",
    )  # fmt: skip


def _describe(
    ranks: Mapping[int, Document], waits: Mapping[int, tuple[str, float, float, float]], group: str,
    number: int, missing: Sequence[int], named: Callable[[Iterable[int]], str],
) -> str:  # fmt: skip
    names: dict[str, list[int]] = defaultdict(list)
    for rank, (name, _, _, _) in waits.items():
        names[name].append(rank)
    (name, first), *others = sorted(names.items(), key=lambda item: -len(item[1]))
    of_group = "" if group == WORLD else f" of group {group}"
    who, wait = named(first), "wait" if len(first) > 1 else "waits"
    if others:
        rest = "; ".join(f"{named(them)} entered {other} instead" for other, them in others)
        text = f"{who} {wait} in {name} #{number}{of_group}; {rest}"
    elif missing:
        has = "has" if len(missing) == 1 else "have"
        text = (
            f"{named(missing)} {has} not come to {name} #{number}{of_group}, which {who} {wait} in"
        )
    else:
        text = f"{who} {wait} in {name} #{number}{of_group}, which does not complete"
    others_too = [*missing, *(rank for rank in ranks if rank not in missing)]
    return text + _places(ranks, others_too, named)


def _places(
    ranks: Mapping[int, Document], order: Iterable[int], named: Callable[[Iterable[int]], str]
) -> str:
    """Describe the line of code of each rank; those at one line together."""
    at: dict[str, list[int]] = defaultdict(list)
    for rank in order:
        at[_place(ranks.get(rank))].append(rank)
    return "".join(
        f"; {named(them)} {'is' if len(them) == 1 else 'are'} {place}" for place, them in at.items()
    )


def _place(record: Document | None) -> str:
    if record is None:
        return "on a node that says nothing"
    state, at = str(record.get("state") or ""), record.get("at")
    if state == "stopped":
        return "stopped (SIGSTOP)"
    if state == "ended":
        return "at its end"
    waits = record.get("waits")
    inside = f", in {waits[0][2]} #{waits[0][1]}" if waits else ""
    return (f"at {at}" if at else "where it does not say") + inside


def names_of(ranks: Iterable[int], nproc: int, nodes: Sequence[int]) -> str:
    """Return ``rank 3 on node 1``, ``ranks 0-2 and 5``; ``nproc`` ranks are on each node."""
    numbers = sorted(ranks)
    rows = itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0])
    spans = [[number for _, number in row] for _, row in rows]
    words = [f"{span[0]}-{span[-1]}" if span[1:] else str(span[0]) for span in spans]
    text = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
    places = {number // nproc for number in numbers}
    where = f" on node {nodes[min(places)]}" if len(places) == 1 and len(nodes) > 1 else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {text}{where}"


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


def median(values: Sequence[float]) -> float:
    """Return the median, or 0: ``statistics`` takes 10 times as long to import as all of this."""
    return sorted(values)[len(values) // 2] if values else 0.0


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
