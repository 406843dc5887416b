"""Does every host find every other by name and by address, and soon?"""

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
"""Seconds that a look-up may take, beyond what it costs a host that is busy. torch's store looks
up the address of every connection."""
_SHOWN = 6
"""Lines of a remedy that are written out."""


class Look(Struct):
    """One look-up: what it gave, and how long it took."""

    begun: bool = False
    found: list[str] = []
    seconds: float | None = None
    """None: it had not ended when all had to."""


class Seen(Struct):
    """All look-ups of one host."""

    hostname: str
    own: Look
    """Its own name for itself."""
    names: dict[str, Look]
    """Name of a host to its addresses."""
    addresses: dict[str, Look]
    """Address of a host to its name."""
    yardsticks: list[Look]
    """Among the others, some that need no looking up: how busy the host is."""


@script("names", Seen, phase=2)
def collect_names(given: dict[str, Any]) -> Any:
    from concurrent.futures import ThreadPoolExecutor, wait

    pool = ThreadPoolExecutor(16)  # whose threads end with this process: a look-up may hang
    work: list[Any] = []

    def later(look: Any, word: str) -> Any:
        seen: dict[str, Any] = {}

        def timed() -> None:
            began = time.monotonic()
            seen["begun"] = True
            found = []
            with contextlib.suppress(OSError, UnicodeError):
                found = look(word)
            seen.update(found=found, seconds=time.monotonic() - began)

        work.append(pool.submit(timed))
        return seen

    def forward(name: str) -> Any:
        return sorted({entry[4][0] for entry in socket.getaddrinfo(name, None)})

    def backward(address: str) -> Any:
        # As torch's store does it: it listens on IPv6, where IPv4 addresses look like this.
        place = (f"::ffff:{address}", 0, 0, 0) if "." in address else (address, 0, 0, 0)
        return [socket.getnameinfo(place, socket.NI_NUMERICSERV)[0]]

    hostname = socket.gethostname()
    seen: dict[str, Any] = {
        "hostname": hostname, "own": later(forward, hostname),
        "names": {}, "addresses": {}, "yardsticks": [],
    }  # fmt: skip
    for number, (name, address) in enumerate(given["hosts"]):
        if re.fullmatch(r"[0-9.]+|.*:.*", address):
            seen["addresses"][address] = later(backward, address)
        else:
            seen["names"][address] = later(forward, address)
        if number % 8 == 0:
            seen["yardsticks"].append(later(forward, "127.0.0.1"))
        seen["names"][name] = later(forward, name)
    wait(work, 3 * given["time_factor"])
    return seen


@check(collect_names, skip_reason=one_host)
def names(answers: Answers) -> Iterator[Verdict]:
    """Every host finds every other by name and by address, at once; its own name is not
    127.0.1.1."""
    subject = answers.subject
    # Ranks get addresses; these find each other by name.
    by_name = subject.needs.launcher in ("mpirun", "deepspeed") or subject.needs.elastic
    level: Level = "fail" if by_name else "warn"
    for host, looks in answers.read(collect_names).items():
        yield from _slow(host, looks, subject.hosts)
        yield from _others(host, looks, subject.hosts, level)
        yield from _own(host, looks, answers.machines[host])
        yield ok(host, "every name, every address, at once")


def _slow(host: str, looks: Seen, machines: Sequence[Machine]) -> Iterator[Verdict]:
    """Look-ups that take long, whatever they give."""
    if any(look.seconds is None for look in looks.yardsticks):
        return  # a host this busy says nothing of its look-ups
    busy = max((look.seconds or 0.0 for look in looks.yardsticks), default=0.0)
    times = {
        what: 2 * FAIL if look.seconds is None else look.seconds - busy
        for what, look in (*looks.names.items(), *looks.addresses.items())
        if look.begun
    }
    longest = max(times.values(), default=0.0)
    if longest <= WARN:
        return
    slow = [
        what
        for machine in machines
        for what in dict.fromkeys((machine.name, machine.at))
        if times.get(what, 0.0) > WARN
    ]
    took = f"{longest:.1f} s" if longest <= FAIL else "more than 2 s"
    # With the answer in /etc/hosts nobody is asked.
    lines = [
        f"{prefix}{machine.at} {machine.name}"
        for machine in machines
        if {machine.name, machine.at} & set(slow)
        for prefix in ("", "::ffff:")
        if "." in machine.at or not prefix
    ]
    cause = f"looking up {listed(slow)} takes {took}: so does every connection of torch's store"
    yield Verdict(host, "fail" if longest > FAIL else "warn", cause, _add_lines(lines))


def _others(host: str, looks: Seen, machines: Sequence[Machine], level: Level) -> Iterator[Verdict]:
    """Other hosts whose names mean nothing here, or something else."""
    unknown, wrong = [], []
    for machine in machines:
        look = looks.names.get(machine.name)
        if machine.name == host or look is None or look.seconds is None:
            continue
        right = parsed_address(machine.at)
        if not look.found:
            unknown.append(machine)
        elif right is not None and right not in map(parsed_address, look.found):
            wrong.append(machine)
    if unknown:
        cause = f"does not know the name of {listed([machine.name for machine in unknown])}"
        yield Verdict(host, level, cause, _add_machines(unknown))
    if wrong:
        known = [f"{each.name} is {' and '.join(looks.names[each.name].found)}" for each in wrong]
        right_names = [f"{machine.name} {machine.at}" for machine in wrong]
        cause = f"thinks that {listed(known)}; right is {listed(right_names)}"
        drop = f"sudo sed -i '/[[:space:]]{wrong[0].name}\\b/d' /etc/hosts"
        edit = drop if len(wrong) == 1 else "sudo nano /etc/hosts"
        yield Verdict(host, level, cause, f"{edit} && {_add_machines(wrong)}")


def _own(host: str, looks: Seen, machine: Machine) -> Iterator[Verdict]:
    """The host's own name for itself: Debian's installer makes it 127.0.1.1."""
    address = parsed_address(machine.at)
    if looks.own.seconds is None or address is None:
        return
    line = f"{machine.at} {looks.hostname}"
    if not looks.own.found:
        yield warn(host, f"does not know its own name, {looks.hostname}", _add_lines([line]))
        return
    loops = [text for text in looks.own.found if (at := parsed_address(text)) and at.is_loopback]
    if loops and not address.is_loopback:
        cause = (
            f"its own name, {looks.hostname}, means {loops[0]} there: programs that give "
            "others this address (gloo without an interface, Open MPI) cannot be reached"
        )
        loop = loops[0].replace(".", "[.]")
        yield warn(host, cause, f"sudo sed -i 's/^{loop}[[:space:]].*/{line}/' /etc/hosts")


def _add_machines(machines: Sequence[Machine]) -> str:
    return _add_lines([f"{machine.at} {machine.name}" for machine in machines])


def _add_lines(lines: list[str]) -> str:
    more = "" if len(lines) <= _SHOWN else f"  # and {len(lines) - _SHOWN} more of this form"
    say = shell.join(["printf", r"%s\n", *lines[:_SHOWN]])
    return f"{say} | sudo tee -a /etc/hosts{more}"
