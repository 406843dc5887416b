"""Can every host connect to every other, on whatever port?"""

from __future__ import annotations

from clusterkit.doctor.base import Answers, Check, Finding, Subject, read
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
        if not reasons:
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


CHECK = Check(
    NAME,
    "Every host can connect to every other on ports that the kernel chooses, as gloo and NCCL do.",
    judge,
    (MEET,),
    quick=False,
    pointless=lambda subject: "one host has no others" if len(subject.hosts) == 1 else None,
)
