"""The plan of a job whose nodes are containers of one machine. Pure."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterable
from ipaddress import IPv4Network
from typing import Any

import msgspec

from clusterkit.assemble import Coordinator, NodePaths, require_packages
from clusterkit.backends.base import OWN_IMAGE
from clusterkit.backends.compose.compose_file import (
    CONTAINER_DIR,
    ComposePlacement,
    parse_volume,
)
from clusterkit.backends.compose.engine import HOST
from clusterkit.backends.placing import device_of, interface_env, split_gpus, threads_of
from clusterkit.backends.ports import default_ports
from clusterkit.cluster import ComposeCluster, Engine, Facts
from clusterkit.errors import BadInput, pluralize
from clusterkit.plan import ComposeNative, Note
from clusterkit.rendezvous import NODE_ADDRESS, Endpoint, Topology
from clusterkit.spec import JobSpec

SYSTEM = frozenset({
    "/", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/opt", "/proc", "/run", "/sbin",
    "/sys", "/tmp", "/usr", "/var",
})  # fmt: skip
"""Folders of the image that a mounted project must not hide."""


def place(job: JobSpec, cluster: ComposeCluster, facts: Facts, run_id: str) -> ComposePlacement:
    """Implement `clusterkit.backends.base.Backend.place`."""
    engine, host = facts.engine, facts.hosts[0]
    if engine is None:
        raise BadInput(
            "--facts is not from a docker compose cluster", hint="use those of a compose run"
        )
    least, most = job.node_range
    nodes = most + job.spares
    device, device_origin = device_of(job, [host])
    nproc, nproc_origin = split_gpus(
        job, host, nodes, device, place="this machine", flag="--gpus {0}"
    )
    _check_subnet_size(cluster, nodes)
    cores = math.floor(cluster.cpus) if cluster.cpus else host.cpus // most
    threads, threads_origin = threads_of(job, max(1, cores), nproc)
    remedy = f"install it in the image ({OWN_IMAGE})"
    require_packages(job, host, where=engine.image, hint=remedy)
    run_dir = posixpath.join(facts.home, "runs", run_id)
    workdir, program = _workdir(job, cluster, engine, run_dir)
    checkpoint_folder = _checkpoint_folder(job, cluster, run_dir)
    topology = Topology(least, most, nproc)
    names = tuple(f"node-{node}" for node in range(nodes))
    mounted = cluster.code == "mounted"
    code = "this machine's, read-only" if mounted else "the image's own"
    image = "cluster: image" if cluster.image else "the default for this machine"
    return ComposePlacement(
        job=program,
        topology=topology,
        endpoint=Endpoint(names[0], facts.port, run_id),
        places=NodePaths(run_dir, workdir, host.python, python_origin=host.python_origin),
        device=device,
        threads=threads,
        where=f"in containers of docker {engine.version}".rstrip(),
        hosts=(HOST,) * nodes,
        names=names,
        cluster=cluster,
        network_env={
            **interface_env(facts.interface),
            **({"PYTHONPATH": f"{CONTAINER_DIR}/python"} if mounted else {}),
        },
        node_env=tuple({NODE_ADDRESS.name: name} if topology.elastic else {} for name in names),
        coordinator=Coordinator(names[0], facts.watch_port or default_ports(facts.port)[1]),
        notes=(
            Note("device", device, device_origin),
            Note("nproc_per_node", str(nproc), nproc_origin),
            Note("image", engine.image, f"{engine.image_id[:19]}, {image}"),
            Note("workdir", workdir, f"{code} (cluster: code)"),
            Note("user", engine.user, "you, as the engine sees you"),
            Note("master_addr", names[0], "name of the first container"),
            Note("master_port", str(facts.port), facts.port_origin),
            Note("threads_per_rank", str(threads), threads_origin),
        ),
        native=ComposeNative(engine.socket),
        engine=engine,
        gpus=host.gpus,
        mounts=_mounts(job, cluster, engine, run_dir, checkpoint_folder),
        checkpoint_folder=checkpoint_folder,
    )


def _check_subnet_size(cluster: ComposeCluster, nodes: int) -> None:
    if cluster.subnet == "auto":
        return
    # Three addresses are taken: network, broadcast, and the engine's gateway.
    room = max(0, IPv4Network(cluster.subnet).num_addresses - 3)
    if nodes > room:
        raise BadInput(
            f"subnet: {cluster.subnet} has room for {pluralize(room, 'node')}, not {nodes}",
            hint="a larger one, or auto",
            cluster="subnet",
        )


def _workdir(
    job: JobSpec, cluster: ComposeCluster, engine: Engine, run_dir: str
) -> tuple[str, JobSpec]:
    """Return the ranks' working folder, and the job with its program as seen from there."""
    workdir = job.workdir or run_dir
    if cluster.code == "mounted":
        if posixpath.normpath(workdir) in SYSTEM or re.match(r"/(proc|sys|dev)/", workdir):
            raise BadInput(
                f"workdir: {workdir} would hide the image's own",
                hint="start from the project's folder, or `code: baked` in the cluster entry",
                job="workdir",
            )
        return workdir, job
    if job.program is not None and _is_below(job.program, workdir):
        job = msgspec.structs.replace(job, program=posixpath.relpath(job.program, workdir))
    return engine.workdir, job


