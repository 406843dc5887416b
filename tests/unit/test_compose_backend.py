"""The compose backend without an engine: plans, refusals, the states of containers."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

import clusterkit
from clusterkit.backends.compose import observe, probe
from clusterkit.backends.compose.backend import ComposeBackend
from clusterkit.backends.compose.compose_file import size_bytes
from clusterkit.backends.compose.containers import Container, inspect
from clusterkit.backends.compose.observe import STATES, ContainerMonitor, native_state
from clusterkit.backends.node_status import NodeFiles, judge_node
from clusterkit.cluster import ComposeCluster, Engine, Gpu
from clusterkit.errors import BadInput, ClusterkitError, SubmitFailed, Unavailable
from clusterkit.output.diagnose import diagnose
from clusterkit.run.folder import RunFolder, RunHandle, node_dir
from clusterkit.run.logs import LogLine
from clusterkit.run.status import NodeCause, NodeStatus, RankExit, State
from clusterkit.spec import CheckpointSpec, JobSpec
from clusterkit.transport import Completed, LocalTransport
from tests.conftest import UGLY

BACKEND = ComposeBackend()
ENGINE = Engine(
    socket="unix:///var/run/docker.sock", version="27.3.1", image="clusterkit:cpu",
    image_id="sha256:" + "ab" * 32, workdir="/opt/clusterkit", user="1000:1000",
    package="/opt/venv/lib/python3.11/site-packages/clusterkit",
)  # fmt: skip


def job(**fields: Any) -> JobSpec:
    given = {"name": "demo", "program": "train.py", "workdir": "/srv/project"}
    return JobSpec(**(given | fields))


@pytest.fixture
def planned(make_facts: Callable[..., Any]) -> Callable[..., Any]:
    """``planned(entry={"memory": "1g"}, gpus=8, nodes=2)``: the plan, its compose file parsed."""

    def make(entry: dict[str, Any] | None = None, gpus: int = 0, **fields: Any) -> Any:
        facts = msgspec.structs.replace(
            make_facts(gpus=gpus, home="/home/u/.clusterkit"), engine=ENGINE, port=29500,
            watch_port=29501, interface="eth0",
        )  # fmt: skip
        cluster = BACKEND.resolved(ComposeCluster(**(entry or {})), Path("/etc/here"), None, None)
        plan = BACKEND.plan(job(**fields), cluster, facts, "demo-1")
        (file,) = (file for file in plan.files if file.path.endswith("compose.yaml"))
        return plan, yaml.safe_load(file.content())

    return make


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


# ---------------------------------------------------------------- probing


INFO: dict[str, Any] = {
    "ID": "PADK:4ETS", "ServerVersion": "20.10.24+dfsg1", "NCPU": 2, "MemTotal": 25276514304,
    "OSType": "linux", "Runtimes": {"runc": {"path": "runc"}},
    "SecurityOptions": ["name=seccomp,profile=default"],
    "ClientInfo": {"Plugins": [{"Name": "buildx", "Version": "v0.13.1"},
                               {"Name": "compose", "Version": "2.26.1-4"}]},
}  # fmt: skip
REPORT = {
    "workdir": "/x", "writable": True, "python": "/opt/venv/bin/python3",
    "python_version": [3, 11, 2], "hostname": "x", "cpus": 2, "memory_mib": 1,
    "interfaces": [], "reached_at": "", "versions": {"torch": "2.13.0+cpu"},
    "tools": {"mpirun": "/usr/bin/mpirun"}, "gpus": "", "visible": None,
}  # fmt: skip
IMAGE = {"Id": "sha256:c1a4", "Config": {"WorkingDir": "/opt/clusterkit"}}


class Docker(LocalTransport):
    """A docker client whose answers were recorded; records its commands."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, tuple[int, str, str]] = {
            "context": (0, "unix:///var/run/docker.sock\n", ""),
            "info": (0, json.dumps(INFO), ""),
            "image": (0, json.dumps([IMAGE]), ""),
            "run": (0, json.dumps(REPORT), ""),
            "network": (0, "", ""),
            "volume": (0, "[]", ""),
            **answers,
        }
        self.commands: list[tuple[str, ...]] = []

    def run(self, host: str, argv: Any, **options: Any) -> Completed:
        if argv[0] != "docker":
            return super().run(host, argv, **options)
        words = argv[3:] if argv[1] == "--host" else argv[1:]
        self.commands.append(tuple(argv))
        return Completed(tuple(argv), *self.answers[words[0]])


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with a docker on it (which is never run) and no nvidia-smi."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "docker").write_text("#!/bin/sh\nexit 9\n")
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_probe_reports_engine_and_image_and_caches_answer(
    tools: Path, clusterkit_home: Path
) -> None:
    docker = Docker()
    facts = BACKEND.probe(ComposeCluster(), docker, job())
    assert facts.engine is not None
    assert facts.engine.image == "clusterkit:cpu"
    assert facts.engine.user == f"{os.getuid()}:{os.getgid()}"
    assert (facts.port, facts.interface, facts.home) == (29500, "eth0", str(clusterkit_home))
    assert facts.hosts[0].python == "/opt/venv/bin/python3"
    assert facts.hosts[0].cpus == 2
    # An image is probed once.
    asked = [words for words in docker.commands if "run" in words]
    assert len(asked) == 1
    assert BACKEND.probe(ComposeCluster(), docker, job()) == facts
    assert [words for words in docker.commands if "run" in words] == asked
    # Another limit may be refused: it is probed again.
    BACKEND.probe(ComposeCluster(ulimits={"core": 0}), docker, job())
    BACKEND.probe(ComposeCluster(infiniband=True), docker, job())
    *_, last = asked = [words for words in docker.commands if "run" in words]
    assert len(asked) == 3
    assert "--device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1" in " ".join(last)


