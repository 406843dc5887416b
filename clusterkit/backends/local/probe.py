"""Probing this machine."""

from __future__ import annotations

from clusterkit.backends.ports import free_ports
from clusterkit.backends.probing import executable_path, gpu_facts, local_interpreter, probe_python
from clusterkit.cluster import Facts, LocalCluster
from clusterkit.run.folder import home
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

HOST = "localhost"
ADDRESS = "127.0.0.1"


def probe(cluster: LocalCluster, transport: Transport, job: JobSpec | None) -> Facts:
    """As `clusterkit.backends.base.Backend.probe`."""
    name, origin = local_interpreter(job, cluster.python)
    python = executable_path(name)
    port, watch_port = free_ports(cluster, HOST, transport, shown_as=ADDRESS)
    report = probe_python(transport, HOST, [python], python=python, where=HOST, workdir=str(home()))
    found = report.visible_gpus()
    host = report.facts(
        HOST, ADDRESS, **gpu_facts(found, cluster.gpus), python=python, python_origin=origin
    )
    return Facts(
        home=str(home()),
        hosts=(host,),
        port=port,
        port_origin="free when probed" if cluster.port == "auto" else "cluster: port",
        interface="lo",
        watch_port=watch_port,
    )
