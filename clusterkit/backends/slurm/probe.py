"""Looking at a partition, and at the Python of the ranks, before a submit."""

from __future__ import annotations

import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from clusterkit import project
from clusterkit.backends.placing import own_ports
from clusterkit.backends.ports import watch_port
from clusterkit.backends.probing import (
    NAMES_PYTHON,
    PACKAGES,
    TOOLS,
    UNSEEN,
    HostReport,
    ask,
    assumed_gpus,
    interpreter,
    own_interpreter,
    own_report,
)
from clusterkit.backends.slurm.queue import HERE, LOGIN_PYTHON
from clusterkit.backends.slurm.queue import ask as ask_slurm
from clusterkit.cluster import Facts, Gpu, HostFacts, SlurmCluster, SlurmFacts
from clusterkit.errors import BadInput, Unavailable
from clusterkit.runs import home
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

_GPUS = re.compile(
    r"(?:^|,)gpu(?::(?!no_consume:)([^:,()]+))?(?::no_consume)?:(\d+)", re.IGNORECASE
)
_GONE = re.compile(r"down|drain|fail|future|inval|unk|boot|power", re.IGNORECASE)
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?\Z")


class PartitionNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as `sinfo` shows it."""

    name: str
    state: str
    cpus: int
    memory_mib: int
    gpus: tuple[Gpu, ...]

    @property
    def usable(self) -> bool:
        return not _GONE.match(self.state)


def probe(cluster: SlurmCluster, transport: Transport, job: JobSpec | None) -> Facts:
    """As `clusterkit.backends.base.Backend.probe`."""
    host = host_of(cluster)
    python, origin = python_of(job, cluster)
    if cluster.ssh is None and cluster.container is None:
        if (found := shutil.which(python)) is None:
            raise Unavailable(
                f"python: {python} does not exist, or cannot be executed", hint=NAMES_PYTHON
            )
        python = os.path.abspath(found)
    there = python if cluster.container is None else LOGIN_PYTHON

    def look() -> HostReport:
        if host == HERE and there == sys.executable:
            return own_report(folder(cluster))
        return ask(
            transport, host, [there], python=there, where="login node", workdir=folder(cluster)
        )

    def ports() -> tuple[int, int]:
        port = transport.free_port(host) if cluster.port == "auto" else cluster.port
        return port, watch_port(cluster, host, port, transport)

    # Each is a process at least, over SSH a round trip more, and Slurm's wait for its controller.
    with ThreadPoolExecutor(4) as pool:
        asked = pool.submit(partition, cluster, transport)
        version = pool.submit(ask_slurm, transport, host, "sinfo", "--version")
        looked, found_ports = pool.submit(look), pool.submit(ports)
        copied = job if cluster.ssh is not None and cluster.sync else None
        sent = project.snapshot(Path(copied.workdir or "."), copied.program) if copied else None
        name, limits, nodes = asked.result()
        report, (port, watch) = looked.result(), found_ports.result()
    least = min((node for node in nodes), key=lambda node: (len(node.gpus), node.cpus))
    if cluster.gpus != "auto":
        gpus = tuple(Gpu(str(index), "GPU", 0) for index in range(cluster.gpus))
    else:
        gpus = () if job is not None and job.device == "cpu" else least.gpus
    versions = report.versions if cluster.container is None else {}
    if cluster.container is None and "/" not in python:
        python = report.python  # which one it is may differ from node to node
    most = limits.get("MaxNodes", "")
    return Facts(
        home=report.workdir,
        hosts=(
            HostFacts(
                host=host,
                address="",
                cpus=least.cpus,
                memory_mib=least.memory_mib,
                gpus=gpus,
                python=python,
                python_origin=origin,
                versions=versions,
                tools=report.tools,
            ),
        ),
        port=port,
        port_origin="free on the login node" if cluster.port == "auto" else "cluster: port",
        interface=cluster.interface or "",
        watch_port=watch,
        project=sent.facts() if sent else None,
        shipped=project.own_package().facts() if copied and "clusterkit" not in versions else None,
        slurm=SlurmFacts(
            ssh=cluster.ssh is not None,
            version=version.result().strip().rpartition(" ")[2],
            partition=name,
            nodes=len(nodes),
            minutes=minutes(limits.get("MaxTime", "")),
            most_nodes=int(most) if most.isdigit() else None,
        ),
    )


def assumed(cluster: SlurmCluster, job: JobSpec) -> Facts:
    """Facts of a partition that nobody has looked at: what the entry and the job say."""
    python, origin = python_of(job, cluster)
    gpus = assumed_gpus(cluster.gpus, job)
    cpus = cluster.cpus if cluster.cpus != "auto" else max(1, len(gpus))
    port, watch_port = own_ports(cluster.port)
    host = HostFacts(
        host=host_of(cluster), address="", cpus=cpus,
        memory_mib=0, gpus=gpus, python=python, python_origin=origin,
        versions=dict.fromkeys(PACKAGES, UNSEEN), tools=dict.fromkeys(TOOLS, UNSEEN),
    )  # fmt: skip
    return Facts(
        home=folder(cluster), hosts=(host,), port=port, port_origin="not asked whether it is free",
        interface=cluster.interface or "", watch_port=watch_port,
        slurm=SlurmFacts(
            ssh=cluster.ssh is not None, version="", partition=cluster.partition or "the default",
            nodes=job.node_range[1],
        ),
    )  # fmt: skip


def host_of(cluster: SlurmCluster) -> str:
    """What the transport calls the login node."""
    return cluster.ssh or HERE


def folder(cluster: SlurmCluster) -> str:
    """For runs and projects, on the login node's disk; the user's own folder there may be ``~``."""
    return str(home()) if cluster.ssh is None else cluster.workdir


def python_of(job: JobSpec | None, cluster: SlurmCluster) -> tuple[str, str]:
    """The ranks' Python, and where it comes from."""
    if cluster.ssh is None and cluster.container is None:
        return own_interpreter(job, cluster.python)
    whose = "the login node's" if cluster.container is None else "the image's"
    return interpreter(job, (cluster.python, "cluster: python"), (LOGIN_PYTHON, whose))


