"""What NCCL's own log tells of a run's network; its lines have the words of NCCL 2.29."""

import functools
import os

import pytest

from clusterkit.agent import host
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.streams import Stream
from tests.sysfs import RECORDED, lay_out

LINES = RECORDED.parent / "nccl_log"
DEVICES = ("dev/nvidia0 ", "dev/nvidia0 \ndev/infiniband/uverbs0 ")
ETHERNET = (r"(sys/\S*link_layer) InfiniBand", r"\1 Ethernet")
DOWN = (r"(sys/\S*/state) 4: ACTIVE", r"\1 1: DOWN")
TOLD = "NET/Socket: NCCL sends over TCP, although InfiniBand is active on mlx5_0, mlx5_10, "


@pytest.fixture
def told(tmp_path, monkeypatch):
    """``told(log, change, ...)``: what a node with these files says of that log of its ranks."""

    def read(name, *changes, times=1):
        root = lay_out(tmp_path / "root", "h100x8", *changes)
        monkeypatch.setattr(
            host, "unused_infiniband", functools.partial(host.unused_infiniband, root)
        )
        log, remarks = NodeLog(tmp_path), []
        log.warn = remarks.append
        source, end = os.pipe()
        stream = Stream(source, log)
        for _ in range(times):
            os.write(end, (LINES / f"{name}.txt").read_bytes())
            stream.pump()
        os.close(end)
        os.close(source)
        os.close(log.handle)
        return remarks

    return read


@pytest.mark.parametrize(
    ("env", "changes", "why"),
    [
        ({}, [], "no /dev/infiniband/uverbs* here: pass the device to the container"),
        ({"NCCL_IB_DISABLE": "1"}, [DEVICES], "NCCL_IB_DISABLE=1 is set"),
        ({}, [DEVICES], "apt-get install ibverbs-providers where the ranks run"),
    ],
)
def test_nccl_sockets_beside_active_infiniband_give_one_remark_with_fix(
    told, monkeypatch, env, changes, why
):
    for name in host._NCCL_NETWORK:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    (remark,) = told("socket", *changes, times=2)
    assert remark.startswith(TOLD)
    assert f"mlx5_9: {why}" in remark


@pytest.mark.parametrize(
    ("name", "changes"),
    [("infiniband", []), ("one_host", []), ("socket", [ETHERNET]), ("socket", [DOWN])],
)
def test_nccl_log_without_unused_infiniband_gives_no_remark(told, name, changes):
    assert told(name, *changes) == []
