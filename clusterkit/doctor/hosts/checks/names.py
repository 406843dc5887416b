"""Name resolution: every host finds every other by name and by address, quickly."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Level, Verdict, ok, warn
from clusterkit.doctor.hosts.base import Answers, Machine, check, one_host, script
from clusterkit.doctor.hosts.helpers import parsed_address
from clusterkit.errors import listed

WARN = 1.0
FAIL = 2.0
"""Seconds that a look-up may take, beyond what a look-up of 127.0.0.1 takes on the host. torch's
store looks up the address of every connection."""
_SHOWN = 6
"""Most lines in a remedy."""


class Lookup(Struct):
    """One look-up: its results and duration."""

    begun: bool = False
    found: list[str] = []
    seconds: float | None = None
    """None: it timed out."""


class Lookups(Struct):
    """All look-ups of one host."""

    hostname: str
    own: Lookup
    """Of its own host name."""
    names: dict[str, Lookup]
    """Name of a host to its addresses."""
    addresses: dict[str, Lookup]
    """Address of a host to its name."""
    yardsticks: list[Lookup]
    """Of 127.0.0.1, between the others: how busy the host is."""


@script("names", Lookups, phase=2)
def collect_names(given: dict[str, Any]) -> Any:
    from concurrent.futures import ThreadPoolExecutor, wait

    pool = ThreadPoolExecutor(16)  # not shut down, which would wait for look-ups that hang
    futures: list[Any] = []

    def start(look_up: Any, word: str) -> Any:
        result: dict[str, Any] = {}

        def timed() -> None:
            began = time.monotonic()
            result["begun"] = True
            found = []
            with contextlib.suppress(OSError, UnicodeError):
                found = look_up(word)
            result.update(found=found, seconds=time.monotonic() - began)

        futures.append(pool.submit(timed))
        return result

    def forward(name: str) -> Any:
        return sorted({entry[4][0] for entry in socket.getaddrinfo(name, None)})

    def backward(address: str) -> Any:
        # torch's store listens on IPv6, where IPv4 addresses have this form.
        mapped = f"::ffff:{address}" if "." in address else address
        return [socket.getnameinfo((mapped, 0, 0, 0), socket.NI_NUMERICSERV)[0]]

    hostname = socket.gethostname()
    seen: dict[str, Any] = {
        "hostname": hostname, "own": start(forward, hostname),
        "names": {}, "addresses": {}, "yardsticks": [],
    }  # fmt: skip
    for number, (name, address) in enumerate(given["hosts"]):
        if re.fullmatch(r"[0-9.]+|.*:.*", address):
            seen["addresses"][address] = start(backward, address)
        else:
            seen["names"][address] = start(forward, address)
        if number % 8 == 0:
            seen["yardsticks"].append(start(forward, "127.0.0.1"))
        seen["names"][name] = start(forward, name)
    wait(futures, 3 * given["time_factor"])
    return seen


@check(collect_names, skip_reason=one_host)
def names(answers: Answers) -> Iterator[Verdict]:
    """Every host finds every other by name and by address, at once; its own name is not
    127.0.1.1."""
    subject = answers.subject
    # Ranks are given addresses; these launchers use names.
    by_name = subject.needs.launcher in ("mpirun", "deepspeed") or subject.needs.elastic
    level: Level = "fail" if by_name else "warn"
    for host, lookups in answers.read(collect_names).items():
        yield from _slow(host, lookups, subject.hosts)
        yield from _other_names(host, lookups, subject.hosts, level)
        yield from _own_name(host, lookups, answers.machines[host])
        yield ok(host, "every name, every address, at once")


def _slow(host: str, lookups: Lookups, machines: Sequence[Machine]) -> Iterator[Verdict]:
    if any(each.seconds is None for each in lookups.yardsticks):
        return  # a host this busy times out whatever it looks up
    busy = max((each.seconds or 0.0 for each in lookups.yardsticks), default=0.0)
    times = {
        word: 2 * FAIL if each.seconds is None else each.seconds - busy
        for word, each in (*lookups.names.items(), *lookups.addresses.items())
        if each.begun
    }
    longest = max(times.values(), default=0.0)
    if longest <= WARN:
        return
    slow = [
        word
        for machine in machines
        for word in dict.fromkeys((machine.name, machine.at))
        if times.get(word, 0.0) > WARN
    ]
    took = f"{longest:.1f} s" if longest <= FAIL else "more than 2 s"
    # Lines in /etc/hosts make the look-up of a name server unnecessary.
    lines = [
        f"{prefix}{machine.at} {machine.name}"
        for machine in machines
        if {machine.name, machine.at} & set(slow)
        for prefix in ("", "::ffff:")
        if "." in machine.at or not prefix
    ]
    cause = f"looking up {listed(slow)} takes {took}: so does every connection of torch's store"
    yield Verdict(host, "fail" if longest > FAIL else "warn", cause, _add_lines(lines))


def _other_names(
    host: str, lookups: Lookups, machines: Sequence[Machine], level: Level
) -> Iterator[Verdict]:
    """Judge the names of other hosts that this host does not know, or resolves wrongly."""
    unknown, wrong = [], []
    for machine in machines:
        lookup = lookups.names.get(machine.name)
        if machine.name == host or lookup is None or lookup.seconds is None:
            continue
        right = parsed_address(machine.at)
        if not lookup.found:
            unknown.append(machine)
        elif right is not None and right not in map(parsed_address, lookup.found):
            wrong.append(machine)
    if unknown:
        cause = f"does not know the name of {listed([machine.name for machine in unknown])}"
        yield Verdict(host, level, cause, _add_machines(unknown))
    if wrong:
        known = [f"{each.name} is {' and '.join(lookups.names[each.name].found)}" for each in wrong]
        right_names = [f"{machine.name} {machine.at}" for machine in wrong]
        cause = f"thinks that {listed(known)}; right is {listed(right_names)}"
        drop = f"sudo sed -i '/[[:space:]]{wrong[0].name}\\b/d' /etc/hosts"
        edit = drop if len(wrong) == 1 else "sudo nano /etc/hosts"
        yield Verdict(host, level, cause, f"{edit} && {_add_machines(wrong)}")


def _own_name(host: str, lookups: Lookups, machine: Machine) -> Iterator[Verdict]:
    """Judge the host's own name, for which Debian's installer writes 127.0.1.1."""
    address, found = parsed_address(machine.at), lookups.own.found
    if lookups.own.seconds is None or address is None:
        return
    line = f"{machine.at} {lookups.hostname}"
    if not found:
        yield warn(host, f"does not know its own name, {lookups.hostname}", _add_lines([line]))
        return
    loops = [text for text in found if (at := parsed_address(text)) and at.is_loopback]
    if loops and not address.is_loopback:
        cause = (
            f"its own name, {lookups.hostname}, means {loops[0]} there: programs that give "
            "others this address (gloo without an interface, Open MPI) cannot be reached"
        )
        loop = loops[0].replace(".", "[.]")
        yield warn(host, cause, f"sudo sed -i 's/^{loop}[[:space:]].*/{line}/' /etc/hosts")


def _add_machines(machines: Sequence[Machine]) -> str:
    return _add_lines([f"{machine.at} {machine.name}" for machine in machines])


def _add_lines(lines: list[str]) -> str:
    more = "" if len(lines) <= _SHOWN else f"  # and {len(lines) - _SHOWN} more of this form"
    print_lines = shell.join(["printf", r"%s\n", *lines[:_SHOWN]])
    return f"{print_lines} | sudo tee -a /etc/hosts{more}"