def partition(
    cluster: SlurmCluster, transport: Transport
) -> tuple[str, dict[str, str], list[PartitionNode]]:
    """Name, limits and nodes of the entry's partition.

    Raises:
        BadInput: there is no such partition.
        Unavailable: the controller does not answer.
    """
    host = host_of(cluster)
    shown = ask_slurm(transport, host, "scontrol", "--oneliner", "show", "partition")
    found = {}
    for line in shown.splitlines():
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        found[words.get("PartitionName", "")] = words
    name = cluster.partition or next(
        (name for name, words in found.items() if words.get("Default") == "YES"), ""
    )
    limits = found.get(name.partition(",")[0])
    if limits is None:
        raise BadInput(
            f"partition: {name} is none of Slurm's" if name else "partition: Slurm has no default",
            hint=f"one of {', '.join(sorted(found))}",
            cluster="partition",
        )
    form = "%N|%T|%c|%m|%G"
    listed = ask_slurm(transport, host, "sinfo", "-hN", f"--partition={name}", f"--format={form}")
    nodes = [node for line in listed.splitlines() if (node := _node(line)) is not None]
    if not nodes:
        raise Unavailable(f"Slurm: partition {name} has no nodes")
    return name, limits, nodes


def _node(line: str) -> PartitionNode | None:
    fields = line.strip().split("|")
    if len(fields) != 5:
        return None
    name, state, cpus, memory, gres = fields
    gpus = [
        (kind or "GPU", int(count)) for kind, count in _GPUS.findall(re.sub(r"\([^)]*\)", "", gres))
    ]
    kinds = [kind for kind, count in gpus for _ in range(count)]
    return PartitionNode(
        name=name,
        state=state,
        cpus=int(re.sub(r"\D", "", cpus) or 1),
        memory_mib=int(re.sub(r"\D", "", memory) or 0),
        gpus=tuple(Gpu(str(index), kind, 0) for index, kind in enumerate(kinds)),
    )


def minutes(text: str) -> int | None:
    """A time as Slurm writes it, ``days-hours:minutes:seconds`` and shorter, in whole minutes;
    None: no limit."""
    match = _TIME.match(text)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is not None:
        return days * 1440 + first * 60 + second + (third > 0)
    if match[4] is not None:
        return first * 60 + second + (third > 0)
    return first + (second > 0)
