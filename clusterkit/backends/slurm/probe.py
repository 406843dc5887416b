"""Probing a partition, and the ranks' Python on the login node."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct

from clusterkit.backends.ports import default_ports, watch_port
from clusterkit.backends.probing import (
    HostReport,
    assumed_gpus,
    assumed_host,
    executable_path,
    interpreter,
    local_interpreter,
    probe_python,
)
from clusterkit.backends.slurm.queue import HERE, LOGIN_PYTHON, query
from clusterkit.cluster import Facts, Gpu, SlurmCluster, SlurmFacts
from clusterkit.errors import BadInput, Unavailable
from clusterkit.run.folder import home
from clusterkit.spec import JobSpec
from clusterkit.sync import snapshot
from clusterkit.transport import Transport

_GPUS = re.compile(
    r"(?:^|,)gpu(?::(?!no_consume:)([^:,()]+))?(?::no_consume)?:(\d+)", re.IGNORECASE
)
_GONE = re.compile(r"down|drain|fail|future|inval|unk|boot|power", re.IGNORECASE)
FORM = "%P|%a|%l|%s|%v|%N|%T|%c|%m|%G"
"""Format of `sinfo`, one line a node: its partition, with state, time limit and most nodes; the
node's version of Slurm, name, state, CPUs, memory and GPUs."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?\Z")


class PartitionNode(Struct, frozen=True, kw_only=True):
    """A node as `sinfo` shows it."""

    name: str
    state: str
    cpus: int
    memory_mib: int
    gpus: tuple[Gpu, ...]

    @property
    def usable(self) -> bool:
        return not _GONE.match(self.state)


class Partition(Struct, frozen=True, kw_only=True):
    """A partition as `sinfo` shows it."""

    facts: SlurmFacts
    state: str
    nodes: tuple[PartitionNode, ...]


def probe(cluster: SlurmCluster, transport: Transport, job: JobSpec | None) -> Facts:
    """Implement `clusterkit.backends.base.Backend.probe`."""
    host = host_of(cluster)
    python, origin = python_of(job, cluster)
    if cluster.ssh is None and cluster.container is None:
        python = executable_path(python)
    probed = python if cluster.container is None else LOGIN_PYTHON

    def probe_login_node() -> HostReport:
        return probe_python(
            transport, host, [probed], python=probed, where="login node", workdir=folder(cluster)
        )

    def ports() -> tuple[int, int]:
        port = transport.free_port(host) if cluster.port == "auto" else cluster.port
        return port, watch_port(cluster, host, port, transport)

    # At once, since each takes a process or a round trip, and Slurm may wait for its controller.
    with ThreadPoolExecutor(3) as pool:
        found_partition = pool.submit(partition, cluster, transport)
        found_login, found_ports = pool.submit(probe_login_node), pool.submit(ports)
        copied = job if cluster.ssh is not None and cluster.sync else None
        sent = snapshot.take(Path(copied.workdir or "."), copied.program) if copied else None
        seen = found_partition.result()
        report, (port, watch) = found_login.result(), found_ports.result()
    smallest = min(seen.nodes, key=lambda node: (len(node.gpus), node.cpus))
    if cluster.gpus != "auto":
        gpus = tuple(Gpu(str(index), "GPU", 0) for index in range(cluster.gpus))
    else:
        gpus = () if job is not None and job.device == "cpu" else smallest.gpus
    versions = report.versions if cluster.container is None else {}
    if cluster.container is None and "/" not in python:
        python = report.python  # the absolute path: PATH may differ between nodes
    return Facts(
        home=report.workdir,
        hosts=(
            report.facts(
                host,
                "",
                cpus=smallest.cpus,
                memory_mib=smallest.memory_mib,
                gpus=gpus,
                python=python,
                python_origin=origin,
                versions=versions,
            ),
        ),
        port=port,
        port_origin="free on the login node" if cluster.port == "auto" else "cluster: port",
        interface=cluster.interface or "",
        watch_port=watch,
        project=sent.facts() if sent else None,
        shipped=snapshot.own_package().facts() if copied and "clusterkit" not in versions else None,
        slurm=seen.facts,
    )


