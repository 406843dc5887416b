"""The plan of a job whose nodes are containers of one machine. Pure."""

from __future__ import annotations

import math
import posixpath
import re
from dataclasses import dataclass
from ipaddress import IPv4Network

import msgspec

from clusterkit.assemble import Assembly, Coordinator, Placement, Places, require_packages
from clusterkit.backends.base import OWN_IMAGE
from clusterkit.backends.compose.compose_file import (
    CONTAINER_DIR,
    Containers,
    checkpoint_folders,
    is_below,
    mounts_of,
    mpi_env,
    mpi_files,
    parse_volume,
    project_name,
    render,
)
from clusterkit.backends.compose.engine import HOST
from clusterkit.backends.placing import device_of, interface_env, split_gpus, threads_of
from clusterkit.backends.ports import default_ports
from clusterkit.cluster import ComposeCluster, Engine, Facts
from clusterkit.errors import BadInput, counted
from clusterkit.plan import ComposeNative, Note, PlanFile, Step
from clusterkit.rendezvous import NODE_ADDRESS, Endpoint, Topology
from clusterkit.spec import JobSpec

SYSTEM = frozenset({
    "/", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/opt", "/proc", "/run", "/sbin",
    "/sys", "/tmp", "/usr", "/var",
})  # fmt: skip
"""Folders of the image that a mounted project must not hide."""


@dataclass(frozen=True, kw_only=True)
class ComposePlacement(Placement):
    """A placement whose nodes are started by one ``docker compose up``."""

    cluster: ComposeCluster
    containers: Containers
    folders: tuple[str, ...]
    """Folders for checkpoints, to be made on this machine."""

    def files(self, assembly: Assembly) -> tuple[PlanFile, ...]:
        text = render(self, self.cluster, self.containers, assembly)
        file = PlanFile(self.places.file("compose.yaml"), text)
        mpi = mpi_files(self.places.run_dir) if self.starter == "mpirun" else ()
        return (*assembly.files, file, *mpi)

    def steps(self, assembly: Assembly) -> tuple[Step, ...]:
        up = (
            "docker", "--host", self.containers.engine.socket, "compose", "--progress", "quiet",
            "--project-name", project_name(self.endpoint.run_id),
            "--file", self.places.file("compose.yaml"),
            "up", "--detach", "--no-build", "--force-recreate",
        )  # fmt: skip
        make = [("mkdir", "-p", "--", folder) for folder in self.folders]
        return (
            *(Step(kind="run", host=HOST, argv=argv) for argv in make),
            Step(kind="run", host=HOST, argv=up, secrets=assembly.secrets),
        )


def place(job: JobSpec, cluster: ComposeCluster, facts: Facts, run_id: str) -> ComposePlacement:
    """Implement `clusterkit.backends.base.Backend.place`."""
    engine, host = facts.engine, facts.hosts[0]
    if engine is None:
        raise BadInput("facts: no docker engine is named", hint="use those of a compose run")
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
    topology = Topology(least, most, nproc)
    names = tuple(f"node-{node}" for node in range(nodes))
    mounted = cluster.code == "mounted"
    code = "this machine's, read-only" if mounted else "the image's own"
    image = "cluster: image" if cluster.image else "by what this machine has"
    return ComposePlacement(
        job=program,
        topology=topology,
        endpoint=Endpoint(names[0], facts.port, run_id),
        places=Places(run_dir, workdir, host.python, python_origin=host.python_origin),
        device=device,
        threads=threads,
        where=f"in containers of docker {engine.version}".rstrip(),
        hosts=(HOST,) * nodes,
        names=names,
        cluster=cluster,
        network_env={
            **interface_env(facts.interface),
            **({"PYTHONPATH": f"{CONTAINER_DIR}/python"} if mounted else {}),
            **(mpi_env(facts.interface) if job.started_by == "mpirun" else {}),
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
        containers=Containers(
            engine=engine, gpus=host.gpus, mounts=mounts_of(job, cluster, engine, run_dir)
        ),
        folders=_folders_to_make(job, cluster, run_dir),
    )


def _check_subnet_size(cluster: ComposeCluster, nodes: int) -> None:
    if cluster.subnet == "auto":
        return
    # Three addresses are taken: network, broadcast, and the engine's gateway.
    room = max(0, IPv4Network(cluster.subnet).num_addresses - 3)
    if nodes > room:
        raise BadInput(
            f"subnet: {cluster.subnet} has room for {counted(room, 'node')}, not {nodes}",
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
    if job.program is not None and is_below(job.program, workdir):
        job = msgspec.structs.replace(job, program=posixpath.relpath(job.program, workdir))
    return engine.workdir, job


def _folders_to_make(job: JobSpec, cluster: ComposeCluster, run_dir: str) -> tuple[str, ...]:
    """Return the folders for checkpoints that are in no volume of the cluster entry."""
    targets = [parse_volume(text)[1] for text in cluster.volumes]
    return tuple(
        folder
        for folder in checkpoint_folders(job, run_dir)
        if folder not in targets and not any(is_below(folder, target) for target in targets)
    )
