"""Can every host connect to every other, on whatever port, over a link that is not slow?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from clusterkit import shell
from clusterkit.doctor.base import Verdict, fail, listed, ok, skip, warn
from clusterkit.doctor.check import Answers, Check, alone
from clusterkit.doctor.checks.head_port import MEET, Met, met_of, open_firewall
from clusterkit.doctor.meeting import SLOW

_SHOWN = 6
_FULL = (
    "sudo ufw status; sysctl net.ipv4.neigh.default.gc_thresh3  "
    "# the kernel keeps no more neighbours than that"
)


def judge(answers: Answers) -> Iterator[Verdict]:
    subject = answers.subject
    bench = shell.join(["clusterkit", "bench", "--cluster", subject.cluster, "--pairwise"])
    measure = f"{bench}  # measures every link; then look at cable, switch and `ethtool` there"
    blocked: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    cut_off: dict[str, list[str]] = {}
    seen = met_of(answers)
    slow = _slow(seen)
    for host, met in seen.items():
        if not met.peers:
            yield skip(host, "it did not meet any other at the head")
            continue
        reasons = {why for why in met.peers.values() if why is not None}
        for why in sorted(reasons):
            peers = tuple(m.name for m in subject.hosts if met.peers.get(m.name) == why)
            if len(peers) > max(_SHOWN, len(met.peers) // 2):
                cut_off.setdefault(why, []).append(host)
            else:
                blocked.setdefault((why, peers), []).append(host)
        if host in slow:
            yield warn(host, slow[host], measure)
        elif not reasons:
            yield ok(host, "all of them")
    for why, hosts in cut_off.items():
        cause = f"cannot connect to most other hosts on ports above 32767: {why}"
        yield from (fail(host, cause, _FULL) for host in hosts)
    for (why, peers), hosts in blocked.items():
        cause = f"cannot connect to {listed(peers, _SHOWN)} on ports above 32767: {why}"
        remedy = f"on {listed(peers, _SHOWN)}: {open_firewall(hosts, subject)}"
        yield from (fail(host, cause, remedy) for host in hosts)


def _slow(seen: Mapping[str, Met]) -> dict[str, str]:
    """Hosts with a slow link, and what was seen of it. A link has two ends: it is that of the
    host that has more of them."""
    links = {
        (host, peer): rate
        for host, met in seen.items()
        for peer, rate in met.rates.items()
        if rate < SLOW and peer in seen
    }
    ends = Counter(host for link in links for host in link)
    words: dict[str, list[str]] = {}
    for (host, peer), rate in links.items():
        if ends[host] >= ends[peer]:
            words.setdefault(host, []).append(f"{rate:.1f} Mbit/s to {peer}")
        else:
            words.setdefault(peer, []).append(f"{rate:.1f} Mbit/s from {host}")
    return {host: f"its link is slow: {', '.join(rates)}" for host, rates in words.items()}


CHECK = Check(
    "mesh",
    "Every host can connect to every other on ports that the kernel chooses, as gloo and NCCL do, "
    f"and its link carries more than {SLOW:g} Mbit/s.",
    judge,
    (MEET,),
    quick=False,
    pointless=alone,
)