def test_probe_asks_job_python_in_image(tools: Path) -> None:
    docker = Docker()
    facts = BACKEND.probe(ComposeCluster(), docker, job(python="/p/python3.12"))
    (asked,) = [words for words in docker.commands if "run" in words]
    assert asked[asked.index("--entrypoint") + 1] == "/p/python3.12"
    host = facts.hosts[0]
    assert (host.python, host.python_origin) == ("/p/python3.12", "job: python")
    missing = Docker(run=(127, "", 'exec: "/q/python": no such file or directory: unknown.'))
    with pytest.raises(Unavailable, match="image clusterkit:cpu has no /q/python"):
        BACKEND.probe(ComposeCluster(), missing, job(python="/q/python"))


def test_rootless_engine_maps_submitter_to_root(tools: Path) -> None:
    info = INFO | {"SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"]}
    facts = BACKEND.probe(ComposeCluster(), Docker(info=(0, json.dumps(info), "")), job())
    assert facts.engine is not None
    assert facts.engine.user == "0:0"


def test_remapping_engine_uses_host_user_namespace(tools: Path, planned: Any) -> None:
    docker = Docker(info=(0, json.dumps(INFO | {"SecurityOptions": ["name=userns"]}), ""))
    facts = BACKEND.probe(ComposeCluster(), docker, job())
    assert facts.engine is not None
    assert facts.engine.remapped
    assert ("--userns", "host") in zip(docker.commands[-1], docker.commands[-1][1:], strict=False)
    text = BACKEND.plan(job(command=("true",), program=None), ComposeCluster(),
                        facts, "demo-1").to_text()  # fmt: skip
    assert "userns_mode: host" in text


def without(key: str) -> str:
    return json.dumps({name: value for name, value in INFO.items() if name != key})


