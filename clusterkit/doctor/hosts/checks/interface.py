"""Network interfaces and routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from clusterkit.doctor.base import Verdict, fail, ok, warn
from clusterkit.doctor.hosts.base import Answers, Collector, HostSubject, Machine, check
from clusterkit.doctor.hosts.collect import network as collect
from clusterkit.doctor.hosts.helpers import most_common, parsed_address

_SHOWN = 6


class Interface(Struct):
    """One network interface."""

    mtu: int
    up: bool
    speed: int | None
    """Mbit/s; None where the driver does not know."""
    addresses: list[str]


Routes = dict[str, str | None]
"""Host to the local address used towards it; None: there is no route."""


INTERFACES = Collector(collect.interfaces, dict[str, Interface])
ROUTES = Collector(collect.routes, Routes, phase=2)


@check(INTERFACES, ROUTES)
def interface(answers: Answers) -> Iterator[Verdict]:
    """The hosts use the intended interface, it is up, and MTU and speed are the same everywhere."""
    subject = answers.subject
    seen = answers.read(INTERFACES)
    routes = answers.read(ROUTES)
    used: dict[str, tuple[str, Interface]] = {}
    for host in (host for host in seen if host in routes):
        name = _used(host, seen[host], routes[host], subject)
        problem = _problem(seen[host], routes[host], subject, answers.machines[host], name)
        if problem is not None:
            yield fail(host, *problem)
        elif name is not None:
            used[host] = (name, seen[host][name])
    mtu = most_common((interface.mtu for _, interface in used.values()), 0)
    speed = most_common((interface.speed for _, interface in used.values()), None)
    usual = most_common((name for name, _ in used.values()), "")
    for host, (name, own) in used.items():
        if own.mtu != mtu:
            cause = f"{name} has MTU {own.mtu}, the others {mtu}: large packets may be lost"
            yield warn(host, cause, f"sudo ip link set dev {name} mtu {mtu}")
        elif own.speed != speed and own.speed is not None:
            cause = f"{name} runs at {own.speed} Mbit/s, the others at {speed}"
            yield warn(host, cause, f"sudo ethtool {name}")
        elif name != usual and subject.interface == "auto":
            yield warn(host, f"uses interface {name}, the others {usual}", "ip route")
        yield ok(host, f"{name}, MTU {own.mtu}")


def _used(
    host: str, interfaces: dict[str, Interface], routes: Routes, subject: HostSubject
) -> str | None:
    """Return the name of the interface that this host uses towards most of the others."""
    if subject.interface != "auto":
        return subject.interface if subject.interface in interfaces else None
    others = {peer: local for peer, local in routes.items() if peer != host} or routes
    for local, _ in Counter(local for local in others.values() if local is not None).most_common():
        for name, interface in interfaces.items():
            if local in interface.addresses:
                return name
    return None


def _problem(
    interfaces: dict[str, Interface],
    routes: Routes,
    subject: HostSubject,
    machine: Machine,
    name: str | None,
) -> tuple[str, str] | None:
    """Return cause and remedy if this host cannot talk as the job requires."""
    has = ", ".join(sorted(each for each, interface in interfaces.items() if interface.addresses))
    if name is None and subject.interface != "auto":
        return f"has no interface {subject.interface}; it has {has}", "interface: auto"
    unreachable = [peer for peer, local in routes.items() if local is None]
    if unreachable:
        return f"has no route to {', '.join(unreachable[:_SHOWN])}; it has {has}", "ip route"
    if name is None:
        return f"none of its interfaces reaches the other hosts; it has {has}", "ip route"
    if not interfaces[name].up:
        return f"{name} is down", f"sudo ip link set dev {name} up"
    own = parsed_address(machine.at)
    if own is None or len(subject.hosts) == 1:
        return None
    remedy = "give the host `clusterkit_address` in the inventory"
    if own.is_loopback:
        return f"was reached at {own}, where the other hosts cannot reach it", remedy
    if own not in {parsed_address(text) for each in interfaces.values() for text in each.addresses}:
        return f"the others would use {own} to reach it, an address that none of {has} has", remedy
    return None
