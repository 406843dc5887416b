"""All checks of hosts, in the order of the report."""

from __future__ import annotations

from clusterkit.doctor.hosts.base import HostCheck
from clusterkit.doctor.hosts.checks import folders, gpus, login, names, network, packages, system

CHECKS: tuple[HostCheck, ...] = (
    login.reachable, login.host_key, login.login_shell, login.user, login.duplicates,
    system.system, system.clock,
    packages.python, packages.packages, packages.compiler,
    network.interface, names.names, network.port, network.head_port, network.mesh,
    gpus.gpu_driver, gpus.gpus, gpus.gpu_processes, gpus.gpu_diagnosis,
    system.memory, system.load, system.shm, system.limits,
    folders.disk, folders.workdir, folders.shared, system.strays,
)  # fmt: skip
