"""Can every host connect to every other, on whatever port, over a link that is not slow?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from clusterkit import shell
from clusterkit.doctor.base import Answers, Check, Finding, Subject, read
from clusterkit.doctor.meeting import SLOW
from clusterkit.doctor.scripts import MEET, Met, open_firewall

NAME = "mesh"
_SHOWN = 6
_FULL = (
    "sudo ufw status; sysctl net.ipv4.neigh.default.gc_thresh3  "
    "# the kernel keeps no more neighbours than that"
)


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    if subject.head.name not in answers:
        reason = f"the head, {subject.head.name}, did not answer"
        return [Finding(NAME, host, "skip", reason) for host in answers]
    seen, findings = read(NAME, MEET, answers, subject, Met)
    blocked: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    lost: dict[str, list[str]] = {}
    slow = _slow(seen)
    for host, met in seen.items():
        if not met.peers:
            reason = "it did not meet any other at the head"
            findings.append(Finding(NAME, host, "skip", reason))
            continue
        reasons = {why for why in met.peers.values() if why is not None}
        for why in sorted(reasons):
            peers = tuple(m.name for m in subject.hosts if met.peers.get(m.name) == why)
            if len(peers) > max(_SHOWN, len(met.peers) // 2):
                lost.setdefault(why, []).append(host)
            else:
                blocked.setdefault((why, peers), []).append(host)
        if host in slow:
            findings.append(Finding(NAME, host, "warn", slow[host], _measure(subject)))
        elif not reasons:
            findings.append(Finding(NAME, host, "ok", "all of them"))
    for why, hosts in lost.items():
        cause = f"cannot connect to most other hosts on ports above 32767: {why}"
        findings += [Finding(NAME, host, "fail", cause, _FULL) for host in hosts]
    for (why, peers), hosts in blocked.items():
        more = f" and {len(peers) - _SHOWN} more" if len(peers) > _SHOWN else ""
        there = ", ".join(peers[:_SHOWN]) + more
        cause = f"cannot connect to {there} on ports above 32767: {why}"
        remedy = f"on {there}: {open_firewall(hosts, subject)}"
        findings += [Finding(NAME, host, "fail", cause, remedy) for host in hosts]
    return findings


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
    return {host: f"its link is slow: {', '.join(told)}" for host, told in words.items()}


def _measure(subject: Subject) -> str:
    bench = shell.join(["clusterkit", "bench", "--cluster", subject.cluster, "--pairwise"])
    return f"{bench}  # measures every link; then look at cable, switch and `ethtool` there"


CHECK = Check(
    NAME,
    "Every host can connect to every other on ports that the kernel chooses, as gloo and NCCL do, "
    f"and its link carries more than {SLOW:g} Mbit/s.",
    judge,
    (MEET,),
    quick=False,
    pointless=lambda subject: "one host has no others" if len(subject.hosts) == 1 else None,
)
