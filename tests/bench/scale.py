"""``python -m tests.bench.scale``: a run on 10, 100 and 1,000 nodes, simulated on this machine.

Everything of ours is real: the supervisor and its mirror in a process of their own, ``clusterkit
status``, ``logs``, ``ls`` and ``cancel`` as commands, and node 0's coordinator. What is not: the
hosts (`tests.bench.fake_hosts`), SSH's own work, and the nodes' launchers. What the fakes cost
is not in the figures: CPU time is that of the one process that is told of.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

import clusterkit
from clusterkit import backends
from clusterkit.agent.client import Client
from clusterkit.agent.files import allow_open_files
from clusterkit.agent.member import RestartPolicy
from clusterkit.agent.messages import EndLauncher, Order, Start
from clusterkit.cli.common import table
from clusterkit.cluster import (
    CLUSTER_TYPES,
    ClusterSpec,
    Engine,
    Facts,
    Host,
    HostFacts,
    KubernetesFacts,
    SlurmFacts,
)
from clusterkit.lifecycle import supervise
from clusterkit.lifecycle.supervisor import Supervisor
from clusterkit.run.folder import RunFolder, Submission, new_run_id
from clusterkit.run.status import RunStatus, State
from clusterkit.spec import JobSpec
from tests.bench.fake_hosts import FakeTransport

SIZES = (10, 100, 1000)
PLANNED = 10_000
SECONDS = 120.0
QUIET_SECONDS = 10.0
"""Over which CPU time is measured."""
RUN = {"run": "bench", "attempt": "1"}


# ---------------------------------------------------------------- processes


def resident(pid: int) -> float:
    """MB of memory that a process holds."""
    told = Path(f"/proc/{pid}/status").read_text()
    return int(told.partition("VmRSS:")[2].split()[0]) * 1024 / 1e6


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_share(pid: int) -> float:
    """Percent of a core that a process takes from here on."""
    begun, before = time.monotonic(), cpu_seconds(pid)
    time.sleep(QUIET_SECONDS)
    return 100 * (cpu_seconds(pid) - before) / (time.monotonic() - begun)


@contextlib.contextmanager
def child(
    *words: str, answer: bool = False, fds: tuple[int, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A Python of its own, ended at the latest here; ``answer``: once it has said a line."""
    argv = [sys.executable, "-m", *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, pass_fds=fds) as process:
        try:
            if answer:
                assert process.stdout is not None
                process.stdout.readline()
            yield process
        finally:
            process.kill()


def seconds_of(argv: list[str], rounds: int = 5) -> float:
    """Median time of a command."""

    def once() -> float:
        begun = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begun

    return statistics.median(once() for _ in range(rounds))


# ---------------------------------------------------------------- a run


def made_up(backend: str, nodes: int) -> tuple[ClusterSpec, Facts]:
    """A cluster entry of this kind, and what probing so many hosts would have found."""
    names = [f"h{number}" for number in range(nodes if backend == "ssh" else 1)]
    hosts = tuple(
        HostFacts(
            host=name, address=f"10.0.{number // 250}.{number % 250 + 1}", cpus=8,
            memory_mib=1 << 16, python="/usr/bin/python3", interface="eth0",
            versions={"torch": "2.13.0", "deepspeed": "0.19.8"},
        )
        for number, name in enumerate(names)
    )  # fmt: skip
    facts = Facts(
        home="/home/u/clusterkit", hosts=hosts, port=29500, port_origin="bench", interface="eth0",
        watch_port=29501,
        engine=Engine(
            socket="unix:///var/run/docker.sock", version="27.3.1", image="clusterkit:cpu",
            image_id="sha256:0", workdir="/opt/clusterkit", user="1000:1000", package="/p",
        ) if backend == "compose" else None,
        kubernetes=KubernetesFacts(version="v1.34.4", context="bench", namespace="default")
        if backend == "kubernetes" else None,
        slurm=SlurmFacts(version="22.05.8", partition="gpu", nodes=nodes)
        if backend == "slurm" else None,
    )  # fmt: skip
    fields = {"hosts": tuple(Host(name=name) for name in names)} if backend == "ssh" else {}
    return CLUSTER_TYPES[backend](**fields), facts


