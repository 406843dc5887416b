"""The network: interfaces and routes, the rendezvous port, and whether hosts reach each other."""

from __future__ import annotations

import errno
import glob
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Verdict, fail, ok, skip, warn
from clusterkit.doctor.hosts import meeting
from clusterkit.doctor.hosts.base import Answers, HostSubject, Machine, check, one_host, script
from clusterkit.doctor.hosts.helpers import Process, end_processes, most_common, parsed_address
from clusterkit.doctor.hosts.meeting import SLOW
from clusterkit.doctor.hosts.runner import text_of, user_of
from clusterkit.errors import listed
from clusterkit.host_probe import addresses, free_port, refusal

_SHOWN, _OPENED = 6, 8


class Interface(Struct):
    """One network interface."""

    mtu: int
    up: bool
    speed: int | None
    """Mbit/s; None where the driver does not know."""
    addresses: list[str]


Routes = dict[str, str | None]
"""The local address that a host uses towards each other host; None: it has no route there."""


@script("interfaces", dict[str, Interface], in_process=True)
def collect_interfaces(given: dict[str, Any]) -> Any:
    def read(name: str, entry: str) -> str:
        return text_of(f"/sys/class/net/{name}/{entry}").strip()

    interfaces: dict[str, Any] = {}
    for name in os.listdir("/sys/class/net"):
        flags, speed = read(name, "flags"), read(name, "speed")
        if not flags:
            continue  # a file of the bonding driver's
        interfaces[name] = {
            "mtu": int(read(name, "mtu") or 0),
            # IFF_UP, and not without a carrier.
            "up": bool(int(flags, 16) & 1)
            and read(name, "operstate") not in ("down", "lowerlayerdown"),
            "speed": int(speed) if speed.isdigit() else None,
            "addresses": [],
        }
    for name, address in addresses():
        if name in interfaces:
            interfaces[name]["addresses"].append(address)
    for line in text_of("/proc/net/if_inet6").splitlines():
        words = line.split()
        if words[-1] in interfaces:
            text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))
            interfaces[words[-1]]["addresses"].append(text)
    return interfaces


@script("routes", Routes, phase=2, in_process=True)
def collect_routes(given: dict[str, Any]) -> Any:
    routes: dict[str, str | None] = {}
    for name, address in given["hosts"]:
        routes[name] = None
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                # Connecting a datagram socket sends nothing; it only looks up the route.
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect((address, 9))
                    routes[name] = probe.getsockname()[0]
                    break
            except OSError:
                continue
    return routes


@check(collect_interfaces, collect_routes)
def interface(answers: Answers) -> Iterator[Verdict]:
    """The hosts talk over the interface that is meant, it is up, and MTU and speed are the same
    everywhere."""
    subject = answers.subject
    seen = answers.read(collect_interfaces)
    routes = answers.read(collect_routes)
    used: dict[str, tuple[str, Interface]] = {}
    for host in (host for host in seen if host in routes):
        name = _used(host, seen[host], routes[host], subject)
        problem = _problem(seen[host], routes[host], subject, answers.machines[host], name)
        if problem is not None:
            yield fail(host, *problem)
        elif name is not None:
            used[host] = (name, seen[host][name])
    mtu = most_common((there.mtu for _, there in used.values()), 0)
    speed = most_common((there.speed for _, there in used.values()), None)
    usual = most_common((name for name, _ in used.values()), "")
    for host, (name, there) in used.items():
        if there.mtu != mtu:
            cause = f"{name} has MTU {there.mtu}, the others {mtu}: large packets may vanish"
            yield warn(host, cause, f"sudo ip link set dev {name} mtu {mtu}")
        elif there.speed != speed and there.speed is not None:
            cause = f"{name} runs at {there.speed} Mbit/s, the others at {speed}"
            yield warn(host, cause, f"sudo ethtool {name}")
        elif name != usual and subject.interface == "auto":
            yield warn(host, f"talks over {name}, the others over {usual}", "ip route")
        yield ok(host, f"{name}, MTU {there.mtu}")