ERRORS = json.dumps({"ServerErrors": ["X"], "ClientInfo": INFO["ClientInfo"]})
REFUSALS: list[tuple[dict[str, Any], dict[str, Any], type[ClusterkitError], str]] = [
    ({}, {"context": (1, "\n", 'context "far": context not found')}, BadInput,
     "context: docker says: context"),
    ({"context": "far"}, {"context": (1, "", "not found")}, BadInput, "no context 'far'"),
    ({}, {"context": (0, "ssh://me@far\n", "")}, BadInput, "engine at ssh://me@far is on another"),
    ({}, {"context": (0, "tcp://10.0.0.1:2375\n", "")}, BadInput, "is on another machine"),
    # docker 20.10 and 28, which put it in different places.
    ({}, {"info": (1, "", "ERROR: Cannot connect to the Docker daemon at unix:///x. Is the docker "
                          "daemon running?\nerrors pretty printing info\n")}, Unavailable,
     "no docker engine answers at unix:///var/run/docker.sock"),
    ({}, {"info": (1, ERRORS.replace("X", "Cannot connect to the Docker daemon"), "")},
     Unavailable, "no docker engine answers"),
    ({}, {"info": (1, ERRORS.replace("X", "permission denied while trying to connect"), "")},
     Unavailable, "you may not use the docker engine"),
    ({}, {"info": (1, "", "Got permission denied while trying to connect to the Docker daemon "
                          "socket at unix:///var/run/docker.sock")}, Unavailable,
     "you may not use the docker engine"),
    ({}, {"info": (1, "\x00\xff not json", "something\nnever seen\n")}, Unavailable,
     "the docker engine at unix:///var/run/docker.sock failed: something never seen"),
    ({}, {"info": (0, "[]", "")}, Unavailable, "failed: nothing"),
    ({}, {"info": (0, without("ClientInfo"), "")}, Unavailable, "has no compose plugin"),
    ({}, {"info": (0, json.dumps(INFO | {"ClientInfo": {"Plugins": None}}), "")}, Unavailable,
     "has no compose plugin"),
    ({}, {"info": (0, json.dumps(INFO).replace("2.26.1-4", "v2.3.3"), "")}, Unavailable,
     "docker has compose v2.3.3; 2.20 or newer"),
    ({}, {"info": (0, json.dumps(INFO | {"OSType": "windows"}), "")}, Unavailable, "windows"),
    ({}, {"image": (1, "[]\n", "Error: No such image: clusterkit:cpu")}, Unavailable,
     "image: the docker engine has no clusterkit:cpu"),
    ({"image": "A b"}, {"image": (1, "[]\n", "invalid reference format")}, Unavailable,
     "image: invalid reference format"),
    ({}, {"run": (125, "", "docker: Error response from daemon: OCI runtime create failed: "
                           "error setting rlimits for ready process: error setting rlimit type 8: "
                           "operation not permitted: unknown.\n")}, Unavailable,
     "ulimits: the docker engine may not set"),
    ({"infiniband": True},
     {"run": (125, "", "docker: Error response from daemon: error gathering device information "
                       'while adding custom device "/dev/infiniband": no such file or '
                       "directory.\n")}, Unavailable,
     "infiniband: this machine has no /dev/infiniband"),
    ({}, {"run": (127, "", "docker: Error response from daemon: failed to create shim task: OCI "
                           'runtime create failed: exec: "python3": executable file not found in '
                           "$PATH: unknown.\n\nRun 'docker run --help' for more information\n")},
     Unavailable, "python: image clusterkit:cpu has no python3"),
    ({}, {"run": (125, "", "docker: Error response from daemon: invalid mount config for type "
                           '"bind": bind source path does not exist: /home/u.\n')}, Unavailable,
     "the docker engine does not see this machine's"),
    ({}, {"run": (1, "", "exec /usr/bin/python3: exec format error\n")}, Unavailable,
     "was built for another CPU architecture"),
    ({}, {"run": (125, "", 'docker: could not select device driver "" with capabilities: '
                           "[[gpu]].\n")}, Unavailable, "cannot give GPUs to containers"),
    ({}, {"run": (1, "Traceback", "ugly\nlast words\n")}, Unavailable,
     "no container of clusterkit:cpu could be run: last words"),
    ({}, {"run": (0, json.dumps(REPORT | {"python_version": [3, 9, 2]}), "")}, Unavailable,
     "is Python 3.9.2"),
    ({}, {"run": (0, json.dumps(REPORT | {"writable": False}), "")}, Unavailable,
     "containers cannot write into"),
    ({"volumes": ("cache:/c",)}, {"volume": (1, "[]", "Error: No such volume: cache")}, BadInput,
     "volumes: docker has no volume cache"),
    ({"volumes": ("/no/such:/c",)}, {}, BadInput, "volumes: /no/such does not exist"),
    ({"subnet": "10.1.2.0/24"}, {"network": (0, "host\nmine 10.0.0.0/8 fd00::/64\n", "")},
     BadInput, "subnet: 10.1.2.0/24 is taken: docker's network mine has 10.0.0.0/8"),
    ({"gpus": 1}, {}, BadInput, "gpus: 1 wanted, but this machine has 0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "answers", "kind", "message"),
    REFUSALS,
    ids=lambda v: str(v)[:50],
)
def test_probe_refuses_in_one_sentence_with_hint(
    entry: dict[str, Any], answers: dict[str, Any], kind: type[ClusterkitError], message: str,
    tools: Path, clusterkit_home: Path,
) -> None:  # fmt: skip
    with pytest.raises(kind, match=re.escape(message)) as error:
        BACKEND.probe(ComposeCluster(**entry), Docker(**answers), job())
    assert "\n" not in error.value.message
    assert error.value.hint
    assert error.value.exit_code == 125
    assert not list(clusterkit_home.rglob("*.json"))


@pytest.mark.parametrize(
    ("entry", "remedy"),
    [
        ({}, "`image: NAME` in the cluster entry (docs/containers.md, An image of your own), or"),
        ({"image": "mine:1"}, "docker pull mine:1, or docker build --tag mine:1 . (docs/"),
    ],
    ids=["none is named", "one is named"],
)
def test_missing_image_hint_shows_how_to_get_image(
    entry: dict[str, Any], remedy: str, tools: Path
) -> None:
    docker = Docker(image=(1, "[]\n", "Error: No such image"))
    with pytest.raises(Unavailable) as error:
        BACKEND.probe(ComposeCluster(**entry), docker, job())
    assert error.value.hint is not None
    assert error.value.hint.startswith(remedy)
    page = Path(__file__).parents[2] / "docs" / "containers.md"
    assert "\n## An image of your own\n" in page.read_text()


def test_probe_without_docker_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="needs docker, which is not installed"):
        BACKEND.probe(ComposeCluster(), Docker(), job())


