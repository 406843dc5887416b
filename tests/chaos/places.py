"""Where runs are broken: this machine, hosts of the lab, containers, pods, nodes of a Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from clusterkit import agent, api
from clusterkit.backends.compose.compose_file import container_name
from clusterkit.errors import Unavailable
from tests.lab import Lab, machine
from tests.live.compose import engine as engines
from tests.live.compose import image
from tests.live.kubernetes import conftest as cluster
from tests.live.kubernetes.conftest import KUBECTL, Kube
from tests.live.kubernetes.counting import Counting
from tests.live.slurm import daemons
from tests.live.slurm.daemons import Slurm


@dataclass
class Local:
    """This machine. Others are this one with another way to a node."""

    entry: dict[str, Any] = field(default_factory=lambda: {"backend": "local", "stop_grace": 2})
    env: dict[str, str] = field(default_factory=dict)
    name: str = "local"
    parallel: bool = True
    """Whether what is done to one run leaves the others alone."""

    def shell(self, run: api.Run, node: int) -> list[str]:
        """What runs a line of shell on a node of a run."""
        return ["sh", "-c"]

    def sh(self, run: api.Run, node: int, script: str, *, check: bool = True) -> str:
        done = subprocess.run(
            [*self.shell(run, node), script], capture_output=True, text=True, timeout=60,
            env={**os.environ, **self.env},
        )  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"node {node}: {script}: {done.stderr.strip()}")
        return done.stdout

    def checkpoints(self, run: api.Run) -> str:
        """Where a node sees them."""
        return f"{run.plan.run_dir}/checkpoints"

    def go(self, run: api.Run, folder: str) -> None:
        """Let a run come to its last step, whose checkpoints lie in a folder."""
        self.sh(run, 0, f"touch {posixpath.dirname(folder)}/go", check=False)

    def left(self, run: api.Run) -> list[str]:
        """What is left of a run that has ended."""
        found = [f"process {pid}" for pid in agent.processes_of(str(run.path))]
        facts = json.loads((run.path / "facts.json").read_bytes())
        for port in filter(None, (facts["port"], facts.get("watch_port"))):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if self.name == "local" and probe.connect_ex(("127.0.0.1", port)) == 0:
                    found.append(f"port {port}")
        return found

    def repair(self) -> None:
        """Undo what was done to it."""


@dataclass
class Hosts(Local):
    """Two hosts of a lab."""

    lab: Lab = field(kw_only=True)

    def shell(self, run: api.Run, node: int) -> list[str]:
        host = self.lab.hosts[node].name
        options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]  # one may be cut off
        return [machine.tool("ssh"), "-F", str(self.lab.ssh_config), *options, host]

    def left(self, run: api.Run) -> list[str]:
        self.repair()
        run.cancel()  # as the status advises for a host that was lost and is back
        mine = f"grep -lz '^CLUSTERKIT_RUN_DIR={run.plan.run_dir}$' /proc/[0-9]*/environ"
        found = super().left(run)
        for node, host in enumerate(self.lab.hosts):
            there = self.sh(run, node, f"{mine} 2>/dev/null; ls -A /tmp", check=False).split()
            found += [f"{path} on {host.name}" for path in there]
        return found

    def repair(self) -> None:
        self.lab.repair()


@dataclass
class Containers(Local):
    """Containers of a docker engine on this machine."""

    def shell(self, run: api.Run, node: int) -> list[str]:
        return ["docker", "exec", container_name(run.id, node), "sh", "-c"]

    def docker(self, *words: str) -> str:
        done = subprocess.run(
            ["docker", *words], env={**os.environ, **self.env}, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"docker {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def left(self, run: api.Run) -> list[str]:
        mine = ("--quiet", "--filter", f"label=clusterkit.run={run.path}")
        containers = self.docker("ps", "--all", *mine).split()
        return [*super().left(run), *containers, *self.docker("network", "ls", *mine).split()]


@dataclass
class Pods(Local):
    """Pods of the test cluster, with checkpoints on a volume of all of them."""

    kube: Kube = field(kw_only=True)
    volume: Path = field(kw_only=True)
    """On this machine."""
    proxy: Counting = field(kw_only=True)
    """Before the API server, for whom it is told to."""

    def shell(self, run: api.Run, node: int) -> list[str]:
        command = [*KUBECTL, "-n", self.kube.namespace, "exec", pod_name(run.id, node)]
        return [*command, "--", "sh", "-c"]

    def checkpoints(self, run: api.Run) -> str:
        return f"{SHARED}/{run.id}/checkpoints"

    def go(self, run: api.Run, folder: str) -> None:
        there = self.volume / run.id  # the pod of node 0 may be away
        there.mkdir(exist_ok=True)
        there.chmod(0o777)
        (there / "go").touch()

    def agent_of(self, run: api.Run, node: int) -> int:
        """Process id on this machine: in its pod nobody may send SIGKILL to the first process."""
        mark = f"HOSTNAME={pod_name(run.id, node)}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = mark in (process / "environ").read_bytes().split(b"\0")
                if ours and b"agent.pyz" in (process / "cmdline").read_bytes():
                    return int(process.name)
        raise LookupError(f"no agent of node {node}")

    def left(self, run: api.Run) -> list[str]:
        return [*super().left(run), *self.kube.there()]


@dataclass
class Allocation(Local):
    """Two nodes of a Slurm on this machine."""

    slurm: Slurm = field(kw_only=True)

    def left(self, run: api.Run) -> list[str]:
        with contextlib.suppress(RuntimeError):
            self.slurm.wait(lambda: not self.slurm.jobs(), "the end of the jobs")
        return [*super().left(run), *(f"job {job}" for job in self.slurm.jobs())]


@contextlib.contextmanager
def kubernetes() -> Iterator[Pods]:
    """The cluster that `make kube-up` has made, image and all, or one of its own."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-kube-")))
        ours = not cluster.KUBECONFIG.exists()
        stack.enter_context(cluster.up())
        if ours:
            with engines.engine() as engine:
                base = engines.base_image(engine)
                image.made(engine, base)
                cluster.load(engine, base)
        kube = stack.enter_context(cluster.own_namespace(folder, claim=True))
        kube.kubectl("wait", "pvc/runs", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")
        volume = kube.kubectl("get", "pvc/runs", "-o", "jsonpath={.spec.volumeName}")
        kube.entry(
            code="copied", memory="128Mi", lost_after=5.0, patch=cluster.apart("job"),
            volumes=[{"claim": "runs", "path": SHARED}], shared=SHARED,
        )  # fmt: skip
        entry = yaml.safe_load(kube.file.read_text())["k8s"]
        where = cluster.STATE / "shared-volumes" / volume.removeprefix("shared-")
        proxy = stack.enter_context(Counting(cluster.KUBECONFIG, folder))
        yield Pods(entry, name="kubernetes", parallel=False, kube=kube, volume=where, proxy=proxy)


def pod_name(run: str, node: int) -> str:
    """As the training operator names the pods of a PyTorchJob."""
    return f"{run}-worker-{node}"


@contextlib.contextmanager
def place(name: str) -> Iterator[Local]:
    """One of them, while it is there.

    Raises:
        ClusterkitError, engines.NoEngine, pytest.skip.Exception: this machine cannot have it.
    """
    if name == "local":
        yield Local()
    elif name == "ssh":
        with Lab(tempfile.mkdtemp(prefix="clusterkit-lab-"), 2, shared=True) as lab:
            entry = {"backend": "ssh", "inventory": str(lab.inventory), "stop_grace": 2}
            entry |= {"lost_after": 6, "connect_timeout": 5, "python": sys.executable}
            yield Hosts(entry, name=name, parallel=False, lab=lab)
    elif name == "slurm":
        if why := daemons.missing():
            raise Unavailable(why)
        with daemons.slurm() as slurm:
            os.environ.update(slurm.env)
            entry = {"backend": "slurm", "cpus": 2, "stop_grace": 2, "lost_after": 6}
            yield Allocation(entry, name=name, parallel=False, slurm=slurm)
    elif name == "kubernetes":
        with kubernetes() as pods:
            yield pods
    else:
        with engines.engine() as engine:
            tag = image.made(engine, engines.base_image(engine))
            entry = {"backend": "compose", "image": tag, "stop_grace": 2}
            entry |= {"lost_after": 4, "memory": "128m"}
            env = {k: v for k, v in engine.env.items() if k.startswith("DOCKER_") or k == "PATH"}
            os.environ.update(env)  # for what this process asks of a run
            yield Containers(entry, env, name=name, parallel=False)


NAMES = ("local", "ssh", "compose", "kubernetes", "slurm")
SHARED = "/shared"
