"""Is every host another machine, with a name and an address of its own?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Verdict, fail, ok
from clusterkit.doctor.check import Answers, Check, Script, alone
from clusterkit.doctor.driver import text_of


class Seen(Struct):
    """What tells machines apart."""

    hostname: str
    boot: str
    """The kernel's id of this boot: the same for all containers of one machine."""
    network: str
    """The network namespace: another one for each of them."""


def collect(given: dict[str, Any]) -> Any:
    import os

    boot = text_of("/proc/sys/kernel/random/boot_id").strip()
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        boot = network = ""
    return {"hostname": os.uname().nodename, "boot": boot, "network": network}


IDENTITY = Script("identity", collect, Seen, safe=True)


def judge(answers: Answers) -> Iterator[Verdict]:
    machines: dict[tuple[str, str], str] = {}
    hostnames: dict[str, str] = {}
    addresses: dict[str, str] = {}
    for host, identity in answers.read(IDENTITY).items():
        key = (identity.boot, identity.network)
        address = answers.machines[host].at
        same_machine = machines.setdefault(key, host) if identity.boot else host
        same_name = hostnames.setdefault(identity.hostname, host)
        same_address = addresses.setdefault(address, host)
        if same_address != host:
            cause = f"has the address {address}, as {same_address} has"
            yield fail(host, cause, "two nodes need two addresses")
        elif same_machine != host:
            cause = f"is the same machine as {same_machine}"
            yield fail(host, cause, f"leave {host} out of the inventory")
        elif same_name != host:
            cause = f"calls itself {identity.hostname}, as {same_name} does"
            mend = shell.join(["sudo", "hostnamectl", "set-hostname", host])
            # Open MPI takes hosts of one name for one host.
            mpi = answers.subject.needs.launcher == "mpirun"
            yield Verdict(host, "fail" if mpi else "warn", cause, mend)
        else:
            yield ok(host, "a machine of its own")


CHECK = Check(
    "duplicates",
    "Every host is a machine of its own, with a name and an address of its own.",
    judge,
    (IDENTITY,),
    pointless=alone,
)
