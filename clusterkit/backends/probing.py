"""Probing an interpreter and its host with `hosts.host_probe`, the same for every backend."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from clusterkit.cluster import Gpu, HostFacts
from clusterkit.errors import BadInput, ClusterkitError, SubmitFailed, Unavailable
from clusterkit.hosts import host_probe, python_text
from clusterkit.hosts.gpus import GPU_QUERY, Found, read_gpus
from clusterkit.spec import JobSpec
from clusterkit.transport import Completed, LocalTransport, Transport

PACKAGES = ("torch", "deepspeed", "transformers", "clusterkit")
"""Packages whose versions are recorded in the facts."""
TOOLS = ("mpirun", "ninja", "c++")
"""Commands that a launcher may need."""
NOT_PROBED = "not looked at"
"""Version or path of a package or command that could not be probed, and may be there."""
OLDEST_PYTHON = (3, 11)
"""Least version of the ranks' interpreter."""
NAMES_PYTHON = "`python` in the job, or in the cluster entry, names the interpreter of the ranks"
PROBE_SECONDS = 60.0
PROJECT_ENVIRONMENTS = (".venv", "venv", "env")
"""Folders of a project that may hold its virtual environment."""


class Interface(Struct, frozen=True):
    """An address, IPv4 or IPv6, of a network interface."""

    name: str
    address: str


class HostReport(Struct, frozen=True, kw_only=True):
    """What `clusterkit.hosts.host_probe` prints of an interpreter and its host."""

    workdir: str
    """Absolute path of the folder in the request."""
    writable: bool
    machine: str = ""
    """As of `clusterkit.hosts.host_probe.machine`."""
    python: str
    python_version: tuple[int, ...]
    cpus: int
    memory_mib: int
    interfaces: tuple[Interface, ...]
    reached_at: str
    """The host's address on which SSH reached it; empty without SSH."""
    versions: dict[str, str]
    tools: dict[str, str]
    gpus: str
    """Output of nvidia-smi."""
    gpu_complaint: str = ""
    """As of `clusterkit.hosts.host_probe.gpus`."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES."""
    omp_num_threads: str | None = None
    """OMP_NUM_THREADS."""

    def visible_gpus(self) -> Found:
        return read_gpus(self.gpus, self.gpu_complaint, self.visible)

    def facts(self, host: str, address: str, **more: Any) -> HostFacts:
        """Return the host's facts; ``more``: fields that are not in the report, or replace it."""
        common: dict[str, Any] = {
            "cpus": self.cpus,
            "memory_mib": self.memory_mib,
            "versions": self.versions,
            "tools": self.tools,
            "omp_num_threads": self.omp_num_threads,
        }
        return HostFacts(host=host, address=address, **(common | more))


def assumed_host(
    host: str, address: str, cpus: int, gpus: tuple[Gpu, ...], python: tuple[str, str]
) -> HostFacts:
    """Return facts of a host that cannot be probed.

    Args:
        python: the interpreter, and where it comes from.
    """
    return HostFacts(
        host=host,
        address=address,
        cpus=cpus,
        memory_mib=0,
        gpus=gpus,
        python=python[0],
        python_origin=python[1],
        versions=dict.fromkeys(PACKAGES, NOT_PROBED),
        tools=dict.fromkeys(TOOLS, NOT_PROBED),
    )


def probe_request(workdir: str) -> dict[str, object]:
    """Return the argument of `clusterkit.hosts.host_probe`."""
    return {"workdir": workdir, "packages": PACKAGES, "tools": TOOLS, "gpu_query": GPU_QUERY}


def executable_path(python: str) -> str:
    """Return the absolute path of an interpreter of this machine.

    Raises:
        Unavailable: this machine does not have it.
    """
    if (path := shutil.which(python)) is None:
        raise Unavailable(
            f"python: {python} does not exist, or cannot be executed", hint=NAMES_PYTHON
        )
    return str(Path(path).absolute())  # `..` stays: where it leads is the file system's to say