def _used(
    host: str, there: dict[str, Interface], routes: Routes, subject: HostSubject
) -> str | None:
    """The interface that carries what this host says to most of the others."""
    if subject.interface != "auto":
        return subject.interface if subject.interface in there else None
    others = {peer: local for peer, local in routes.items() if peer != host} or routes
    for local, _ in Counter(local for local in others.values() if local is not None).most_common():
        for name, interface in there.items():
            if local in interface.addresses:
                return name
    return None


def _problem(
    there: dict[str, Interface],
    routes: Routes,
    subject: HostSubject,
    machine: Machine,
    name: str | None,
) -> tuple[str, str] | None:
    """Why this host cannot talk as the job wants it to: cause and remedy."""
    has = ", ".join(sorted(other for other, interface in there.items() if interface.addresses))
    if name is None and subject.interface != "auto":
        return f"has no interface {subject.interface}; it has {has}", "interface: auto"
    nowhere = [peer for peer, local in routes.items() if local is None]
    if nowhere:
        return f"has no route to {', '.join(nowhere[:_SHOWN])}; it has {has}", "ip route"
    if name is None:
        return f"none of its interfaces leads to the other hosts; it has {has}", "ip route"
    if not there[name].up:
        return f"{name} is down", f"sudo ip link set dev {name} up"
    own = parsed_address(machine.at)
    if own is None or len(subject.hosts) == 1:
        return None
    mend = "give the host `clusterkit_address` in the inventory"
    if own.is_loopback:
        return f"was reached at {own}, where the other hosts cannot reach it", mend
    if own not in {parsed_address(text) for other in there.values() for text in other.addresses}:
        return f"the others are to reach it at {own}, which none of {has} has", mend
    return None


# ---------------------------------------------------------------- the rendezvous port


class Port(Struct):
    """Whether the port can be had, and who has it otherwise."""

    port: int
    error: str | None
    taken: bool
    holders: list[Process]
    me: str = ""
    """The user who asked."""


@script("port", Port, where="head", in_process=True)
def collect_port(given: dict[str, Any]) -> Any:
    wanted = given["port"]
    port = (free_port(None) or 20000) if wanted is None else wanted
    problem = refusal(port)
    if problem is None:
        return {"port": port, "error": None, "taken": False, "holders": []}
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in text_of(table).splitlines()[1:]:
            cells = line.split()
            if int(cells[1].rpartition(":")[2], 16) == port and cells[3] == "0A":
                sockets.add(f"socket:[{cells[9]}]")
    holders = {}
    for handle in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(handle) not in sockets:
                continue
            pid = int(handle.split("/")[2])
            user = user_of(os.stat(f"/proc/{pid}").st_uid)
        except OSError:
            continue
        command = text_of(f"/proc/{pid}/cmdline").rstrip("\0").replace("\0", " ")
        holders[pid] = {"pid": pid, "user": user, "command": command[:80]}
    return {
        "port": port,
        "error": problem.strerror or str(problem),
        "taken": problem.errno == errno.EADDRINUSE,
        "holders": list(holders.values()),
        "me": user_of(os.geteuid()),
    }


@check(collect_port)
def port(answers: Answers) -> Iterator[Verdict]:
    """The rendezvous port is free on the head."""
    wanted = answers.subject.port
    for host, there in answers.read(collect_port).items():
        if there.error is None:
            yield ok(host, f"{wanted} is free")
        elif not there.taken:
            yield fail(host, f"port {wanted} cannot be used: {there.error}", "port: auto")
        else:
            who = ", ".join(f"{h.command} (process {h.pid} of {h.user})" for h in there.holders)
            cause = f"port {wanted} is in use by {who or 'a process that only root can see'}"
            mend = end_processes(there.holders, there.me) or f"sudo ss -ltnp 'sport = :{wanted}'"
            yield fail(host, cause, f"{mend}, or `port: auto`")


# ---------------------------------------------------------------- the meeting


class Met(Struct):
    """What `clusterkit.doctor.hosts.meeting.meet` gives."""

    head: str | None
    listening: str | None
    came: list[str]
    peers: dict[str, str | None] | None
    rates: dict[str, float] = {}


