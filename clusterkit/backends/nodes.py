"""What backends share whose nodes run `clusterkit.agent`: reading what it left, GPUs, planning."""

from __future__ import annotations

import json
import os
import posixpath
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from clusterkit.agent import STOPPED, STOPPED_BY_PEERS
from clusterkit.backends.base import Handle, Observation
from clusterkit.cluster import Gpu, HostFacts
from clusterkit.errors import BadInput, Unavailable, counted
from clusterkit.plan import Plan
from clusterkit.runs import node_dir
from clusterkit.spec import JobSpec
from clusterkit.status import NodeCause, NodeStatus, RankExit, State
from clusterkit.transport import Transport

PACKAGES = ("torch", "deepspeed", "transformers", "clusterkit")
"""Packages whose versions facts hold."""
TOOLS = ("mpirun", "ninja", "c++")
"""Commands that a launcher may need."""
OLDEST_PYTHON = (3, 11)
"""Of the ranks' interpreter."""
GPU_IMAGE, CPU_IMAGE = "clusterkit:gpu", "clusterkit:cpu"
"""What `make image` makes."""
GPU_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total",
    "--format=csv,noheader,nounits",
)


# ---------------------------------------------------------------- Python


def interpreter(job: JobSpec | None, *entries: tuple[str | None, str]) -> tuple[str, str]:
    """The ranks' Python and where it comes from: the job's, or the first that is there.

    Args:
        entries: interpreters, None for none, and where each comes from; the last is there.
    """
    own = None if job is None else job.python
    found = next((python, origin) for python, origin in ((own, "job: python"), *entries) if python)
    return found


def check_version(version: Sequence[int], python: str, where: str) -> None:
    """Refuse an interpreter that is too old for the node agent.

    Raises:
        Unavailable: names both versions.
    """
    if tuple(version) < OLDEST_PYTHON:
        raise Unavailable(
            f"{where}: python: {python} is Python {'.'.join(map(str, version))}",
            hint=f"{'.'.join(map(str, OLDEST_PYTHON))} or newer is needed",
        )


# ---------------------------------------------------------------- GPUs


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