def probe_python(
    transport: Transport,
    host: str,
    start: Sequence[str],
    *,
    python: str,
    where: str,
    workdir: str,
    env: Mapping[str, str] | None = None,
    seconds: float = PROBE_SECONDS,
    hint: str = NAMES_PYTHON,
    refusal: Callable[[Completed], ClusterkitError] | None = None,
) -> HostReport:
    """Return the report of `hosts.host_probe`, run by an interpreter from its standard input.

    Args:
        start: the command that starts the interpreter.
        python: the interpreter's name in messages.
        where: its host or image in messages.
        workdir: the folder to report on.
        refusal: makes the error for an interpreter that prints no report; None: it does not work.

    Raises:
        Unavailable: the interpreter does not work, or is too old for the agent.
    """
    # The interpreter that runs clusterkit need not be started.
    if isinstance(transport, LocalTransport) and [*start] == [sys.executable] and env is None:
        return msgspec.convert(host_probe.document(probe_request(workdir)), HostReport)
    program = python_text.program(
        (resources.files("clusterkit") / "hosts" / "host_probe.py").read_bytes()
    )
    argv = [*start, "-", msgspec.json.encode(probe_request(workdir)).decode()]
    failure = f"{where}: python: {python} is not a working Python interpreter"
    try:
        done = transport.run(host, argv, env=env, stdin=program, timeout=seconds)
    except SubmitFailed as error:
        raise Unavailable(f"{failure}: {error.message}", hint) from None
    try:
        report = msgspec.json.decode(done.stdout, type=HostReport)
    except msgspec.MsgspecError:
        if refusal is not None:
            raise refusal(done) from None
        raise Unavailable(f"{failure}: {done.error}", hint) from None
    if report.python_version < OLDEST_PYTHON:
        raise Unavailable(
            f"{where}: python: {python} is Python {'.'.join(map(str, report.python_version))}",
            hint=f"{'.'.join(map(str, OLDEST_PYTHON))} or newer is needed",
        )
    return report


def interpreter(job: JobSpec | None, *entries: tuple[str | None, str]) -> tuple[str, str]:
    """Return the ranks' interpreter and where it comes from: the job's, or the first of the others.

    Args:
        entries: interpreters and where each comes from; None: no interpreter. The last is not None.

    Raises:
        BadInput: it begins with ``~``, which no shell of the node would expand.
    """
    wanted = (None if job is None else job.python, "job: python")
    python, origin = next((python, origin) for python, origin in (wanted, *entries) if python)
    if python.startswith("~"):
        raise BadInput(
            f"python: {python}: ~ is not expanded ({origin})",
            hint=f"write the whole path, such as /home/NAME{python[1:]}",
            cluster="python" if origin == "cluster: python" else (),
        )
    return python, origin


def local_interpreter(job: JobSpec | None, entry: str | None) -> tuple[str, str]:
    """Return `interpreter` for ranks on this machine.

    The last resorts are the active environment's interpreter, and the one that runs clusterkit; if
    that has no torch, before it one of the project or of the PATH that has torch.
    """
    if (job is not None and job.python) or entry:
        return interpreter(job, (entry, "cluster: python"))
    active = []
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        folder = os.environ.get(variable, "")
        python = sys.executable if folder == sys.prefix else os.path.join(folder, "bin/python")
        # A shell may still name an environment that has been removed.
        if folder and os.access(python, os.X_OK):
            active.append((python, f"the active environment, {variable}"))
    own = (sys.executable, "clusterkit's own")
    if not active and importlib.util.find_spec("torch") is None:
        # clusterkit's Python, from pipx for one, has no torch; the project's may have it.
        folder = (job.workdir if job is not None else None) or "."
        for name in (*PROJECT_ENVIRONMENTS, "python3"):
            path = os.path.abspath(os.path.join(folder, name, "bin/python"))
            found = shutil.which(name if name == "python3" else path)
            if found is not None and _has_torch(found):
                origin = "on PATH" if name == "python3" else f"the project's {name}"
                return found, f"{origin}; clusterkit's own has no torch"
    return interpreter(job, *active, own)


def _has_torch(python: str) -> bool:
    program = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    try:
        done = subprocess.run(
            [python, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def assumed_gpus(wanted: int | Literal["auto"], job: JobSpec, nodes: int = 1) -> tuple[Gpu, ...]:
    """Return the GPUs of nodes that cannot be probed: as many as the entry says, or one a rank."""
    if wanted == "auto":
        wanted = 0 if job.gpus_per_node == "auto" else nodes * job.gpus_per_node
    return tuple(Gpu(str(index), "GPU", 0) for index in range(wanted if job.device != "cpu" else 0))


def gpu_facts(found: Found, wanted: int | Literal["auto"]) -> dict[str, Any]:
    """Return the fields of this machine's facts about its GPUs, as many as its cluster entry says.

    Raises:
        BadInput: this machine has fewer.
    """
    if wanted == "auto":
        return {"gpus": found.gpus, "gpu_trouble": found.trouble, "gpu_remark": found.remark}
    if wanted > len(found.gpus):
        why = f": {found.trouble}" if found.trouble else ""
        raise BadInput(
            f"gpus: {wanted} wanted, but this machine has {len(found.gpus)}{why}",
            hint="auto: all that are visible",
            cluster="gpus",
        )
    return {"gpus": found.gpus[:wanted], "gpu_remark": found.remark if wanted else ""}
