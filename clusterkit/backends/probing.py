"""What a Python and its host have, found by `clusterkit.host_probe` for every backend."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, Literal

import msgspec
from msgspec import Struct

from clusterkit import host_probe
from clusterkit.cluster import Gpu, HostFacts
from clusterkit.errors import BadInput, ClusterkitError, SubmitFailed, Unavailable
from clusterkit.spec import JobSpec
from clusterkit.transport import Completed, Transport

PACKAGES = ("torch", "deepspeed", "transformers", "clusterkit")
"""Packages whose versions facts hold."""
TOOLS = ("mpirun", "ninja", "c++")
"""Commands that a launcher may need."""
UNSEEN = "not looked at"
"""A version, or a path, of what nobody could look at; a launcher may need it."""
OLDEST_PYTHON = (3, 11)
"""Of the ranks' interpreter."""
GPU_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total",
    "--format=csv,noheader,nounits",
)
NAMES_PYTHON = "`python` in the job, or in the cluster entry, names the interpreter of the ranks"
PROBE_SECONDS = 60.0


class Interface(Struct, frozen=True):
    """A network interface with an IPv4 address."""

    name: str
    address: str


class HostReport(Struct, frozen=True, kw_only=True):
    """What a Python and its host have: the document of `clusterkit.host_probe`."""

    workdir: str
    """The folder that was asked for, as an absolute path."""
    writable: bool
    python: str
    python_version: tuple[int, ...]
    cpus: int
    memory_mib: int
    interfaces: tuple[Interface, ...]
    reached_at: str
    """Which of its addresses SSH reached it at; empty without SSH."""
    versions: dict[str, str]
    tools: dict[str, str]
    gpus: str
    """nvidia-smi's list."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES."""

    def visible_gpus(self) -> tuple[Gpu, ...]:
        return parse_gpus(self.gpus, self.visible)

    def facts(self, host: str, address: str, **more: Any) -> HostFacts:
        """Those of a host; ``more`` says what is decided and not found."""
        return HostFacts(
            host=host, address=address, versions=self.versions, tools=self.tools,
            **{"cpus": self.cpus, "memory_mib": self.memory_mib, **more},
        )  # fmt: skip


def unseen(host: str, address: str, cpus: int, gpus: tuple[Gpu, ...],
           python: tuple[str, str]) -> HostFacts:  # fmt: skip
    """Facts of what nobody could look at; ``python``: the interpreter, and where it comes from."""
    return HostFacts(
        host=host, address=address, cpus=cpus, memory_mib=0, gpus=gpus, python=python[0],
        python_origin=python[1], versions=dict.fromkeys(PACKAGES, UNSEEN),
        tools=dict.fromkeys(TOOLS, UNSEEN),
    )  # fmt: skip


def questions(workdir: str) -> dict[str, object]:
    """What `clusterkit.host_probe` is asked."""
    return {"workdir": workdir, "packages": PACKAGES, "tools": TOOLS, "gpu_query": GPU_QUERY}


def on_this_machine(python: str) -> str:
    """The path of an interpreter that this machine has.

    Raises:
        Unavailable: it has none.
    """
    if (found := shutil.which(python)) is None:
        raise Unavailable(
            f"python: {python} does not exist, or cannot be executed", hint=NAMES_PYTHON
        )
    return os.path.abspath(found)


def looked_at(
    transport: Transport, host: str, python: str, *, own: bool, where: str, workdir: str
) -> HostReport:
    """The report of a Python; ``own``: of this machine, where it may be this very one."""
    if own and python == sys.executable:
        return msgspec.convert(host_probe.document(questions(workdir)), HostReport)
    return ask(transport, host, [python], python=python, where=where, workdir=workdir)


