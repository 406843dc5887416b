"""Connections: the rendezvous port on the head, and ports between all hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Verdict, fail, ok, skip, warn
from clusterkit.doctor.hosts.base import Answers, Collector, HostSubject, check, one_host
from clusterkit.doctor.hosts.collect import meeting
from clusterkit.doctor.hosts.collect import network as collect
from clusterkit.doctor.hosts.helpers import Process, end_processes
from clusterkit.errors import join_some

_SHOWN, _OPENED = 6, 8


class Port(Struct):
    """Whether something can listen on the port, and what prevents it."""

    port: int
    error: str | None
    taken: bool
    holders: list[Process]
    user: str = ""
    """The user whose commands run there."""


PORT = Collector(collect.port, Port, where="head")


@check(PORT)
def port(answers: Answers) -> Iterator[Verdict]:
    """The rendezvous port is free on the head."""
    wanted = answers.subject.port
    for host, found in answers.read(PORT).items():
        if found.error is None:
            yield ok(host, f"{wanted} is free")
        elif not found.taken:
            yield fail(host, f"port {wanted} cannot be used: {found.error}", "port: auto")
        else:
            users = ", ".join(f"{h.command} (process {h.pid} of {h.user})" for h in found.holders)
            cause = f"port {wanted} is in use by {users or 'a process that only root can see'}"
            remedy = end_processes(found.holders, found.user)
            remedy = remedy or f"sudo ss -ltnp 'sport = :{wanted}'"
            yield fail(host, cause, f"{remedy}, or `port: auto`")


# ---------------------------------------------------------------- the meeting


class Met(Struct):
    """The result of `clusterkit.doctor.hosts.collect.meeting` on one host."""

    head_error: str | None
    """Why the head could not be reached."""
    listen_error: str | None
    """On the head: why nothing can listen on the port."""
    arrived: list[str]
    """On the head: hosts that connected."""
    peer_errors: dict[str, str | None] | None
    """Host to why it could not be reached, or None; None as a whole: nothing was tried."""
    rates: dict[str, float] = {}
    """The next host to the Mbit/s at which it received a megabyte."""


MEETING = Collector(meeting.meet, Met, timeout=meeting.END_SECONDS + 3, phase=2, needs_head=True)


def _met(answers: Answers) -> dict[str, Met]:
    """Return what `MEETING` collected; skip every host if the head did not answer."""
    head = answers.subject.head.name
    if head in answers.of:
        return answers.read(MEETING)
    reason = f"the head, {head}, did not answer"
    answers.unread += [skip(host, reason) for host in answers.of]
    return {}


def _open_firewall(hosts: Sequence[str], subject: HostSubject) -> str:
    """Return the command that lets hosts in, on all ports: those of ranks are not known before."""
    addresses = [machine.at for machine in subject.hosts if machine.name in hosts]
    more = f"  # and {len(addresses) - _OPENED} more" if len(addresses) > _OPENED else ""
    if len(addresses) == 1:
        return f"sudo ufw allow from {addresses[0]}"
    return f"for a in {' '.join(addresses[:_OPENED])}; do sudo ufw allow from $a; done{more}"


@check(MEETING)
def head_port(answers: Answers) -> Iterator[Verdict]:
    """Every host can connect to the head's rendezvous port, at the address the ranks will use."""
    subject, head = answers.subject, answers.subject.head
    seen = _met(answers)
    show_holder = f"sudo ss -ltnp 'sport = :{subject.port}'"
    listen_error = seen[head.name].listen_error if head.name in seen else None
    if listen_error is not None:
        yield fail(head.name, f"cannot listen on port {subject.port}: {listen_error}", show_holder)
        reason = f"nothing listens on {head.name}"
        yield from (skip(host, reason) for host in seen if host != head.name)
        return
    place = f"{head.at}:{subject.port}"
    failed = [host for host, met in seen.items() if met.head_error is not None]
    for host, met in seen.items():
        if (error := met.head_error) is None:
            yield ok(host, place)
            continue
        remedy = f"on {head.name}: {_open_firewall(failed, subject)}"
        if "route" in error or "unreachable" in error:
            remedy = f"ip route get {head.at}"
        elif "resolve" in error:
            remedy = f"getent hosts {head.at}"
        elif "another" in error:
            remedy = f"on {head.name}: {show_holder}"
        yield fail(host, f"cannot connect to {head.name} ({place}): {error}", remedy)


_NEIGHBOURS = (
    "sudo ufw status; sysctl net.ipv4.neigh.default.gc_thresh3  "
    "# the kernel's limit of neighbour entries"
)


@check(MEETING, quick=False, skip_reason=one_host)
def mesh(answers: Answers) -> Iterator[Verdict]:
    """Every host can connect to every other on ports that the kernel chooses, as gloo and NCCL
    do, and its link carries more than 10 Mbit/s."""
    subject = answers.subject
    bench = shell.join(["clusterkit", "bench", "--cluster", subject.cluster, "--pairwise"])
    measure = f"{bench}  # measures every link; then look at cable, switch and `ethtool` there"
    seen = _met(answers)
    slow = _slow_links(seen)
    # Hosts that cannot reach the same peers for the same reason share a cause and a remedy.
    blocked: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    cut_off: dict[str, list[str]] = {}
    for host, met in seen.items():
        errors = met.peer_errors
        if not errors:
            yield skip(host, "it met no other host at the head")
            continue
        for error in sorted({error for error in errors.values() if error is not None}):
            peers = tuple(m.name for m in subject.hosts if errors.get(m.name) == error)
            if len(peers) > max(_SHOWN, len(errors) // 2):
                cut_off.setdefault(error, []).append(host)
            else:
                blocked.setdefault((error, peers), []).append(host)
        if host in slow:
            yield warn(host, slow[host], measure)
        yield ok(host, "all of them")
    for error, hosts in cut_off.items():
        cause = f"cannot connect to most other hosts on ports above 32767: {error}"
        yield from (fail(host, cause, _NEIGHBOURS) for host in hosts)
    for (error, peers), hosts in blocked.items():
        cause = f"cannot connect to {join_some(peers, _SHOWN)} on ports above 32767: {error}"
        remedy = f"on {join_some(peers, _SHOWN)}: {_open_firewall(hosts, subject)}"
        yield from (fail(host, cause, remedy) for host in hosts)


def _slow_links(seen: Mapping[str, Met]) -> dict[str, str]:
    """Return the hosts with a slow link, and the cause. Of the two ends of a slow link the host
    with more slow links is blamed."""
    links = {
        (host, peer): rate
        for host, met in seen.items()
        for peer, rate in met.rates.items()
        if rate < meeting.SLOW and peer in seen
    }
    ends = Counter(host for link in links for host in link)
    slow: dict[str, list[str]] = {}
    for (host, peer), rate in links.items():
        if ends[host] >= ends[peer]:
            slow.setdefault(host, []).append(f"{rate:.1f} Mbit/s to {peer}")
        else:
            slow.setdefault(peer, []).append(f"{rate:.1f} Mbit/s from {host}")
    return {host: f"its link is slow: {', '.join(rates)}" for host, rates in slow.items()}
