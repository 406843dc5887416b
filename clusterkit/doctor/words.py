"""What judges put into words, and what they compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

V = TypeVar("V", bound=Hashable)


class Process(Struct):
    """A process on a host that holds what the job needs."""

    pid: int
    user: str
    command: str


def end_processes(processes: Collection[Process], me: str) -> str:
    """What frees what these processes hold: ``kill`` for those of user ``me``; the owners of the
    others are to be asked."""
    own = [str(process.pid) for process in processes if process.user == me]
    asked = [
        f"ask {each.user} to end process {each.pid} ({shortened(each.command, 80)})"
        for each in processes
        if each.user != me
    ]
    return "; ".join([f"kill {' '.join(own)}", *asked] if own else asked)


def common(values: Iterable[V], of_none: V) -> V:
    """What most hosts have; between equals, what the first of them has; ``of_none`` of no hosts."""
    return next((value for value, _ in Counter(values).most_common(1)), of_none)


def is_about_host_key(message: str) -> bool:
    """Whether a transport's error is about the key that proves who a host is."""
    return "host key" in message.lower()


@cache  # each of many hosts names each of the others
def parsed_address(text: str) -> IPv4Address | IPv6Address | None:
    """An address, None for a name; an IPv4 address written as an IPv6 one as itself."""
    import ipaddress

    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def size(count: float) -> str:
    """Bytes as people say them: ``512 MiB``, ``1.5 GiB``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            value = count / scale
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{count:.0f} B"


def shortened(text: str, most: int = 160) -> str:
    """One line of at most ``most`` characters, without control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else line[: most - 3] + "..."
