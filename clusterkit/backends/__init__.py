"""The registry of backends; a module is imported when its backend is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clusterkit.errors import BadInput

if TYPE_CHECKING:
    from clusterkit.backends.base import Backend
    from clusterkit.cluster import ClusterSpec
    from clusterkit.transport import Transport

_MODULES = {
    "local": "clusterkit.backends.local.backend:LocalBackend",
    "ssh": "clusterkit.backends.ssh.backend:SshBackend",
    "compose": "clusterkit.backends.compose.backend:ComposeBackend",
    "kubernetes": "clusterkit.backends.kubernetes.backend:KubernetesBackend",
    "slurm": "clusterkit.backends.slurm.backend:SlurmBackend",
}

NAMES = tuple(_MODULES)

FORMS: dict[str, tuple[str, dict[str, str]]] = {
    "sbatch": ("slurm", {}),
    **{
        flavor: ("kubernetes", {"flavor": flavor})
        for flavor in ("pytorchjob", "mpijob", "trainjob", "jobset", "job")
    },
}
"""The formats of `clusterkit export`: for each the backend, and keys of its cluster entry."""


def backend_type(name: str) -> type[Backend[Any]]:
    """Return the class of a backend.

    Raises:
        BadInput: there is no backend of this name.
    """
    if name not in _MODULES:
        raise BadInput(f"backend {name!r} is unknown", hint=f"one of {', '.join(NAMES)}")
    module, _, attribute = _MODULES[name].partition(":")
    kind: type[Backend[Any]] = getattr(import_module(module), attribute)
    return kind


def transport_for(cluster: ClusterSpec) -> Transport:
    """Return the transport to a cluster's hosts."""
    return backend_type(cluster.backend).transport(cluster)


def backend(name: str) -> Backend[Any]:
    """Return a new instance of `backend_type`."""
    return backend_type(name)()