def ask(
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
    """The report of another Python; it runs `clusterkit.host_probe`, from its standard input.

    Args:
        start: the command that starts it.
        python: what it is called.
        where: which host or image it is of, for messages.
        workdir: folder to look at.
        refusal: the error where it prints no report; by default that it does not work.

    Raises:
        Unavailable: it does not work, or is too old for the node agent.
    """
    program = (resources.files("clusterkit") / "host_probe.py").read_bytes()
    question = msgspec.json.encode(questions(workdir)).decode()
    failure = f"{where}: python: {python} is not a working Python interpreter"
    try:
        done = transport.run(host, [*start, "-", question], env=env, stdin=program, timeout=seconds)
    except SubmitFailed as error:
        raise Unavailable(f"{failure}: {error.message}", hint) from None
    try:
        report = msgspec.json.decode(done.stdout, type=HostReport)
    except msgspec.MsgspecError:
        if refusal is not None:
            raise refusal(done) from None
        said = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.exit_code}"
        raise Unavailable(f"{failure}: {said}", hint) from None
    if report.python_version < OLDEST_PYTHON:
        raise Unavailable(
            f"{where}: python: {python} is Python {'.'.join(map(str, report.python_version))}",
            hint=f"{'.'.join(map(str, OLDEST_PYTHON))} or newer is needed",
        )
    return report


def interpreter(job: JobSpec | None, *entries: tuple[str | None, str]) -> tuple[str, str]:
    """The ranks' Python and where it comes from: the job's, or the first that is there.

    Args:
        entries: interpreters, None for none, and where each comes from; the last is there.
    """
    own = None if job is None else job.python
    found = next((python, origin) for python, origin in ((own, "job: python"), *entries) if python)
    return found


def own_interpreter(job: JobSpec | None, entry: str | None) -> tuple[str, str]:
    """`interpreter` where the ranks can have this machine's: the active environment's, or ours."""
    active = []
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        folder = os.environ.get(variable, "")
        python = sys.executable if folder == sys.prefix else os.path.join(folder, "bin/python")
        # A shell may outlive the environment that was active in it.
        if folder and os.access(python, os.X_OK):
            active.append((python, f"the active environment, {variable}"))
    return interpreter(
        job, (entry, "cluster: python"), *active, (sys.executable, "clusterkit's own")
    )


def parse_gpus(csv: str, visible: str | None = None) -> tuple[Gpu, ...]:
    """GPUs from nvidia-smi's ``index, uuid, name, memory`` lines.

    Args:
        csv: the output; lines of another form (a driver's complaint) are passed over.
        visible: CUDA_VISIBLE_DEVICES, by index or UUID: which GPUs and in which order.
    """
    listed: dict[str, Gpu] = {}
    for line in csv.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0].isdigit() and fields[3].isdigit():
            gpu = Gpu(fields[0], fields[2], int(fields[3]))
            listed[fields[0]] = listed[fields[1]] = gpu
    if visible is None:
        return tuple(dict.fromkeys(listed.values()))
    found = []
    for name in (name.strip() for name in visible.split(",")):
        # As CUDA does: a UUID may be cut short, and what follows an unknown name is not seen.
        matching = [
            key for key in listed if key == name or (name[:4] == "GPU-" and key.startswith(name))
        ]
        if not matching:
            break
        found.append(listed[matching[0]])
    return tuple(found)


def assumed_gpus(wanted: int | Literal["auto"], job: JobSpec, nodes: int = 1) -> tuple[Gpu, ...]:
    """Those of nodes that cannot be looked at: what the entry says, or one for each rank."""
    if wanted == "auto":
        wanted = 0 if job.gpus_per_node == "auto" else nodes * job.gpus_per_node
    return tuple(Gpu(str(index), "GPU", 0) for index in range(wanted if job.device != "cpu" else 0))


def limited(gpus: tuple[Gpu, ...], wanted: int | Literal["auto"]) -> tuple[Gpu, ...]:
    """The first of this machine's GPUs, as many as a cluster entry wants.

    Raises:
        BadInput: there are fewer.
    """
    if wanted == "auto":
        return gpus
    if wanted > len(gpus):
        raise BadInput(
            f"gpus: {wanted} wanted, but this machine has {len(gpus)}",
            hint="auto: all that are visible",
            cluster="gpus",
        )
    return gpus[:wanted]
