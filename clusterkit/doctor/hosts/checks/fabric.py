"""What connects GPUs: InfiniBand ports, and the NVSwitches of a host."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct

from clusterkit.doctor.base import Verdict, fail, ok, skip, warn
from clusterkit.doctor.hosts.base import Answers, Collector, check
from clusterkit.doctor.hosts.checks.gpus import Command, no_gpus_needed
from clusterkit.doctor.hosts.collect import gpus as collect
from clusterkit.doctor.hosts.helpers import most_common
from clusterkit.errors import join_some, pluralize


class Port(Struct):
    """An InfiniBand port, in the words of sysfs without their numbers."""

    state: str
    physical: str
    rate: str


class Fabric(Struct):
    """What connects the GPUs of a host to each other and to those of other hosts."""

    ports: dict[str, Port]
    """By device and number, such as ``mlx5_0/1``; without those of Ethernet."""
    gpus: int
    direct: bool
    """Whether network cards can read the memory of GPUs."""
    driver: str
    """Version of NVIDIA's driver; empty: it is not loaded."""
    switches: int
    manager: Command | None = None
    """None: the fabric manager is not installed."""
    active: str = ""
    """What systemd says of it; empty: there is no systemd."""


FABRIC = Collector(collect.fabric, Fabric, timeout=15)


@check(FABRIC, skip_reason=no_gpus_needed)
def infiniband(answers: Answers) -> Iterator[Verdict]:
    """InfiniBand ports are up and as fast as the others, and can reach the memory of GPUs."""
    seen = answers.read(FABRIC)
    most = max((len(found.ports) for found in seen.values()), default=0)
    for host, found in seen.items():
        yield from _ports(host, found.ports, seen)
        rates = [port.rate for port in found.ports.values() if port.state == "ACTIVE"]
        if found.gpus and rates and not found.direct:
            cause = "no GPUDirect RDMA: network cards copy GPU data through host memory"
            load = "echo nvidia-peermem | sudo tee /etc/modules-load.d/nvidia-peermem.conf"
            yield warn(host, cause, f"sudo modprobe nvidia-peermem && {load}")
        if found.ports:
            usual = most_common(rates, "no rate")
            yield ok(host, f"{pluralize(len(rates), 'active port')}, {usual}")
        elif most:
            cause = f"no InfiniBand, but {pluralize(most, 'port')} on another host: NCCL uses TCP"
            yield warn(host, cause, "lspci | grep -i infiniband; sudo modprobe mlx5_ib")
        else:
            yield skip(host, "no InfiniBand")


def _ports(host: str, ports: Mapping[str, Port], seen: Mapping[str, Fabric]) -> Iterator[Verdict]:
    """Judge the ports of a host by the ports of the same names on the others.

    One that is down on all of several hosts is not used. A single host has its other ports to
    compare with, of which some may be slower by their kind: a slow link is one alone.
    """
    down = {}
    rates = [_gigabits(port) for port in ports.values() if port.state == "ACTIVE"]
    usual = most_common(rates, 0.0)
    for name, port in sorted(ports.items()):
        same = [found.ports[name] for found in seen.values() if name in found.ports]
        if port.state != "ACTIVE":
            if len(same) == 1 or any(each.state == "ACTIVE" for each in same):
                down[name] = port
            continue
        rate, best = _gigabits(port), max(map(_gigabits, same))
        if len(same) == 1 and rates.count(rate) == 1:
            best = max(best, usual)
        if rate < best:
            cause = f"{name} runs at {port.rate}, others at {best:g} Gb/sec: NCCL runs at its speed"
            yield warn(host, cause, f"ibstat {name.partition('/')[0]}  # the cable, or its ends")
    waits = [name for name, port in down.items() if port.state == "INIT"]
    if waits:
        cause = f"{join_some(waits, 4)}: INIT: no subnet manager has configured it"
        yield warn(host, cause, "sudo systemctl enable --now opensm  # on one host, or a switch")
    if dead := [f"{n} ({p.state}, {p.physical})" for n, p in down.items() if n not in waits]:
        cause = f"{len(dead)} of {pluralize(len(ports), 'port')} down: {join_some(dead, 4)}"
        yield warn(host, cause, f"ibstat {dead[0].partition('/')[0]}  # the cable, or its ends")


def _gigabits(port: Port) -> float:
    number = re.match(r"[\d.]+", port.rate) if port.state == "ACTIVE" else None
    return float(number[0]) if number else 0.0


@check(FABRIC, skip_reason=no_gpus_needed)
def fabric_manager(answers: Answers) -> Iterator[Verdict]:
    """Where there are NVSwitches, the fabric manager runs, of the driver's own version."""
    for host, found in answers.read(FABRIC).items():
        if not found.switches or not found.driver:
            yield skip(host, "no driver" if found.switches else "no NVSwitch")
            continue
        branch, start = found.driver.partition(".")[0], "sudo systemctl enable --now "
        install = (
            f"sudo apt-get install -y nvidia-fabricmanager-{branch} && {start}"
            f"nvidia-fabricmanager  # NVIDIA's repository; version {found.driver}"
        )
        told = pluralize(found.switches, "NVSwitch chip")
        version = re.search(r"\d+\.\d+(\.\d+)?", found.manager.stdout) if found.manager else None
        if found.manager is None:
            cause = f"{told}, but no fabric manager: CUDA fails with error 802"
            yield fail(host, cause, install)
        elif version is not None and version[0] != found.driver:
            cause = f"fabric manager {version[0]}, but driver {found.driver}: they must be equal"
            yield fail(host, cause, install)
        elif found.active not in ("", "active"):
            cause = f"the fabric manager is {found.active}: CUDA fails with error 802"
            yield fail(host, cause, f"{start}nvidia-fabricmanager")
        yield ok(host, f"{told}, fabric manager {version[0] if version else 'installed'}")
