"""Backend compose: one compose project for each run, with one container for each node.

The run folder is mounted into the containers at its own path, so the agents' files are read on this
machine as for local runs. The engine adds the states of the containers: they show why an agent
stopped writing.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from clusterkit.backends.base import IMAGE_NOTE, Backend, Inside, Observation, SupportsCleanup
from clusterkit.backends.compose.compose_file import container_name, parse_volume, size_bytes
from clusterkit.backends.compose.containers import docker_of, inspect, remove
from clusterkit.backends.compose.engine import HOST
from clusterkit.backends.compose.observe import ContainerMonitor, status
from clusterkit.cluster import ComposeCluster, Facts
from clusterkit.errors import BadInput
from clusterkit.plan import Plan
from clusterkit.run.folder import RunHandle
from clusterkit.spec import JobSpec
from clusterkit.transport import Stream, Transport

if TYPE_CHECKING:
    from clusterkit.assemble import Placement

_VOLUME_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")


class ComposeBackend(Backend[ComposeCluster], SupportsCleanup):
    """Nodes are containers; see `clusterkit.agent` for what runs in each of them."""

    name = "compose"
    summary = "containers of a docker engine on this machine, one node each"
    command = "docker"
    init_note = IMAGE_NOTE.format("nodes'")
    unsupported: ClassVar[dict[str, str]] = {
        "launcher=mpirun": "its containers run no sshd for mpirun; torchrun needs none"
    }

    def probe(
        self, cluster: ComposeCluster, transport: Transport, job: JobSpec | None = None
    ) -> Facts:
        from clusterkit.backends.compose.probe import probe

        return probe(cluster, transport, job)

    def place(self, job: JobSpec, cluster: ComposeCluster, facts: Facts, run_id: str) -> Placement:
        from clusterkit.backends.compose.place import place

        return place(job, cluster, facts, run_id)

    @classmethod
    def resolved(
        cls, cluster: ComposeCluster, folder: Path, include: str | None, exclude: str | None
    ) -> ComposeCluster:
        super().resolved(cluster, folder, include, exclude)
        for key in ("shm_size", "memory"):
            if (size := getattr(cluster, key)) is not None:
                size_bytes(key, size)
        if cluster.subnet != "auto":
            try:
                ipaddress.IPv4Network(cluster.subnet)
            except ValueError as error:
                raise BadInput(
                    f"subnet: {error}", hint="such as 10.99.0.0/24, or auto", cluster="subnet"
                ) from None
        for name, value in cluster.ulimits.items():
            if not re.match(r"[a-z]+\Z", name) or value < -1:
                raise BadInput(
                    f"ulimits: {name}: {value} is not a limit",
                    hint="{memlock: -1}",
                    cluster="ulimits",
                )
        volumes = tuple(_resolved_volume(text, folder) for text in cluster.volumes)
        return msgspec.structs.replace(cluster, volumes=volumes)

    def node_plan(self, plan: Plan, node: int) -> Plan:
        up = plan.steps[-1]
        argv = (*up.argv, "--no-deps", f"node-{node}")
        return msgspec.structs.replace(plan, steps=(msgspec.structs.replace(up, argv=argv),))

    def status(self, handle: RunHandle, transport: Transport) -> Observation | None:
        return status(handle, transport)

    def watch(self, handle: RunHandle, transport: Transport) -> ContainerMonitor:
        return ContainerMonitor(handle, transport)

    def inside(
        self, handle: RunHandle, transport: Transport, nodes: Sequence[int]
    ) -> dict[int, Inside]:
        found = inspect(handle, transport)
        running = [node for node in nodes if node in found and found[node].state == "running"]
        names = {node: container_name(handle.plan.run_id, node) for node in running}
        docker = (*docker_of(handle.plan, transport).command, "exec", "--interactive")
        return {
            node: Inside(name, partial(_open, transport, (*docker, name)))
            for node, name in names.items()
        }

    def cancel(self, handle: RunHandle, transport: Transport, reason: str = "cancelled") -> None:
        remove(handle, transport)

    def clean_up(self, handle: RunHandle, transport: Transport) -> None:
        remove(handle, transport)


def _open(transport: Transport, docker: Sequence[str], argv: Sequence[str]) -> Stream:
    return transport.open(HOST, [*docker, *argv], own_group=True)


def _resolved_volume(text: str, folder: Path) -> str:
    source, target, readonly = parse_volume(text)
    if source.startswith(("/", ".", "~")):
        source = os.path.normpath(folder / Path(source).expanduser())
    elif not _VOLUME_NAME.match(source):
        raise BadInput(
            f"volumes: {source!r} is not a valid name of a volume",
            hint=f"a folder: ./{source}",
            cluster="volumes",
        )
    return f"{source}:{target}{':ro' if readonly else ''}"