def test_probe_needs_nvidia_runtime_or_cdi_for_gpus(tools: Path) -> None:
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho '0, GPU-1, NVIDIA H100, 81559'\n")
    (tools / "nvidia-smi").chmod(0o755)
    with pytest.raises(Unavailable, match="1 GPU, but the docker engine lacks NVIDIA's runtime"):
        BACKEND.probe(ComposeCluster(), Docker(), job())
    # A job for the CPU needs no runtime.
    assert BACKEND.probe(ComposeCluster(), Docker(), job(device="cpu")).hosts[0].gpus == ()
    info = INFO | {"Runtimes": {"nvidia": {}, "runc": {}}}
    docker = Docker(info=(0, json.dumps(info), ""))
    facts = BACKEND.probe(ComposeCluster(), docker, job())
    assert facts.hosts[0].gpus == (Gpu("0", "NVIDIA H100", 81559),)
    assert facts.engine is not None
    assert facts.engine.image == "clusterkit:gpu"
    assert "--gpus" in docker.commands[-1]
    # Docker 28.2 and later, after `nvidia-ctk cdi generate`, without the runtime.
    devices = [{"Source": "cdi", "ID": f"nvidia.com/gpu={name}"} for name in ("0", "all")]
    for_cuda = REPORT | {"versions": {"torch": "2.13.0+cu130"}}
    docker = Docker(
        info=(0, json.dumps(INFO | {"DiscoveredDevices": devices}), ""),
        run=(0, json.dumps(for_cuda), ""),
    )
    facts = BACKEND.probe(ComposeCluster(), docker, job())
    assert "nvidia.com/gpu=all" in docker.commands[-1]
    plan = BACKEND.plan(job(), ComposeCluster(), facts, "any-1")
    (file,) = (file for file in plan.files if file.path.endswith("compose.yaml"))
    (found,) = yaml.safe_load(file.content())["services"]["node-0"]["deploy"]["resources"][
        "reservations"
    ]["devices"]
    assert found == {
        "driver": "cdi",
        "device_ids": ["nvidia.com/gpu=0"],
        "capabilities": ["gpu"],
    }


def test_routes_parse_interfaces_except_default_route() -> None:
    table = (
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\nbroken\n"
    )
    assert probe._routes(table) == [("172.17.0.0/16", "interface docker0")]
    assert probe._routes("") == []


# ---------------------------------------------------------------- states


def exited(code: int, reason: str | None = None) -> bytes:
    return json.dumps({"exit_code": code, "at": 1.0, "reason": reason}).encode()


UP, GONE = Container(state="running"), None
STOPPED = "stopped on request"


def judge(node: int, files: NodeFiles, **native: Any) -> NodeStatus:
    return judge_node(node, f"node-{node}", files, native_state(files, **native))