def assumed(cluster: SlurmCluster, job: JobSpec) -> Facts:
    """Return facts of a partition that cannot be probed, from its entry and the job."""
    gpus = assumed_gpus(cluster.gpus, job)
    cpus = cluster.cpus if cluster.cpus != "auto" else max(1, len(gpus))
    port, watch_port = default_ports(cluster.port)
    host = assumed_host(host_of(cluster), "", cpus, gpus, python_of(job, cluster))
    return Facts(
        home=folder(cluster), hosts=(host,), port=port, port_origin="not probed",
        interface=cluster.interface or "", watch_port=watch_port,
        slurm=SlurmFacts(
            version="", partition=cluster.partition or "(default)",
            nodes=job.node_range[1] + job.spares,
        ),
    )  # fmt: skip


def host_of(cluster: SlurmCluster) -> str:
    """Return the transport's name of the login node."""
    return cluster.ssh or HERE


def folder(cluster: SlurmCluster) -> str:
    """Return the folder for runs and projects on the login node; it may begin with ``~``."""
    return str(home()) if cluster.ssh is None else cluster.workdir


def python_of(job: JobSpec | None, cluster: SlurmCluster) -> tuple[str, str]:
    """Return the ranks' Python, and where it comes from."""
    if cluster.ssh is None and cluster.container is None:
        return local_interpreter(job, cluster.python)
    origin = "the login node's" if cluster.container is None else "the image's"
    return interpreter(job, (cluster.python, "cluster: python"), (LOGIN_PYTHON, origin))


def partition(cluster: SlurmCluster, transport: Transport) -> Partition:
    """Return the entry's partition, or Slurm's default.

    Raises:
        BadInput: there is no such partition.
        Unavailable: the controller does not answer.
    """
    host, wanted = host_of(cluster), cluster.partition
    chosen = [f"--partition={wanted}"] if wanted else []
    listed = query(transport, host, "sinfo", "-hN", *chosen, f"--format={FORM}")
    rows = [row for line in listed.splitlines() if len(row := line.strip().split("|")) == 10]
    mine = rows if wanted else [row for row in rows if row[0].endswith("*")]
    if not mine:
        names = set(query(transport, host, "sinfo", "-h", "--format=%R").split())
        if wanted in names:
            raise Unavailable(f"Slurm: partition {wanted} has no nodes")
        raise BadInput(
            f"Slurm has no partition {wanted}" if wanted else "partition: Slurm has no default",
            hint=f"one of {', '.join(sorted(names))}",
            cluster="partition",
        )
    name, state, limit, sizes, *_ = mine[0]
    most = sizes.rpartition("-")[2]
    nodes = {row[5]: _node(*row[5:]) for row in mine}
    facts = SlurmFacts(
        version=next((row[4] for row in mine if row[4][:1].isdigit()), ""),
        partition=wanted or name.rstrip("*"),
        nodes=len(nodes),
        minutes=minutes(limit),
        most_nodes=int(most) if most.isdigit() else None,
    )
    return Partition(facts=facts, state=state, nodes=tuple(nodes.values()))


def _node(name: str, state: str, cpus: str, memory: str, gres: str) -> PartitionNode:
    listed = _GPUS.findall(re.sub(r"\([^)]*\)", "", gres))
    kinds = [kind or "GPU" for kind, count in listed for _ in range(int(count))]
    return PartitionNode(
        name=name,
        state=state,
        cpus=int(re.sub(r"\D", "", cpus) or 1),
        memory_mib=int(re.sub(r"\D", "", memory) or 0),
        gpus=tuple(Gpu(str(index), kind, 0) for index, kind in enumerate(kinds)),
    )


def minutes(text: str) -> int | None:
    """Parse Slurm's ``days-hours:minutes:seconds`` and its shorter forms; None: no limit.

    Returns:
        Minutes, rounded up.
    """
    match = _TIME.match(text)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is not None:
        return days * 1440 + first * 60 + second + (third > 0)
    if match[4] is not None:
        return first * 60 + second + (third > 0)
    return first + (second > 0)
