"""Every check, in the order in which people read about them."""

from __future__ import annotations

from clusterkit.doctor.check import Check
from clusterkit.doctor.checks import (
    clock,
    compiler,
    disk,
    duplicates,
    gpu_driver,
    gpu_processes,
    gpus,
    head_port,
    host_key,
    interface,
    limits,
    load,
    login_shell,
    memory,
    mesh,
    names,
    packages,
    port,
    python,
    reachable,
    shared,
    shm,
    strays,
    system,
    user,
    workdir,
)

CHECKS: tuple[Check, ...] = tuple(
    module.CHECK
    for module in (
        reachable, host_key, login_shell, user, duplicates, system, clock,
        python, packages, compiler,
        interface, names, port, head_port, mesh,
        gpu_driver, gpus, gpu_processes,
        memory, load, shm, limits, disk, workdir, shared, strays,
    )
)  # fmt: skip