@pytest.mark.parametrize(
    ("begun", "exit_json", "live", "saved", "state", "reason"),
    [
        # Without faults.
        (False, None, GONE, GONE, "PENDING", None),
        (False, None, Container(state="created"), GONE, "PENDING", None),
        (False, None, UP, GONE, "PENDING", None),
        (True, None, UP, GONE, "RUNNING", None),
        (True, exited(0), UP, GONE, "RUNNING", None),
        (True, exited(0), Container(state="exited"), GONE, "SUCCEEDED", None),
        (True, exited(0), GONE, Container(state="exited"), "SUCCEEDED", None),
        (True, exited(0), GONE, GONE, "SUCCEEDED", None),
        (True, exited(7), Container(state="exited", exit_code=7), GONE, "FAILED", None),
        (True, b"{", Container(state="exited"), GONE, "UNKNOWN", "damaged"),
        # Ended by clusterkit itself.
        (True, exited(143, STOPPED), GONE, UP, "CANCELLED", STOPPED),
        (True, None, GONE, UP, "CANCELLED", "did not stop"),
        (True, None, Container(state="exited", exit_code=137), UP, "CANCELLED", "did not stop"),
        # Ended or interrupted from outside.
        (True, None, Container(state="exited", exit_code=137), GONE, "FAILED", "killed from out"),
        (True, None, GONE, Container(state="exited", exit_code=137), "FAILED", "killed from out"),
        (True, None, Container(state="exited", exit_code=137, oom=True, memory=512 << 20), GONE,
         "FAILED", "OOMKilled: its container used more than its memory limit of 512 MiB"),
        (True, None, Container(state="exited", exit_code=137, oom=True), GONE, "FAILED",
         "OOMKilled: this machine ran out of memory"),
        (False, None, Container(state="exited", exit_code=73, last_line="mkdir: denied"), GONE,
         "FAILED", "exit code 73 of its container: mkdir: denied"),
        (False, None, Container(state="created", error="no such device"), GONE, "PENDING", None),
        (False, None, Container(state="exited", exit_code=127, error="not found"), GONE, "FAILED",
         "could not be started: not found"),
        (True, None, GONE, GONE, "FAILED", "removed from outside"),
        (True, exited(143, STOPPED), Container(state="exited", exit_code=143), GONE, "FAILED",
         "stopped from outside (docker stop)"),
        (True, None, Container(state="paused"), GONE, "RUNNING", "paused"),
        (True, None, Container(state="running", connected=False), GONE, "RUNNING", "cut off"),
        (True, exited(143, STOPPED), GONE, Container(state="paused"), "FAILED", "paused"),
        (True, None, GONE, Container(state="paused"), "FAILED", "paused"),
        (True, exited(143, "stopped: node 0 has not answered for 4 s"), GONE,
         Container(state="exited", connected=False), "FAILED", "cut off"),
        # Stopped by the other nodes.
        (True, exited(143, "stopped: node 1 failed"), Container(state="exited", exit_code=143),
         GONE, "CANCELLED", "node 1 failed"),
        # States that only a newer engine has.
        (True, None, Container(state="hibernating"), GONE, "UNKNOWN", "'hibernating'"),
        (True, None, Container(state=""), GONE, "UNKNOWN", "''"),
    ],
)  # fmt: skip
def test_judge_node_derives_state_from_exit_file_and_container(
    begun: bool, exit_json: bytes | None, live: Container | None, saved: Container | None,
    state: str, reason: str | None,
) -> None:  # fmt: skip
    found = judge(3, NodeFiles(begun=begun, exit=exit_json), live=live, saved=saved)
    assert found.state is State[state], found
    assert (found.node, found.host) == (3, "node-3")
    assert (found.reason is None) if reason is None else reason in (found.reason or "")


def test_every_container_state_maps_to_node_state() -> None:
    for word, state in STATES.items():
        found = judge(0, NodeFiles(begun=True), live=Container(state=word), saved=None)
        assert found.state is state


def test_unreachable_engine_leaves_state_to_exit_file() -> None:
    engine = {"live": None, "saved": None, "unreachable": "it does not answer"}
    assert judge(0, NodeFiles(begun=True), **engine).state is State.UNKNOWN
    assert judge(0, NodeFiles(begun=True, exit=exited(0)), **engine).state is State.SUCCEEDED


def test_unreachable_engine_keeps_last_known_container_state() -> None:
    silent = "the docker engine does not answer"
    for live in (UP, Container(state="paused")):
        found = judge(0, NodeFiles(begun=True), live=live, saved=None, unreachable=silent)
        assert (found.state, found.reason) == (State.RUNNING, silent)
    over = Container(state="exited", exit_code=9)
    found = judge(0, NodeFiles(begun=True), live=over, saved=None, unreachable=silent)
    assert (found.state, found.exit_code) == (State.FAILED, 9)


