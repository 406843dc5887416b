"""Parse and check host addresses: ``[user@]host[:port]``, with IPv6 in brackets before a port.

A hostfile has one on each line, followed by ``slots=N``.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence

import msgspec

from clusterkit.cluster import Host
from clusterkit.errors import BadInput

_PLACE = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::([0-9]{1,9}))?")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z")
_USER = re.compile(r"""[^\s\x00-\x1f'"`$;&<>|(){}\-][^\s\x00-\x1f'"`$;&<>|(){}]*\Z""")
"""User names that OpenSSH's client accepts, such as `me@corp.example` and `CORP\\me`."""

_SLOTS = re.compile(r"(\S+)(?:\s+max[-_]slots\s*=\s*[0-9]+)?(?:\s+slots\s*=\s*(\S+)(?:\s.*)?)?\Z")
_ONCE = "keep one of the two; `slots` is the number of its ranks"


def host_and_port(text: str) -> tuple[str, int | None]:
    """Split ``host:2222`` or ``[2001:db8::1]:2222``; whether the host is valid is left to `check`.

    Returns:
        The host, and its port or None. Text of another form is returned unchanged: an IPv6
        address without brackets, or one of Ansible's ranges of hosts.
    """
    found = _PLACE.fullmatch(text)
    if found is None or (found[1] and not _is_address(found[1])):
        return text, None
    return found[1] or found[2], int(found[3]) if found[3] else None


def host_from(text: str) -> Host:
    """Parse ``[ssh://][user@]host[:port]``.

    Raises:
        BadInput: the port is not between 1 and 65535.
    """
    user, at, place = text.removeprefix("ssh://").rpartition("@")
    name, port = host_and_port(place)
    no_number = port is None and place.count(":") == 1
    if no_number or (port is not None and not 0 < port < 1 << 16):
        raise BadInput(f"{place!r}: not a port", hint="1 to 65535")
    return Host(name=name, user=user if at else None, port=port)


def check(host: Host, where: str) -> None:
    """Check that name, address, user and jump hosts are safe to pass to a shell and to `ssh`.

    Raises:
        BadInput: an invalid host name, address, user name or port.
    """
    for text in (host.name, host.address):
        if text is not None and not (_NAME.match(text) or _is_address(text)):
            raise BadInput(
                f"{where}: host {host.name!r}: {text!r} is neither a host name nor an address",
                hint="letters, digits, '-', '.', '_' and, in IPv6 addresses, ':'",
            )
    if host.user is not None and not _USER.match(host.user):
        raise BadInput(
            f"{where}: host {host.name}: user {host.user!r} is not a valid user name",
            hint="no leading '-', no spaces, quotes or other characters special to a shell",
        )
    for hop in host.jump.split(",") if host.jump not in (None, "none") else ():
        try:
            check(host_from(hop), where)
        except BadInput as error:
            reason = error.message.removeprefix(f"{where}: ")
            raise BadInput(f"{where}: host {host.name}: jump {hop}: {reason}", error.hint) from None


def check_hosts(
    hosts: Sequence[Host], where: str, lines: Mapping[str, str] | None = None
) -> tuple[Host, ...]:
    """Return the hosts if all are valid and different.

    Args:
        where: the file or key that lists them, for errors.
        lines: file and line of each host, by its name.

    Raises:
        BadInput: as `check`, or the same name or address twice.
    """
    names: set[str] = set()
    taken: dict[tuple[str, int, str | None], str] = {}
    for host in hosts:
        line = (lines or {}).get(host.name, where)
        check(host, line)
        if host.name in names:
            raise BadInput(f"{where}: host {host.name} is listed twice", hint=_ONCE)
        names.add(host.name)
        # Machines behind different jump hosts may have the same private address.
        key = ((host.address or host.name).lower(), host.port or 22, host.jump)
        if key in taken:
            raise BadInput(
                f"{line}: hosts {taken[key]} and {host.name} have the same address {key[0]}",
                hint="two nodes need two machines, or two SSH ports",
            )
        taken[key] = host.name
    return tuple(hosts)


def hostfile_lines(text: str) -> list[tuple[int, str]]:
    """Return a hostfile's lines with their numbers, without comments and empty lines."""
    rows = enumerate(text.splitlines(), 1)
    return [(number, line) for number, raw in rows if (line := raw.partition("#")[0].strip())]


def hostfile(name: str, lines: Sequence[tuple[int, str]], *, mixed: bool = False) -> list[Host]:
    """Parse the lines of a hostfile: ``[user@]host[:port] slots=N``, or all without slots.

    Args:
        name: the file's name, for errors.
        mixed: allow lines with slots beside lines without, as Open MPI does.

    Raises:
        BadInput: a line of another form, an invalid host, port or number, the same host twice.
    """
    hosts: list[Host] = []
    lines_of: dict[str, str] = {}
    mixed = mixed or all(len(line.split()) == 1 for _, line in lines)
    for number, line in lines:
        match = _SLOTS.match(line)
        if match is None or not (match[2] or mixed):
            raise BadInput(
                f"{name}:{number}: {line!r} is not `host slots=N`",
                hint="slots on every line, or names alone on every line",
            )
        if match[2] and not re.fullmatch(r"[0-9]{1,6}", match[2]):
            raise BadInput(
                f"{name}:{number}: slots={match[2]}: not a number of ranks", hint="slots=8"
            )
        try:
            host = host_from(match[1])
        except BadInput as error:
            raise BadInput(f"{name}:{number}: {error.message}", error.hint) from None
        if first := lines_of.get(host.name):
            raise BadInput(
                f"{name}:{number}: host {host.name} is listed twice, first in {first}", hint=_ONCE
            )
        lines_of[host.name] = f"{name}:{number}"
        hosts.append(msgspec.structs.replace(host, slots=int(match[2]) if match[2] else None))
    return list(check_hosts(hosts, name, lines_of))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
