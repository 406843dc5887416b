"""Which CPUs ranks run on: those near their GPUs, on recorded hosts."""

import functools
import os

import pytest

from clusterkit.agent import numa
from tests.forked import Case, servers
from tests.sysfs import lay_out

NEAR = {0: [*range(56), *range(112, 168)], 1: [*range(56, 112), *range(168, 224)]}
GPUS = {"CLUSTERKIT_DEVICE": "cuda", "OMP_NUM_THREADS": "28"}
UUID = "GPU-0000000{}-1111-2222-3333-444444444444".format
SEVEN_FIRST = {"CUDA_VISIBLE_DEVICES": "7,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
BUS = "sys/bus/pci/devices/0000:{}:00.0/numa_node {}"
INFORMATION = r"proc/driver/nvidia/gpus/0000:{}:00.0/information {}: *\t.*"
ONE_NODE = ("sys/devices/system/node/node1/cpulist .*", "")


def bound(root, nproc, allowed=range(224), **env):
    return numa.near_gpus(nproc, GPUS | env, allowed, root)


def nodes(binding):
    return [next(node for node in NEAR if NEAR[node] == cpus) for cpus in binding.cpus]


@pytest.mark.parametrize(
    ("nproc", "env", "expected"),
    [
        (8, {}, [0, 0, 0, 0, 1, 1, 1, 1]),
        (2, SEVEN_FIRST, [1, 0]),
        (2, {"CUDA_VISIBLE_DEVICES": f"{UUID(6)},{UUID(3)}"}, [1, 0]),
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-00000005,2,1"}, [1, 0]),
        (1, {"OMP_NUM_THREADS": "112,4"}, [0]),
    ],
)
def test_rank_is_bound_to_cpus_of_numa_node_of_its_gpu(tmp_path, nproc, env, expected):
    found = bound(lay_out(tmp_path, "h100x8"), nproc, **env)
    assert nodes(found) == expected
    assert found.remark.startswith("bound to the NUMA nodes of their GPUs: local rank")


def test_remark_lists_cpus_and_numa_node_of_local_ranks(tmp_path):
    remark = bound(lay_out(tmp_path, "h100x8"), 5).remark
    first = "local ranks 0 to 3: CPUs 0-55,112-167 (node 0)"
    assert remark.endswith(f"GPUs: {first}; local rank 4: CPUs 56-111,168-223 (node 1)")


@pytest.mark.parametrize(
    ("changes", "env", "why"),
    [
        ([], {"OMP_NUM_THREADS": ""}, "OMP_NUM_THREADS is not set"),
        ([], {"OMP_NUM_THREADS": "113"}, "a NUMA node has 112 CPUs: threads_per_rank: 112"),
        ([], {"CUDA_VISIBLE_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES=0 does not give"),
        ([], {"CUDA_VISIBLE_DEVICES": "0,0"}, "CUDA_VISIBLE_DEVICES=0,0 does not give"),
        ([], {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, "does not give"),
        ([(BUS.format("df", 1), BUS.format("df", -1))], {}, "know the NUMA node of GPU 0000:df:0"),
        ([(BUS.format("df", 1), BUS.format("df", 7))], SEVEN_FIRST, "NUMA node 7 has no CPUs"),
        ([(BUS.format("df", 1), BUS.format("df", "none"))], {}, "invalid literal"),
        # A GPU that CUDA may not count: the numbers after it are others.
        ([(INFORMATION.format("43", "GPU UUID"),
           "proc/driver/nvidia/gpus/0000:43:00.0/information GPU UUID: \t GPU-????????-????")],
         {}, "a GPU reports no UUID"),
        # CUDA numbers the fastest GPU first.
        ([(INFORMATION.format("1b", "Model"),
           "proc/driver/nvidia/gpus/0000:1b:00.0/information Model: \t NVIDIA H100 PCIe")],
         {}, "the GPUs differ"),
        ([("proc/driver/nvidia/gpus/.*", "")], {}, "has no GPU that this node may use"),
    ],
)  # fmt: skip
def test_uncertain_topology_binds_no_rank_and_names_reason(tmp_path, changes, env, why):
    found = bound(lay_out(tmp_path, "h100x8", *changes), 2, **env)
    assert found.cpus == []
    assert found.remark.startswith("no rank is bound to its GPU's NUMA node: ")
    assert why in found.remark


def test_restricted_cpu_affinity_is_kept(tmp_path):
    found = bound(lay_out(tmp_path, "h100x8"), 2, allowed=range(64))
    assert (found.cpus, "chosen already" in found.remark) == ([], True)


def test_excluded_gpu_is_not_counted(tmp_path):
    excluded = "proc/driver/nvidia/gpus/0000:1b:00.0/information GPU Excluded:\t Yes"
    root = lay_out(tmp_path, "h100x8", (INFORMATION.format("1b", "GPU Excluded"), excluded))
    assert nodes(bound(root, 7)) == [0, 0, 0, 1, 1, 1, 1]


def test_gpus_without_device_file_are_not_counted(tmp_path):
    """CUDA numbers those that the control group lets this node use, from 0."""
    root = lay_out(tmp_path, "h100x8", *((f"dev/nvidia{i} .*", "") for i in (0, 1, 2, 3)))
    assert nodes(bound(root, 2, CUDA_VISIBLE_DEVICES="0,1")) == [1, 1]


def test_gpus_without_uuids_are_found_by_index_only(tmp_path):
    name = "proc/driver/nvidia/gpus/0000:{}:00.0/information GPU UUID: \t GPU-????????-????"
    unknown = [
        (INFORMATION.format(bus, "GPU UUID"), name.format(bus))
        for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
    ]
    root = lay_out(tmp_path, "h100x8", *unknown)
    assert nodes(bound(root, 2, **SEVEN_FIRST)) == [1, 0]
    assert bound(root, 2, CUDA_VISIBLE_DEVICES=f"{UUID(6)},{UUID(3)}").cpus == []


def test_mig_rank_is_bound_if_all_gpus_share_one_numa_node(tmp_path):
    there = [(BUS.format(bus, 1), BUS.format(bus, 0)) for bus in ("9d", "c3", "d1", "df")]
    root = lay_out(tmp_path, "h100x8", *there)
    assert nodes(bound(root, 1, CUDA_VISIBLE_DEVICES="MIG-1111")) == [0]


@pytest.mark.parametrize("env", [{}, {"CLUSTERKIT_DEVICE": "cpu"}])
def test_no_binding_on_single_numa_node_or_cpu_device(tmp_path, env):
    root = lay_out(tmp_path, "h100x8", *([] if env else [ONE_NODE]))
    assert bound(root, 8, **env) == numa.Binding()


PROGRAM = """
import os
print(sorted(os.sched_getaffinity(0)))
import torch
before = torch.get_num_threads()
torch.rand(100, 100) @ torch.rand(100, 100)
print(before, torch.get_num_threads())
import threading
threading.Thread(target=lambda: print(sorted(os.sched_getaffinity(0)))).start()
"""


@pytest.mark.parametrize("bind", ["auto", "none"])
def test_forked_ranks_run_on_bound_cpus_with_unchanged_torch_threads(
    tmp_path, tmp_path_factory, monkeypatch, bind
):
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one CPU alone: there is nothing to bind to")
    lists = [",".join(map(str, each)) for each in (cpus, cpus[:1], cpus[1:])]
    paths = ("cpu/online", "node/node0/cpulist", "node/node1/cpulist")
    lines = [f"sys/devices/system/{path}" for path in paths]
    changes = [(f"{line} .*", f"{line} {own}") for line, own in zip(lines, lists, strict=True)]
    root, told = lay_out(tmp_path / "root", "h100x8", *changes), []
    monkeypatch.setattr(numa, "near_gpus", functools.partial(numa.near_gpus, root=root))
    for name, value in {**GPUS, **SEVEN_FIRST, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    case = Case(PROGRAM)
    case.lay_out(tmp_path / "case")
    monkeypatch.chdir(tmp_path / "case")
    with servers(tmp_path_factory, nproc=2) as forked:
        server = forked.server(case)
        server._options.bind, server._log.line = bind, told.append
        server._options.preload = ["torch"]
        said = [output.decode().splitlines() for output, _ in forked.run(case)]
        forked.run(case)
    own = [cpus[1:], cpus[:1]] if bind == "auto" else [cpus, cpus]
    assert said == [[str(each), "1 1", str(each)] for each in own]
    assert len(told) == (bind == "auto")  # not at each start