def test_paused_or_disconnected_node_fails_once_lost() -> None:
    for live in (Container(state="paused"), Container(state="running", connected=False)):
        found = judge(0, NodeFiles(begun=True), live=live, saved=None, lost=True)
        assert found.state is State.FAILED


# ---------------------------------------------------------------- the engine's answers


class FakeEngine(LocalTransport):
    """An engine whose inspect answers are set by the test, and whose events never come."""

    def __init__(self) -> None:
        self.answer: Completed | Exception = Completed((), 0, "", "")
        self.queries = 0

    def run(self, host: str, argv: Any, **options: Any) -> Completed:
        assert "inspect" in argv
        self.queries += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def open(self, host: str, argv: Any, **options: Any) -> Any:
        raise SubmitFailed("no events here")

    def containers(self, handle: RunHandle, **states: Any) -> None:
        lines = []
        for name, state in states.items():
            entry = {
                "run_dir": handle.plan.run_dir, "attempt": str(handle.attempt), "node": name[-1],
                "connected": True, "memory": 0, "state": "running", "exit_code": 0, "oom": False,
                "error": "",
            }  # fmt: skip
            lines.append(json.dumps(entry | state))
        self.answer = Completed((), 0, "\n".join(lines), "")


@pytest.fixture
def handle(planned: Callable[..., Any], tmp_path: Path) -> RunHandle:
    """A run of two nodes whose agents have begun."""
    plan, _ = planned({"lost_after": 0.2}, nodes=2)
    plan = msgspec.structs.replace(plan, run_dir=str(tmp_path / "run"))
    for node in (0, 1):
        folder = Path(node_dir(plan.run_dir, 1, node))
        folder.mkdir(parents=True)
        (folder / "pid").write_text("7\n")
    Path(plan.run_dir, "run.json").write_text("{}")
    return RunHandle(RunFolder(Path(plan.run_dir)), plan)


def test_inspect_ignores_containers_of_later_attempt(handle: RunHandle) -> None:
    engine = FakeEngine()
    engine.containers(replace(handle, attempt=2), node0={}, node1={})
    assert inspect(handle, engine) == {}
    for attempt in (2, 3):  # which their agents may have begun
        assert set(inspect(replace(handle, attempt=attempt), engine)) == {0, 1}


@pytest.mark.parametrize(
    "text",
    ["", "not json", "[]", "null", "{}", '{"state": "running", "node": ""}', '{"state": 3}'],
)
def test_inspect_refuses_malformed_answer(handle: RunHandle, text: str) -> None:
    engine = FakeEngine()
    engine.answer = Completed((), 0, text, "")
    with pytest.raises(Unavailable, match="docker inspect"):
        inspect(handle, engine)


def test_inspect_accepts_missing_containers_and_refuses_dead_engine(handle: RunHandle) -> None:
    engine = FakeEngine()
    for words in ("Error: No such object: x", "Error response from daemon: No such container: x"):
        engine.answer = Completed((), 1, "", words)
        assert inspect(handle, engine) == {}
    engine.answer = Completed((), 1, "", "Cannot connect to the Docker daemon at unix:///x.")
    with pytest.raises(Unavailable, match="does not answer: Cannot connect"):
        inspect(handle, engine)


def test_monitor_queries_engine_rarely(handle: RunHandle) -> None:
    engine = FakeEngine()
    engine.containers(handle, node0={}, node1={})
    monitor = ContainerMonitor(handle, engine)
    for _ in range(50):
        assert monitor.status().state is State.RUNNING
    assert engine.queries <= 3
    monitor.close()


def test_monitor_keeps_run_running_while_engine_is_silent(
    handle: RunHandle, monkeypatch: Any
) -> None:
    monkeypatch.setattr(observe, "INSPECT_INTERVAL", 0.0)
    monkeypatch.setattr(observe, "RETRY_SECONDS", 0.0)
    engine = FakeEngine()
    engine.containers(handle, node0={}, node1={})
    monitor = ContainerMonitor(handle, engine)
    assert monitor.status().state is State.RUNNING
    engine.answer = SubmitFailed("docker on localhost did not end within 10 s")
    deadline = time.monotonic() + 30
    while (seen := monitor.status()).nodes[0].reason is None:
        assert time.monotonic() < deadline
    # Containers run on without their engine.
    assert seen.state is State.RUNNING
    assert re.search(r"did not end within 10 s \(since \d\d:\d\d:\d\d\)", seen.nodes[0].reason)
    # What is only read once the engine answers is in the run's folder as well.
    Path(node_dir(handle.plan.run_dir, 1, 0), "exit.json").write_bytes(exited(0))
    assert monitor.status().nodes[0].state is State.SUCCEEDED
    assert monitor.status().state is State.RUNNING
    Path(node_dir(handle.plan.run_dir, 1, 0), "exit.json").unlink()
    engine.containers(handle, node0={}, node1={"state": "exited", "exit_code": 137})
    while (seen := monitor.status()).nodes[1].state is not State.FAILED:
        assert time.monotonic() < deadline
    assert seen.nodes[1].exit_code == 137


