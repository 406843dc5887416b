"""What the suite must know of each backend beyond its six methods: how to stage a run by hand."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
import yaml

from clusterkit import backends
from clusterkit.backends.base import Backend
from clusterkit.backends.kubernetes.api_server import Context, InternalError, KubeTransport
from clusterkit.backends.kubernetes.objects import ATTEMPT
from clusterkit.cluster import (
    CLUSTER_TYPES,
    ClusterSpec,
    Engine,
    Facts,
    Host,
    KubernetesFacts,
    SlurmFacts,
)
from clusterkit.plan import Plan, Step
from clusterkit.run import folder as run_folder
from clusterkit.run.logs import LogLine
from clusterkit.spec import BatchSpec, CheckpointSpec, JobSpec
from clusterkit.transport import Completed, LocalTransport, Put, Stream, Transport

PROGRAMS = Path(__file__).parent / "programs"


class RecordingTransport(KubeTransport):
    """Keeps what a backend asks for; starts nothing, writes nothing, reads real files."""

    def __init__(self, exit_code: int = 0) -> None:
        super().__init__()
        self.exit_code = exit_code
        self.puts: list[tuple[str, str, bytes, int]] = []
        self.commands: list[tuple[str, str, tuple[str, ...], dict[str, str]]] = []
        self.attempt: dict[str, str] = {}

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: bytes = b"",
    ) -> Completed:
        self.commands.append(("run", host, tuple(argv), dict(env or {})))
        return Completed(tuple(argv), self.exit_code, "", "it complained" if self.exit_code else "")

    def request(
        self, to: Context, method: str, path: str, body: Any = None, content: str = ""
    ) -> str:
        """Creates objects; in place of an environment are what came from it into the object."""
        if self.exit_code:
            raise InternalError("it complained")
        if method != "PATCH":
            return "{}"
        if number := body["metadata"].get("labels", {}).get(ATTEMPT):
            self.attempt = {"CLUSTERKIT_ATTEMPT": number}
        env = self.attempt | body.get("stringData", {})
        self.commands.append(("request", "localhost", (method, path), env))
        return json.dumps(body | {"metadata": body["metadata"] | {"uid": "1"}})

    def start(
        self, host: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> None:
        self.commands.append(("start", host, tuple(argv), dict(env or {})))

    def put_all(self, host: str, files: Sequence[Put]) -> None:
        self.puts += [(host, file.path, file.data, file.mode) for file in files]


class Stage:
    """One backend on one machine, and the traces that its runs would leave."""

    name: str
    watch_each_other = True
    """Whether its nodes do, where there are several."""
    head: str | None = None
    """What node 0 is called here, where only its peers know its name: a rank waits 12 s for one
    that does not resolve."""

    def __init__(self, facts: Callable[..., Facts]) -> None:
        self.facts_of = facts
        self.backend: Backend = backends.backend(self.name)
        self.transport: Transport = LocalTransport()

    def cluster(self, **fields: Any) -> ClusterSpec:
        return CLUSTER_TYPES[self.name](**fields)

    def plan(
        self,
        job: JobSpec,
        facts: Facts | None = None,
        run_id: str = "demo-1",
        cluster: ClusterSpec | None = None,
    ) -> Plan:
        return self.backend.plan(job, cluster or self.cluster(), facts or self.facts_of(), run_id)

    def address(self, plan: Plan) -> str:
        """What the ranks have as MASTER_ADDR."""
        return self.head or plan.address

    def nodes_run(self, plan: Plan) -> None:
        """The nodes that were started by hand run; what the backend asks of says so."""

    # -- what a backend without processes of its own would have to override --------

    def write_files(self, plan: Plan) -> None:
        """The plan's files, where a node would find them."""
        planned = f"MASTER_ADDR={plan.address}\n".encode()
        here = f"MASTER_ADDR={self.address(plan)}\n".encode()
        for file in plan.files:
            content = file.content().replace(planned, here)
            self.transport.put("localhost", file.path, content, file.mode)

    def handle(self, plan: Plan, attempt: int = 1) -> run_folder.RunHandle:
        return run_folder.RunHandle(run_folder.RunFolder(Path(plan.run_dir)), plan, attempt)

    def node_steps(self, plan: Plan) -> list[Step]:
        """The steps that start a node."""
        return [step for step in plan.steps if step.kind == "start"]

    def begin(self, plan: Plan) -> None:
        """The run is known, and nothing of it has started."""
        raise NotImplementedError

    def node_ended(self, handle: run_folder.RunHandle, node: int, native: object) -> None:
        """A node has left its native word on how it ended."""
        raise NotImplementedError

    def node_log(self, handle: run_folder.RunHandle, node: int, data: bytes) -> None:
        raise NotImplementedError

    def lines(
        self,
        handle: run_folder.RunHandle,
        nodes: Sequence[int] = (0, 1),
        follow: Callable[[], bool] | None = None,
    ) -> list[LogLine]:
        """What the run's folder has of an attempt's log."""
        return [x for batch in handle.folder.log(handle.attempt, nodes, follow) for x in batch]

    NATIVE: Mapping[str, object]
    """State to a native word that means it."""
    GARBAGE: Sequence[object]
    """Native words that mean nothing."""


