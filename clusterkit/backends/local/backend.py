"""This machine as a cluster: each node is a launcher process with its share of the devices."""

from __future__ import annotations

import posixpath
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from clusterkit import warm as warmth
from clusterkit.assemble import Coordinator, Placement, Places, require_packages
from clusterkit.backends.base import Backend, Observation, SupportsDoctor
from clusterkit.backends.local.probe import ADDRESS, HOST
from clusterkit.backends.node_status import (
    NodeFiles,
    folder_exists,
    judge_node,
    observed,
    stop_run,
)
from clusterkit.backends.placing import (
    device_of,
    divided_gpus,
    gpu_share,
    interface_env,
    threads_of,
)
from clusterkit.backends.ports import replace_taken_ports
from clusterkit.backends.probing import own_interpreter
from clusterkit.cluster import Facts, LocalCluster
from clusterkit.errors import BadInput, Unavailable, about, counted
from clusterkit.plan import Note
from clusterkit.rendezvous import Endpoint, Topology
from clusterkit.run.folder import RunHandle, home
from clusterkit.run.status import State
from clusterkit.spec import JobSpec, parse_duration
from clusterkit.transport import Transport

if TYPE_CHECKING:
    from clusterkit.doctor.hosts.base import HostSubject


class LocalBackend(Backend, SupportsDoctor):
    """Nodes are processes on this machine; see `clusterkit.agent` for what each one is."""

    name = "local"
    summary = "this machine; several nodes are simulated on it"

    @classmethod
    def resolved(
        cls, cluster: LocalCluster, folder: Path, include: str | None, exclude: str | None
    ) -> LocalCluster:
        super().resolved(cluster, folder, include, exclude)
        if cluster.warm is not None:
            with about("cluster", "warm"):
                parse_duration(cluster.warm, "warm")
        elif idle := warmth.seconds():
            return msgspec.structs.replace(cluster, warm=idle)
        return cluster

    def subject(self, name: str, cluster: LocalCluster, job: JobSpec | None = None) -> HostSubject:
        from clusterkit.doctor.hosts.base import HostSubject, Machine, Needs

        ranks = None
        if job is not None and job.gpus_per_node != "auto":
            ranks = job.gpus_per_node * (job.node_range[1] + job.spares)
        python, _ = own_interpreter(job, cluster.python)
        return HostSubject(
            cluster=name,
            hosts=(Machine(name=HOST, address=ADDRESS, python=python, slots=ranks),),
            workdir=str(home()),
            port=None if cluster.port == "auto" else cluster.port,
            interface="lo",
            needs=Needs.of(job),
        )

    def place(self, job: JobSpec, cluster: LocalCluster, facts: Facts, run_id: str) -> Placement:
        host = facts.hosts[0]
        least, nodes = job.node_range
        all_nodes = nodes + job.spares
        device, device_origin = device_of(job, [host])
        nproc, nproc_origin = divided_gpus(
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
        shared = f"{topology.world_size} ranks share {counted(host.cpus, 'core')}: expect them slow"
        slow = device == "cpu" and topology.world_size > host.cpus
        notes = []
        warm = 0.0 if cluster.warm is None else parse_duration(cluster.warm, "warm")
        if warm and job.started_by == "forkserver":
            notes = [Note("warm", f"{warm:g} s", "cluster: warm, or clusterkit warm on")]
        return Placement(
            job=job,
            topology=topology,
            endpoint=Endpoint(host.address, facts.port, run_id),
            places=Places(
                run_dir, job.workdir or run_dir, host.python, python_origin=host.python_origin
            ),
            device=device,
            threads=threads,
            where="on this machine",
            hosts=(host.host,) * all_nodes,
            # mpirun starts processes on hosts that it knows; deepspeed only counts names.
            names=tuple(f"node-{node}" for node in range(nodes))
            if job.started_by == "deepspeed"
            else (host.host,) * nodes,
            cluster=cluster,
            network_env=interface_env(facts.interface),
            node_env=tuple(
                gpu_share(host.gpus, device, n * nproc, nproc) for n in range(all_nodes)
            ),
            warm=warm,
            coordinator=Coordinator(host.address, facts.watch_port) if facts.watch_port else None,
            notes=(
                Note("device", device, device_origin),
                Note("nproc_per_node", str(nproc), nproc_origin),
                Note("master_addr", host.address, "this machine, loopback"),
                Note("master_port", str(facts.port), facts.port_origin),
                Note("threads_per_rank", str(threads), threads_origin),
                *notes,
            ),
            remarks=(Note("", shared, ""),) if slow else (),
        )

    def before_attempt(
        self, cluster: LocalCluster, facts: Facts, transport: Transport, *, fresh: bool
    ) -> tuple[Facts, str] | None:
        return replace_taken_ports(cluster, facts, transport)

    def status(self, handle: RunHandle, transport: Transport) -> Observation | None:
        if not folder_exists(handle):
            return None
        nodes, ended = [], {}
        for node in range(handle.plan.nodes):
            left = NodeFiles.read(handle.folder.node_dir(handle.attempt, node))
            found = judge_node(node, HOST, left)
            nodes.append(found)
            if found.state in (State.FAILED, State.CANCELLED):
                ended[node] = left.exit or b""
        return observed(nodes, ended)

    def cancel(self, handle: RunHandle, transport: Transport, reason: str = "cancelled") -> None:
        done = stop_run(handle.plan, transport, HOST, sys.executable, reason)
        if done.exit_code:
            raise Unavailable(f"could not end run {handle.plan.run_id}: {done.stderr.strip()}")
