"""Is every host another machine, with a name and an address of its own?"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Answers, Check, Finding, Level, Script, Subject, read

NAME = "duplicates"


class Seen(Struct):
    """What tells machines apart."""

    hostname: str
    boot: str
    """The kernel's id of this boot: the same for all containers of one machine."""
    network: str
    """The network namespace: another one for each of them."""


def collect(given: dict[str, Any]) -> Any:
    import os

    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        boot = network = ""
    return {"hostname": os.uname().nodename, "boot": boot, "network": network}


IDENTITY = Script("identity", collect, safe=True)


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    seen, findings = read(NAME, IDENTITY, answers, subject, Seen)
    addresses = {machine.name: machine.at for machine in subject.hosts}
    machines: dict[tuple[str, str], str] = {}
    hostnames: dict[str, str] = {}
    first: dict[str, str] = {}
    # Open MPI takes hosts of one name for one host.
    level: Level = "fail" if subject.needs.launcher == "mpirun" else "warn"
    for host, identity in seen.items():
        key = (identity.boot, identity.network)
        other = machines.setdefault(key, host) if identity.boot else host
        namesake = hostnames.setdefault(identity.hostname, host)
        neighbour = first.setdefault(addresses[host], host)
        if neighbour != host:
            cause = f"has the address {addresses[host]}, as {neighbour} has"
            findings.append(Finding(NAME, host, "fail", cause, "two nodes need two addresses"))
        elif other != host:
            cause = f"is the same machine as {other}"
            findings.append(
                Finding(NAME, host, "fail", cause, f"leave {host} out of the inventory")
            )
        elif namesake != host:
            cause = f"calls itself {identity.hostname}, as {namesake} does"
            mend = shell.join(["sudo", "hostnamectl", "set-hostname", host])
            findings.append(Finding(NAME, host, level, cause, mend))
        else:
            findings.append(Finding(NAME, host, "ok", "a machine of its own"))
    return findings


CHECK = Check(
    NAME,
    "Every host is a machine of its own, with a name and an address of its own.",
    judge,
    (IDENTITY,),
    pointless=lambda subject: "one host has no others" if len(subject.hosts) == 1 else None,
)
