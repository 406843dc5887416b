"""Decisions of `place` that backends share: device, ranks, threads, project copies. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

import msgspec

from clusterkit.cluster import Facts, HostFacts, Project
from clusterkit.errors import BadInput, pluralize
from clusterkit.hosts.gpus import names
from clusterkit.plan import Tree
from clusterkit.spec import JobSpec
from clusterkit.sync import snapshot

GPU_IMAGE, CPU_IMAGE = "clusterkit:gpu", "clusterkit:cpu"
"""The images that `make image` builds, in a checkout of clusterkit."""


def device_of(job: JobSpec, hosts: Sequence[HostFacts]) -> tuple[str, str]:
    """Return ``cuda`` or ``cpu``, and where the choice comes from.

    Raises:
        BadInput: the job wants CUDA and a host has no GPU; or a host seems to have GPUs that cannot
            be used, and the job leaves it to us on what, or on how many, it runs; or the GPUs are
            there, and torch is a build for CPUs: programs that look would train on those.
    """
    if job.device == "cpu":
        return "cpu", "job: device"
    for host in hosts:
        left = bool(host.gpus)
        chosen = job.gpus_per_node != "auto" if left else job.device == "cuda"
        if host.gpu_trouble and not chosen:
            raise BadInput(
                f"device: {job.device}: {host.host}: {host.gpu_trouble}",
                hint=f"--gpus {len(host.gpus)} trains on the others; " * left
                + "--set device=cpu trains on CPUs; `clusterkit doctor` looks at the GPUs",
                job="device",
            )
    without = [host for host in hosts if not host.gpus]
    if job.device == "cuda" and without:
        why = f": {without[0].gpu_trouble}" if without[0].gpu_trouble else ""
        raise BadInput(
            f"device: cuda, but {without[0].host} has no GPU{why}", hint="device: auto, or cpu",
            job="device",
        )  # fmt: skip
    for host in hosts if not without and job.command is None else ():
        if (torch := host.versions.get("torch", "")).endswith("+cpu"):
            raise BadInput(
                f"device: {job.device}: torch {torch} of {host.python} on {host.host} is built "
                "without CUDA",
                hint="install torch from an index that has it for CUDA (`clusterkit doctor` says "
                "how); --set device=cpu trains on CPUs",
                job="device",
            )
    if job.device != "auto":
        return job.device, "job: device"
    if not without:
        remarks = dict.fromkeys(host.gpu_remark for host in hosts if host.gpu_remark)
        return "cuda", "; ".join([names(gpu.name for gpu in hosts[0].gpus), *remarks])
    if len(without) < len(hosts):
        having = next(host.host for host in hosts if host.gpus)
        raise BadInput(
            f"device: auto: {without[0].host} has no GPU, but {having} does",
            hint="exclude that host (--exclude), or --set device=cpu",
            job="device",
        )
    return "cpu", "no GPU found"


def gpu_env(host: HostFacts, device: str, first: int, nproc: int) -> dict[str, str]:
    """Return the environment that restricts a node to ``nproc`` GPUs of its host, from number
    ``first`` on.

    Raises:
        BadInput: they are MIG slices, and several ranks would share them.
    """
    if device != "cuda":
        # torch's optimizers ask for the current stream of a GPU that is there, also on a CPU: this
        # takes memory of it, or fails of its driver (torch 2.13, optim/optimizer.py).
        return {"CUDA_VISIBLE_DEVICES": ""} if host.gpus or host.gpu_trouble else {}
    own = host.gpus[first : first + nproc]
    if nproc > 1 and any(gpu.index.startswith("MIG-") for gpu in own):
        raise BadInput(
            f"gpus_per_node: {nproc} ranks cannot share MIG slices: NCCL does not connect them",
            hint="--gpus 1, or turn MIG off: nvidia-smi -mig 0",
            job="gpus_per_node",
        )
    share = ",".join(gpu.index for gpu in own)
    # nvidia-smi numbers GPUs by their PCI address, CUDA by default the fastest first.
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"CUDA_VISIBLE_DEVICES": share, "CLUSTERKIT_GPUS": share, **order}


def split_gpus(
    job: JobSpec, host: HostFacts, nodes: int, device: str, *, place: str, flag: str
) -> tuple[int, str]:
    """Return the ranks of each of several nodes that share one host, and where that comes from.

    Args:
        place: the host's name in messages.
        flag: the option for fewer GPUs, for hints; ``{0}`` stands for their number.

    Raises:
        BadInput: the host has too few GPUs.
    """
    available = len(host.gpus)
    if job.gpus_per_node != "auto":
        wanted = job.gpus_per_node * nodes
        if device == "cuda" and wanted > available:
            possible = available // nodes
            fewer = f"{flag.format(possible)}, or " if possible else ""
            raise BadInput(
                f"gpus_per_node: {pluralize(nodes, 'node')} x {job.gpus_per_node} = "
                f"{pluralize(wanted, 'GPU')}, but {place} has {available}",
                hint=f"{fewer}--set device=cpu to run on CPU threads",
                job="gpus_per_node",
            )
        return job.gpus_per_node, "job: gpus_per_node"
    if device == "cpu":
        return 1, "without GPUs one rank per node"
    if available < nodes:
        raise BadInput(
            f"nodes: {nodes} nodes cannot share {pluralize(available, 'GPU')} of {place}",
            hint=f"--nodes {available}, or --set device=cpu to run on CPU threads",
            job="nodes",
        )
    return available // nodes, f"{pluralize(available, 'GPU')} / {pluralize(nodes, 'node')}"


def threads_of(job: JobSpec, cpus: int, ranks: int) -> tuple[int, str]:
    """Return the CPU threads of each rank, and where the number comes from."""
    if job.threads_per_rank != "auto":
        return job.threads_per_rank, "job: threads_per_rank"
    return max(1, cpus // ranks), f"{pluralize(cpus, 'core')} / {pluralize(ranks, 'rank')}"


def interface_env(interface: str | None) -> dict[str, str]:
    """Return the environment that makes gloo and NCCL use this network interface; None: any."""
    if not interface:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def project_copies(
    job: JobSpec, facts: Facts, run_dir: str
) -> tuple[JobSpec, str, tuple[Tree, ...], str]:
    """Decide what is copied to hosts that do not see the submitter's disk.

    Returns:
        The job with its program's path on the hosts, the ranks' working directory, the trees to
        copy, and the copy of clusterkit itself for PYTHONPATH; empty: none is copied.
    """
    workdir, program = job.workdir or run_dir, job.program
    tree = project_tree(facts, facts.project)
    shipped = project_tree(facts, facts.shipped, "clusterkit")
    if tree is not None:
        workdir = posixpath.normpath(_copied(tree, workdir))
        if program is not None and posixpath.isabs(program):
            program = _copied(tree, program)
    trees = tuple(each for each in (tree, shipped) if each is not None)
    job = msgspec.structs.replace(job, program=program)
    return job, workdir, trees, shipped.path if shipped else ""


def project_tree(facts: Facts, source: Project | None, name: str | None = None) -> Tree | None:
    """Return a project and the place of its copy on the hosts; None: there is no project."""
    if source is None:
        return None
    name = name or re.sub(r"[^A-Za-z0-9_.-]+", "-", posixpath.basename(source.root)) or "project"
    path = posixpath.join(facts.home, "projects", name, source.digest[:16])
    return Tree(source.root, path, source.digest, f"{snapshot.summary(source)}; {source.how}")


def _copied(tree: Tree, path: str) -> str:
    """Return the path of one of the submitter's files in the copy."""
    return posixpath.join(tree.path, posixpath.relpath(path, tree.source))
