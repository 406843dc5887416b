"""A Slurm of this machine's own: munged, slurmctld and a few slurmd, that leave nothing behind.

``python -m tests.live.slurm.daemons COMMAND...`` runs a command with it, for trying things by hand.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from clusterkit import agent, api
from clusterkit.run.status import State

NODES = 3
"""The last one is in partition ``wide`` alone."""
CPUS = 4
READY_SECONDS = 60.0
_CONF = """\
ClusterName=clusterkit
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=5
SchedulerTimeSlice=5
OverTimeLimit=0
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port={slurmds} CPUs={cpus}
PartitionName=main Nodes=n[0-1] Default=YES MaxTime=30 PriorityTier=1 State=UP
PartitionName=wide Nodes=ALL MaxTime=30 PriorityTier=1 State=UP
PartitionName=urgent Nodes=n[0-1] MaxTime=30 PriorityTier=9 PreemptMode=OFF State=UP
PartitionName=down Nodes=n0 State=DOWN
"""


def missing() -> str | None:
    """Why there can be none here; None: there can."""
    for tool in ("munged", "slurmctld", "slurmd", "sbatch"):
        if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            return f"{tool} is not installed (apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "slurmd needs root"


class Slurm:
    """The daemons, and what reaches them: ``env``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        ports = _free_ports(1 + NODES)
        host = socket.gethostname().partition(".")[0]
        conf = _CONF.format(
            host=host, folder=self.folder, ports=ports, last=NODES - 1, cpus=CPUS,
            slurmds="[" + ",".join(map(str, ports[1:])) + "]",
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(conf)
        # A container's /sys may hold neither kind of cgroup; nothing here confines jobs by them.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
        options = [f"--{name}={self.folder}/munge.{end}" for name, end in files.items()]
        self.start("munged", "--foreground", "--force", *options,
                   f"--seed-file={self.folder}/munge.seed")  # fmt: skip
        self.wait(lambda: (self.folder / "munge.socket").exists(), "munged")
        self.start_controller()
        for node in range(NODES):
            self.start_node(node)
        self.wait(lambda: self.states("wide") == ["idle"] * NODES, "the nodes")

    def start(self, name: str, *arguments: str, key: str = "") -> None:
        log = (self.folder / f"{key or name}.out").open("ab")
        with log:
            self.running[key or name] = subprocess.Popen(
                [shutil.which(name, path="/usr/sbin:/usr/bin") or name, *arguments],
                env={**os.environ, **self.env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def start_controller(self) -> None:
        self.start("slurmctld", "-D")

    def start_node(self, node: int) -> None:
        self.start("slurmd", "-D", "-N", f"n{node}", key=f"n{node}")

    def stop(self, key: str, signum: int = signal.SIGTERM) -> None:
        daemon = self.running.pop(key)
        daemon.send_signal(signum)
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def crash(self, node: int) -> None:
        """End a node and all that runs on it at once; Slurm is told rather than left to notice."""
        self.stop(f"n{node}", signal.SIGKILL)
        steps = self._steps(f"SLURMD_NODENAME=n{node}")
        # Children first: the one of an srun that sees that go ends its step on all nodes.
        agent.send(steps[::-1], signal.SIGKILL)
        self.run("scontrol", "update", f"nodename=n{node}", "state=down", "reason=a test")

    def repair(self, node: int) -> None:
        self.start_node(node)  # Slurm takes it back by itself (ReturnToService)
        self.wait(lambda: self.states("wide") == ["idle"] * NODES, "the repaired node")

    def let_go(self, run: api.Run, seconds: float = 60) -> None:
        """Slurm holds a job back for two minutes before it starts it again: not this one."""
        waiting = run.wait(seconds, until=lambda status: any("two minutes" in (n.reason or "")
                                                             for n in status.nodes))  # fmt: skip
        assert waiting.state in (State.PENDING, State.RUNNING), waiting
        job = self.run("squeue", "-h", f"--name={run.id}", "-o", "%i").strip()
        self.run("scontrol", "update", f"jobid={job}", "StartTime=now")

    def run(self, *argv: str) -> str:
        """A command's output."""
        env = {**os.environ, **self.env}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{argv}: {done.stderr}")
        return done.stdout

    def states(self, partition: str = "main") -> list[str]:
        with contextlib.suppress(RuntimeError):
            return self.run("sinfo", "-h", "-N", "-p", partition, "-o", "%T").split()
        return []

    def jobs(self) -> list[str]:
        return self.run("squeue", "-h", "-o", "%i").split()

    def wait(self, ready: object, what: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not ready():  # type: ignore[operator]
            for key, daemon in self.running.items():
                if daemon.poll() is not None:
                    said = (self.folder / f"{key}.out").read_text()[-2000:]
                    raise RuntimeError(f"{key} ended with {daemon.returncode}: {said}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}: not ready within {READY_SECONDS:g} s")
            time.sleep(0.05)

    def down(self) -> None:
        with contextlib.suppress(Exception):
            if jobs := self.jobs():
                self.run("scancel", "--signal=KILL", "--full", *jobs)
                self.run("scancel", *jobs)
        # What the nodes started goes on without them: steps first.
        steps = [pid for daemon in self.running.values() for pid in agent.descendants(daemon.pid)]
        steps += self._steps()
        for key in list(self.running)[::-1]:
            self.stop(key)
        agent.send([*steps, *self._steps()], signal.SIGKILL)

    def _steps(self, mark: str = "") -> list[int]:
        """Living slurmstepd of these nodes, who are nobody's children, and all below them.

        Args:
            mark: only those below whom a process has this in its environment.
        """
        ours, found = os.fsencode(f"SLURM_CONF={self.env['SLURM_CONF']}"), []
        for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            if ours in _words(pid, "environ") and "slurmstepd" in str(_words(pid, "cmdline")[0]):
                step = [pid, *agent.descendants(pid)]
                if any(os.fsencode(mark) in _words(each, "environ") for each in step):
                    found += step
        return found


def _words(pid: int, of: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{of}").read_bytes().split(b"\0")
    except OSError:
        return [b""]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in made]


@contextlib.contextmanager
def slurm() -> Iterator[Slurm]:
    """Daemons that run meanwhile.

    Raises:
        RuntimeError: they cannot; the message holds what the daemon said.
    """
    # Short: a socket's path has 108 bytes at most.
    with tempfile.TemporaryDirectory(prefix="ck-slurm-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)  # munged refuses a socket that others cannot reach
        made = Slurm(Path(folder))
        try:
            made.up()
            yield made
        finally:
            made.down()


if __name__ == "__main__":
    with slurm() as here:
        os.environ.update(here.env)
        sys.exit(subprocess.run(sys.argv[1:] or ["bash"]).returncode)
