"""Find ranks that others wait for, from records of ranks, and say where everyone is.

A rank's record (`rank_state.record`) is a JSON object:

* ``rank``; ``at``: where its Python is, ``train.py:44 in load()``, or None
* ``state``: ``stopped``, ``ended``, or empty; ``busy``: whether it writes a checkpoint or evaluates
* ``last``: of each process group by name, the number of the newest collective it has entered; with
  NCCL, that its CPU has queued
* ``waits``: those it has entered that are not complete: group, number, name, since how many
  seconds, how often one like it comes (seconds; 0: it never came before), and the timeout of its
  process group (seconds; 0: unknown)

With NCCL also, as far as its recorder tells:

* ``members``: the ranks of the groups it waits in, as rows of first, last and step
* ``unstarted``: of those groups, the number of the first collective that its GPU has not started,
  0: it has started all that were queued; missing without TORCH_NCCL_ENABLE_TIMING=1
* ``moves``: its collectives advance; then nothing of the above is known

Only numbers of one group and backend are compared. Gloo does not report the ranks of a group: they
are those that have ever entered a collective of it, and of the default group (``WORLD``) all.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from clusterkit.agent import limits
from clusterkit.agent.protocol import Document

WORLD, NCCL = "world", "nccl"
"""The name, in records, of the group of all ranks; the name of a group of NCCL begins with NCCL."""
_Wait = tuple[str, float, float, float]
"""Name, seconds, how often, timeout."""


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


def compare(
    ranks: Mapping[int, Document],
    nodes: Sequence[int],
    nproc: int,
    pace: float,
    *,
    silent: bool = True,
) -> Finding | None:
    """Return which ranks did not come to a collective that others wait in; None: nobody waits.

    Args:
        ranks: their records.
        nodes: with ``nproc`` ranks each, by the numbers that messages use.
        pace: seconds that a step takes; 0: unknown.
        silent: whether a rank without a record did not come; else nothing is known of it.
    """  # fmt: skip
    named = partial(names_of, nproc=nproc, nodes=nodes)
    waiting: dict[tuple[str, int], dict[int, _Wait]] = defaultdict(dict)
    for rank, record in ranks.items():
        for group, number, name, seconds, every, timeout in record.get("waits", ()):
            waiting[group, number][rank] = name, seconds, every, timeout
    found = []
    for (group, number), waits in waiting.items():
        members = _members(group, ranks, len(nodes) * nproc)
        missing = [
            rank for rank in members
            if (silent or rank in ranks) and not ranks.get(rank, {}).get("moves")
            and ranks.get(rank, {}).get("last", {}).get(group, 0) < number
        ]  # fmt: skip
        # A rank that waits for another one is seldom the cause.
        cause = [rank for rank in missing if not ranks.get(rank, {}).get("waits")]
        behind = [] if missing else _unstarted(ranks, waits, group, number)
        moving = [rank for rank in members if ranks.get(rank, {}).get("moves")]
        first = cause or missing or behind or moving or waits
        seconds = max(seconds for _, seconds, _, _ in waits.values())
        like = min(
            median([every for _, _, every, _ in waits.values() if every]), limits.LONGEST_PACE
        )
        found.append(
            (not cause, not missing, -seconds, group, number, Finding(
                about=(group, number, tuple(missing or behind)), seconds=seconds,
                pace=pace or like, node=min(first) // nproc,
                busy=any(ranks[rank].get("busy") for rank in first if rank in ranks),
                timeout=max(timeout for _, _, _, timeout in waits.values()),
                text=_describe(
                    ranks, waits, group, number, cause or missing, behind, moving, named
                ),
            ))
        )  # fmt: skip
    return min(found, key=lambda each: each[:5])[5] if found else None


def _members(group: str, ranks: Mapping[int, Document], world: int) -> Iterable[int]:
    if group in (WORLD, f"{NCCL} {WORLD}"):
        return range(world)
    told = [row for each in ranks.values() for row in each.get("members", {}).get(group, ())]
    if told:
        return sorted({rank for first, last, step in told for rank in range(first, last + 1, step)})
    return [rank for rank, record in ranks.items() if group in record.get("last", {})]


def _unstarted(
    ranks: Mapping[int, Document], waits: Collection[int], group: str, number: int
) -> list[int]:
    """Return the ranks that have queued a collective that their GPU has not started."""
    first = {rank: ranks[rank].get("unstarted", {}).get(group, 0) for rank in waits}
    return [rank for rank, of in first.items() if 0 < of <= number]


def _describe(
    ranks: Mapping[int, Document], waits: Mapping[int, _Wait], group: str, number: int,
    missing: Sequence[int], behind: Sequence[int], moving: Sequence[int],
    named: Callable[[Iterable[int]], str],
) -> str:  # fmt: skip
    names: dict[str, list[int]] = defaultdict(list)
    for rank, (name, _, _, _) in waits.items():
        names[name].append(rank)
    (name, together), *others = sorted(names.items(), key=lambda item: -len(item[1]))
    nccl, own = group.startswith(f"{NCCL} "), group.removeprefix(f"{NCCL} ")
    what = f"{name} #{number}" if own == WORLD else f"{name} #{number} of group {own}"
    who, wait = named(together), "wait" if together[1:] else "waits"
    if others:
        rest = "; ".join(f"{named(them)} entered {other} instead" for other, them in others)
        text = f"{who} {wait} in {what}; {rest}"
    elif missing:
        has = "has" if len(missing) == 1 else "have"
        text = f"{named(missing)} {has} not entered {what}, which {who} {wait} in"
    elif behind and (there := [rank for rank in waits if rank not in behind]):
        wait = "wait" if there[1:] else "waits"
        has, gpu = ("have", "their GPUs have") if behind[1:] else ("has", "its GPU has")
        text = (
            f"{named(behind)} {has} queued {what}, which {named(there)} {wait} in, but {gpu} not "
            "started it: kernels that were queued before it still run"
        )
    elif behind:
        text = (
            f"{who} {wait} in {what}, which no GPU has started: kernels that were queued before it "
            "still run"
        )
    elif moving:
        text = f"{who} {wait} in {what}; the collectives of {named(moving)} advance meanwhile"
    else:
        text = f"{who} {wait} in {what}, which does not complete"
        if nccl and not any(group in ranks[rank].get("unstarted", {}) for rank in waits):
            text += " (which GPU has not started it is known with TORCH_NCCL_ENABLE_TIMING=1)"
    first = [*missing, *behind, *moving]
    others_too = [*first, *(rank for rank in ranks if rank not in first)]
    return text + places(ranks, others_too, named)


def places(
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
        return "on a node that does not report"
    state, at = str(record.get("state") or ""), record.get("at")
    if state == "stopped":
        return "stopped (SIGSTOP)"
    if state == "ended":
        return "at its end"
    waits = record.get("waits")
    inside = f", in {waits[0][2]} #{waits[0][1]}" if waits else ""
    return (f"at {at}" if at else "at an unknown place") + inside


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


def median(values: Sequence[float]) -> float:
    """Return the median, or 0: ``statistics`` takes 10 times as long to import as all of this."""
    return sorted(values)[len(values) // 2] if values else 0.0