class LocalStage(Stage):
    name = "local"
    watch_each_other = False
    NATIVE = {  # noqa: RUF012
        "SUCCEEDED": {"exit_code": 0, "at": 1.0, "reason": None},
        "FAILED": {"exit_code": 7, "at": 1.0, "reason": None},
        "CANCELLED": {"exit_code": 143, "at": 1.0, "reason": "stopped on request"},
    }
    GARBAGE = ([], {}, None, "text", {"exit_code": "x"}, {"exit_code": []}, b"\xff\x00{", b"")

    def begin(self, plan: Plan) -> None:
        self.transport.put("localhost", f"{plan.run_dir}/run.json", b"{}")

    def _folder(self, handle: run_folder.RunHandle, node: int) -> Path:
        path = Path(run_folder.node_dir(handle.plan.run_dir, handle.attempt, node))
        path.mkdir(parents=True, exist_ok=True)
        return path

    def node_ended(self, handle: run_folder.RunHandle, node: int, native: object) -> None:
        data = native if isinstance(native, bytes) else json.dumps(native).encode()
        (self._folder(handle, node) / "exit.json").write_bytes(data)

    def node_log(self, handle: run_folder.RunHandle, node: int, data: bytes) -> None:
        (self._folder(handle, node) / "log").write_bytes(data)


class SshStage(LocalStage):
    """Every host is this machine: what the backend does is the same, and all of it is real."""

    name = "ssh"
    watch_each_other = True

    def __init__(self, facts: Callable[..., Facts]) -> None:
        def several(*args: Any, **fields: Any) -> Facts:
            found = facts(*args, **fields)
            return msgspec.structs.replace(
                found,
                hosts=tuple(
                    msgspec.structs.replace(found.hosts[0], host=f"h{number}")
                    for number in range(4)
                ),
                watch_port=found.port + 1,
            )

        super().__init__(several)

    def cluster(self, **fields: Any) -> ClusterSpec:
        hosts = tuple(Host(name=f"h{number}") for number in range(4))
        return super().cluster(hosts=hosts, **fields)

    def handle(self, plan: Plan, attempt: int = 1) -> run_folder.RunHandle:
        folder = run_folder.RunFolder(Path(plan.run_dir).parents[1] / "here")
        return run_folder.RunHandle(folder, plan, attempt)

    def lines(self, handle: run_folder.RunHandle, *args: Any, **options: Any) -> list[LogLine]:
        self.backend.status(handle, self.transport)  # brings it from the hosts
        return super().lines(handle, *args, **options)

    def begin(self, plan: Plan) -> None:
        self.write_files(plan)


