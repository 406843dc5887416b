"""The compose file of a run: one service a node, what all of them share written once. Pure."""

from __future__ import annotations

import math
import posixpath
import re
from dataclasses import dataclass
from typing import Any

from clusterkit.assemble import Assembly, Placement
from clusterkit.cluster import ComposeCluster, Engine, Gpu
from clusterkit.errors import BadInput
from clusterkit.plan import PlanFile
from clusterkit.rendezvous import mpirun_interface
from clusterkit.shell import quote
from clusterkit.spec import JobSpec
from clusterkit.yaml_text import Shared, documents, merged

LABEL = "clusterkit.run_dir"
"""Marks what belongs to a run, whatever becomes of its files."""
ATTEMPT = "clusterkit.attempt"
"""Marks the attempt that a container was made for; its agent may go on with later ones."""
OURS = "/run/clusterkit"
"""Folder in the containers that no image and no project has."""
STOP_EXTRA = 5
"""Seconds that a container has beyond its ranks' own to end."""
_SIZE = re.compile(r"([1-9]\d*)([bkmg])?b?\Z", re.IGNORECASE)


def project_name(run_id: str) -> str:
    """The compose project of a run; a run's id is fit to be part of it."""
    return f"clusterkit-{run_id}"


def container_name(run_id: str, node: int) -> str:
    return f"{project_name(run_id)}-node-{node}"


@dataclass(frozen=True)
class Containers:
    """What a run's containers are made of, and what they see of this machine."""

    engine: Engine
    gpus: tuple[Gpu, ...]
    """All of the machine's that the run divides."""
    mounts: list[dict[str, Any]]


