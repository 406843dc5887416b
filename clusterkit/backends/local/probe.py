"""What this machine tells of itself before a submit."""

from __future__ import annotations

import os
import shutil
import sys

from clusterkit.backends.probing import (
    NAMES_PYTHON,
    HostReport,
    ask,
    interpreter,
    limited,
    no_python,
    own_report,
    report,
)
from clusterkit.cluster import Facts, HostFacts, LocalCluster
from clusterkit.errors import PortTaken, SubmitFailed, Unavailable
from clusterkit.runs import home
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

HOST = "localhost"
ADDRESS = "127.0.0.1"


def probe(cluster: LocalCluster, transport: Transport, job: JobSpec | None) -> Facts:
    """As `clusterkit.backends.base.Backend.probe`."""
    name, origin = ranks_python(cluster, job)
    if (found := shutil.which(name)) is None:
        raise Unavailable(f"python: {name} is not there, or cannot be executed", hint=NAMES_PYTHON)
    python = os.path.abspath(found)
    port = transport.free_port(HOST, None if cluster.port == "auto" else cluster.port)
    if cluster.port not in ("auto", port):
        raise PortTaken(int(cluster.port), ADDRESS)
    told = _report(python, transport)
    host = HostFacts(
        host=HOST,
        address=ADDRESS,
        cpus=told.cpus,
        memory_mib=told.memory_mib,
        gpus=limited(told.visible_gpus(), cluster.gpus),
        python=python,
        python_origin=origin,
        versions=told.versions,
        tools=told.tools,
    )
    return Facts(
        home=str(home()),
        hosts=(host,),
        port=port,
        port_origin="free when probed" if cluster.port == "auto" else "cluster: port",
        interface="lo",
    )


def ranks_python(cluster: LocalCluster, job: JobSpec | None) -> tuple[str, str]:
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


def _report(python: str, transport: Transport) -> HostReport:
    if python == sys.executable:
        return own_report(str(home()))
    try:
        done = ask(transport, HOST, [python], str(home()))
    except SubmitFailed as error:
        raise no_python(python, error.message, HOST) from None
    if (found := report(done, python, HOST)) is None:
        raise no_python(python, done.stderr or f"exit code {done.exit_code}", HOST)
    return found
