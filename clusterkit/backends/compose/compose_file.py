"""The compose file of a run, with one service for each node. Pure."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clusterkit.assemble import Assembly, Placement
from clusterkit.backends.compose.engine import CDI_KIND, HOST
from clusterkit.cluster import ComposeCluster, Engine, Gpu
from clusterkit.errors import BadInput
from clusterkit.jobfile.yaml_text import Shared, documents, merged
from clusterkit.plan import PlanFile, Step

LABEL = "clusterkit.run_dir"
"""Label of a run's containers and network; finds them even if the run's files are gone."""
ATTEMPT = "clusterkit.attempt"
"""Label with the attempt that a container was created for; its agent may begin later ones."""
CONTAINER_DIR = "/run/clusterkit"
"""Folder in the containers for clusterkit's own files; no image and no project has it."""
STOP_EXTRA = 5
"""Seconds that a container has to stop, beyond `stop_grace` of its ranks."""
INFINIBAND = "/dev/infiniband"
_SIZE = re.compile(r"([1-9]\d*)([bkmg])?b?\Z", re.IGNORECASE)


def project_name(run_id: str) -> str:
    return f"clusterkit-{run_id}"


def container_name(run_id: str, node: int) -> str:
    return f"{project_name(run_id)}-node-{node}"


@dataclass(frozen=True, kw_only=True)
class ComposePlacement(Placement):
    """A placement whose nodes are started by one ``docker compose up``."""

    cluster: ComposeCluster
    engine: Engine
    gpus: tuple[Gpu, ...]
    """The machine's GPUs, which the nodes divide."""
    mounts: list[dict[str, Any]]
    """Mounts of each container, as the compose file has them."""
    checkpoint_folder: str | None
    """Folder to be made on this machine before the start; None: none."""

    def files(self, assembly: Assembly) -> tuple[PlanFile, ...]:
        file = PlanFile(self.places.file("compose.yaml"), _render(self, assembly))
        return (*assembly.files, file)

    def steps(self, assembly: Assembly) -> tuple[Step, ...]:
        up = Step(
            kind="run",
            host=HOST,
            argv=(
                "docker", "--host", self.engine.socket, "compose", "--progress", "quiet",
                "--project-name", project_name(self.endpoint.run_id),
                "--file", self.places.file("compose.yaml"),
                "up", "--detach", "--no-build", "--force-recreate",
            ),
            secrets=assembly.secrets,
        )  # fmt: skip
        if self.checkpoint_folder is None:
            return (up,)
        argv = ("mkdir", "-p", "--", self.checkpoint_folder)
        return (Step(kind="run", host=HOST, argv=argv), up)


def _render(placement: ComposePlacement, assembly: Assembly) -> str:
    """Return the text of the compose file; what all nodes share is written once."""
    run_id, run_dir = placement.endpoint.run_id, placement.places.run_dir
    # Variables without a value: from the environment of `docker compose up`, taken literally.
    environment = _shared(
        "environment",
        {
            "CLUSTERKIT_ATTEMPT": None,
            **dict.fromkeys(assembly.secrets),
            "HOME": f"{CONTAINER_DIR}/home",
            "USER": "clusterkit",
            "LOGNAME": "clusterkit",
        },
    )
    labels = _shared(
        "labels",
        {
            "clusterkit.run": run_id,
            LABEL: run_dir,
            ATTEMPT: _Interpolated("${CLUSTERKIT_ATTEMPT:-1}"),
        },
    )
    node = _shared("node", _service(placement, assembly))
    services = {}
    for number in range(len(placement.hosts)):
        own: dict[str, Any] = {
            "container_name": container_name(run_id, number),
            "hostname": f"node-{number}",
        }
        variables = {"NODE_RANK": str(number), **placement.node_env[number]}
        own["environment"] = merged(environment, variables)
        own["labels"] = merged(labels, {"clusterkit.node": str(number)})
        if placement.device == "cuda":
            nproc = placement.topology.nproc_per_node
            own_gpus = placement.gpus[number * nproc : (number + 1) * nproc]
            own["deploy"] = _gpu_reservation(own_gpus, cdi=placement.engine.cdi)
        services[f"node-{number}"] = merged(node, own)
    network: dict[str, Any] = {"labels": merged(labels, {})}
    if placement.cluster.subnet != "auto":
        network["ipam"] = {"config": [{"subnet": placement.cluster.subnet}]}
    document: dict[str, Any] = {
        "name": project_name(run_id),
        "x-environment": environment,
        "x-labels": labels,
        "x-node": node,
        "services": services,
        "networks": {"default": network},
    }
    volumes = {m["source"]: {"external": True} for m in placement.mounts if m["type"] == "volume"}
    if volumes:
        document["volumes"] = volumes
    head = (
        f"run {run_id}: {placement.topology}\n"
        "by hand: docker compose --file compose.yaml up\n"
        "variables without a value come from the environment of that command"
    )
    return documents([_escaped(document)], head)


