"""Do the hosts talk over the interface they should, and with the same MTU?"""

from __future__ import annotations

from collections import Counter
from typing import Any

from clusterkit.doctor.base import (
    Answers,
    Check,
    Finding,
    Machine,
    Script,
    Subject,
    common,
    parsed_address,
    read,
)
from clusterkit.doctor.scripts import INTERFACES, Interface

NAME = "interface"
_SHOWN = 6


def collect_routes(given: dict[str, Any]) -> Any:
    import socket

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


ROUTES = Script("routes", collect_routes, phase=2, safe=True)
"""The local address that a host uses towards each other host; None: it has no route there."""


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    seen, findings = read(NAME, INTERFACES, answers, subject, dict[str, Interface])
    routes, unread = read(NAME, ROUTES, answers, subject, dict[str, str | None])
    findings += unread
    used: dict[str, tuple[str, Interface]] = {}
    for machine in subject.hosts:
        host = machine.name
        if host not in seen or host not in routes:
            continue
        name = _used(host, seen[host], routes[host], subject)
        problem = _problem(seen[host], routes[host], subject, machine, name)
        if problem is not None:
            findings.append(Finding(NAME, host, "fail", *problem))
        elif name is not None:
            used[host] = (name, seen[host][name])
    mtu = common({host: interface.mtu for host, (_, interface) in used.items()}, 0)
    speed = common({host: interface.speed for host, (_, interface) in used.items()}, None)
    usual = common({host: name for host, (name, _) in used.items()}, "")
    for host, (name, interface) in used.items():
        if interface.mtu != mtu:
            cause = f"{name} has MTU {interface.mtu}, the others {mtu}: large packets may vanish"
            remedy = f"sudo ip link set dev {name} mtu {mtu}"
            findings.append(Finding(NAME, host, "warn", cause, remedy))
        elif interface.speed != speed and interface.speed is not None:
            cause = f"{name} runs at {interface.speed} Mbit/s, the others at {speed}"
            findings.append(Finding(NAME, host, "warn", cause, f"sudo ethtool {name}"))
        elif name != usual and subject.interface == "auto":
            cause = f"talks over {name}, the others over {usual}"
            findings.append(Finding(NAME, host, "warn", cause, "ip route"))
        else:
            findings.append(Finding(NAME, host, "ok", f"{name}, MTU {interface.mtu}"))
    return findings


def _used(
    host: str, there: dict[str, Interface], routes: dict[str, str | None], subject: Subject
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
    routes: dict[str, str | None],
    subject: Subject,
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
    if own.is_loopback:
        cause = f"was reached at {own}, where the other hosts cannot reach it"
        return cause, "give the host `clusterkit_address` in the inventory"
    if own not in {parsed_address(text) for other in there.values() for text in other.addresses}:
        cause = f"the others are to reach it at {own}, which none of {has} has"
        return cause, "give the host `clusterkit_address` in the inventory"
    return None


CHECK = Check(
    NAME,
    "The hosts talk over the interface that is meant, it is up, and MTU and speed are the same "
    "everywhere.",
    judge,
    (INTERFACES, ROUTES),
)
