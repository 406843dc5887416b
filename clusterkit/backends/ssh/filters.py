"""Which hosts and GPUs a job takes: ``--include`` and ``--exclude``, in DeepSpeed's form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from clusterkit.cluster import Host
from clusterkit.errors import BadInput, counted, did_you_mean, listed

BRACKETED = re.compile(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?\Z")
"""An IPv6 address in brackets, and what stands behind a colon."""
_NUMBERS = re.compile(r"\s*[0-9]{1,6}\s*(,\s*[0-9]{1,6}\s*)*\Z")


def chosen(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """The hosts that ``--include`` names or ``--exclude`` leaves; those without slots never.

    The form is DeepSpeed's: ``host1@host2:0,2`` is all of host1 and GPUs 0 and 2 of host2. A host
    that is named several times means all GPUs that were named. IPv6 addresses stand in brackets.

    Raises:
        BadInput: both are given, an unknown host, a GPU that the host does not have, nothing left.
    """
    if include and exclude:
        raise BadInput("include and exclude: only one of the two can be given")
    usable = [host for host in hosts if host.slots != 0]
    if not include and not exclude:
        if hosts and not usable:
            raise BadInput("every host has slots=0", hint="slots=8")
        return tuple(usable)
    flag, text = ("include", include) if include else ("exclude", exclude or "")
    named = _filter(flag, text, {host.name: host for host in hosts})
    found = []
    for host in usable:
        if devices := named.get(host.name):
            if exclude:
                devices = [number for number in _all_devices(host) if number not in devices]
            if devices:
                found.append(
                    msgspec.structs.replace(host, devices=tuple(devices), slots=len(devices))
                )
        elif (host.name in named) == bool(include):
            found.append(host)
    if not found:
        raise BadInput(f"{flag} {text}: no host is left")
    return tuple(found)


def _filter(flag: str, text: str, hosts: Mapping[str, Host]) -> dict[str, list[int]]:
    """Host to the GPUs that are named of it; none where the host alone is."""
    named: dict[str, set[int]] = {}
    for part in map(str.strip, text.split("@")):
        if part in hosts:  # an IPv6 address without brackets, too
            name, numbers = part, None
        elif match := BRACKETED.match(part):
            name, numbers = match[1], match[2]
        else:
            name, colon, rest = part.partition(":")
            numbers = rest if colon else None
        if name not in hosts:
            raise BadInput(
                f"{flag} {text}: host {name!r} is unknown",
                hint=did_you_mean(name, hosts) or f"known: {listed(hosts, 8)}",
            )
        if numbers is not None and not _NUMBERS.match(numbers):
            raise BadInput(f"{flag} {text}: {numbers!r} is not a list of GPUs", hint=f"{name}:0,1")
        devices = sorted(map(int, numbers.split(","))) if numbers else []
        host = hosts[name]
        if devices and (host.slots is not None or host.devices is not None):
            there = _all_devices(host)
            if missing := [device for device in devices if device not in there]:
                slots = counted(len(there), "slot")
                raise BadInput(
                    f"{flag} {text}: {name} has {slots}, no number {missing[0]}",
                    hint=f"its numbers: {', '.join(map(str, there)) or 'none'}",
                )
        named.setdefault(name, set()).update(devices)
    return {name: sorted(devices) for name, devices in named.items()}


def _all_devices(host: Host) -> list[int]:
    if host.devices is not None:
        return list(host.devices)
    if host.slots is None:
        raise BadInput(
            f"exclude: it is not known how many GPUs {host.name} has",
            hint="give it `slots` in the inventory, or name the wanted ones with include",
        )
    return list(range(host.slots))
