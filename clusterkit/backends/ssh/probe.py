"""Probing the hosts that a job gets."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clusterkit.backends.ports import free_ports
from clusterkit.backends.probing import HostReport, probe_python
from clusterkit.backends.ssh.hosts import job_hosts, ranks_python
from clusterkit.cluster import Facts, Host, HostFacts, SshCluster
from clusterkit.errors import BadInput, pluralize
from clusterkit.spec import JobSpec
from clusterkit.sync import snapshot
from clusterkit.transport import Transport, fan_out, in_order


def probe(cluster: SshCluster, transport: Transport, job: JobSpec | None) -> Facts:
    """Implement `clusterkit.backends.base.Backend.probe`."""
    hosts = {host.name: host for host in job_hosts(cluster, job)}
    head = next(iter(hosts))
    with ThreadPoolExecutor(1) as pool:
        ports = pool.submit(free_ports, cluster, head, transport, shown_as=f"host {head}")
        reports = in_order(
            fan_out([*hosts], lambda name: _probe_host(cluster, hosts[name], transport, job))
        )
    _check_different(reports)
    host_facts = tuple(
        _host_facts(cluster, host, reports[name], len(hosts) == 1, job)
        for name, host in hosts.items()
    )
    homes = {reports[name].workdir: name for name in hosts}
    if len(homes) > 1:
        (one, first), (other, second) = list(homes.items())[:2]
        raise BadInput(
            f"workdir: {cluster.workdir} is {one} on {first}, but {other} on {second}",
            hint="give an absolute path",
            cluster="workdir",
        )
    port, watch_port = ports.result()
    interfaces = {host.interface for host in host_facts}
    copied = job if cluster.sync else None
    installed = all("clusterkit" in host.versions for host in host_facts)
    return Facts(
        home=next(iter(homes)),
        hosts=host_facts,
        watch_port=watch_port,
        port=port,
        port_origin=f"free on {head} when probed" if cluster.port == "auto" else "cluster: port",
        interface=interfaces.pop() or "" if len(interfaces) == 1 else "",
        project=snapshot.take(Path(copied.workdir or "."), copied.program).facts()
        if copied
        else None,
        shipped=snapshot.own_package().facts() if copied and not installed else None,
    )


def _check_different(reports: Mapping[str, HostReport]) -> None:
    """Refuse two names of one host: two nodes would use the same GPUs.

    Raises:
        BadInput: naming both.
    """
    known: dict[tuple[str, object], str] = {}
    for name, report in reports.items():
        # Virtual machines that were cloned while they ran have one boot id, and other addresses.
        first = known.setdefault((report.machine or name, report.interfaces), name)
        if first != name:
            raise BadInput(
                f"host {name} is the same machine as {first}",
                hint=f"leave {name} out (--exclude {name}); backend `local` simulates several "
                "nodes on one machine",
            )


def _probe_host(
    cluster: SshCluster, host: Host, transport: Transport, job: JobSpec | None
) -> HostReport:
    python, _ = ranks_python(cluster, host, job)
    return probe_python(
        transport,
        host.name,
        [python],
        python=python,
        where=f"host {host.name}",
        workdir=cluster.workdir,
        # Without -I, which hides packages in the user's own folder that the ranks will find.
        env={**cluster.env, **(job.env if job else {}), "PYTHONSAFEPATH": "1"},
        hint="`python` in the job or the cluster entry, or `clusterkit_python` in the inventory, "
        "names the interpreter of the ranks",
    )


def _host_facts(
    cluster: SshCluster, host: Host, report: HostReport, alone: bool, job: JobSpec | None
) -> HostFacts:
    # Other nodes connect to an interface's first address.
    by_name = {each.name: each.address for each in reversed(report.interfaces)}
    if cluster.interface != "auto":
        if cluster.interface not in by_name:
            raise BadInput(
                f"interface: host {host.name} has no {cluster.interface} with an address",
                hint=f"it has {', '.join(dict.fromkeys(each.name for each in report.interfaces))}",
                cluster="interface",
            )
        address, interface = by_name[cluster.interface], cluster.interface
    else:
        address = str(host.cluster_address or report.reached_at or "127.0.0.1")
        carrying = (each.name for each in report.interfaces if each.address == address)
        interface = next(carrying, "")
    address = host.cluster_address or address
    if (address.startswith("127.") or address == "::1") and not alone:
        raise BadInput(
            f"host {host.name}: it was reached at {address}, where the other hosts cannot reach it",
            hint="clusterkit_address in the inventory, or `interface:` in the cluster entry",
        )
    gpus, trouble, remark = report.visible_gpus()
    if host.devices is not None:
        by_index = {gpu.index: gpu for gpu in gpus}
        if gpus and (missing := [d for d in host.devices if str(d) not in by_index]):
            raise BadInput(
                f"host {host.name}: GPU {missing[0]} is asked for, "
                f"it has {pluralize(len(gpus), 'GPU')}"
            )
        gpus = tuple(by_index[str(device)] for device in host.devices if by_index)
        trouble = trouble if host.devices and not gpus else ""
    python, origin = ranks_python(cluster, host, job)
    # Not the report's resolved path: a virtual environment works only by its own path.
    return report.facts(
        host.name, address, gpus=gpus, gpu_trouble=trouble, gpu_remark=remark, python=python,
        python_origin=origin, interface=interface or None, slots=host.slots,
    )  # fmt: skip
