"""Where a job's nodes run on the hosts, and where its project is copied to. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence

from clusterkit.assemble import Coordinator, NodePaths, Placement, require_packages
from clusterkit.backends.placing import (
    device_of,
    gpu_env,
    interface_env,
    project_copies,
    threads_of,
)
from clusterkit.backends.ssh.hosts import check_host_count
from clusterkit.cluster import Facts, HostFacts, SshCluster
from clusterkit.errors import BadInput, join_some, pluralize
from clusterkit.plan import Note
from clusterkit.rendezvous import NODE_ADDRESS, Endpoint, Topology, mpirun_interface
from clusterkit.spec import JobSpec


def place(job: JobSpec, cluster: SshCluster, facts: Facts, run_id: str) -> Placement:
    """Implement `clusterkit.backends.base.Backend.place`."""
    least, most = job.node_range
    check_host_count(cluster, job, len(facts.hosts))
    nodes = min(most, len(facts.hosts) - job.spares)
    hosts = facts.hosts[: nodes + job.spares]
    head = hosts[0]
    device, device_origin = device_of(job, hosts)
    nproc, nproc_origin = _ranks_per_node(job, hosts, device)
    topology = Topology(min(least, nodes), nodes, nproc)
    threads, threads_origin = threads_of(job, min(host.cpus for host in hosts), nproc)
    for host in hosts:
        require_packages(job, host)
        if host.python != head.python:
            raise BadInput(
                f"python: {head.python} on {head.host}, but {host.python} on {host.host}",
                hint="the ranks' interpreter must have one path on all hosts: a link is enough",
                cluster="python",
            )
    run_dir = posixpath.join(facts.home, "runs", run_id)
    copied, workdir, trees, shipped = project_copies(job, facts, run_dir)
    if job.started_by == "mpirun":
        _check_devices(hosts[1:], device, nproc)
    network_env = interface_env(facts.interface)
    if job.started_by == "mpirun" and facts.interface:
        network_env |= mpirun_interface(facts.interface)
    shared = posixpath.join(cluster.shared, "runs", run_id) if cluster.shared else None
    remarks = _version_notes(hosts)
    if nodes < most:
        remarks.append(
            Note("", f"{most} nodes requested, {pluralize(nodes, 'host')} available", "")
        )
    return Placement(
        job=copied,
        topology=topology,
        endpoint=Endpoint(head.address, facts.port, run_id),
        places=NodePaths(run_dir, workdir, head.python, shared, head.python_origin),
        device=device,
        threads=threads,
        where=f"on {join_some([host.host for host in hosts], 4)}",
        hosts=tuple(host.host for host in hosts),
        names=tuple(host.address for host in hosts),
        cluster=cluster,
        network_env=network_env
        | (_defaults({"PYTHONPATH": shipped}, job, cluster) if shipped else {}),
        node_env=tuple(
            {
                **({NODE_ADDRESS.name: host.address} if topology.elastic else {}),
                **({} if network_env else _defaults(interface_env(host.interface), job, cluster)),
                **gpu_env(host, device, 0, nproc),
            }
            for host in hosts
        ),
        coordinator=Coordinator(head.address, facts.watch_port) if facts.watch_port else None,
        trees=trees,
        notes=(
            Note("device", device, device_origin),
            Note("nproc_per_node", str(nproc), nproc_origin),
            Note("master_addr", head.address, _address_origin(cluster, head)),
            Note("master_port", str(facts.port), facts.port_origin),
            Note("threads_per_rank", str(threads), threads_origin),
            Note("workdir", workdir, "the project as it is copied" if trees else "job: workdir"),
            *_interface_notes(facts, hosts),
        ),
        remarks=tuple(remarks),
    )


def _ranks_per_node(job: JobSpec, hosts: tuple[HostFacts, ...], device: str) -> tuple[int, str]:
    if job.gpus_per_node != "auto":
        wanted = job.gpus_per_node
        for host in hosts:
            if device == "cuda" and len(host.gpus) < wanted:
                raise BadInput(
                    f"gpus_per_node: {wanted}, but {host.host} has "
                    f"{pluralize(len(host.gpus), 'GPU')}",
                    hint=f"--gpus {len(host.gpus)}, or --exclude {host.host}",
                    job="gpus_per_node",
                )
            if host.slots is not None and host.slots < wanted:
                raise BadInput(
                    f"gpus_per_node: {wanted}, but {host.host} has "
                    f"{pluralize(host.slots, 'slot')} in the inventory",
                    hint=f"--gpus {host.slots}, or slots: {wanted} for {host.host}",
                    job="gpus_per_node",
                )
        return wanted, "job: gpus_per_node"
    if device == "cuda":
        usable = {host.host: min(len(host.gpus), host.slots or len(host.gpus)) for host in hosts}
        fewest = min(usable, key=usable.__getitem__)
        return usable[fewest], f"the fewest GPUs of a host: {fewest}"
    slots = [host.slots for host in hosts if host.slots is not None]
    if slots:
        return min(slots), "inventory: slots"
    return 1, "without GPUs one rank per node"


def _check_devices(others: Sequence[HostFacts], device: str, nproc: int) -> None:
    """Check that the ranks on other hosts than the first use GPUs 0, 1, ... of their host.

    mpirun gives all hosts the first host's environment, and so its CUDA_VISIBLE_DEVICES.

    Raises:
        BadInput: a host's GPUs are others.
    """
    for host in others if device == "cuda" else ():
        indices = [gpu.index for gpu in host.gpus[:nproc]]
        if indices != [str(number) for number in range(nproc)]:
            raise BadInput(
                f"launcher: mpirun cannot restrict {host.host} to GPUs {','.join(indices)}",
                hint="launcher: forkserver can",
                job="launcher",
            )


def _defaults(env: Mapping[str, str], job: JobSpec, cluster: SshCluster) -> dict[str, str]:
    """Return the variables that neither the job nor the cluster entry sets."""
    return {key: env[key] for key in env if key not in job.env and key not in cluster.env}


def _interface_notes(facts: Facts, hosts: tuple[HostFacts, ...]) -> list[Note]:
    if facts.interface:
        return [Note("interface", facts.interface, "carries the hosts' addresses")]
    without = [host.host for host in hosts if host.interface is None]
    if without:
        return [
            Note(
                "",
                f"no interface of {join_some(without, 4)} carries the address it was reached at: "
                "gloo and NCCL choose an interface themselves (`interface:` sets one)",
                "",
            )
        ]
    return [Note("interface", ", ".join(f"{h.host} {h.interface}" for h in hosts), "per host")]


def _version_notes(hosts: tuple[HostFacts, ...]) -> list[Note]:
    notes = []
    for package in ("torch", "deepspeed", "transformers"):
        by_version: dict[str, list[str]] = {}
        for host in hosts:
            by_version.setdefault(host.versions.get(package, "none"), []).append(host.host)
        if len(by_version) > 1:
            differing = "; ".join(
                f"{version} on {join_some(names, 4)}" for version, names in by_version.items()
            )
            notes.append(Note("", f"the hosts differ in {package}: {differing}", ""))
    return notes


def _address_origin(cluster: SshCluster, head: HostFacts) -> str:
    on = f", interface {head.interface}" if head.interface else ""
    given = next((host.cluster_address for host in cluster.hosts if host.name == head.host), None)
    return f"first host, {head.host}{on}" + (", as the inventory says" if given else "")
