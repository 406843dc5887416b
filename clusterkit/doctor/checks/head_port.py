"""Can every host connect to the head's rendezvous port?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from clusterkit.doctor import meeting
from clusterkit.doctor.base import HostSubject, Verdict, fail, ok, skip
from clusterkit.doctor.check import Answers, Check, Script


class Met(Struct):
    """What `clusterkit.doctor.meeting.meet` gives."""

    head: str | None
    listening: str | None
    came: list[str]
    peers: dict[str, str | None] | None
    rates: dict[str, float] = {}


MEET = Script(
    "meet", meeting.meet, Met, limit=meeting.END + 3, phase=2, with_head=True, whole_module=True
)


def met_of(answers: Answers) -> dict[str, Met]:
    """What `MEET` collected. Without the head nobody meets: then every host is skipped."""
    head = answers.subject.head.name
    if head in answers.of:
        return answers.read(MEET)
    reason = f"the head, {head}, did not answer"
    answers.unread += [skip(host, reason) for host in answers.of]
    return {}


def open_firewall(hosts: Sequence[str], subject: HostSubject, most: int = 8) -> str:
    """The command that lets hosts in; ranks talk on ports that nobody knows beforehand."""
    addresses = [machine.at for machine in subject.hosts if machine.name in hosts]
    more = f"  # and {len(addresses) - most} more" if len(addresses) > most else ""
    if len(addresses) == 1:
        return f"sudo ufw allow from {addresses[0]}"
    return f"for a in {' '.join(addresses[:most])}; do sudo ufw allow from $a; done{more}"


def judge(answers: Answers) -> Iterator[Verdict]:
    subject, head = answers.subject, answers.subject.head
    seen = met_of(answers)
    there = seen.get(head.name)
    if there is not None and there.listening is not None:
        cause = f"cannot listen on port {subject.port}: {there.listening}"
        yield fail(head.name, cause, f"sudo ss -ltnp 'sport = :{subject.port}'")
        reason = f"nothing listens on {head.name}"
        yield from (skip(host, reason) for host in seen if host != head.name)
        return
    place = f"{head.at}:{subject.port}"
    outside = [host for host, met in seen.items() if met.head is not None]
    for host, met in seen.items():
        if met.head is not None:
            cause = f"cannot connect to {head.name} ({place}): {met.head}"
            yield fail(host, cause, _remedy(met.head, outside, subject))
        else:
            yield ok(host, place)


def _remedy(why: str, outside: list[str], subject: HostSubject) -> str:
    head = subject.head
    if "route" in why or "unreachable" in why:
        return f"ip route get {head.at}"
    if "resolve" in why:
        return f"getent hosts {head.at}"
    if "another" in why:
        return f"on {head.name}: sudo ss -ltnp 'sport = :{subject.port}'"
    return f"on {head.name}: {open_firewall(outside, subject)}"


CHECK = Check(
    "head-port",
    "Every host can connect to the head's rendezvous port, at the address the ranks will use.",
    judge,
    (MEET,),
)