class NoContainers(LocalTransport):
    """This machine, with a docker engine that has no container."""

    def run(self, host: str, argv: Sequence[str], **options: Any) -> Completed:
        if argv[0] != "docker":
            return super().run(host, argv, **options)
        none = "Error response from daemon: No such container: x\n"
        return Completed(tuple(argv), *((1, "", none) if "inspect" in argv else (0, "", "")))


class Running(LocalTransport):
    """This machine, on which commands that are to run in containers or allocations do.

    Args:
        command, answer: what says that these run.
        starter: what starts a command there, with the first of its words.
    """

    def __init__(self, command: str, answer: str, starter: Sequence[str]) -> None:
        self._command, self._answer, self._starter = command, answer, [*starter]

    def run(self, host: str, argv: Sequence[str], **options: Any) -> Completed:
        if self._command not in argv:
            return super().run(host, argv, **options)
        return Completed(tuple(argv), 0, self._answer, "")

    def open(self, host: str, argv: Sequence[str], **options: Any) -> Stream:
        assert [*argv][: len(self._starter)] == self._starter
        return super().open(host, argv[argv.index(sys.executable) :], **options)


class ComposeStage(LocalStage):
    """Each service's command runs here as it would in its container; the engine has forgotten it,
    as it has of every run that has ended."""

    name = "compose"
    watch_each_other = True
    head = "localhost"

    def __init__(self, facts: Callable[..., Facts]) -> None:
        def with_engine(*args: Any, **fields: Any) -> Facts:
            engine = Engine(
                socket="unix:///var/run/docker.sock", version="20.10.24", image="clusterkit:cpu",
                image_id="sha256:c1a4f5e87bfe9044", workdir="/opt/clusterkit", user="1000:1000",
                package="/srv/clusterkit/clusterkit",
            )  # fmt: skip
            return msgspec.structs.replace(facts(*args, **fields), engine=engine)

        super().__init__(with_engine)
        self.transport = NoContainers()

    def nodes_run(self, plan: Plan) -> None:
        each = {"state": "running", "attempt": "1", "run_dir": plan.run_dir, "exit_code": 0,
                "oom": False}  # fmt: skip
        found = [json.dumps(each | {"node": str(node)}) for node in range(plan.nodes)]
        starter = ["docker", "--host", "unix:///var/run/docker.sock", "exec", "--interactive"]
        self.transport = Running("inspect", "\n".join(found), starter)

    def node_steps(self, plan: Plan) -> list[Step]:
        (file,) = (file for file in plan.files if file.path.endswith("compose.yaml"))
        services = yaml.safe_load(file.content())["services"]
        return [
            Step(
                kind="start",
                host="localhost",
                node=number,
                argv=tuple(word.replace("$$", "$") for word in service["entrypoint"]),
                env={
                    name: value.replace("$$", "$")
                    for name, value in service["environment"].items()
                    if value is not None and name != "HOME"
                },
            )
            for number, service in enumerate(services.values())
        ]