def plan_seconds(backend: str, nodes: int) -> float:
    """A plan for so many nodes, and its text, in this process."""
    cluster, facts = made_up(backend, nodes)
    job = JobSpec(
        name="bench", command=("train",), nodes=nodes, gpus_per_node=8, launcher="torchrun"
    )
    begun = time.perf_counter()
    backends.backend(backend).plan(job, cluster, facts, "bench").to_text()
    return time.perf_counter() - begun


def new_run(nodes: int) -> RunFolder:
    """The folder of a run over SSH that is to be started."""
    cluster, facts = made_up("ssh", nodes)
    job = JobSpec(name="scale", command=("train",), nodes=nodes, gpus_per_node=1)
    folder = RunFolder.create(new_run_id("scale"))
    folder.write_json("job.json", job)
    folder.write_json("cluster.json", {"backend": "ssh"} | msgspec.to_builtins(cluster))
    plan = backends.backend("ssh").plan(job, cluster, facts, folder.run_id)
    folder.save_plan(facts, plan)
    folder.write_json("run.json", Submission(
        run=folder.run_id, job=job.name, cluster="bench", backend="ssh", created_at=time.time(),
        clusterkit=clusterkit.__version__,
    ))  # fmt: skip
    return folder


@contextlib.contextmanager
def supervised(address: str, folder: RunFolder) -> Iterator[int]:
    """The run's supervisor, as `supervise.spawn` starts it; its process id."""
    lock = folder.acquire_supervisor_lock()
    assert lock is not None
    _with_fakes(address)
    Supervisor(folder).start()  # as submit does; the process takes it up
    read, write = os.pipe()
    files = (lock.fileno(), write)
    words = ("tests.bench.scale", "--supervisor", address, str(folder.path), *map(str, files))
    with open(read, "rb") as answer, child(*words, fds=files) as process:
        os.close(write)
        lock.close()
        assert answer.read() == supervise.STARTED
        yield process.pid
        process.wait(SECONDS)


