"""What ranks use of their node."""

import json
import os
import types

import pytest

from clusterkit.agent import host, identity, usage
from clusterkit.agent.usage import Usage, own_gpus
from clusterkit.hosts.gpus import read_gpus

TABLE = """\
0, GPU-aa, 93, 61234
1, GPU-bb, 0, 4
2, GPU-cc, [N/A], [N/A]
3, GPU-dd, 100, 81000
"""


def test_usage_measures_cpu_memory_and_gpu_of_live_ranks(tmp_path, monkeypatch):
    mine = identity(os.getpid())
    ranks = [{**mine, "rank": 3}, {**mine, "rank": 2}, {**mine, "rank": 4, "start_ticks": 1}]
    monkeypatch.setattr(usage, "nvidia_smi", lambda columns, seconds: TABLE)
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0,1")
    watched = Usage(types.SimpleNamespace(folder=tmp_path), lambda: ranks, 1, print)
    found = watched.measure()
    assert [*found] == ["2", "3"]
    assert found["2"][0] is None
    assert found["2"][1] > 1 << 20
    assert (found["2"][2:], found["3"][2:]) == ([100, 81000 << 20], [93, 61234 << 20])
    assert watched.measure()["2"][0] >= 0.0
    json.dumps(found)


def test_usage_reports_less_often_for_large_runs():
    assert [Usage(None, list, nodes, print)._pause for nodes in (1, 250, 1000)] == [5.0, 5.0, 20.0]


def test_own_gpus_lists_gpus_in_rank_order(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert own_gpus(TABLE) == [(93, 61234 << 20), (0, 4 << 20), (), (100, 81000 << 20)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-dd,1")
    assert own_gpus(TABLE) == [(100, 81000 << 20), (0, 4 << 20)]
    assert own_gpus("") == []
    ill = "Failed to initialize NVML: Driver/library version mismatch\nNVML library: 535.1\n"
    assert own_gpus(ill) == []


@pytest.mark.parametrize(
    ("visible", "used"),
    [("", []), ("3,0,1", [100, 93, 0]), ("0,0", []), ("01", [0]), ("1x", [0]), ("0,9,1", [93]),
     ("GPU-d", [100]), ("GPU-", []), ("GPU-aa,GPU-aa", []), ("GPU-bb, 0", [0, 93]),
     ("MIG-1,MIG-2", [None, None])],
)  # fmt: skip
def test_own_gpus_reads_visible_devices_as_cuda_does(visible, used, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [one[0] if one else None for one in own_gpus(TABLE)] == used
    listed = "".join(
        f"{i}, GPU-{c}{c}, NVIDIA H100 80GB HBM3, 81559\n" for i, c in enumerate("abcd")
    )
    assert len(read_gpus(listed, "", visible).gpus) == len(used)


def test_has_gpus_detects_nvidia_and_wsl_devices(monkeypatch):
    for path, said in (("/dev/nvidiactl", True), ("/dev/dxg", True), ("/dev/kfd", False)):
        monkeypatch.setattr(os.path, "exists", lambda asked, path=path: asked == path)
        assert host.has_gpus() is said
