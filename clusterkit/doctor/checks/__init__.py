"""Every check, in the order in which people read about them."""

from __future__ import annotations

from importlib import import_module

from clusterkit.doctor.check import Check

_MODULES = (
    "reachable", "host_key", "login_shell", "user", "duplicates", "system", "clock",
    "python", "packages", "compiler",
    "interface", "names", "port", "head_port", "mesh",
    "gpu_driver", "gpus", "gpu_processes",
    "memory", "load", "shm", "limits", "disk", "workdir", "shared", "strays",
)  # fmt: skip
CHECKS: tuple[Check, ...] = tuple(
    import_module(f"clusterkit.doctor.checks.{name}").CHECK for name in _MODULES
)
