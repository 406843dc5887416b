"""Can every host connect to the head's rendezvous port?"""

from __future__ import annotations

from clusterkit.doctor.base import Answers, Check, Finding, Subject, read
from clusterkit.doctor.scripts import MEET, Met, open_firewall

NAME = "head-port"


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    head = subject.head
    if head.name not in answers:
        reason = f"the head, {head.name}, did not answer"
        return [Finding(NAME, host, "skip", reason) for host in answers]
    seen, findings = read(NAME, MEET, answers, subject, Met)
    there = seen.get(head.name)
    if there is not None and there.listening is not None:
        cause = f"cannot listen on port {subject.port}: {there.listening}"
        reason = f"nothing listens on {head.name}"
        return [
            *findings,
            Finding(NAME, head.name, "fail", cause, f"sudo ss -ltnp 'sport = :{subject.port}'"),
            *(Finding(NAME, host, "skip", reason) for host in seen if host != head.name),
        ]
    place = f"{head.at}:{subject.port}"
    outside = {host: met.head for host, met in seen.items() if met.head is not None}
    for host in seen:
        if host in outside:
            cause = f"cannot connect to {head.name} ({place}): {outside[host]}"
            remedy = _remedy(outside[host], list(outside), subject)
            findings.append(Finding(NAME, host, "fail", cause, remedy))
        else:
            findings.append(Finding(NAME, host, "ok", place))
    return findings


def _remedy(why: str, outside: list[str], subject: Subject) -> str:
    head = subject.head
    if "route" in why or "unreachable" in why:
        return f"ip route get {head.at}"
    if "resolve" in why:
        return f"getent hosts {head.at}"
    if "another" in why:
        return f"on {head.name}: sudo ss -ltnp 'sport = :{subject.port}'"
    return f"on {head.name}: {open_firewall(outside, subject)}"


CHECK = Check(
    NAME,
    "Every host can connect to the head's rendezvous port, at the address the ranks will use.",
    judge,
    (MEET,),
)
