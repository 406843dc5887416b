"""Which links and hosts between nodes are slow. Pure: matrices in, findings and sentences out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

SLOW_BANDWIDTH = 1 / 0.6
SLOW_LATENCY = 3.0
"""A link is slow when a byte, or an answer, takes this many times as long as usual ..."""
SLOW_SPREADS = 4.0
"""... and this many standard deviations of the usual links longer, so that noise blames nobody."""
_MAD_TO_SIGMA = 1.4826
"""Standard deviation / median absolute deviation of normally distributed numbers."""

Matrix = Sequence[Sequence[float | None]]
"""By node of origin, then by node of destination; None where they are the same."""


Link = tuple[int, int]
"""Node of origin and node of destination."""


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
    """Which hosts and links are slow, and the judgement in sentences.

    Usual is the median of the links that are not slow. To begin with, those are the quickest
    part of them that remains when one host, whichever, is left out: (n-2)/n of the links. So one
    slow host, even of three, does not shift what it is compared with; from six hosts on that
    holds for two of them.

    Args:
        names: of the nodes.
        bandwidth: GB/s.
        latency: us.
    """
    speeds, delays = _links(bandwidth), _links(latency)
    # Both ends of a link timed the same round trip.
    trips = {(a, b): min(one, delays.get((b, a), one)) for (a, b), one in delays.items()}
    findings = [
        *_findings(names, {link: 1 / one for link, one in speeds.items()}, "bandwidth"),
        *_findings(names, trips, "latency"),
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


def _findings(names: Sequence[str], costs: Mapping[Link, float], what: str) -> Iterator[Finding]:
    """Slow hosts, and the slow links that are not theirs.

    Args:
        costs: the latency of each link, or the time of a byte (1 / bandwidth).
        what: ``latency`` or ``bandwidth``.
    """
    unit, ratio = ("us", SLOW_LATENCY) if what == "latency" else ("GB/s", SLOW_BANDWIDTH)
    slow = slow_links(costs, len(names), ratio)
    if not slow:
        return

    def value(cost: float) -> float:
        return cost if what == "latency" else 1 / cost

    def text(cost: float) -> str:
        return f"{what} {figure(value(cost))} {unit}"

    usual = statistics.median(cost for link, cost in costs.items() if link not in slow)
    compared = "" if len(names) == 2 else f", usual is {figure(value(usual))} {unit}"
    rest = set(slow)
    for host, direction, explained in slow_hosts(slow, len(names)):
        rest -= explained
        median = statistics.median(costs[link] for link in explained)
        peers = {end for link in explained for end in link} - {host}
        verb = {"sending": "sends slowly", "receiving": "receives slowly"}.get(direction, "is slow")
        yield Finding(
            kind="host",
            hosts=(names[host],),
            direction=direction,
            what=what,
            value=value(median),
            usual=value(usual),
            sentence=f"Host {names[host]} {verb}: {text(median)} with {len(peers)} of "
            f"{len(names) - 1} hosts (median){compared}",
        )
    for source, target in sorted(rest):
        back = (target, source)
        both = back in rest
        if both and target < source:
            continue  # named with the other direction
        first, second = names[source], names[target]
        if both:
            worst = max(costs[source, target], costs[back])
            where, other = f"between {first} and {second}", ""
        else:
            worst = costs[source, target]
            where = f"from {first} to {second}"
            other = f", the other way {figure(value(costs[back]))} {unit}"
        yield Finding(
            kind="link",
            hosts=(first, second),
            direction="both" if both else "one",
            what=what,
            value=value(worst),
            usual=value(usual),
            sentence=f"The link {where} is slow: {text(worst)}{other}{compared}",
        )


def slow_links(costs: Mapping[Link, float], nodes: int, ratio: float) -> set[Link]:
    """The links that cost much more than usual (see `judge`)."""
    ordered = sorted(costs.values())
    usual = ordered[: max(1, math.ceil(len(ordered) * (nodes - 2) / nodes))]
    slow = _above(costs, usual, ratio)
    while slow:
        # The quickest are quicker than usual by chance: look again at all that are not slow.
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
    """Hosts most of whose links are slow, the worst first: host, direction, those links.

    Most are three quarters, and two at least, of the links to hosts that are not blamed already.
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
            if len(sending) >= enough and len(receiving) >= enough:
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
    """Three significant digits without an exponent: 1234, 85.3, 0.0123."""
    if number <= 0:
        return "0"
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}"