def probe_gpus(transport: Transport, host: str) -> tuple[Gpu, ...]:
    """What this machine's nvidia-smi lists, limited to CUDA_VISIBLE_DEVICES; none without it."""
    if not shutil.which(GPU_QUERY[0]):
        return ()
    done = transport.run(host, GPU_QUERY, timeout=30)
    if done.exit_code:
        return ()
    return parse_gpus(done.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def device_of(job: JobSpec, hosts: Sequence[HostFacts]) -> tuple[str, str]:
    """``cuda`` or ``cpu``, and where that comes from.

    Raises:
        BadInput: the job wants CUDA and a host has no GPU.
    """
    without = [host.host for host in hosts if not host.gpus]
    if job.device == "cuda" and without:
        raise BadInput(
            f"device: cuda, but {without[0]} has no GPU", hint="device: auto, or cpu", job="device"
        )
    if job.device != "auto":
        return job.device, "job: device"
    if not without:
        return "cuda", f"{len(hosts[0].gpus)} x {hosts[0].gpus[0].name}"
    if len(without) < len(hosts):
        raise BadInput(
            f"device: auto: {without[0]} has no GPU, {_first_with(hosts)} has",
            hint="leave that host out (--exclude), or --set device=cpu",
            job="device",
        )
    return "cpu", "no GPU found"


def _first_with(hosts: Sequence[HostFacts]) -> str:
    return next(host.host for host in hosts if host.gpus)


def gpu_share(gpus: Sequence[Gpu], device: str, first: int, nproc: int) -> dict[str, str]:
    """The environment that gives one node ``nproc`` of a host's GPUs, from the ``first`` on."""
    if device != "cuda":
        return {}
    share = ",".join(gpu.index for gpu in gpus[first : first + nproc])
    return {"CUDA_VISIBLE_DEVICES": share, "CLUSTERKIT_GPUS": share}


def divided_gpus(
    job: JobSpec, host: HostFacts, nodes: int, device: str, *, place: str, flag: str
) -> tuple[int, str]:
    """Ranks of each of several nodes on one host, and where the number comes from.

    Args:
        place: the host in words.
        flag: what asks for fewer GPUs; ``{0}`` stands for how many.

    Raises:
        BadInput: the host has too few GPUs.
    """
    there = len(host.gpus)
    if job.gpus_per_node != "auto":
        wanted = job.gpus_per_node * nodes
        if device == "cuda" and wanted > there:
            fit = there // nodes
            fewer = f"{flag.format(fit)}, or " if fit else ""
            raise BadInput(
                f"gpus_per_node: {counted(nodes, 'node')} x {job.gpus_per_node} = "
                f"{counted(wanted, 'GPU')}, but {place} has {there}",
                hint=f"{fewer}--set device=cpu to run on CPU threads",
                job="gpus_per_node",
            )
        return job.gpus_per_node, "job: gpus_per_node"
    if device == "cpu":
        return 1, "without GPUs one rank per node"
    if there < nodes:
        raise BadInput(
            f"nodes: {nodes} nodes cannot share {counted(there, 'GPU')} of {place}",
            hint=f"--nodes {there}, or --set device=cpu to run on CPU threads",
            job="nodes",
        )
    return there // nodes, f"{counted(there, 'GPU')} / {counted(nodes, 'node')}"


def own_ports(port: int | Literal["auto"]) -> tuple[int, int]:
    """For rendezvous and for watching each other, where nothing else of this address listens."""
    chosen = 29500 if port == "auto" else port
    return chosen, 29501 if chosen != 29501 else 29502


def threads_of(job: JobSpec, cpus: int, ranks: int) -> tuple[int, str]:
    """CPU threads per rank, and where the number comes from."""
    if job.threads_per_rank != "auto":
        return job.threads_per_rank, "job: threads_per_rank"
    return max(1, cpus // ranks), f"{counted(cpus, 'core')} / {counted(ranks, 'rank')}"


# ---------------------------------------------------------------- watching


def node_file(handle: Handle, node: int, name: str) -> str:
    """A file that a node's agent writes, where the node keeps it."""
    return posixpath.join(node_dir(handle.plan.run_dir, handle.attempt, node), name)


def overall(states: set[State]) -> State:
    """A run's state from its nodes' states."""
    for state in (State.UNKNOWN, State.RUNNING, State.FAILED, State.CANCELLED):
        if state in states:
            return state
    if states == {State.SUCCEEDED}:
        return State.SUCCEEDED
    return State.RUNNING if State.SUCCEEDED in states else State.PENDING


def judge_node(
    node: int,
    host: str,
    *,
    begun: bool,
    alive: bool,
    exit_json: bytes | None,
    complaint: bytes,
    started: bytes | None = None,
) -> NodeStatus:
    """A node's state from what its agent left behind.

    Args:
        begun: it has recorded its process.
        alive: that process runs.
        exit_json: contents of ``exit.json``; None: there is none.
        complaint: contents of ``agent.log``.
        started: contents of ``started.json``; None: there is none.
    """
    if alive:
        return NodeStatus(node=node, host=host, state=State.RUNNING, remarks=remarks(started))
    if exit_json is not None:
        return judge_exit(node, host, exit_json)
    if not begun:
        return NodeStatus(node=node, host=host, state=State.PENDING)
    last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
    return NodeStatus(
        node=node,
        host=host,
        state=State.FAILED,
        reason=f"its agent ended without reporting an exit code{f': {last}' if last else ''}",
        remarks=remarks(started),
    )


def judge_exit(node: int, host: str, data: bytes) -> NodeStatus:
    """A node's state from its ``exit.json``; what cannot be read is UNKNOWN."""
    ended = _document(data)
    if not isinstance(ended.get("exit_code"), int):
        return NodeStatus(node=node, host=host, state=State.UNKNOWN, reason="exit.json is damaged")
    code, reason, at = ended["exit_code"], ended.get("reason"), ended.get("at")
    # One that was asked to stop and left with 0 has not done its work either.
    ended_as = State.SUCCEEDED if code == 0 else State.FAILED
    return NodeStatus(
        node=node,
        host=host,
        state=State.CANCELLED if _was_stopped(reason) else ended_as,
        exit_code=code,
        reason=reason,
        ended_at=at if isinstance(at, float) else None,
        remarks=remarks(data),
    )


def remarks(data: bytes | None) -> tuple[str, ...]:
    """What a node's agent remarks in its ``started.json`` or ``exit.json``."""
    found = _document(data or b"").get("remarks")
    return tuple(map(str, found)) if isinstance(found, list) else ()


def stop_arguments(plan: Plan, reason: str) -> list[str]:
    """For the node agent's program: end everything of a run on a host."""
    return ["stop", plan.run_dir, "--grace", f"{plan.stop_grace:g}", "--reason", reason]


def _was_stopped(reason: object) -> bool:
    return isinstance(reason, str) and (reason == STOPPED or reason.startswith(STOPPED_BY_PEERS))


def _endings(node: int, exit_json: bytes) -> tuple[list[RankExit], int]:
    """How the ranks ended of which the node agent knows it, and the kernel's memory kills."""
    try:
        ended = _document(exit_json)
        exits = [
            RankExit(node, end["rank"], end["exit_code"], end["at"])
            for end in ended.get("processes", [])
            if isinstance(end["rank"], int)
        ]
        return exits, int(ended.get("oom_kills", 0))
    except (ValueError, KeyError, TypeError, AttributeError):
        return [], 0


def observed(nodes: Sequence[NodeStatus], exit_json: Mapping[int, bytes]) -> Observation:
    """An attempt, from its nodes' states and the ``exit.json`` of those that left one."""
    failed = [node.node for node in nodes if node.state is State.FAILED]
    told = [_endings(node, exit_json.get(node, b"")) for node in failed]
    return Observation(
        state=overall({node.state for node in nodes}),
        nodes=tuple(nodes),
        rank_exits=tuple(end for ends, _ in told for end in ends),
        oom_kills=max((kills for _, kills in told), default=0),
        causes=tuple(cause for node, data in exit_json.items() for cause in _causes(node, data)),
    )


def _causes(node: int, exit_json: bytes) -> list[NodeCause]:
    """What was done to a node or its ranks, as its agent saw it."""
    ended = _document(exit_json)
    found, code = ended.get("causes"), ended.get("exit_code")
    return [
        NodeCause(
            node=node,
            words=str(words),
            hint="kill -CONT lets a stopped process go on" if "SIGSTOP" in str(words) else None,
            exit_code=code if isinstance(code, int) and code else 1,
        )
        for words in (found if isinstance(found, list) else ())
    ]


def _document(data: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
