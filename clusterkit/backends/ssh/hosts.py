"""The hosts of a cluster entry: from its inventory, chosen by include and exclude, and by a job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from clusterkit import shell
from clusterkit.backends.probing import interpreter
from clusterkit.backends.ssh.inventory import BRACKETED, read_hosts
from clusterkit.backends.ssh.variables import absolute
from clusterkit.cluster import Host, SshCluster
from clusterkit.errors import BadInput, did_you_mean, error_key, join_some, pluralize
from clusterkit.hosts.addresses import check_hosts
from clusterkit.spec import JobSpec

_NUMBERS = re.compile(r"\s*[0-9]{1,6}\s*(,\s*[0-9]{1,6}\s*)*\Z")


def resolved(
    cluster: SshCluster, folder: Path, include: str | None, exclude: str | None
) -> SshCluster:
    """Implement `clusterkit.backends.base.Backend.resolved`."""
    if bool(cluster.inventory) == bool(cluster.hosts):
        raise BadInput(
            "inventory: a cluster has either an inventory or hosts",
            hint="inventory: ansible/inventory.yaml, or a hostfile with `host slots=N` lines",
            cluster="inventory",
        )
    if cluster.shared is not None and not cluster.shared.startswith("/"):
        raise BadInput(
            f"shared: {cluster.shared} is not an absolute path",
            hint="give an absolute path on the hosts",
            cluster="shared",
        )
    if cluster.inventory:
        hosts = read_hosts(folder / Path(cluster.inventory).expanduser(), cluster.group)
    else:
        with error_key("cluster", "hosts"):
            listed_hosts = check_hosts(cluster.hosts, "hosts")
        hosts = tuple(
            msgspec.structs.replace(
                host,
                identity=absolute(host.identity, folder),
                known_hosts=absolute(host.known_hosts, folder),
                ssh_config=absolute(host.ssh_config, folder),
            )
            for host in listed_hosts
        )
    for at, host in enumerate(cluster.hosts):
        if host.known_hosts in (os.devnull, "none"):
            raise BadInput(
                f"hosts[{at}].known_hosts: {host.known_hosts} holds no key, and a host's key is "
                "always checked",
                hint=f"ssh-keyscan {shell.quote(host.address or host.name)} >>FILE, and "
                "known_hosts: FILE; without known_hosts, ~/.ssh/known_hosts is read",
                cluster=("hosts", at, "known_hosts"),
            )
    if not include and not exclude:
        include, exclude = cluster.include, cluster.exclude
    with error_key("cluster", "include" if include else "exclude"):
        hosts = choose_hosts(hosts, include, exclude)
    return msgspec.structs.replace(
        cluster, inventory=None, group="all", include=None, exclude=None, hosts=hosts
    )


def choose_hosts(
    hosts: Sequence[Host], include: str | None, exclude: str | None
) -> tuple[Host, ...]:
    """Return the hosts that ``include`` names or ``exclude`` leaves, without those of 0 slots.

    The syntax is DeepSpeed's: ``host1@host2:0,2`` is all of host1, and GPUs 0 and 2 of host2. The
    GPUs of a host that is named several times add up. IPv6 addresses are put in brackets.

    Raises:
        BadInput: both are given, a host or GPU is unknown, or no host is left.
    """
    if include and exclude:
        raise BadInput("include and exclude: only one of the two can be given")
    usable = [host for host in hosts if host.slots != 0]
    if not include and not exclude:
        if hosts and not usable:
            raise BadInput("every host has slots=0", hint="slots=8")
        return tuple(usable)
    flag, text = ("include", include) if include else ("exclude", exclude or "")
    named = _parse_filter(flag, text, {host.name: host for host in hosts})
    chosen = []
    for host in usable:
        if devices := named.get(host.name):
            if exclude:
                devices = [number for number in _all_devices(host) if number not in devices]
            if devices:
                chosen.append(
                    msgspec.structs.replace(host, devices=tuple(devices), slots=len(devices))
                )
        elif (host.name in named) == bool(include):
            chosen.append(host)
    if not chosen:
        raise BadInput(f"{flag} {text}: no host is left")
    return tuple(chosen)


def _parse_filter(flag: str, text: str, hosts: Mapping[str, Host]) -> dict[str, list[int]]:
    """Return the GPUs that are named of each host; none where only the host is named."""
    named: dict[str, set[int]] = {}
    for part in map(str.strip, text.split("@")):
        if part in hosts:  # also an IPv6 address without brackets
            name, numbers = part, None
        elif match := BRACKETED.match(part):
            name, numbers = match[1], match[2]
        else:
            name, colon, rest = part.partition(":")
            numbers = rest if colon else None
        if name not in hosts:
            raise BadInput(
                f"{flag} {text}: host {name!r} is unknown",
                hint=did_you_mean(name, hosts) or f"known: {join_some(hosts, 8)}",
            )
        if numbers is not None and not _NUMBERS.match(numbers):
            raise BadInput(f"{flag} {text}: {numbers!r} is not a list of GPUs", hint=f"{name}:0,1")
        devices = sorted(map(int, numbers.split(","))) if numbers else []
        host = hosts[name]
        if devices and (host.slots is not None or host.devices is not None):
            available = _all_devices(host)
            if missing := [device for device in devices if device not in available]:
                slots = pluralize(len(available), "slot")
                raise BadInput(
                    f"{flag} {text}: {name} has {slots}, no number {missing[0]}",
                    hint=f"its numbers: {', '.join(map(str, available)) or 'none'}",
                )
        named.setdefault(name, set()).update(devices)
    return {name: sorted(devices) for name, devices in named.items()}


def _all_devices(host: Host) -> list[int]:
    if host.devices is not None:
        return list(host.devices)
    if host.slots is None:
        raise BadInput(
            f"exclude: the number of GPUs of {host.name} is not known",
            hint="give it `slots` in the inventory, or name the wanted ones with include",
        )
    return list(range(host.slots))


def job_hosts(cluster: SshCluster, job: JobSpec | None) -> tuple[Host, ...]:
    """Return the hosts that a job gets: the first ones of the cluster; all without a job.

    Raises:
        BadInput: the cluster has too few.
    """
    if not cluster.hosts:
        raise BadInput(
            "hosts: the cluster entry names none",
            hint="`inventory:` names a file of hosts",
            cluster="hosts",
        )
    if job is None:
        return cluster.hosts
    check_host_count(cluster, job, len(cluster.hosts))
    return cluster.hosts[: job.node_range[1] + job.spares]


def check_host_count(cluster: SshCluster, job: JobSpec, count: int) -> None:
    """Check that ``count`` hosts are enough for a job and its spares.

    Raises:
        BadInput: they are not.
    """
    least = job.node_range[0]
    if least + job.spares <= count:
        return
    spares = f" and {pluralize(job.spares, 'spare')}" if job.spares else ""
    room = count - job.spares
    raise BadInput(
        f"nodes: {least}{spares} needed, the cluster has {pluralize(count, 'host')}"
        f" ({join_some([host.name for host in cluster.hosts], 4)})",
        hint=f"{f'--nodes {room}' if room > 0 else 'fewer spares'}, or more hosts in the inventory",
        job="nodes",
    )


def ranks_python(cluster: SshCluster, host: Host, job: JobSpec | None) -> tuple[str, str]:
    """Return the ranks' Python on a host, and where it comes from."""
    return interpreter(job, (host.python, "the host's own"), (cluster.python, "cluster: python"))
