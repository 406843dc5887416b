"""Where a job's nodes run on this machine. Pure."""

from __future__ import annotations

import posixpath

from clusterkit.assemble import Coordinator, NodePaths, Placement, require_packages
from clusterkit.backends.placing import (
    device_of,
    gpu_env,
    interface_env,
    split_gpus,
    threads_of,
)
from clusterkit.cluster import Facts, LocalCluster
from clusterkit.errors import BadInput, pluralize
from clusterkit.plan import Note
from clusterkit.rendezvous import Endpoint, Topology
from clusterkit.spec import JobSpec


def place(job: JobSpec, cluster: LocalCluster, facts: Facts, run_id: str) -> Placement:
    """Implement `clusterkit.backends.base.Backend.place`."""
    host = facts.hosts[0]
    least, nodes = job.node_range
    all_nodes = nodes + job.spares
    device, device_origin = device_of(job, [host])
    nproc, nproc_origin = split_gpus(
        job, host, all_nodes, device, place=host.host, flag="--gpus {0} (make: GPUS={0})"
    )
    topology = Topology(least, nodes, nproc)
    if job.started_by == "mpirun" and device == "cuda" and nodes > 1:
        raise BadInput(
            "launcher: mpirun cannot divide this machine's GPUs between simulated nodes",
            hint=f"--nodes 1 --gpus {topology.world_size}, or launcher: forkserver",
            job="launcher",
        )
    threads, threads_origin = threads_of(job, host.cpus, topology.world_size)
    require_packages(job, host)
    run_dir = posixpath.join(facts.home, "runs", run_id)
    remarks = []
    if device == "cpu" and topology.world_size > host.cpus:
        shared = f"{topology.world_size} ranks share {pluralize(host.cpus, 'core')}"
        remarks.append(Note("", f"{shared}: expect them slow", ""))
    return Placement(
        job=job,
        topology=topology,
        endpoint=Endpoint(host.address, facts.port, run_id),
        places=NodePaths(
            run_dir, job.workdir or run_dir, host.python, python_origin=host.python_origin
        ),
        device=device,
        threads=threads,
        where="on this machine",
        hosts=(host.host,) * all_nodes,
        # mpirun starts processes on the hosts that it is given; deepspeed only counts names.
        names=tuple(f"node-{node}" for node in range(nodes))
        if job.started_by == "deepspeed"
        else (host.host,) * nodes,
        cluster=cluster,
        network_env=interface_env(facts.interface),
        node_env=tuple(gpu_env(host, device, n * nproc, nproc) for n in range(all_nodes)),
        coordinator=Coordinator(host.address, facts.watch_port) if facts.watch_port else None,
        notes=(
            Note("device", device, device_origin),
            Note("nproc_per_node", str(nproc), nproc_origin),
            Note("master_addr", host.address, "this machine, loopback"),
            Note("master_port", str(facts.port), facts.port_origin),
            Note("threads_per_rank", str(threads), threads_origin),
        ),
        remarks=tuple(remarks),
    )
