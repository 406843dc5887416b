"""Probing this machine."""

from __future__ import annotations

import os
import shutil

from clusterkit.backends.ports import free_ports
from clusterkit.backends.probing import executable_path, gpu_facts, local_interpreter, probe_python
from clusterkit.cluster import Facts, LocalCluster
from clusterkit.errors import BadInput
from clusterkit.jobfile.command import PYTHONS
from clusterkit.run.folder import home
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

HOST = "localhost"
ADDRESS = "127.0.0.1"


def _check_command(name: str, python: str) -> None:
    """Refuse a command that no folder of the ranks' PATH has: every rank would end with 127.

    Raises:
        BadInput: naming the command.
    """
    path = f"{os.path.dirname(python)}:{os.environ.get('PATH', os.defpath)}"
    if "/" not in name and name not in PYTHONS and shutil.which(name, path=path) is None:
        script = os.path.isfile(name)
        raise BadInput(
            f"command: {name}: not found on PATH",
            hint=f"./{name} is the file in this folder" if script else None,
            job="command",
        )


def probe(cluster: LocalCluster, transport: Transport, job: JobSpec | None) -> Facts:
    """As `clusterkit.backends.base.Backend.probe`."""
    name, origin = local_interpreter(job, cluster.python)
    python = executable_path(name)
    if job is not None and job.command is not None and "PATH" not in {**cluster.env, **job.env}:
        _check_command(job.command[0], python)
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