def render(
    placement: Placement, cluster: ComposeCluster, containers: Containers, assembly: Assembly
) -> str:
    """The compose file: what all nodes share stands in it once."""
    engine, topology = containers.engine, placement.topology
    run_id, run_dir = placement.endpoint.run_id, placement.places.run_dir
    uid, _, gid = engine.user.partition(":")
    # Without a value: taken from the environment of `docker compose up`, to the letter.
    environment = _shared(
        "environment",
        {
            "CLUSTERKIT_ATTEMPT": None,
            **dict.fromkeys(assembly.secrets),
            "HOME": f"{OURS}/home",
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
    common: dict[str, Any] = {
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
        common |= {"mem_limit": size, "memswap_limit": size}
    if cluster.cpus is not None:
        common["cpus"] = cluster.cpus
    if cluster.ulimits:
        common["ulimits"] = dict(cluster.ulimits)
    common |= {
        "tmpfs": [f"{OURS}/home:exec,mode=0700,uid={uid},gid={gid}"],
        "volumes": containers.mounts,
    }
    node = _shared("node", common)
    services = {}
    for number in range(len(placement.hosts)):
        own: dict[str, Any] = {
            "container_name": container_name(run_id, number),
            "hostname": f"node-{number}",
        }
        if number and placement.starter == "mpirun":
            own["entrypoint"] = ["/bin/sh", f"{run_dir}/files/mpi-node.sh"]
        its = {"NODE_RANK": str(number), **placement.node_env[number]}
        own["environment"] = merged(environment, its)
        own["labels"] = merged(labels, {"clusterkit.node": str(number)})
        if placement.device == "cuda":
            first = number * topology.nproc_per_node
            share = containers.gpus[first : first + topology.nproc_per_node]
            devices = {
                "driver": "nvidia",
                "device_ids": [gpu.index for gpu in share],
                "capabilities": ["gpu"],
            }
            own["deploy"] = {"resources": {"reservations": {"devices": [devices]}}}
        services[f"node-{number}"] = merged(node, own)
    network: dict[str, Any] = {"labels": merged(labels, {})}
    if cluster.subnet != "auto":
        network["ipam"] = {"config": [{"subnet": cluster.subnet}]}
    document: dict[str, Any] = {
        "name": project_name(run_id),
        "x-environment": environment,
        "x-labels": labels,
        "x-node": node,
        "services": services,
        "networks": {"default": network},
    }
    named = {m["source"]: {"external": True} for m in containers.mounts if m["type"] == "volume"}
    if named:
        document["volumes"] = named
    head = (
        f"run {run_id}: {topology}\n"
        "by hand: docker compose --file compose.yaml up\n"
        "variables without a value come from the environment of that command"
    )
    return documents([_literal(document)], head)


def size_bytes(key: str, size: str) -> int:
    """``512m`` as bytes.

    Raises:
        BadInput: no such form; the message begins with ``key``.
    """
    match = _SIZE.match(size)
    if match is None:
        raise BadInput(f"{key}: {size!r} is not a size", hint="such as 512m, or 8g", cluster=key)
    power = {"b": 0, "k": 1, "m": 2, "g": 3}[(match[2] or "b").lower()]
    return int(match[1]) << (10 * power)


class _Interpolated(str):
    """A value in which compose is to replace variables."""


def _shared(anchor: str, content: dict[str, Any]) -> Shared:
    return Shared(anchor, _literal(content))


def _literal(value: Any) -> Any:
    """``value`` with each ``$`` kept from compose, which would replace variables; shared parts are
    so already."""
    if isinstance(value, Shared):
        return value
    if isinstance(value, dict):
        return {key: _literal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_literal(inner) for inner in value]
    if isinstance(value, str) and not isinstance(value, _Interpolated):
        return value.replace("$", "$$")
    return value


# ---------------------------------------------------------------- what they see


def parse_volume(text: str) -> tuple[str, str, bool]:
    """Source, target, and whether it is read-only.

    Raises:
        BadInput: not of that form.
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


def is_below(path: str, folder: str) -> bool:
    return posixpath.normpath(path).startswith(posixpath.normpath(folder).rstrip("/") + "/")


def mounts_of(
    job: JobSpec, cluster: ComposeCluster, engine: Engine, run_dir: str
) -> list[dict[str, Any]]:
    """What the containers see of this machine; a folder inside another one comes after it."""
    mounts = [_bind(run_dir, run_dir)]
    seen = [run_dir]

    def add(path: str, *, readonly: bool) -> None:
        if path not in seen and not any(is_below(path, folder) for folder in seen):
            seen.append(path)
            mounts.append(_bind(path, path, readonly=readonly))

    for text in cluster.volumes:
        source, target, readonly = parse_volume(text)
        seen.append(target)
        if source.startswith("/"):
            mounts.append(_bind(source, target, readonly=readonly))
        else:
            mounts.append({
                "type": "volume", "source": source, "target": target,
                **({"read_only": True} if readonly else {}),
            })  # fmt: skip
    for folder in checkpoint_folders(job, run_dir):
        add(folder, readonly=False)
    if job.checkpoint is not None and job.checkpoint.resume.startswith("/"):
        add(job.checkpoint.resume, readonly=True)
    if cluster.code == "mounted":
        if job.workdir:
            mounts.append(_bind(job.workdir, job.workdir, readonly=True))
            seen.append(job.workdir)
        if job.program and posixpath.isabs(job.program):
            add(posixpath.dirname(job.program), readonly=True)
        mounts.append(_bind(engine.package, f"{OURS}/python/clusterkit", readonly=True))
    if job.started_by == "mpirun":
        # Open MPI splits the agent's name at spaces and colons, which a home may have.
        mounts.append(_bind(f"{run_dir}/files/mpi-agent.sh", f"{OURS}/mpi-agent", readonly=True))
    unique = {mount["target"]: mount for mount in mounts}
    return sorted(unique.values(), key=lambda mount: (mount["target"].count("/"), mount["target"]))


def _bind(source: str, target: str, *, readonly: bool = False) -> dict[str, Any]:
    return {
        "type": "bind", "source": source, "target": target,
        **({"read_only": True} if readonly else {}),
        # A folder that is not there is a mistake, not to be made by the engine as root's.
        "bind": {"create_host_path": False},
    }  # fmt: skip


def checkpoint_folders(job: JobSpec, run_dir: str) -> list[str]:
    """Checkpoint folders that do not lie in the run's."""
    if job.checkpoint is None or "://" in job.checkpoint.dir:
        return []
    folder = posixpath.normpath(posixpath.join(run_dir, job.checkpoint.dir))
    return [] if is_below(folder, run_dir) else [folder]


# ---------------------------------------------------------------- mpirun


def mpi_env(interface: str) -> dict[str, str]:
    return {
        **mpirun_interface(interface),
        "OMPI_MCA_plm_rsh_agent": f"{OURS}/mpi-agent",
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        # Its daemons stay where they were started: their container lives as long as they.
        "OMPI_MCA_orte_leave_session_attached": "1",
    }


def mpi_files(run_dir: str) -> list[PlanFile]:
    """How mpirun reaches the other containers: not over SSH, through the folder they share."""
    files = posixpath.join(run_dir, "files")
    agent = (
        "#!/bin/sh\n"
        "# called by mpirun as: mpi-agent [OPTIONS] NODE COMMAND...; leaves the command where the\n"
        "# node's container looks for it, and waits for its end\n"
        'while [ "${1#node-}" = "$1" ]; do shift; done\n'
        'box="${CLUSTERKIT_NODE_DIR%/*}/mpi-$1"\n'
        "shift\n"
        'printf "%s\\n" "$*" >"$box.new" && mv "$box.new" "$box.todo" || exit 73\n'
        'while [ ! -e "$box.exit" ]; do sleep 0.2; done\n'
        'exit "$(cat "$box.exit")"\n'
    )
    helper = (
        "#!/bin/sh\n"
        "# a node that mpirun's first node puts to work\n"
        "set -u\n"
        f"box={quote(run_dir)}"
        '"/attempts/${CLUSTERKIT_ATTEMPT:-1}/mpi-node-$NODE_RANK"\n'
        'mkdir -p "${box%/*}" || exit 73\n'
        'while [ ! -e "$box.todo" ]; do sleep 0.2; done\n'
        'sh "$box.todo"\n'
        "code=$?\n"
        'echo "$code" >"$box.new" && mv "$box.new" "$box.exit"\n'
        'exit "$code"\n'
    )
    return [
        PlanFile(posixpath.join(files, "mpi-agent.sh"), text=agent, mode=0o755),
        PlanFile(posixpath.join(files, "mpi-node.sh"), text=helper, mode=0o755),
    ]
