"""The compose file of a plan; entries that are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterkit.backends.compose.compose_file import size_bytes
from clusterkit.cluster import ComposeCluster
from clusterkit.errors import BadInput
from clusterkit.spec import CheckpointSpec
from tests.conftest import UGLY
from tests.unit.compose.containers import BACKEND, ENGINE

# ---------------------------------------------------------------- the file


@pytest.mark.parametrize("value", [value for value in UGLY.values() if value])
def test_compose_file_mounts_workdir_and_escapes_dollars(
    planned: Callable[..., Any], value: str
) -> None:
    _, document = planned(workdir=f"/srv/{value}")
    sources = [mount["source"] for mount in document["x-node"]["volumes"]]
    assert f"/srv/{value}".replace("$", "$$") in sources


def test_compose_file_leaves_attempt_number_to_compose(planned: Callable[..., Any]) -> None:
    _, document = planned()
    assert document["x-labels"]["clusterkit.attempt"] == "${CLUSTERKIT_ATTEMPT:-1}"
    assert document["services"]["node-0"]["labels"]["clusterkit.attempt"].startswith("${")


@pytest.mark.parametrize(
    ("text", "size"), [("512m", 512 << 20), ("8G", 8 << 30), ("1kb", 1024), ("7", 7), ("9b", 9)]
)
def test_size_bytes_parses_units(text: str, size: int) -> None:
    assert size_bytes("memory", text) == size


@pytest.mark.parametrize("text", ["", "0", "1.5g", "8 g", "-1", "8t", "much"])
def test_size_bytes_refuses_invalid_text(text: str) -> None:
    with pytest.raises(BadInput, match="memory: "):
        size_bytes("memory", text)


def test_spare_is_service_with_gpus_of_its_own(planned: Callable[..., Any]) -> None:
    plan, file = planned(gpus=6, nodes=2, spares=1)
    assert list(file["services"]) == ["node-0", "node-1", "node-2"]
    (devices,) = file["services"]["node-2"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices["device_ids"] == ["4", "5"]
    assert (plan.nodes, plan.world_size) == (3, 4)


def test_compose_file_describes_thousand_nodes(planned: Callable[..., Any]) -> None:
    _, file = planned(nodes=1000)
    assert len(file["services"]) == 1000
    first, last = file["services"]["node-0"], file["services"]["node-999"]
    assert (first["hostname"], last["hostname"]) == ("node-0", "node-999")
    assert last["environment"]["NODE_RANK"] == "999"
    assert first["volumes"] == last["volumes"]


def test_gpus_are_divided_between_nodes(planned: Callable[..., Any]) -> None:
    plan, file = planned(gpus=8, nodes=2)
    shares = [
        service["deploy"]["resources"]["reservations"]["devices"]
        for service in file["services"].values()
    ]
    assert [[d["device_ids"] for d in share] for share in shares] == [
        [["0", "1", "2", "3"]], [["4", "5", "6", "7"]],
    ]  # fmt: skip
    # In its container each node's GPUs begin with 0 again.
    assert "CUDA_VISIBLE_DEVICES" not in json.dumps(file)
    assert plan.world_size == 8


def test_plan_refuses_more_gpus_than_machine_has(planned: Callable[..., Any]) -> None:
    with pytest.raises(BadInput, match="3 nodes cannot share 2 GPUs"):
        planned(gpus=2, nodes=3)
    with pytest.raises(BadInput, match="2 nodes x 2 = 4 GPUs, but this machine has 2"):
        planned(gpus=2, nodes=2, gpus_per_node=2)


def test_compose_file_applies_cluster_limits_and_subnet(planned: Callable[..., Any]) -> None:
    _, file = planned({
        "memory": "512m", "cpus": 1.5, "shm_size": "1g", "ulimits": {"memlock": -1, "core": 0},
        "subnet": "10.99.0.0/29", "stop_grace": 2.5,
    })  # fmt: skip
    node = file["services"]["node-0"]
    assert node["mem_limit"] == node["memswap_limit"] == 512 << 20
    assert (node["cpus"], node["shm_size"]) == (1.5, 1 << 30)
    assert node["ulimits"] == {"memlock": -1, "core": 0}
    assert node["stop_grace_period"] == "8s"
    assert file["networks"]["default"]["ipam"] == {"config": [{"subnet": "10.99.0.0/29"}]}


def test_infiniband_adds_devices_ipc_lock_and_memlock_limit(planned: Callable[..., Any]) -> None:
    for more, memlock in (({}, -1), ({"ulimits": {"memlock": 1 << 30}}, 1 << 30)):
        _, file = planned({"infiniband": True, **more})
        node = file["services"]["node-0"]
        assert node["devices"] == ["/dev/infiniband:/dev/infiniband"]
        assert node["cap_add"] == ["IPC_LOCK"]
        assert node["ulimits"] == {"memlock": memlock}


def test_plan_refuses_more_nodes_than_subnet_holds(planned: Callable[..., Any]) -> None:
    planned({"subnet": "10.99.0.0/29"}, nodes=5)
    with pytest.raises(BadInput, match="has room for 5 nodes, not 6"):
        planned({"subnet": "10.99.0.0/29"}, nodes=6)


def binds(file: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    return {
        mount["target"]: (mount["source"], mount.get("read_only", False))
        for mount in file["services"]["node-0"]["volumes"]
    }


def test_containers_mount_run_project_volumes_and_checkpoints(planned: Callable[..., Any]) -> None:
    plan, file = planned(
        {"volumes": ("./sets:/data:ro", "cache:/cache", "/srv/out:/out")},
        program="/home/u/other/train.py",
        checkpoint=CheckpointSpec(dir="/ckpt/a", resume="/old/step-1"),
    )
    assert binds(file) == {
        "/home/u/.clusterkit/runs/demo-1": ("/home/u/.clusterkit/runs/demo-1", False),
        "/srv/project": ("/srv/project", True),
        "/home/u/other": ("/home/u/other", True),
        "/run/clusterkit/python/clusterkit": (ENGINE.package, True),
        "/data": ("/etc/here/sets", True),
        "/cache": ("cache", False),
        "/out": ("/srv/out", False),
        "/ckpt/a": ("/ckpt/a", False),
        "/old/step-1": ("/old/step-1", True),
    }
    assert file["volumes"] == {"cache": {"external": True}}
    # Made before: the engine would create it as root's.
    assert plan.steps[0].argv == ("mkdir", "-p", "--", "/ckpt/a")
    # A folder inside another one is mounted after it.
    depths = [mount["target"].count("/") for mount in file["services"]["node-0"]["volumes"]]
    assert depths == sorted(depths)


def test_checkpoints_in_volume_need_no_host_folder(planned: Callable[..., Any]) -> None:
    plan, file = planned(
        {"volumes": ("cache:/cache",)}, checkpoint=CheckpointSpec(dir="/cache/run1")
    )
    assert len(plan.steps) == 1
    assert "/cache/run1" not in binds(file)


def test_baked_code_runs_from_image_without_project_mount(planned: Callable[..., Any]) -> None:
    plan, file = planned({"code": "baked"}, program="/srv/project/jobs/train.py")
    assert list(binds(file)) == ["/home/u/.clusterkit/runs/demo-1"]
    script = plan.files[0].content().decode()
    assert "--workdir /opt/clusterkit" in script
    assert " jobs/train.py" in script
    assert "PYTHONPATH" not in script


@pytest.mark.parametrize("folder", ["/", "/usr", "/tmp", "/proc/self/cwd", "/etc/"])
def test_workdir_that_hides_image_folder_is_refused(
    planned: Callable[..., Any], folder: str
) -> None:
    with pytest.raises(BadInput, match="would hide the image's own"):
        planned(workdir=folder)
    planned({"code": "baked"}, workdir=folder)


def test_compose_file_names_secret_without_value(
    planned: Callable[..., Any], monkeypatch: Any
) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    plan, file = planned(secrets=("TOKEN",))
    assert file["services"]["node-0"]["environment"]["TOKEN"] is None
    assert plan.steps[-1].secrets == ("TOKEN",)
    assert "hunter2" not in plan.to_text()


# ---------------------------------------------------------------- entries


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory": "lots"}, "memory: 'lots' is not a size"),
        ({"shm_size": "1.5g"}, "shm_size: "),
        ({"subnet": "10.0.0.1/8"}, "subnet: 10.0.0.1/8 has host bits set"),
        ({"subnet": "fd00::/64"}, "subnet: "),
        ({"ulimits": {"memlock": -2}}, "ulimits: memlock: -2"),
        ({"volumes": ("data",)}, "volumes: 'data' is not SOURCE:TARGET"),
        ({"volumes": ("data:relative",)}, "volumes: "),
        ({"volumes": ("/a:/b:rx",)}, "volumes: "),
        ({"volumes": ("a b:/c",)}, "volumes: 'a b' is not a valid name of a volume"),
    ],
    ids=str,
)
def test_invalid_cluster_entries_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)) as error:
        BACKEND.resolved(ComposeCluster(**fields), Path("/x"), None, None)
    assert error.value.hint


def test_include_is_refused_on_compose_cluster() -> None:
    with pytest.raises(BadInput, match="include: backend compose has no hosts"):
        BACKEND.resolved(ComposeCluster(), Path("/x"), "a", None)
