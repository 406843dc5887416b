"""This machine as a cluster: each node is a launcher process with its share of the devices."""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import sys
from typing import TYPE_CHECKING, Any

from clusterkit import agent
from clusterkit.agent import process_start
from clusterkit.assemble import Places, assemble, require_packages
from clusterkit.backends.base import Backend, Handle, Observation
from clusterkit.backends.nodes import (
    PACKAGES,
    TOOLS,
    check_version,
    device_of,
    divided_gpus,
    gpu_share,
    interpreter,
    judge_node,
    node_file,
    observed,
    probe_gpus,
    stop_arguments,
    threads_of,
)
from clusterkit.cluster import ClusterSpec, Facts, HostFacts, LocalCluster
from clusterkit.errors import BadInput, PortTaken, SubmitFailed, Unavailable, counted
from clusterkit.plan import Note, Plan, Step
from clusterkit.rendezvous import Endpoint, Topology
from clusterkit.runs import home
from clusterkit.spec import JobSpec
from clusterkit.status import NodeStatus, State
from clusterkit.transport import Transport

if TYPE_CHECKING:
    from clusterkit.doctor.base import Subject

HOST = "localhost"
ADDRESS = "127.0.0.1"
_NAMES_PYTHON = "`python` in the job, or in the cluster entry, names the interpreter of the ranks"


class LocalBackend(Backend):
    """Nodes are processes on this machine; see `clusterkit.agent` for what each one is."""

    name = "local"
    summary = "this machine; several nodes are simulated on it"

    def probe(
        self, cluster: ClusterSpec, transport: Transport, job: JobSpec | None = None
    ) -> Facts:
        assert isinstance(cluster, LocalCluster)
        python, origin = _interpreter(cluster, job)
        python = _found(python)
        port = transport.free_port(HOST, None if cluster.port == "auto" else cluster.port)
        if cluster.port not in ("auto", port):
            raise PortTaken(int(cluster.port), ADDRESS)
        gpus = probe_gpus(transport, HOST)
        if cluster.gpus != "auto":
            if cluster.gpus > len(gpus):
                raise BadInput(
                    f"gpus: {cluster.gpus} wanted, but this machine has {len(gpus)}",
                    cluster="gpus",
                )
            gpus = gpus[: cluster.gpus]
        host = HostFacts(
            host=HOST,
            address=ADDRESS,
            cpus=len(os.sched_getaffinity(0)),
            memory_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
            gpus=gpus,
            python=python,
            python_origin=origin,
            versions=_probe_versions(python, transport),
            tools=_probe_tools(transport),
        )
        return Facts(
            home=str(home()),
            hosts=(host,),
            port=port,
            port_origin="free when probed" if cluster.port == "auto" else "cluster: port",
            interface="lo",
        )

    def subject(self, name: str, cluster: ClusterSpec, job: JobSpec | None = None) -> Subject:
        from clusterkit.doctor.base import Machine, Needs, Subject

        assert isinstance(cluster, LocalCluster)
        ranks = None
        if job is not None and job.gpus_per_node != "auto":
            ranks = job.gpus_per_node * job.node_range[1]
        python, _ = _interpreter(cluster, job)
        return Subject(
            cluster=name,
            hosts=(Machine(name=HOST, address=ADDRESS, python=python, slots=ranks),),
            workdir=str(home()),
            port=None if cluster.port == "auto" else cluster.port,
            interface="lo",
            needs=Needs.of(job),
        )

    def plan(self, job: JobSpec, cluster: ClusterSpec, facts: Facts, run_id: str) -> Plan:
        host = facts.hosts[0]
        min_nodes, nodes = job.node_range
        device, device_origin = device_of(job, [host])
        nproc, nproc_origin = divided_gpus(
            job, host, nodes, device, place=host.host, flag="--gpus {0} (make: GPUS={0})"
        )
        topology = Topology(min_nodes, nodes, nproc)
        if job.launcher == "mpirun" and device == "cuda" and nodes > 1:
            raise BadInput(
                "launcher: mpirun cannot divide this machine's GPUs between simulated nodes",
                hint=f"--nodes 1 --gpus {topology.world_size}, or launcher: torchrun",
                job="launcher",
            )
        threads, threads_origin = threads_of(job, host.cpus, topology.world_size)
        require_packages(job, host)
        endpoint = Endpoint(host.address, facts.port, run_id)
        run_dir = posixpath.join(facts.home, "runs", run_id)
        assembly = assemble(
            job,
            topology=topology,
            endpoint=endpoint,
            places=Places(
                run_dir, job.workdir or run_dir, host.python, python_origin=host.python_origin
            ),
            device=device,
            threads=threads,
            hosts=[f"node-{node}" for node in range(nodes)]
            if job.launcher == "deepspeed"
            else [host.host] * nodes,
            cluster_env=cluster.env,
            network_env={
                "GLOO_SOCKET_IFNAME": facts.interface,
                "NCCL_SOCKET_IFNAME": facts.interface,
            },
            stop_grace=cluster.stop_grace,
        )
        notes = [
            Note("device", device, device_origin),
            Note("nproc_per_node", str(nproc), nproc_origin),
            Note("master_addr", host.address, "this machine, loopback"),
            Note("master_port", str(facts.port), facts.port_origin),
            Note("threads_per_rank", str(threads), threads_origin),
            *assembly.notes,
        ]
        if device == "cpu" and topology.world_size > host.cpus:
            notes.append(
                Note(
                    "",
                    f"{topology.world_size} ranks share {counted(host.cpus, 'core')}: "
                    "expect them slow",
                    "",
                )
            )
        started = 1 if job.launcher == "mpirun" else nodes
        return Plan(
            run_id=run_id,
            run_dir=run_dir,
            backend=self.name,
            summary=f"{topology} on this machine, started by {job.launcher}; "
            f"world size {topology.world_size}",
            notes=tuple(notes),
            files=assembly.files,
            steps=tuple(
                Step(
                    kind="start",
                    host=host.host,
                    node=node,
                    argv=assembly.command,
                    env={
                        "NODE_RANK": str(node),
                        **gpu_share(host.gpus, device, node * nproc, nproc),
                    },
                    secrets=assembly.secrets,
                )
                for node in range(started)
            ),
            hosts=(host.host,) * nodes,
            nodes=started,
            world_size=topology.world_size,
            topology={"min_nodes": min_nodes, "nodes": nodes, "nproc_per_node": nproc},
            address=host.address,
            port=facts.port,
            python=host.python,
            stop_grace=cluster.stop_grace,
        )

    def status(self, handle: Handle, transport: Transport) -> Observation | None:
        if transport.get(HOST, posixpath.join(handle.plan.run_dir, "run.json"), 0, 1) is None:
            return None
        nodes = tuple(_node_status(handle, node, transport) for node in range(handle.plan.nodes))
        ended = {
            node.node: transport.get(HOST, node_file(handle, node.node, "exit.json")) or b""
            for node in nodes
            if node.state in (State.FAILED, State.CANCELLED)
        }
        return observed(nodes, ended)

    def cancel(self, handle: Handle, transport: Transport, reason: str = "cancelled") -> None:
        # Our own agent, not the run folder's copy: that may be gone, its processes not.
        stop = [sys.executable, "-I", agent.__file__, *stop_arguments(handle.plan, reason)]
        done = transport.run(HOST, stop, timeout=handle.plan.stop_grace + 60)
        if done.exit_code:
            raise Unavailable(f"could not end run {handle.plan.run_id}: {done.stderr.strip()}")


