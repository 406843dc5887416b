"""Looking at the hosts before a submit; which of them a job gets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from clusterkit.backends.ports import free_ports
from clusterkit.backends.probing import HostReport, interpreter, probe_python
from clusterkit.backends.ssh import inventory
from clusterkit.cluster import Facts, Host, HostFacts, SshCluster
from clusterkit.errors import BadInput, about, counted, listed
from clusterkit.spec import JobSpec
from clusterkit.sync import snapshot
from clusterkit.transport import Transport, fan_out, in_order


def resolved(
    cluster: SshCluster, folder: Path, include: str | None, exclude: str | None
) -> SshCluster:
    """The entry with its hosts read and chosen; `Backend.resolved` says of what."""
    if bool(cluster.inventory) == bool(cluster.hosts):
        raise BadInput(
            "inventory: a cluster has either an inventory or hosts",
            hint="inventory: ansible/inventory.yaml, or a hostfile with `host slots=N` lines",
            cluster="inventory",
        )
    if cluster.shared is not None and not cluster.shared.startswith("/"):
        raise BadInput(
            f"shared: {cluster.shared} is not an absolute path",
            hint="give an absolute path on the hosts",
            cluster="shared",
        )
    if cluster.inventory:
        path = folder / Path(cluster.inventory).expanduser()
        hosts = inventory.read_hosts(path, cluster.group)
    else:
        with about("cluster", "hosts"):
            given = inventory.check_hosts(cluster.hosts, "hosts")
        hosts = tuple(
            msgspec.structs.replace(
                host,
                identity=inventory.absolute(host.identity, folder),
                known_hosts=inventory.absolute(host.known_hosts, folder),
                ssh_config=inventory.absolute(host.ssh_config, folder),
            )
            for host in given
        )
    if not include and not exclude:
        include, exclude = cluster.include, cluster.exclude
    with about("cluster", "include" if include else "exclude"):
        hosts = inventory.chosen(hosts, include, exclude)
    return msgspec.structs.replace(
        cluster, inventory=None, group="all", include=None, exclude=None, hosts=hosts,
    )  # fmt: skip


def probe(cluster: SshCluster, transport: Transport, job: JobSpec | None) -> Facts:
    """As `clusterkit.backends.base.Backend.probe`."""
    hosts = hosts_for(cluster, job)
    first = hosts[0].name
    with ThreadPoolExecutor(1) as pool:
        ports = pool.submit(free_ports, cluster, first, transport, shown_as=f"host {first}")
        reports = in_order(
            fan_out([h.name for h in hosts], lambda name: _ask(cluster, name, transport, job))
        )
    alone = len(hosts) == 1
    found = tuple(_host_facts(cluster, host, reports[host.name], alone, job) for host in hosts)
    homes = {reports[host.name].workdir: host.name for host in hosts}
    if len(homes) > 1:
        (one, first), (other, second) = list(homes.items())[:2]
        raise BadInput(
            f"workdir: {cluster.workdir} is {one} on {first}, but {other} on {second}",
            hint="give an absolute path",
            cluster="workdir",
        )
    port, watch_port = ports.result()
    interfaces = {host.interface for host in found}
    copied = cluster.sync and job is not None
    lacking = any("clusterkit" not in host.versions for host in found)
    return Facts(
        home=next(iter(homes)),
        hosts=found,
        watch_port=watch_port,
        port=port,
        port_origin=f"free on {first} when probed" if cluster.port == "auto" else "cluster: port",
        interface=interfaces.pop() or "" if len(interfaces) == 1 else "",
        project=snapshot.take(Path(job.workdir or "."), job.program).facts()
        if copied and job is not None
        else None,
        shipped=snapshot.own_package().facts() if copied and lacking else None,
    )


def hosts_for(cluster: SshCluster, job: JobSpec | None) -> tuple[Host, ...]:
    """The hosts that a job of this many nodes gets: the first ones."""
    if not cluster.hosts:
        raise BadInput(
            "hosts: the cluster entry names none",
            hint="`inventory:` names a file of hosts",
            cluster="hosts",
        )
    if job is None:
        return cluster.hosts
    least, most = job.node_range
    if least + job.spares > len(cluster.hosts):
        raise too_few(job, len(cluster.hosts), cluster)
    return cluster.hosts[: most + job.spares]


def too_few(job: JobSpec, there: int, cluster: SshCluster) -> BadInput:
    spares = f" and {counted(job.spares, 'spare')}" if job.spares else ""
    room = there - job.spares
    return BadInput(
        f"nodes: {job.node_range[0]}{spares} are wanted, the cluster has {counted(there, 'host')}"
        f" ({listed([host.name for host in cluster.hosts], 4)})",
        hint=f"{f'--nodes {room}' if room > 0 else 'fewer spares'}, or more hosts in the inventory",
        job="nodes",
    )


def ranks_python(cluster: SshCluster, host: Host, job: JobSpec | None) -> tuple[str, str]:
    """The ranks' Python on a host, and where it comes from."""
    return interpreter(job, (host.python, "the host's own"), (cluster.python, "cluster: python"))


def _ask(cluster: SshCluster, name: str, transport: Transport, job: JobSpec | None) -> HostReport:
    host = next(host for host in cluster.hosts if host.name == name)
    python, _ = ranks_python(cluster, host, job)
    return probe_python(
        transport,
        name,
        [python],
        python=python,
        where=f"host {name}",
        workdir=cluster.workdir,
        # Without -I: what the ranks will find, in the user's own packages too, counts.
        env={**cluster.env, **(job.env if job else {}), "PYTHONSAFEPATH": "1"},
        hint="`python` in the job or the cluster entry, or `clusterkit_python` in the inventory, "
        "names the interpreter of the ranks",
    )


def _host_facts(
    cluster: SshCluster, host: Host, report: HostReport, alone: bool, job: JobSpec | None
) -> HostFacts:
    by_name = {found.name: found.address for found in report.interfaces}
    if cluster.interface != "auto":
        if cluster.interface not in by_name:
            raise BadInput(
                f"interface: host {host.name} has no {cluster.interface} with an IPv4 address",
                hint=f"it has {', '.join(by_name)}",
                cluster="interface",
            )
        address, interface = by_name[cluster.interface], cluster.interface
    else:
        address = str(host.cluster_address or report.reached_at or "127.0.0.1")
        interface = next((name for name, own in by_name.items() if own == address), "")
    address = host.cluster_address or address
    if address.startswith("127.") and not alone:
        raise BadInput(
            f"host {host.name}: it was reached at {address}, where the other hosts cannot reach it",
            hint="clusterkit_address in the inventory, or `interface:` in the cluster entry",
        )
    gpus = report.visible_gpus()
    if host.devices is not None:
        by_index = {gpu.index: gpu for gpu in gpus}
        if gpus and (gone := [d for d in host.devices if str(d) not in by_index]):
            raise BadInput(
                f"host {host.name}: GPU {gone[0]} is asked for, it has {counted(len(gpus), 'GPU')}"
            )
        gpus = tuple(by_index[str(device)] for device in host.devices if by_index)
    python, origin = ranks_python(cluster, host, job)
    # The Python as it was named: a virtual environment's own path matters.
    return report.facts(
        host.name, address, gpus=gpus, python=python, python_origin=origin,
        interface=interface or None, slots=host.slots,
    )  # fmt: skip