def test_monitor_fails_node_that_stays_paused(handle: RunHandle, monkeypatch: Any) -> None:
    monkeypatch.setattr(observe, "INSPECT_INTERVAL", 0.0)
    engine = FakeEngine()
    engine.containers(handle, node0={}, node1={"state": "paused"})
    monitor = ContainerMonitor(handle, engine)
    first = monitor.status()
    assert (first.state, first.nodes[1].reason) == (
        State.RUNNING, "its container was paused (docker pause)",
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while (seen := monitor.status()).nodes[1].state is State.RUNNING:
        assert time.monotonic() < deadline
    assert seen.nodes[1].state is State.FAILED
    assert [cause.node for cause in seen.causes] == [1]


def test_run_without_folder_has_no_status(handle: RunHandle) -> None:
    engine = FakeEngine()
    Path(handle.plan.run_dir, "run.json").unlink()
    assert BACKEND.status(handle, engine) is None
    assert ContainerMonitor(handle, engine).status() is None
    assert engine.queries == 0


# ---------------------------------------------------------------- diagnosis


CAUSE = NodeCause(node=1, words="killed by the kernel: over the limit", hint="more memory")


def line(node: int, text: str, rank: int | None = None, at: float = 1.0) -> LogLine:
    return LogLine(at, node, rank, text, 1)


def nodes(*states: str) -> list[NodeStatus]:
    return [
        NodeStatus(node=n, host=f"node-{n}", state=State[state]) for n, state in enumerate(states)
    ]


def test_diagnose_gives_killed_rank_backend_cause() -> None:
    failure = diagnose(
        nodes("CANCELLED", "FAILED"), [], rank_exits=[RankExit(1, 1, -9, 1.0)], causes=[CAUSE]
    )
    assert (failure.node, failure.rank, failure.cause) == (1, 1, CAUSE.words)
    assert (failure.exit_code, failure.hint) == (137, "more memory")


def test_diagnose_prefers_backend_cause_over_peer_errors() -> None:
    lines = [
        line(0, "Traceback (most recent call last):", 0),
        line(0, "RuntimeError: Connection closed by peer", 0),
    ]
    failure = diagnose(nodes("FAILED", "FAILED"), lines, causes=[CAUSE])
    assert (failure.node, failure.rank, failure.cause) == (1, None, CAUSE.words)


def test_diagnose_prefers_program_failure_over_backend_cause() -> None:
    lines = [line(0, "Traceback (most recent call last):", 0), line(0, "ValueError: boom", 0)]
    failure = diagnose(nodes("FAILED", "FAILED"), lines, causes=[CAUSE])
    assert (failure.node, failure.cause) == (0, "ValueError: boom")
    # A rank killed on a node without a known cause keeps its signal as the cause.
    failure = diagnose(
        nodes("FAILED", "FAILED"), [], rank_exits=[RankExit(0, 0, -9, 1.0)], causes=[CAUSE]
    )
    assert failure.node == 0
    assert "SIGKILL" in failure.cause


def test_diagnose_maps_mpirun_rank_to_its_node_and_cause() -> None:
    failure = diagnose(
        nodes("FAILED"), [], rank_exits=[RankExit(0, 3, -9, 1.0)], nproc_per_node=2, causes=[CAUSE]
    )
    assert (failure.node, failure.rank, failure.cause) == (1, 3, CAUSE.words)


def test_host_probe_does_not_depend_on_clusterkit() -> None:
    """Standard library only: an image need not hold clusterkit."""
    text = (Path(clusterkit.__file__).parent / "hosts" / "host_probe.py").read_text()
    assert "clusterkit" not in re.sub(r'""".*?"""', "", text, count=1, flags=re.S)
