"""What probing a docker engine finds."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusterkit.backends.compose import probe
from clusterkit.cluster import ComposeCluster, Gpu
from clusterkit.errors import BadInput, ClusterkitError, Unavailable
from clusterkit.transport import Completed, LocalTransport
from tests.unit.compose.containers import BACKEND, job

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
    page = Path(__file__).parents[3] / "docs" / "containers.md"
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
