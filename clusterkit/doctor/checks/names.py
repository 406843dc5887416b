"""Does every host find every other by name and by address, and soon?"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import (
    Answers,
    Check,
    Finding,
    Level,
    Machine,
    Script,
    Subject,
    parsed_address,
    read,
)

NAME = "names"
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
    error: str | None = None
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


def collect(given: dict[str, Any]) -> Any:
    import socket
    import threading
    import time

    until = time.monotonic() + 3 * given["patience"]
    work: list[Any] = []

    def later(look: Any, *words: Any) -> Any:
        seen: dict[str, Any] = {}
        work.append((seen, look, words))
        return seen

    def worker() -> None:
        while work:
            try:
                seen, look, words = work.pop(0)
            except IndexError:
                return
            began = time.monotonic()
            seen["begun"] = True
            try:
                found, error = look(*words), None
            except (OSError, UnicodeError) as problem:
                found, error = [], str(problem)
            seen.update(found=found, error=error, seconds=time.monotonic() - began)

    def forward(name: str) -> Any:
        return sorted({entry[4][0] for entry in socket.getaddrinfo(name, None)})

    def backward(address: str) -> Any:
        # As torch's store does it: it listens on IPv6, where IPv4 addresses look like this.
        place = (f"::ffff:{address}", 0, 0, 0) if "." in address else (address, 0, 0, 0)
        return [socket.getnameinfo(place, socket.NI_NUMERICSERV)[0]]

    def is_address(text: str) -> bool:
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                socket.inet_pton(family, text)
                return True
            except OSError:
                pass
        return False

    hostname = socket.gethostname()
    seen: dict[str, Any] = {
        "hostname": hostname, "own": later(forward, hostname),
        "names": {}, "addresses": {}, "yardsticks": [],
    }  # fmt: skip
    for number, (name, address) in enumerate(given["hosts"]):
        if is_address(address):
            seen["addresses"][address] = later(backward, address)
        else:
            seen["names"][address] = later(forward, address)
        if number % 8 == 0:
            seen["yardsticks"].append(later(forward, "127.0.0.1"))
        seen["names"][name] = later(forward, name)
    threads = [threading.Thread(target=worker, daemon=True) for _ in range(min(16, len(work)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0, until - time.monotonic()))
    return seen


NAMES = Script("names", collect, phase=2)


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    seen, findings = read(NAME, NAMES, answers, subject, Seen)
    machines = {machine.name: machine for machine in subject.hosts}
    for host, looks in seen.items():
        found = [
            *_slow(host, looks, subject),
            *_peers(host, looks, subject),
            *_own(host, looks, machines[host]),
        ]
        findings += found or [Finding(NAME, host, "ok", "every name, every address, at once")]
    return findings


def _slow(host: str, looks: Seen, subject: Subject) -> list[Finding]:
    """Look-ups that take long, whatever they give."""
    unmeasured = [look for look in looks.yardsticks if look.seconds is None]
    if unmeasured:
        return []  # a host this busy says nothing of its look-ups
    busy = max((look.seconds or 0.0 for look in looks.yardsticks), default=0.0)
    times = {
        what: 2 * FAIL if look.seconds is None else look.seconds - busy
        for what, look in (*looks.names.items(), *looks.addresses.items())
        if look.begun
    }
    longest = max(times.values(), default=0.0)
    if longest <= WARN:
        return []
    slow = [
        what
        for machine in subject.hosts
        for what in dict.fromkeys((machine.name, machine.at))
        if times.get(what, 0.0) > WARN
    ]
    took = f"{longest:.1f} s" if longest <= FAIL else "more than 2 s"
    # The answer stands in a file then, and nobody is asked.
    lines = [
        f"{prefix}{machine.at} {machine.name}"
        for machine in subject.hosts
        if {machine.name, machine.at} & set(slow)
        for prefix in ("", "::ffff:")
        if "." in machine.at or not prefix
    ]
    return [
        Finding(
            NAME,
            host,
            "fail" if longest > FAIL else "warn",
            f"looking up {_listed(slow)} takes {took}: so does every connection of torch's store",
            _add_lines(lines),
        )
    ]


def _peers(host: str, looks: Seen, subject: Subject) -> list[Finding]:
    """Other hosts whose names mean nothing here, or something else."""
    unknown, wrong = [], []
    for machine in subject.hosts:
        look = looks.names.get(machine.name)
        if machine.name == host or look is None or look.seconds is None:
            continue
        if not look.found:
            unknown.append(machine)
        elif _is_address(machine.at) and not _means(look.found, machine.at):
            wrong.append((machine, look.found))
    level = _level(subject)
    findings = []
    if unknown:
        cause = f"does not know the name of {_listed([machine.name for machine in unknown])}"
        findings.append(Finding(NAME, host, level, cause, _add_lines(_lines(unknown))))
    if wrong:
        told = [f"{machine.name} is {' and '.join(found)}" for machine, found in wrong]
        right = [f"{machine.name} {machine.at}" for machine, _ in wrong]
        cause = f"thinks that {_listed(told)}; right is {_listed(right)}"
        remedy = (
            f"sudo sed -i '/[[:space:]]{wrong[0][0].name}\\b/d' /etc/hosts"
            if len(wrong) == 1
            else "sudo nano /etc/hosts"
        )
        add = _add_lines(_lines([machine for machine, _ in wrong]))
        findings.append(Finding(NAME, host, level, cause, f"{remedy} && {add}"))
    return findings


def _own(host: str, looks: Seen, machine: Machine) -> list[Finding]:
    """The host's own name for itself: Debian's installer makes it 127.0.1.1."""
    own = looks.own
    if own.seconds is None or not _is_address(machine.at):
        return []
    if not own.found:
        cause = f"does not know its own name, {looks.hostname}"
        remedy = _add_lines([f"{machine.at} {looks.hostname}"])
        return [Finding(NAME, host, "warn", cause, remedy)]
    loops = [address for address in own.found if _is_loopback(address)]
    if loops and not _is_loopback(machine.at):
        cause = (
            f"its own name, {looks.hostname}, means {loops[0]} there: whoever tells the others "
            "his address by it (gloo without an interface, Open MPI) cannot be reached"
        )
        line = f"{machine.at} {looks.hostname}"
        remedy = f"sudo sed -i 's/^{loops[0].replace('.', '[.]')}[[:space:]].*/{line}/' /etc/hosts"
        return [Finding(NAME, host, "warn", cause, remedy)]
    return []


def _level(subject: Subject) -> Level:
    """Whether names matter: ranks are told addresses; these find each other by name."""
    by_name = subject.needs.launcher in ("mpirun", "deepspeed") or subject.needs.elastic
    return "fail" if by_name else "warn"


def _means(found: list[str], address: str) -> bool:
    wanted = parsed_address(address)
    return any(parsed_address(text) == wanted for text in found)


def _is_address(text: str) -> bool:
    return parsed_address(text) is not None


def _is_loopback(text: str) -> bool:
    address = parsed_address(text)
    return address is not None and address.is_loopback


def _lines(machines: list[Machine]) -> list[str]:
    return [f"{machine.at} {machine.name}" for machine in machines]


def _add_lines(lines: list[str]) -> str:
    more = "" if len(lines) <= _SHOWN else f"  # and {len(lines) - _SHOWN} more of this form"
    say = shell.join(["printf", r"%s\n", *lines[:_SHOWN]])
    return f"{say} | sudo tee -a /etc/hosts{more}"


def _listed(words: list[str]) -> str:
    more = "" if len(words) <= _SHOWN else f" and {len(words) - _SHOWN} more"
    return ", ".join(words[:_SHOWN]) + more


CHECK = Check(
    NAME,
    "Every host finds every other by name and by address, at once; its own name is not 127.0.1.1.",
    judge,
    (NAMES,),
    pointless=lambda subject: "one host has no others" if len(subject.hosts) == 1 else None,
)