def _service(placement: ComposePlacement, assembly: Assembly) -> dict[str, Any]:
    """Return the keys that the services of all nodes share."""
    cluster, engine = placement.cluster, placement.engine
    uid, _, gid = engine.user.partition(":")
    service: dict[str, Any] = {
        "image": engine.image,
        "pull_policy": "never",
        "init": True,
        "user": engine.user,
        **({"userns_mode": "host"} if engine.remapped else {}),
        "entrypoint": list(assembly.command),
        "command": [],
        "stop_grace_period": f"{math.ceil(cluster.stop_grace) + STOP_EXTRA}s",
        "healthcheck": {"disable": True},
        "shm_size": size_bytes("shm_size", cluster.shm_size),
    }
    if cluster.memory is not None:
        size = size_bytes("memory", cluster.memory)
        service |= {"mem_limit": size, "memswap_limit": size}
    if cluster.cpus is not None:
        service["cpus"] = cluster.cpus
    if cluster.infiniband:
        service |= {"devices": [f"{INFINIBAND}:{INFINIBAND}"], "cap_add": ["IPC_LOCK"]}
    if ulimits := ulimits_of(cluster):
        service["ulimits"] = ulimits
    service["tmpfs"] = [f"{CONTAINER_DIR}/home:exec,mode=0700,uid={uid},gid={gid}"]
    service["volumes"] = placement.mounts
    return service


def ulimits_of(cluster: ComposeCluster) -> dict[str, int]:
    """Return the limits of a node; it locks the memory that InfiniBand reads and writes."""
    return {**({"memlock": -1} if cluster.infiniband else {}), **cluster.ulimits}


def _gpu_reservation(gpus: Sequence[Gpu], *, cdi: bool) -> dict[str, Any]:
    devices = {
        "driver": "cdi" if cdi else "nvidia",
        "device_ids": [f"{CDI_KIND}={gpu.index}" if cdi else gpu.index for gpu in gpus],
        "capabilities": ["gpu"],
    }
    return {"resources": {"reservations": {"devices": [devices]}}}


def size_bytes(key: str, size: str) -> int:
    """Return the bytes of a size such as ``512m``.

    Raises:
        BadInput: it is not a size; the message begins with ``key``.
    """
    match = _SIZE.match(size)
    if match is None:
        raise BadInput(f"{key}: {size!r} is not a size", hint="such as 512m, or 8g", cluster=key)
    power = {"b": 0, "k": 1, "m": 2, "g": 3}[(match[2] or "b").lower()]
    return int(match[1]) << (10 * power)


class _Interpolated(str):
    """Text in which compose has to replace variables."""


def _shared(anchor: str, content: dict[str, Any]) -> Shared:
    return Shared(anchor, _escaped(content))


def _escaped(value: Any) -> Any:
    """Double each ``$``: compose would replace variables."""
    if isinstance(value, Shared):  # escaped already
        return value
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    if isinstance(value, str) and not isinstance(value, _Interpolated):
        return value.replace("$", "$$")
    return value


def parse_volume(text: str) -> tuple[str, str, bool]:
    """Return the source and target of a volume, and whether it is read-only.

    Raises:
        BadInput: it is not ``SOURCE:TARGET`` or ``SOURCE:TARGET:ro``.
    """
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source or not target.startswith("/") or mode not in ("", "ro", "rw"):
        raise BadInput(
            f"volumes: {text!r} is not SOURCE:TARGET or SOURCE:TARGET:ro",
            hint="the target is an absolute path in the containers",
            cluster="volumes",
        )
    return source, posixpath.normpath(target), mode == "ro"