MEET = script(
    "meet", Met, timeout=meeting.END + 3, phase=2, needs_head=True, whole_module=True
)(meeting.meet)  # fmt: skip


def _met(answers: Answers) -> dict[str, Met]:
    """What `MEET` collected. Without the head nobody meets: then every host is skipped."""
    head = answers.subject.head.name
    if head in answers.of:
        return answers.read(MEET)
    reason = f"the head, {head}, did not answer"
    answers.unread += [skip(host, reason) for host in answers.of]
    return {}


def _open_firewall(hosts: Sequence[str], subject: HostSubject) -> str:
    """The command that lets hosts in; ranks talk on ports that nobody knows beforehand."""
    addresses = [machine.at for machine in subject.hosts if machine.name in hosts]
    more = f"  # and {len(addresses) - _OPENED} more" if len(addresses) > _OPENED else ""
    if len(addresses) == 1:
        return f"sudo ufw allow from {addresses[0]}"
    return f"for a in {' '.join(addresses[:_OPENED])}; do sudo ufw allow from $a; done{more}"


@check(MEET)
def head_port(answers: Answers) -> Iterator[Verdict]:
    """Every host can connect to the head's rendezvous port, at the address the ranks will use."""
    subject, head = answers.subject, answers.subject.head
    seen = _met(answers)
    there = seen.get(head.name)
    holder = f"sudo ss -ltnp 'sport = :{subject.port}'"
    if there is not None and there.listening is not None:
        yield fail(head.name, f"cannot listen on port {subject.port}: {there.listening}", holder)
        reason = f"nothing listens on {head.name}"
        yield from (skip(host, reason) for host in seen if host != head.name)
        return
    place = f"{head.at}:{subject.port}"
    outside = [host for host, met in seen.items() if met.head is not None]
    for host, met in seen.items():
        if (why := met.head) is None:
            yield ok(host, place)
            continue
        mend = f"on {head.name}: {_open_firewall(outside, subject)}"
        if "route" in why or "unreachable" in why:
            mend = f"ip route get {head.at}"
        elif "resolve" in why:
            mend = f"getent hosts {head.at}"
        elif "another" in why:
            mend = f"on {head.name}: {holder}"
        yield fail(host, f"cannot connect to {head.name} ({place}): {why}", mend)


_FULL = (
    "sudo ufw status; sysctl net.ipv4.neigh.default.gc_thresh3  "
    "# the kernel keeps no more neighbours than that"
)


@check(MEET, quick=False, skip_reason=one_host)
def mesh(answers: Answers) -> Iterator[Verdict]:
    """Every host can connect to every other on ports that the kernel chooses, as gloo and NCCL
    do, and its link carries more than 10 Mbit/s."""
    subject = answers.subject
    bench = shell.join(["clusterkit", "bench", "--cluster", subject.cluster, "--pairwise"])
    measure = f"{bench}  # measures every link; then look at cable, switch and `ethtool` there"
    blocked: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    cut_off: dict[str, list[str]] = {}
    seen = _met(answers)
    slow = _slow_links(seen)
    for host, met in seen.items():
        if not met.peers:
            yield skip(host, "it did not meet any other at the head")
            continue
        for why in sorted({why for why in met.peers.values() if why is not None}):
            peers = tuple(m.name for m in subject.hosts if met.peers.get(m.name) == why)
            if len(peers) > max(_SHOWN, len(met.peers) // 2):
                cut_off.setdefault(why, []).append(host)
            else:
                blocked.setdefault((why, peers), []).append(host)
        if host in slow:
            yield warn(host, slow[host], measure)
        yield ok(host, "all of them")
    for why, hosts in cut_off.items():
        cause = f"cannot connect to most other hosts on ports above 32767: {why}"
        yield from (fail(host, cause, _FULL) for host in hosts)
    for (why, peers), hosts in blocked.items():
        cause = f"cannot connect to {listed(peers, _SHOWN)} on ports above 32767: {why}"
        remedy = f"on {listed(peers, _SHOWN)}: {_open_firewall(hosts, subject)}"
        yield from (fail(host, cause, remedy) for host in hosts)


def _slow_links(seen: Mapping[str, Met]) -> dict[str, str]:
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
