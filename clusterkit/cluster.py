"""Where to run: the entries of ``clusters.yaml``, and the facts that probing one finds."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from clusterkit.spec import Auto

Port = Annotated[int, Meta(ge=1, le=65535)]


class LocalCluster(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """This machine; several nodes are simulated on it."""

    backend: Annotated[Literal["local"], Meta(description="This machine.")] = "local"
    gpus: Annotated[
        Annotated[int, Meta(ge=0)] | Auto,
        Meta(description="How many of the machine's GPUs to use; `auto`: all that are visible."),
    ] = "auto"
    port: Annotated[
        Port | Auto, Meta(description="Rendezvous port; `auto`: a free one, chosen by probing.")
    ] = "auto"
    python: Annotated[
        str | None,
        Meta(description="Interpreter of the ranks; by default the one that runs clusterkit."),
    ] = None
    env: Annotated[
        dict[str, str], Meta(description="Environment of every job here; a job's `env` goes first.")
    ] = {}
    stop_grace: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="Seconds between SIGTERM and SIGKILL when a run is ended; "
            "mpirun ends its ranks after 1 s of its own.",
        ),
    ] = 10.0


ClusterSpec = LocalCluster
"""Every kind of cluster entry; a new backend adds its own to this union."""

CLUSTER_TYPES: dict[str, type[ClusterSpec]] = {"local": LocalCluster}


class Gpu(Struct, frozen=True):
    """One GPU: the index CUDA_VISIBLE_DEVICES takes, its name, its memory in MiB."""

    index: str
    name: str
    memory_mib: int


class HostFacts(Struct, frozen=True, kw_only=True):
    """What probing found on one host."""

    host: str
    address: str
    cpus: int
    memory_mib: int
    gpus: tuple[Gpu, ...] = ()
    python: str
    """Interpreter that the ranks use."""
    versions: dict[str, str] = {}
    """Package to version in that interpreter; what is missing there is missing here."""
    tools: dict[str, str] = {}
    """Command to path, of those a launcher may need."""


class Facts(Struct, frozen=True, kw_only=True):
    """All that a plan needs to know of a cluster; saved with the run."""

    home: str
    """CLUSTERKIT_HOME on the nodes."""
    hosts: tuple[HostFacts, ...]
    port: int
    """Rendezvous port on the first host, free when probed."""
    port_origin: str
    """Why this port, in words."""
    interface: str
    """Network interface that the ranks talk over."""
