"""This machine as a cluster: each node is a launcher process with its share of the devices."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from clusterkit.backends.base import Backend, Observation, SupportsDoctor
from clusterkit.backends.local.probe import ADDRESS, HOST
from clusterkit.backends.node_status import (
    NativeState,
    NodeFiles,
    folder_exists,
    judge_node,
    observed,
    stop_run,
)
from clusterkit.backends.ports import replace_taken_ports
from clusterkit.backends.probing import local_interpreter
from clusterkit.cluster import Facts, LocalCluster
from clusterkit.errors import Unavailable
from clusterkit.run.folder import RunHandle, home
from clusterkit.run.status import State
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

if TYPE_CHECKING:
    from clusterkit.assemble import Placement
    from clusterkit.doctor.hosts.base import HostSubject


class LocalBackend(Backend[LocalCluster], SupportsDoctor[LocalCluster]):
    """Nodes are processes on this machine; see `clusterkit.agent` for what each one is."""

    name = "local"
    runs_here = True
    summary = "this machine; several nodes are simulated on it"

    def probe(
        self, cluster: LocalCluster, transport: Transport, job: JobSpec | None = None
    ) -> Facts:
        from clusterkit.backends.local.probe import probe

        return probe(cluster, transport, job)

    def place(self, job: JobSpec, cluster: LocalCluster, facts: Facts, run_id: str) -> Placement:
        from clusterkit.backends.local.place import place

        return place(job, cluster, facts, run_id)

    def subject(self, name: str, cluster: LocalCluster, job: JobSpec | None = None) -> HostSubject:
        from clusterkit.doctor.hosts.base import HostSubject, Machine, Needs

        ranks = None
        if job is not None and job.gpus_per_node != "auto":
            ranks = job.gpus_per_node * (job.node_range[1] + job.spares)
        python, _ = local_interpreter(job, cluster.python)
        return HostSubject(
            cluster=name,
            hosts=(Machine(name=HOST, address=ADDRESS, python=python, slots=ranks),),
            workdir=str(home()),
            port=None if cluster.port == "auto" else cluster.port,
            interface="lo",
            needs=Needs.of(job),
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
            files = NodeFiles.read(handle.folder.node_dir(handle.attempt, node))
            found = judge_node(node, HOST, files, NativeState.of_process(files))
            nodes.append(found)
            if found.state in (State.FAILED, State.CANCELLED):
                ended[node] = files.exit or b""
        return observed(nodes, ended)

    def cancel(self, handle: RunHandle, transport: Transport, reason: str = "cancelled") -> None:
        done = stop_run(handle.plan, transport, HOST, sys.executable, reason)
        if done.exit_code:
            raise Unavailable(f"could not end run {handle.plan.run_id}: {done.stderr.strip()}")