def until(folder: RunFolder, holds: Callable[[RunStatus], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while (status := folder.maybe_json("state.json", RunStatus)) is None or not holds(status):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{status!r}")
        time.sleep(0.02)


def measure_run(nodes: int, home: Path) -> list[str]:
    """One run of so many nodes from its start to its cancel."""
    print(f"measuring a run of {nodes} nodes", file=sys.stderr)
    address = str(home / f"hosts-{nodes}")
    with child("tests.bench.fake_hosts", address, answer=True):
        begun = time.monotonic()
        folder = new_run(nodes)
        with supervised(address, folder) as pid:
            until(folder, lambda s: sum(n.state is State.RUNNING for n in s.nodes) == nodes)
            up = time.monotonic() - begun
            idle = cpu_share(pid)
            FakeTransport(address).run("", ["print", "1"])
            time.sleep(1)
            printing = cpu_share(pid)
            command = [sys.executable, "-m", "clusterkit"]
            status = seconds_of([*command, "status", folder.run_id])
            logs = seconds_of([*command, "logs", folder.run_id, "--rank", str(nodes // 2)])
            listed = seconds_of([*command, "ls"])
            FakeTransport(address).run("", ["print", "0"])
            memory = resident(pid)
            threads = len(os.listdir(f"/proc/{pid}/task"))
            words = [sys.executable, "-m", "tests.bench.scale", "--command", address]
            cancel = seconds_of([*words, "cancel", folder.run_id], 1)
            until(folder, lambda s: s.state is State.CANCELLED)
    return [
        str(nodes), f"{up:.1f}", f"{memory:.0f}", str(threads), f"{idle:.1f}", f"{printing:.1f}",
        f"{status:.2f}", f"{logs:.2f}", f"{listed:.2f}", f"{cancel:.1f}",
    ]  # fmt: skip


# ---------------------------------------------------------------- the coordinator


class Member:
    """A node that speaks to the coordinator as every agent does, and has no launcher.

    Args:
        started: takes this node's rank each time that its launcher is to start.
    """

    def __init__(self, port: int, node: int, nodes: int, started: queue.SimpleQueue[int]) -> None:
        self._node, self._started = node, started
        self.client = Client(
            ("127.0.0.1", port), node=node, terms=RestartPolicy(nodes, 60.0, 600.0), run=RUN,
            token=b"0123456789abcdef", on_order=self._handle,
        )  # fmt: skip
        self.client.start()

    def _handle(self, order: Order) -> None:
        if isinstance(order, Start):
            self._started.put(self._node)
        elif isinstance(order, EndLauncher):
            self.client.launcher_ended(143)  # it ends at once


def coordinate(port: int, nodes: int) -> None:
    """The process of node 0."""
    started: queue.SimpleQueue[int] = queue.SimpleQueue()
    Member(port, 0, nodes, started)
    while True:
        print(started.get(), flush=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def measure_coordinator(nodes: int, rounds: int) -> list[str]:
    """Node 0 in a process of its own, all other nodes in this one."""
    print(f"measuring a coordinator of {nodes} nodes", file=sys.stderr)
    allow_open_files(8 * nodes)
    port, started = free_port(), queue.SimpleQueue[int]()

    def await_start() -> None:
        waiting = set(range(nodes))
        while waiting:
            waiting.discard(started.get(timeout=SECONDS))

    with child("tests.bench.scale", "--coordinator", str(port), str(nodes)) as process:
        assert process.stdout is not None
        node_0 = iter(process.stdout)
        threading.Thread(target=lambda: [started.put(int(line)) for line in node_0]).start()
        begun = time.perf_counter()
        members = [Member(port, node, nodes, started) for node in range(1, nodes)]
        await_start()
        first = time.perf_counter() - begun
        taken, used = [], []
        for _ in range(rounds):
            time.sleep(1)
            begun, before = time.perf_counter(), cpu_seconds(process.pid)
            members[-1].client.leave()
            members[-1].client.close()
            members[-1] = Member(port, nodes - 1, nodes, started)
            await_start()
            taken.append(time.perf_counter() - begun)
            used.append(cpu_seconds(process.pid) - before)
        idle = cpu_share(process.pid)
        memory = resident(process.pid)
    for member in members:
        member.client.close()
    return [
        str(nodes), f"{first:.2f}", f"{statistics.median(taken):.3f}",
        f"{statistics.median(used):.3f}", f"{idle:.1f}", f"{memory:.0f}",
    ]  # fmt: skip


def main(sizes: tuple[int, ...], rounds: int) -> int:
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        os.environ["CLUSTERKIT_HOME"] = str(Path(folder, "home"))
        rows = [measure_run(size, Path(folder)) for size in sizes]
    header = ["nodes", "started s", "memory MB", "threads", "idle %", "printing %", "status s",
              "logs s", "ls s", "cancel s"]  # fmt: skip
    print(table(rows, header))
    print()
    rows = [measure_coordinator(size, rounds) for size in sizes]
    print(table(rows, ["nodes", "met s", "round s", "its CPU s", "idle %", "memory MB"]))
    print()
    rows = []
    larger = (*sizes, PLANNED)
    for name in backends.NAMES:
        times = [statistics.median(plan_seconds(name, n) for _ in range(rounds)) for n in larger]
        rows.append([name, *(f"{taken:.4f}" for taken in times)])
    print(table(rows, ["plan s", *map(str, larger)]))
    return 0


def _with_fakes(address: str) -> None:
    kind = backends.backend_type("ssh")
    kind.transport = classmethod(lambda cls, cluster: FakeTransport(address))  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--supervisor"]:
        _with_fakes(sys.argv[2])
        supervise.main(sys.argv[3:])
    elif sys.argv[1:2] == ["--command"]:
        from clusterkit.cli import main as command

        _with_fakes(sys.argv[2])
        sys.argv[1:] = sys.argv[3:]
        sys.exit(command())
    elif sys.argv[1:2] == ["--coordinator"]:
        coordinate(int(sys.argv[2]), int(sys.argv[3]))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
        parser.add_argument("--rounds", type=int, default=5)
        options = parser.parse_args()
        sys.exit(main(tuple(options.sizes), options.rounds))