class Kubelet(KubeTransport):
    """This machine, with an API server that tells of the nodes that were run by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.homes: set[str] = set()
        self.ended: set[str] = set()

    def request(self, to: Context, method: str, path: str, *body: object) -> str:
        run_id = re.search(r"clusterkit%2Frun%3D([a-z0-9-]+)", path)
        if method == "DELETE":
            self.ended.add(path.partition("?")[0].rpartition("/")[2])
        if run_id is None:
            return "{}"
        items = [] if run_id[1] in self.ended else list(self._pods(run_id[1]))
        listed = {"metadata": {"resourceVersion": "1"}, "items": items}
        return json.dumps(listed)

    def _pods(self, run_id: str) -> Iterator[dict[str, Any]]:
        for home in self.homes:
            for folder in Path(home, "runs", run_id, "attempts").glob("*/node-*"):
                node, attempt = folder.name.removeprefix("node-"), folder.parent.name
                labels = {
                    "clusterkit/run": run_id, "clusterkit/attempt": attempt,
                    "clusterkit/role": "node", "training.kubeflow.org/replica-index": node,
                }  # fmt: skip
                name = f"{run_id}-worker-{node}"
                yield {
                    "metadata": {"name": name, "uid": f"{attempt}-{node}", "labels": labels},
                    "status": self._status(folder),
                }

    def execute(self, to: Context, path: str) -> Stream:
        command = parse_qs(urlsplit(path).query)["command"]
        return self.open("localhost", command, own_group=True)

    def _status(self, folder: Path) -> Any:
        if (folder / "pod.json").exists():
            return json.loads((folder / "pod.json").read_bytes())
        if not (folder / "exit.json").exists():
            own = {"name": "pytorch", "state": {"running": {}}}
            return {"phase": "Running", "containerStatuses": [own]}
        ended = json.loads((folder / "exit.json").read_bytes())
        return terminated(ended["exit_code"], json.dumps(ended))


def terminated(code: int, message: str = "") -> dict[str, Any]:
    """The status of a pod that has ended."""
    state = {"terminated": {"exitCode": code, "message": message}}
    status = {"name": "pytorch", "state": state}
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [status]}


class KubernetesStage(LocalStage):
    """Each pod's command runs here, in a folder that is the run's as well."""

    name = "kubernetes"
    watch_each_other = True
    head = "localhost"
    NATIVE = {  # noqa: RUF012
        "SUCCEEDED": terminated(0),
        "FAILED": terminated(7),
        "CANCELLED": terminated(143, '{"exit_code": 143, "reason": "stopped: node 1 failed"}'),
    }
    GARBAGE = ([], {}, None, "text", {"phase": "Confused"}, {"phase": []}, {"phase": "Failed\0"})

    def __init__(self, facts: Callable[..., Facts]) -> None:
        kubelet = Kubelet()

        def in_pods(*args: Any, **fields: Any) -> Facts:
            found = facts(*args, **fields)
            kubelet.homes.add(found.home)
            kubernetes = KubernetesFacts(
                version="v1.34.4", context="test", namespace="default",
                kinds=("PyTorchJob", "MPIJob", "TrainJob"), root=f"{found.home}/runs",
            )  # fmt: skip
            return msgspec.structs.replace(found, kubernetes=kubernetes)

        super().__init__(in_pods)
        self.transport = kubelet

    def cluster(self, **fields: Any) -> ClusterSpec:
        return super().cluster(**{"workdir": str(PROGRAMS), **fields})

    def begin(self, plan: Plan) -> None:
        super().begin(plan)
        self.transport.put("localhost", f"{plan.run_dir}/{run_folder.OWNS_CLUSTER_OBJECTS}", b"")

    def plan(
        self,
        job: JobSpec,
        facts: Facts | None = None,
        run_id: str = "demo-1",
        cluster: ClusterSpec | None = None,
    ) -> Plan:
        # The image's folder of the project is here the project's own.
        entry = cluster or self.cluster(workdir=job.workdir or str(PROGRAMS))
        return super().plan(job, facts, run_id, entry)

    def node_steps(self, plan: Plan) -> list[Step]:
        (pod,) = (file for file in plan.files if file.path.endswith("/pod.sh"))
        *_, last = pod.content().decode().splitlines()
        argv = tuple(shlex.split(last.removeprefix("exec ")))
        return [
            Step(kind="start", host="localhost", node=node, argv=argv, env={"NODE_RANK": str(node)})
            for node in range(plan.nodes)
        ]

    def node_ended(self, handle: run_folder.RunHandle, node: int, native: object) -> None:
        (self._folder(handle, node) / "pod.json").write_text(json.dumps(native))


class NoJobs(LocalTransport):
    """This machine as a login node, with a Slurm that has forgotten every job."""

    def run(self, host: str, argv: Sequence[str], **options: Any) -> Completed:
        if argv[0] != "squeue":
            return super().run(host, argv, **options)
        return Completed(tuple(argv), 0, "", "")


class SlurmStage(LocalStage):
    """Each task's command runs here as `srun` would start it; the run's folder is shared."""

    name = "slurm"
    watch_each_other = True
    head = "127.0.0.1"

    def __init__(self, facts: Callable[..., Facts]) -> None:
        def in_partition(*args: Any, **fields: Any) -> Facts:
            slurm = SlurmFacts(version="22.05.8", partition="main", nodes=4)
            return msgspec.structs.replace(facts(*args, **fields), slurm=slurm)

        super().__init__(in_partition)
        self.transport = NoJobs()

    def nodes_run(self, plan: Plan) -> None:
        answer = f"7|RUNNING|N/A|None|{plan.run_dir}\n"
        self.transport = Running("squeue", answer, ["srun", "--jobid=7", "--overlap"])
        entry = msgspec.json.encode({"backend": self.name})
        self.transport.put("localhost", f"{plan.run_dir}/cluster.json", entry)

    def node_steps(self, plan: Plan) -> list[Step]:
        (script,) = (file for file in plan.files if file.path.endswith("/slurm.sh"))
        _, _, started = script.content().decode().rpartition("\nsrun ")
        words = shlex.split(started.partition(" &\n")[0])
        argv = tuple(words[words.index("/bin/sh") :])
        head = {"CLUSTERKIT_HEAD": self.address(plan)}
        return [
            Step(kind="start", host="localhost", node=node, argv=argv,
                 env={**head, "SLURM_NODEID": str(node)})
            for node in range(plan.nodes)
        ]  # fmt: skip


KINDS = (LocalStage, SshStage, ComposeStage, KubernetesStage, SlurmStage)
STAGES = {kind.name: kind for kind in KINDS}


@pytest.fixture(params=backends.NAMES)
def stage(request: pytest.FixtureRequest, make_facts: Callable[..., Facts]) -> Stage:
    """Every backend of the registry, one after the other."""
    return STAGES[request.param](make_facts)


@pytest.fixture
def staged_names() -> set[str]:
    return set(STAGES)


@pytest.fixture
def recording() -> Callable[..., RecordingTransport]:
    return RecordingTransport


@pytest.fixture
def demo() -> Callable[..., JobSpec]:
    """A job of plain python: ``demo(nodes=2, env={...})``."""

    def make(**fields: Any) -> JobSpec:
        given = {
            "name": "demo",
            "program": str(PROGRAMS / "dump.py"),
            "launcher": "forkserver",
            "workdir": str(PROGRAMS),
        }
        return JobSpec(**(given | fields))

    return make


@pytest.fixture
def run_nodes(tmp_path: Path) -> Callable[..., list[int]]:
    """Run the node commands of a plan for real, in an empty environment; gives exit codes."""

    def run(stage: Stage, plan: Plan, **env: str) -> list[int]:
        stage.write_files(plan)
        nodes = [
            subprocess.Popen(
                ["env", "-i", f"PATH={os.environ['PATH']}",
                 *(f"{name}={value}" for name, value in {**step.env, **env}.items()), *step.argv],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            for step in stage.node_steps(plan)
        ]  # fmt: skip
        return [node.wait(60) for node in nodes]

    return run


@pytest.fixture
def start_nodes() -> Iterator[Callable[[Stage, Plan], None]]:
    """Start the node commands of a plan, and return once all of their ranks have begun."""
    nodes: list[subprocess.Popen[bytes]] = []

    def start(stage: Stage, plan: Plan) -> None:
        stage.write_files(plan)
        for step in stage.node_steps(plan):
            words = [f"{name}={value}" for name, value in {**step.env}.items()]
            nodes.append(subprocess.Popen(
                ["env", "-i", f"PATH={os.environ['PATH']}", *words, *step.argv],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            ))  # fmt: skip
        deadline = time.monotonic() + 120
        for node in range(plan.nodes):
            ranks = Path(run_folder.node_dir(plan.run_dir, 1, node), "ranks.jsonl")
            while not ranks.exists():
                assert time.monotonic() < deadline, f"node {node} has not begun"
                time.sleep(0.05)
        stage.nodes_run(plan)

    yield start
    for node in nodes:
        node.terminate()
    for node in nodes:
        node.wait(60)


@pytest.fixture
def forbidden() -> Callable[[], Any]:
    """A context in which the outside world cannot be touched."""
    import builtins
    import contextlib
    import io
    import pathlib
    import random
    import secrets
    import socket
    import uuid

    targets = [
        (builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "lstat"),
        (os, "listdir"), (os, "scandir"), (os, "getcwd"), (os, "getpid"), (os, "getenv"),
        (os, "environ"), (os, "environb"), (os, "urandom"), (os, "system"), (os, "popen"),
        (os, "mkdir"), (os, "access"), (os, "cpu_count"), (os, "sched_getaffinity"),
        (os, "sysconf"), (os, "uname"), (os, "fork"), (os, "posix_spawn"), (os, "readlink"),
        (socket, "socket"), (socket, "gethostname"), (socket, "getaddrinfo"),
        (subprocess, "Popen"), (subprocess, "run"), (threading.Thread, "start"),
        (time, "time"), (time, "time_ns"), (time, "monotonic"), (time, "perf_counter"),
        (time, "strftime"), (time, "localtime"), (time, "gmtime"), (time, "sleep"),
        (random, "random"), (random, "randrange"), (random, "sample"), (random, "choice"),
        (secrets, "choice"), (secrets, "token_hex"),
        (uuid, "uuid1"), (uuid, "uuid4"),
        (pathlib.Path, "cwd"), (pathlib.Path, "home"), (pathlib.Path, "exists"),
        (pathlib.Path, "expanduser"), (pathlib.Path, "resolve"),
    ]  # fmt: skip

    mine = threading.get_ident()

    class Forbidden:
        """Refuses whatever is done with it; for other threads, which plan nothing, the real one."""

        def __init__(self, owner: Any, name: str) -> None:
            self._name = f"{owner.__name__}.{name}"
            self._there = inspect.getattr_static(owner, name)  # 3.13 inherits Path.cwd

        def _real(self) -> Any:
            if threading.get_ident() == mine:
                raise AssertionError(f"a plan must not touch {self._name}")
            return self._there

        def __get__(self, instance: Any, owner: Any) -> Any:
            return self if threading.get_ident() == mine else self._there.__get__(instance, owner)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(self._real(), name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self._real()(*args, **kwargs)

        def __getitem__(self, key: Any) -> Any:
            return self._real()[key]

        def __setitem__(self, key: Any, value: Any) -> None:
            self._real()[key] = value

        def __contains__(self, key: Any) -> bool:
            return key in self._real()

        def __iter__(self) -> Any:
            return iter(self._real())

        def __instancecheck__(self, instance: Any) -> bool:
            return isinstance(instance, self._real())

    @contextlib.contextmanager
    def context() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in targets:
                patch.setattr(owner, name, Forbidden(owner, name))
            yield

    return context


KINDS_OF_JOB = {
    "torchrun": {"launcher": "torchrun"},
    "torchrun on two nodes": {"launcher": "torchrun", "nodes": 2, "gpus_per_node": 2},
    "elastic torchrun": {"launcher": "torchrun", "nodes": "1:4"},
    "deepspeed": {
        "launcher": "deepspeed",
        "nodes": 2,
        "deepspeed": {"zero_optimization": {"stage": 3}},
        "batch": BatchSpec(global_size=64, micro=8),
    },
    "mpirun": {"launcher": "mpirun", "nodes": 2},
    "forkserver": {"launcher": "forkserver", "checkpoint": CheckpointSpec()},
    "forkserver on two nodes": {"nodes": 2, "gpus_per_node": 2},
    "module": {"program": None, "module": "json.tool"},
    "command": {"program": None, "command": ("./train.sh", "--a b")},
}


@pytest.fixture(params=KINDS_OF_JOB)
def any_job(request, demo):
    return demo(**KINDS_OF_JOB[request.param])


@pytest.fixture
def dump_dir(tmp_path):
    folder = tmp_path / "dump"
    folder.mkdir()
    return folder