def _checkpoint_folder(job: JobSpec, cluster: ComposeCluster, run_dir: str) -> str | None:
    """Return the folder for checkpoints; None: in the run's folder, a volume or remote storage."""
    if job.checkpoint is None or "://" in job.checkpoint.dir:
        return None
    folder = posixpath.normpath(posixpath.join(run_dir, job.checkpoint.dir))
    targets = [parse_volume(text)[1] for text in cluster.volumes]
    return None if _is_below(folder, run_dir) or _is_in(folder, targets) else folder


def _mounts(
    job: JobSpec,
    cluster: ComposeCluster,
    engine: Engine,
    run_dir: str,
    checkpoint_folder: str | None,
) -> list[dict[str, Any]]:
    """Return the mounts of each container; a folder inside another one comes after it."""
    mounts = [_bind(run_dir, run_dir)]
    targets = [run_dir]

    def add(path: str, *, readonly: bool) -> None:
        if not _is_in(path, targets):
            targets.append(path)
            mounts.append(_bind(path, path, readonly=readonly))

    for text in cluster.volumes:
        source, target, readonly = parse_volume(text)
        targets.append(target)
        if source.startswith("/"):
            mounts.append(_bind(source, target, readonly=readonly))
        else:
            mounts.append({
                "type": "volume", "source": source, "target": target,
                **({"read_only": True} if readonly else {}),
            })  # fmt: skip
    if checkpoint_folder is not None:
        add(checkpoint_folder, readonly=False)
    if job.checkpoint is not None and job.checkpoint.resume.startswith("/"):
        add(job.checkpoint.resume, readonly=True)
    if cluster.code == "mounted":
        if job.workdir:
            mounts.append(_bind(job.workdir, job.workdir, readonly=True))
            targets.append(job.workdir)
        if job.program and posixpath.isabs(job.program):
            add(posixpath.dirname(job.program), readonly=True)
        mounts.append(_bind(engine.package, f"{CONTAINER_DIR}/python/clusterkit", readonly=True))
    unique = {mount["target"]: mount for mount in mounts}
    return sorted(unique.values(), key=lambda mount: (mount["target"].count("/"), mount["target"]))


def _bind(source: str, target: str, *, readonly: bool = False) -> dict[str, Any]:
    return {
        "type": "bind", "source": source, "target": target,
        **({"read_only": True} if readonly else {}),
        # The engine would create a missing folder as root's.
        "bind": {"create_host_path": False},
    }  # fmt: skip


def _is_in(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or _is_below(path, folder) for folder in folders)


def _is_below(path: str, folder: str) -> bool:
    return posixpath.normpath(path).startswith(posixpath.normpath(folder).rstrip("/") + "/")
