"""All checks of hosts, in the order of the report."""

from __future__ import annotations

from clusterkit.doctor.hosts.base import HostCheck
from clusterkit.doctor.hosts.checks import (
    compiler,
    fabric,
    folders,
    gpus,
    interface,
    login,
    packages,
    ports,
    resources,
    system,
)

CHECKS: tuple[HostCheck, ...] = (
    login.reachable, login.host_key, login.user, login.logout,
    system.system, system.clock,
    packages.python, packages.packages, compiler.compiler,
    interface.interface, ports.port, ports.head_port, ports.mesh,
    gpus.gpu_driver, gpus.gpus, gpus.gpu_processes, gpus.gpu_diagnosis,
    fabric.fabric_manager, fabric.infiniband,
    resources.memory, resources.shm, resources.limits,
    folders.disk, folders.workdir, folders.shared,
)  # fmt: skip
