"""Machines as people write them: ``[user@]host[:port]``; IPv6 with a port stands in brackets."""

from __future__ import annotations

import ipaddress
import re

from clusterkit.cluster import Host
from clusterkit.errors import BadInput

_PLACE = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::([0-9]{1,9}))?")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z")
_USER = re.compile(r"""[^\s\x00-\x1f'"`$;&<>|(){}\-][^\s\x00-\x1f'"`$;&<>|(){}]*\Z""")
"""What OpenSSH's client takes; `me@corp.example` and `CORP\\me` are users of directories."""


def host_and_port(text: str) -> tuple[str, int | None]:
    """``host:2222``, ``[2001:db8::1]`` and ``[2001:db8::1]:2222`` taken apart; `check` says whether
    the name that is left can be a host's."""
    found = _PLACE.fullmatch(text)
    if found is None or (found[1] and not _is_address(found[1])):
        return text, None  # an IPv6 address alone, a range of Ansible's, or no host
    return found[1] or found[2], int(found[3]) if found[3] else None


def host_from(text: str) -> Host:
    """``[ssh://][user@]host[:port]`` as a host of that name.

    Raises:
        BadInput: a port that there is not.
    """
    user, at, place = text.removeprefix("ssh://").rpartition("@")
    name, port = host_and_port(place)
    if port is not None and not 0 < port < 1 << 16:
        raise BadInput(f"{place!r}: not a port", hint="1 to 65535")
    return Host(name=name, user=user if at else None, port=port)


def check(host: Host, where: str) -> None:
    """Refuse what would mean something else to a shell, or to `ssh`.

    Raises:
        BadInput: a name or an address that no host has, or that of no user.
    """
    for text in (host.name, host.address):
        if text is not None and not (_NAME.match(text) or _is_address(text)):
            raise BadInput(
                f"{where}: host {host.name!r}: {text!r} is neither a host name nor an address",
                hint="letters, digits, '-', '.', '_' and, in IPv6 addresses, ':'",
            )
    if host.user is not None and not _USER.match(host.user):
        raise BadInput(
            f"{where}: host {host.name}: user {host.user!r} is not the name of a user",
            hint="no '-' in front, no blanks, quotes or other characters of the shell",
        )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
