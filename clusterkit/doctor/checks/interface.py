"""Do the hosts talk over the interface they should, and with the same MTU?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import (
    HostSubject,
    Machine,
    Verdict,
    common,
    fail,
    ok,
    parsed_address,
    warn,
)
from clusterkit.doctor.check import Answers, Check, Script
from clusterkit.doctor.driver import text_of

_SHOWN = 6


class Interface(Struct):
    """One network interface."""

    mtu: int
    up: bool
    speed: int | None
    """Mbit/s; None where the driver does not know."""
    addresses: list[str]


Routes = dict[str, str | None]
"""The local address that a host uses towards each other host; None: it has no route there."""


def collect(given: dict[str, Any]) -> Any:
    import array
    import fcntl
    import os
    import socket
    import struct

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
    # SIOCGIFCONF: every IPv4 address with its interface, 40 bytes each.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        room = array.array("B", bytes(40 * 1024))
        size = struct.unpack(
            "iL",
            fcntl.ioctl(
                probe.fileno(), 0x8912, struct.pack("iL", len(room), room.buffer_info()[0])
            ),
        )[0]
    data = room.tobytes()[:size]
    for start in range(0, size, 40):
        name = data[start : start + 16].partition(b"\0")[0].decode().partition(":")[0]
        if name in interfaces:
            interfaces[name]["addresses"].append(socket.inet_ntoa(data[start + 20 : start + 24]))
    for line in text_of("/proc/net/if_inet6").splitlines():
        words = line.split()
        if words[-1] in interfaces:
            text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))
            interfaces[words[-1]]["addresses"].append(text)
    return interfaces


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


INTERFACES = Script("interfaces", collect, dict[str, Interface], safe=True)
ROUTES = Script("routes", collect_routes, Routes, phase=2, safe=True)


def judge(answers: Answers) -> Iterator[Verdict]:
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
    mtu = common((interface.mtu for _, interface in used.values()), 0)
    speed = common((interface.speed for _, interface in used.values()), None)
    usual = common((name for name, _ in used.values()), "")
    for host, (name, interface) in used.items():
        if interface.mtu != mtu:
            cause = f"{name} has MTU {interface.mtu}, the others {mtu}: large packets may vanish"
            yield warn(host, cause, f"sudo ip link set dev {name} mtu {mtu}")
        elif interface.speed != speed and interface.speed is not None:
            cause = f"{name} runs at {interface.speed} Mbit/s, the others at {speed}"
            yield warn(host, cause, f"sudo ethtool {name}")
        elif name != usual and subject.interface == "auto":
            yield warn(host, f"talks over {name}, the others over {usual}", "ip route")
        else:
            yield ok(host, f"{name}, MTU {interface.mtu}")


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


CHECK = Check(
    "interface",
    "The hosts talk over the interface that is meant, it is up, and MTU and speed are the same "
    "everywhere.",
    judge,
    (INTERFACES, ROUTES),
)
