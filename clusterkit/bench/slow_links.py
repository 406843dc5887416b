"""Finding slow links and hosts in matrices of bandwidth and latency. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

SLOW_BANDWIDTH = 1 / 0.6
SLOW_LATENCY = 3.0
"""A link is slow if its cost is this many times the usual ..."""
SLOW_SPREADS = 4.0
"""... and this many standard deviations above the usual, so that noise makes no link slow."""
_MAD_TO_SIGMA = 1.4826
"""Standard deviation / median absolute deviation of normally distributed numbers."""

Matrix = Sequence[Sequence[float | None]]
"""By sender, then by receiver; None where they are the same."""

Link = tuple[int, int]
"""Sender and receiver, as numbers of nodes."""


class Finding(Struct, frozen=True, kw_only=True):
    """One host or link that is slow."""

    kind: str
    """``host`` or ``link``."""
    hosts: tuple[str, ...]
    """The host, or the two ends of the link."""
    direction: str
    """``both``; of a host ``sending`` or ``receiving``; of a link ``one``: from first to second."""
    what: str
    """``bandwidth`` (GB/s) or ``latency`` (us)."""
    value: float
    usual: float
    sentence: str


def judge(names: Sequence[str], bandwidth: Matrix, latency: Matrix) -> tuple[list[Finding], str]:
    """Return slow hosts and links, and a text for people.

    The usual value is the median of the links that are not slow. At first, those are the quickest
    (n-2)/n of all links: as many as have no part in one of the n hosts. So one slow host, even of
    three, does not shift the usual value; from six hosts on that holds for two slow hosts.

    Args:
        names: of the nodes.
        bandwidth: GB/s.
        latency: us.
    """
    speeds, delays = _links(bandwidth), _links(latency)
    # Both ends of a link timed the same round trip.
    trips = {(a, b): min(one, delays.get((b, a), one)) for (a, b), one in delays.items()}
    findings = [
        *_findings(names, {link: 1 / one for link, one in speeds.items()}, _BANDWIDTH),
        *_findings(names, trips, _LATENCY),
    ]
    if findings:
        return findings, ". ".join(finding.sentence for finding in findings) + "."
    if len(names) == 2:
        there, back = speeds.values()
        return [], (
            f"Between {names[0]} and {names[1]}: {figure(there)} GB/s, the other way "
            f"{figure(back)} GB/s, latency {figure(min(trips.values()))} us. With one link there "
            "is nothing to compare it with."
        )
    return [], (
        f"No link and no host stands out: {_spread(names, speeds, 'GB/s')}; "
        f"latency {_spread(names, trips, 'us')}."
    )


def _links(matrix: Matrix) -> dict[Link, float]:
    return {
        (source, target): one
        for source, line in enumerate(matrix)
        for target, one in enumerate(line)
        if one is not None
    }


@dataclass(frozen=True)
class _Quantity:
    """Bandwidth or latency, whose cost grows as a link gets slower."""

    name: str
    unit: str
    ratio: float
    """A link with so many times the usual cost can be slow."""
    value: Callable[[float], float]
    """Cost to value."""

    def text(self, cost: float) -> str:
        return f"{figure(self.value(cost))} {self.unit}"


_BANDWIDTH = _Quantity("bandwidth", "GB/s", SLOW_BANDWIDTH, lambda cost: 1 / cost)
_LATENCY = _Quantity("latency", "us", SLOW_LATENCY, lambda cost: cost)


def _findings(
    names: Sequence[str], costs: Mapping[Link, float], of: _Quantity
) -> Iterator[Finding]:
    """Yield slow hosts, and the slow links that are not theirs."""
    slow = slow_links(costs, len(names), of.ratio)
    if not slow:
        return
    usual = statistics.median(cost for link, cost in costs.items() if link not in slow)
    compared = "" if len(names) == 2 else f", usual is {of.text(usual)}"

    def finding(cost: float, text: str, **fields: Any) -> Finding:
        fields |= {"value": of.value(cost), "usual": of.value(usual)}
        return Finding(what=of.name, sentence=text + compared, **fields)

    rest = set(slow)
    for host, direction, explained in slow_hosts(slow, len(names)):
        rest -= explained
        median = statistics.median(costs[link] for link in explained)
        peers = {end for link in explained for end in link} - {host}
        verb = {"sending": "sends slowly", "receiving": "receives slowly"}.get(direction, "is slow")
        text = f"Host {names[host]} {verb}: {of.name} {of.text(median)}"
        text += f" with {len(peers)} of {len(names) - 1} hosts (median)"
        yield finding(median, text, kind="host", hosts=(names[host],), direction=direction)
    for source, target in sorted(rest):
        first, second = hosts = names[source], names[target]
        cost, back = costs[source, target], costs[target, source]
        if (target, source) not in rest:
            text = f"The link from {first} to {second} is slow: {of.name} {of.text(cost)}"
            text += f", the other way {of.text(back)}"
            yield finding(cost, text, kind="link", hosts=hosts, direction="one")
        elif source < target:
            cost = max(cost, back)
            text = f"The link between {first} and {second} is slow: {of.name} {of.text(cost)}"
            yield finding(cost, text, kind="link", hosts=hosts, direction="both")


def slow_links(costs: Mapping[Link, float], nodes: int, ratio: float) -> set[Link]:
    """Return the links that cost much more than usual (see `judge`)."""
    ordered = sorted(costs.values())
    usual = ordered[: max(1, math.ceil(len(ordered) * (nodes - 2) / nodes))]
    slow = _above(costs, usual, ratio)
    while slow:
        # The quickest links are quicker than usual by chance: compare with all that are not slow.
        fewer = slow & _above(costs, [costs[link] for link in costs.keys() - slow], ratio)
        if fewer == slow:
            break
        slow = fewer
    return slow


def _above(costs: Mapping[Link, float], usual: Sequence[float], ratio: float) -> set[Link]:
    median = statistics.median(usual)
    spread = _MAD_TO_SIGMA * statistics.median(abs(cost - median) for cost in usual)
    limit = max(ratio * median, median + SLOW_SPREADS * spread)
    return {link for link, cost in costs.items() if cost > limit}


def slow_hosts(slow: set[Link], nodes: int) -> list[tuple[int, str, set[Link]]]:
    """Return hosts most of whose links are slow, the worst first: host, direction, those links.

    Most are three quarters, and at least two, of the links to hosts that are not in the result.
    """
    found: list[tuple[int, str, set[Link]]] = []
    rest = set(slow)
    while True:
        blamed = {host for host, *_ in found}
        enough = max(2, math.ceil((nodes - 1 - len(blamed)) * 0.75))
        suspects = []
        for host in sorted(set(range(nodes)) - blamed):
            sending = {link for link in rest if link[0] == host}
            receiving = {link for link in rest if link[1] == host}
            if min(len(sending), len(receiving)) >= enough:
                suspects.append((host, "both", sending | receiving))
            elif len(sending) >= enough:
                suspects.append((host, "sending", sending))
            elif len(receiving) >= enough:
                suspects.append((host, "receiving", receiving))
        if not suspects:
            return found
        found.append(max(suspects, key=lambda suspect: len(suspect[2])))
        rest -= found[-1][2]


def _spread(names: Sequence[str], links: Mapping[Link, float], unit: str) -> str:
    low, high = min(links, key=links.__getitem__), max(links, key=links.__getitem__)
    ends = [f"{figure(links[link])} ({names[link[0]]} to {names[link[1]]})" for link in (low, high)]
    return f"{ends[0]} to {ends[1]}, median {figure(statistics.median(links.values()))} {unit}"


def figure(number: float) -> str:
    """Format with three significant digits and no exponent: 1234, 85.3, 0.0123."""
    if number <= 0:
        return "0"
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}"
