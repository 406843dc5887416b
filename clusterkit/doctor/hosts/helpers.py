"""Helpers of the checks of hosts: values compared between hosts, texts, remedies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from clusterkit.doctor.base import Level, shortened

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

V = TypeVar("V", bound=Hashable)


def most_common(values: Iterable[V], default: V) -> V:
    """Return the value that most hosts have; of several equally common ones, the first."""
    return next((value for value, _ in Counter(values).most_common(1)), default)


def level_of(value: float, *, warn_below: float, fail_below: float) -> Level:
    return "fail" if value < fail_below else "warn" if value < warn_below else "ok"


@cache  # each of many hosts names each of the others
def parsed_address(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an IP address, an IPv4-mapped IPv6 one as IPv4; None: it is a name."""
    import ipaddress

    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def size_text(count: float) -> str:
    """Format bytes: ``512 MiB``, ``1.5 GiB``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            value = count / scale
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{count:.0f} B"


_OF_DNF = {"g++": "gcc-c++", "python3-dev": "python3-devel"}
"""Packages of Debian and Ubuntu that Fedora and its kin call differently."""


def install_packages(installer: str, packages: Iterable[str]) -> str:
    """Return the command that installs packages, given by Debian's names, on a host that has this
    installer."""
    if installer == "dnf":
        # Python's venv is part of its package there.
        packages = [_OF_DNF.get(name, name) for name in packages if not name.endswith("-venv")]
    return f"sudo {installer or 'apt-get'} install -y {' '.join(packages)}"


class Process(Struct):
    """A process on a host that holds something the job needs."""

    pid: int
    user: str
    command: str


def end_processes(processes: Collection[Process], user: str) -> str:
    """Return the remedy: ``kill`` for the processes of ``user``, a request to the owners of the
    others."""
    own = [str(process.pid) for process in processes if process.user == user]
    foreign = [
        f"ask {each.user} to end process {each.pid} ({shortened(each.command, 80)})"
        for each in processes
        if each.user != user
    ]
    return "; ".join([f"kill {' '.join(own)}", *foreign] if own else foreign)
