"""The CPUs of each rank: those of its GPU's NUMA node, as ``torchrun --numa-binding node`` has it.

Ranks of one node share its CPUs, and their memory is there as well, where they touch it first. All
ranks or none are bound: what is not certain is told instead. Unlike torch (2.13,
numa/binding.py) this starts no CUDA, needs no numactl, and takes no unknown node for node 0.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from clusterkit.agent.files import read_text
from clusterkit.agent.visible import visible_gpus


class Binding(NamedTuple):
    """The CPUs of each local rank, and what the node's log is told of it."""

    cpus: list[list[int]] = []  # noqa: RUF012 (nobody changes it); empty: no rank is bound
    remark: str = ""


class _Gpu(NamedTuple):
    address: str
    uuid: str
    model: str
    node: int  # -1: the kernel does not know it


class _Uncertain(Exception):
    """Why no rank is bound."""


def near_gpus(
    nproc: int, env: Mapping[str, str], allowed: Collection[int], root: str = "/"
) -> Binding:
    """Return the CPUs of the ranks of this node.

    Args:
        nproc: local rank N uses the Nth GPU that CUDA sees.
        env: of the ranks.
        allowed: the CPUs that the agent may use.
    """
    if env.get("CLUSTERKIT_DEVICE") != "cuda":
        return Binding()
    lists = {
        int(file.parent.name[4:]): text
        for file in Path(root, "sys/devices/system/node").glob("node[0-9]*/cpulist")
        if (text := read_text(file).strip())  # the memory of some GPUs is a node without CPUs
    }
    if len(lists) < 2:
        return Binding()
    try:
        online = read_text(Path(root, "sys/devices/system/cpu/online")).strip()
        if {*allowed} != {*_numbers(online)}:
            raise _Uncertain("the CPUs that this node may use have been chosen already")
        nodes = _nodes(nproc, env, root)
        if bare := sorted({*nodes} - lists.keys()):
            raise _Uncertain(f"NUMA node {bare[0]} has no CPUs")
        cpus = {node: _numbers(lists[node]) for node in {*nodes}}
        _check_threads(env.get("OMP_NUM_THREADS", ""), min(map(len, cpus.values())))
    except (_Uncertain, ValueError) as why:
        return Binding(remark=f"no rank is bound to its GPU's NUMA node: {why}")
    spans = []
    for node, ranks in itertools.groupby(range(nproc), nodes.__getitem__):
        first, *others = ranks
        span = f"ranks {first} to {others[-1]}" if others else f"rank {first}"
        spans.append(f"local {span}: CPUs {lists[node]} (node {node})")
    remark = f"bound to the NUMA nodes of their GPUs: {'; '.join(spans)}"
    return Binding([cpus[node] for node in nodes], remark)


def _check_threads(setting: str, cpus: int) -> None:
    # Without OMP_NUM_THREADS torch counts the CPUs that it may use (tried with torch 2.13), and
    # sums of another number of threads differ.
    first = setting.partition(",")[0].strip()
    if not first.isdigit():
        raise _Uncertain("OMP_NUM_THREADS is not set: another number of threads would result")
    if int(first) > cpus:
        raise _Uncertain(f"OMP_NUM_THREADS={first}, but a NUMA node has {cpus} CPUs: "
                         f"threads_per_rank: {cpus} binds them")  # fmt: skip


def _nodes(nproc: int, env: Mapping[str, str], root: str) -> list[int]:
    """Return the NUMA node of each local rank's GPU."""
    gpus = _gpus(root)
    if not gpus:
        raise _Uncertain("/proc/driver/nvidia/gpus has no GPU that this node may use")
    if unknown := [gpu.address for gpu in gpus if gpu.node < 0]:
        raise _Uncertain(f"the kernel does not know the NUMA node of GPU {unknown[0]}")
    if len({gpu.node for gpu in gpus}) == 1:
        return [gpus[0].node] * nproc  # whichever they use, also slices of MIG
    by_speed = env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"  # CUDA's default
    if by_speed and len({gpu.model for gpu in gpus}) > 1:
        raise _Uncertain("the GPUs differ, and CUDA_DEVICE_ORDER is not PCI_BUS_ID")
    listed = {str(index): str(index) for index in range(len(gpus))}
    # A GPU that no program has opened, and one that does not answer, has question marks.
    listed |= {gpu.uuid: str(i) for i, gpu in enumerate(gpus) if gpu.uuid and "?" not in gpu.uuid}
    if 0 < len(listed) - len(gpus) < len(gpus):
        raise _Uncertain("a GPU reports no UUID: CUDA may not enumerate it")
    visible = env.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus)))))
    seen = visible_gpus(listed, visible)[:nproc]
    if len(seen) < nproc or not all(map(str.isdigit, seen)):
        raise _Uncertain(f"CUDA_VISIBLE_DEVICES={visible} does not give the GPUs' PCI addresses")
    return [gpus[int(index)].node for index in seen]


def _gpus(root: str) -> list[_Gpu]:
    """Return the GPUs that CUDA counts, in the order of their PCI addresses."""
    found = []
    for file in Path(root, "proc/driver/nvidia/gpus").glob("*/information"):
        fields = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", read_text(file), re.MULTILINE))
        address = file.parent.name
        node = read_text(Path(root, "sys/bus/pci/devices", address, "numa_node")).strip() or "-1"
        # A container by CDI, and Slurm with ConstrainDevices, show GPUs that CUDA does not count:
        # the control group denies them, to access(2) as well (Linux, inode_permission).
        device = Path(root, f"dev/nvidia{fields.get('Device Minor')}")
        if fields.get("GPU Excluded") != "Yes" and os.access(device, os.R_OK | os.W_OK):
            gpu = _Gpu(address, fields.get("GPU UUID", ""), fields.get("Model", ""), int(node))
            found.append(gpu)
    return sorted(found, key=lambda gpu: (len(gpu.address), gpu.address))


def _numbers(ranges: str) -> list[int]:
    """Return the numbers of a list such as ``0-2,5``."""
    ends = [span.split("-") for span in ranges.split(",") if span]
    return [number for span in ends for number in range(int(span[0]), int(span[-1]) + 1)]
