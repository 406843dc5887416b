"""What backends share that decide where a job's nodes run: device, ranks, threads, ports. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

import msgspec

from clusterkit.cluster import Facts, Gpu, HostFacts, Project
from clusterkit.errors import BadInput, counted
from clusterkit.plan import Tree
from clusterkit.spec import JobSpec
from clusterkit.sync import snapshot

GPU_IMAGE, CPU_IMAGE = "clusterkit:gpu", "clusterkit:cpu"
"""What `make image` makes, in a checkout of clusterkit."""


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
        having = next(host.host for host in hosts if host.gpus)
        raise BadInput(
            f"device: auto: {without[0]} has no GPU, {having} has",
            hint="leave that host out (--exclude), or --set device=cpu",
            job="device",
        )
    return "cpu", "no GPU found"


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


def threads_of(job: JobSpec, cpus: int, ranks: int) -> tuple[int, str]:
    """CPU threads per rank, and where the number comes from."""
    if job.threads_per_rank != "auto":
        return job.threads_per_rank, "job: threads_per_rank"
    return max(1, cpus // ranks), f"{counted(cpus, 'core')} / {counted(ranks, 'rank')}"


def interface_env(interface: str | None) -> dict[str, str]:
    """The environment that keeps gloo and NCCL to one network interface; None: to none."""
    if not interface:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def copies(job: JobSpec, facts: Facts, run_dir: str) -> tuple[JobSpec, str, tuple[Tree, ...], str]:
    """What is copied to hosts that do not see the submitter's disk.

    Returns:
        The job with its program's path there, the ranks' folder, the trees, and the folder that
        PYTHONPATH needs for clusterkit itself, if one is.
    """
    workdir, program = job.workdir or run_dir, job.program
    tree, shipped = tree_of(facts, facts.project), tree_of(facts, facts.shipped, "clusterkit")
    if tree is not None:
        workdir = posixpath.normpath(_copied(tree, workdir))
        if program is not None and posixpath.isabs(program):
            program = _copied(tree, program)
    trees = tuple(each for each in (tree, shipped) if each is not None)
    return (
        msgspec.structs.replace(job, program=program), workdir, trees,
        shipped.path if shipped else "",
    )  # fmt: skip


def tree_of(facts: Facts, found: Project | None, name: str | None = None) -> Tree | None:
    """Where a copy of a project lies on the hosts."""
    if found is None:
        return None
    name = name or re.sub(r"[^A-Za-z0-9_.-]+", "-", posixpath.basename(found.root)) or "project"
    path = posixpath.join(facts.home, "projects", name, found.digest[:16])
    return Tree(found.root, path, found.digest, f"{snapshot.summary(found)}; {found.how}")


def _copied(tree: Tree, path: str) -> str:
    """A path of the submitter's in the copy."""
    return posixpath.join(tree.path, posixpath.relpath(path, tree.source))