# ---------------------------------------------------------------- probing


def _interpreter(cluster: LocalCluster, job: JobSpec | None) -> tuple[str, str]:
    """The ranks' Python as it was named, and where it comes from."""
    active = []
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        folder = os.environ.get(variable, "")
        python = sys.executable if folder == sys.prefix else os.path.join(folder, "bin/python")
        # A shell may outlive the environment that was active in it.
        if folder and os.access(python, os.X_OK):
            active.append((python, f"the active environment, {variable}"))
    return interpreter(
        job, (cluster.python, "cluster: python"), *active, (sys.executable, "clusterkit's own")
    )


def _found(python: str) -> str:
    """A Python's absolute path.

    Raises:
        Unavailable: there is none of that name.
    """
    if (path := _which(python)) is None:
        raise Unavailable(
            f"python: {python} does not exist, or cannot be executed", hint=_NAMES_PYTHON
        )
    return os.path.abspath(path)


def _probe_versions(python: str, transport: Transport) -> dict[str, str]:
    if python == sys.executable:
        return installed_versions()
    code = (
        "import json, sys, importlib.metadata as m\nfound = {}\n"
        f"for name in {PACKAGES!r}:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps([list(sys.version_info[:3]), found]))"
    )
    try:
        done = transport.run(HOST, [python, "-c", code], timeout=30)
        version, versions = json.loads(done.stdout)
    except (SubmitFailed, ValueError):
        raise Unavailable(
            f"python: {python} is not a working Python interpreter", hint=_NAMES_PYTHON
        ) from None
    check_version(version, python, HOST)
    found: dict[str, str] = versions
    return found


def installed_versions() -> dict[str, str]:
    """Versions of the packages a job may need, in this very interpreter."""
    from importlib import metadata

    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _probe_tools(transport: Transport) -> dict[str, str]:
    return {tool: path for tool in TOOLS if (path := _which(tool))}


def _which(tool: str) -> str | None:
    import shutil

    return shutil.which(tool)


# ---------------------------------------------------------------- watching


def _node_status(handle: Handle, node: int, transport: Transport) -> NodeStatus:
    def read(name: str) -> bytes | None:
        return transport.get(HOST, node_file(handle, node, name))

    started, alive = read("started.json"), False
    pid = read("pid")
    with contextlib.suppress(ValueError):
        if started is not None:
            alive = _is_alive(json.loads(started), transport)
        elif pid is not None:
            stat = transport.get(HOST, f"/proc/{int(pid)}/stat")
            alive = process_start(stat) is not None
    return judge_node(
        node,
        HOST,
        begun=started is not None or pid is not None,
        alive=alive,
        # Read after the process was seen to be gone: then it is there, if it ever will be.
        exit_json=read("exit.json"),
        complaint=read("agent.log") or b"",
        started=started,
    )


def _is_alive(started: Any, transport: Transport) -> bool:
    """`clusterkit.agent.is_alive`, through the transport."""
    if not isinstance(started, dict):
        return False
    ticks = started.get("start_ticks")
    boot = transport.get(HOST, "/proc/sys/kernel/random/boot_id") or b"unknown"
    return (
        isinstance(ticks, int)
        and boot.decode().strip() == started.get("boot_id")
        and process_start(transport.get(HOST, f"/proc/{started.get('pid')}/stat")) == ticks
    )
