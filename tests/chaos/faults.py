"""What is done to runs: a name, where, how, and what must come of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterkit.agent import processes
from clusterkit.run.status import State
from tests.live.kubernetes import conftest as cluster

if TYPE_CHECKING:
    from tests.chaos.case import Case

ALL = "local ssh compose kubernetes slurm"
STOPPED_SECONDS = 2.5
"""Longer than an agent takes to see it of a rank, shorter than a host may be silent for."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Args:
        name: what it is called.
        on: the places where it can happen.
        do: does it, once the run is at the step that was drawn.
        state: the run's end.
        attempts: how many it may take to that.
        blames: whom a failure must name: ``rank``, ``node``, or nobody; ``lost``: nobody either, as
            a node that is lost costs no attempt.
        cause: a pattern that the failure's cause matches; ``{rank}`` and the like are filled in.
        said: a pattern that a line of the log or an event matches.
        mischief: what the program does by itself at that step.
        early: it is done at a random moment after Enter instead.
        restarts: of the job, as `hang_timeout` and `on_node_loss` are.
        traced: whether the log tells of all steps.
        rank: the one it is done to; by default one is drawn.
        nodes: of the job, which share its four ranks.
        entry: what the cluster's entry has for it, at that place.
        long: its log is: it is not read whole, and nobody follows it.
    """

    name: str
    on: str
    do: Callable[[Case], None] = lambda case: None
    state: State = State.SUCCEEDED
    attempts: tuple[int, ...] = (2,)
    blames: str = ""
    cause: str = ""
    said: str = ""
    mischief: str = ""
    early: bool = False
    restarts: int = 2
    hang_timeout: float = 0.0
    on_node_loss: str = "wait"
    traced: bool = True
    rank: int | None = None
    nodes: int = 2
    entry: Callable[[Any], dict[str, Any]] = lambda there: {}
    long: bool = False


# ---------------------------------------------------------------- how


def rank(signum: int) -> Callable[[Case], None]:
    return lambda case: case.signal(case.node, case.rank_pid(case.rank), signum)


def agent(signum: int) -> Callable[[Case], None]:
    return lambda case: case.signal(case.node, case.agent_pid(case.node), signum)


def supervisor(signum: int) -> Callable[[Case], None]:
    return lambda case: os.kill(case.supervisor_pid(), signum)


def submitter(signum: int) -> Callable[[Case], None]:
    return lambda case: case.submitter.send_signal(signum)


def for_a_while(stop: Callable[[int], Callable[[Case], None]]) -> Callable[[Case], None]:
    """Stopped (SIGSTOP), and after some seconds not any more."""

    def do(case: Case) -> None:
        pid = {rank: lambda: case.rank_pid(case.rank), agent: lambda: case.agent_pid(case.node)}
        if stop in pid:  # by one command: on a busy machine each takes long in a container
            found, case.struck = pid[stop](), time.time()
            wakes = f"(sleep {STOPPED_SECONDS}; kill -CONT {found}) >/dev/null 2>&1 &"
            case.sh(case.node, f"kill -STOP {found}; {wakes}")
        else:
            stop(signal.SIGSTOP)(case)
        case.go()
        time.sleep(STOPPED_SECONDS)
        if stop not in pid:
            stop(signal.SIGCONT)(case)

    return do


def fork_server(case: Case) -> None:
    """The agent's child whose children the ranks are."""
    pid = case.rank_pid(case.rank)
    stat = case.sh(case.node, f"cat /proc/{pid}/stat")
    case.signal(case.node, int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)


def whole_node(case: Case) -> None:
    """The agent and all below it."""
    pid = case.agent_pid(case.node)
    processes.send([pid, *processes.descendants(pid)], signal.SIGKILL)


def memory_limit(case: Case) -> None:
    """A cgroup of 64 MiB for a rank that takes more at its last step; containers have theirs."""
    if case.place.name == "local":
        group = Path("/sys/fs/cgroup/memory") / f"{case.folder.parent.name}-{case.folder.name}"
        group.mkdir()
        case.held.callback(lambda: case.until(lambda: not group.rmdir(), "empty cgroup"))
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        (group / "cgroup.procs").write_text(str(case.rank_pid(case.rank)))
    case.go()


def two_ranks(case: Case) -> None:
    """One on each node."""
    pids = [(node, case.rank_pid(2 * node)) for node in (0, 1)]
    for node, pid in pids:
        with contextlib.suppress(RuntimeError):  # gone already, of the first one's end
            case.signal(node, pid, signal.SIGKILL)


def rank_twice(case: Case) -> None:
    rank(signal.SIGKILL)(case)
    case.until_step(case.step, attempt=2)
    case.signal(case.node, case.rank_pid(case.rank, attempt=2), signal.SIGKILL)


def supervisor_and_rank(case: Case) -> None:
    supervisor(signal.SIGKILL)(case)
    rank(signal.SIGKILL)(case)


def killed_and_attached(case: Case) -> None:
    submitter(signal.SIGKILL)(case)
    case.submitter.wait()
    case.attach()


def squat(case: Case) -> None:
    """Take rank 0's port as soon as it is known, or as soon as its rank is gone."""
    port = case.port()
    if not case.fault.early:
        rank(signal.SIGKILL)(case)
    squatter = case.held.enter_context(socket.socket())
    squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            squatter.bind(("", port))
            squatter.listen()
            return


def fill(name: str) -> Callable[[Case], None]:
    """The disk that a folder of the case lies on."""

    def do(case: Case) -> None:
        assert (case.folder / name).is_mount()  # and not this machine's disk
        with contextlib.suppress(OSError), (case.folder / name / "filler").open("wb") as file:
            while True:
                file.write(b"x" * 4096)
                file.flush()

    return do


def full_and_killed(case: Case) -> None:
    fill("home")(case)
    rank(signal.SIGKILL)(case)


def full_and_attached(case: Case) -> None:
    """The submitter's disk is full; an agent and, once all have started again, the supervisor are
    killed, and another one comes."""
    fill("home")(case)
    agent(signal.SIGKILL)(case)
    folder = f"{case.run.plan.run_dir}/attempts/2/node-{case.node}"
    case.until(lambda: case.sh(case.node, f"ls {folder} || true"), "second attempt")
    time.sleep(2)
    supervisor(signal.SIGKILL)(case)
    (case.folder / "home" / "filler").unlink()
    case.attach()


def long_log(case: Case) -> None:
    """2 GB of output (a hole and its last 64 MB: disks are slow), and then a rank is killed."""
    log = f"{case.run.plan.run_dir}/attempts/1/node-{case.node}/log"
    line = f"2026-01-01T00:00:00.000000Z {case.rank} {'x' * 995}"
    case.sh(case.node, f"truncate -s 2G {log}; yes {line} | head -c 64M >>{log}")
    rank(signal.SIGKILL)(case)


def tear(case: Case) -> None:
    """The newest checkpoint loses its end, once no other will follow; then a rank is killed."""
    case.until_step(case.last_step - 1)
    case.sh(0, f"f=$(ls {case.checkpoints_of(case.run)}/step-* | tail -n 1); truncate -s 9 $f")
    rank(signal.SIGKILL)(case)


def cancel(case: Case) -> None:
    for run in case.until(case.runs, "run"):
        case.clusterkit("cancel", run.id)


def twice(case: Case) -> None:
    """The same job again, by the same person at the same time."""
    case.started.append(case.start())
    case.until(lambda: len([run for run in case.runs() if run.plan]) == 2, "second run")


def host(fault: str, *then: str, seconds: float = 2.0) -> Callable[[Case], None]:
    def do(case: Case) -> None:
        name, value = (*fault.split(), None)[:2]
        case.place.lab.fault(name, f"h{case.node}", value)
        for each in then:
            time.sleep(seconds)
            case.place.lab.fault(each, f"h{case.node}")

    return do


def sshd_refuses(case: Case) -> None:
    """Connections break, and it accepts none, while an agent is killed and all start again."""
    lab, name = case.place.lab, f"h{case.node}"
    config = lab.root(name) / "etc/ssh/sshd_config"
    text = config.read_text()
    pid = case.agent_pid(case.node)
    case.sh(case.node, f"(sleep 3; kill -9 {pid}) >/dev/null 2>&1 &")
    config.write_text(f"Port 2222\n{text}")
    first = lab.pid(name)
    os.kill(first, signal.SIGHUP)
    program = os.readlink(f"/proc/{first}/exe")
    for other in map(int, (lab.cgroup(name) / "cgroup.procs").read_text().split()):
        with contextlib.suppress(OSError):
            if other != first and os.readlink(f"/proc/{other}/exe") == program:
                os.kill(other, signal.SIGKILL)
    time.sleep(10)
    config.write_text(text)
    os.kill(first, signal.SIGHUP)
    lab.wait_for_ssh(name)


def container(*words: str) -> Callable[[Case], None]:
    def do(case: Case) -> None:
        case.place.docker(*(word.format(**case.names()) for word in words))

    return do


def pod(*words: str) -> Callable[[Case], None]:
    def do(case: Case) -> None:
        case.place.kube.kubectl(*(word.format(**case.names()) for word in words))

    return do


def pod_killed(case: Case) -> None:
    """With its first process, as its node would do it."""
    os.kill(case.place.agent_of(case.run, case.node), signal.SIGKILL)


def node_of_cluster(how: str, remedy: str) -> Callable[[Case], None]:
    """``crash`` or ``cut`` that of one of the pods."""

    def do(case: Case) -> None:
        (case.node,) = (each.node for each in case.run.status().nodes if each.host == "node-2")
        case.held.callback(cluster.mend, remedy, case.place.kube)
        cluster.cluster(how, "node-2")

    return do


def api_away(case: Case) -> None:
    """While a rank is killed and all start again."""
    pid = case.rank_pid(case.rank)
    case.sh(case.node, f"(sleep 3; kill -9 {pid}) >/dev/null 2>&1 &")
    try:
        cluster.cluster("api", "down")
        time.sleep(6)  # nobody can be asked meanwhile
        case.go()
    finally:
        cluster.api_up()
        words = ("wait", "node", "--all", "--for=condition=Ready", "--timeout=120s")
        case.place.kube.kubectl(*words)


def api_html(case: Case) -> None:
    """A proxy answers for the API server, with 200, while the run comes to its end."""
    with case.place.proxy.instead(b"<html>Please sign in</html>", "text/html"):
        time.sleep(10)
    with case.place.proxy.instead(b'{"kind": "Status"}', "application/json"):
        case.go()
        time.sleep(10)
        if (status := case.run.status()).state.final:
            raise RuntimeError(f"ended without evidence: {status}")


def scancel(case: Case) -> None:
    case.place.slurm.run("scancel", f"--name={case.run.id}")


def slurmctld(case: Case) -> None:
    """Away while a rank is killed and all start again."""
    slurm = case.place.slurm
    slurm.stop("slurmctld")
    try:
        rank(signal.SIGKILL)(case)
        case.until((case.run.path / "attempts" / "2").exists, "second attempt")
    finally:
        slurm.start_controller()
        slurm.wait(slurm.states, "slurmctld")


def slurm_node(crash: bool) -> Callable[[Case], None]:
    """Its slurmd, or all that runs on it; Slurm starts the job again once it is back."""

    def do(case: Case) -> None:
        slurm = case.place.slurm
        if crash:
            slurm.crash(case.node)
        else:
            slurm.stop(f"n{case.node}", signal.SIGKILL)
            slurm.wait(lambda: any(each.startswith("down") for each in slurm.states()), "loss")
        slurm.start_node(case.node)
        slurm.let_go(case.run)

    return do


# ---------------------------------------------------------------- what

KILLED = "SIGKILL: the (rank|launcher) was killed|OOMKilled: the"
"""What runs beside on this machine may be out of memory meanwhile."""
SILENT = "its agent ended without reporting an exit code|: the agent was killed"
FAULTS = (
    Fault("none", ALL, attempts=(1,)),
    Fault("rank-kill", ALL, rank(signal.SIGKILL), blames="rank", cause=KILLED),
    Fault("rank-segv", ALL, rank(signal.SIGSEGV), blames="rank", cause="SIGSEGV: the rank crashed"),
    Fault("rank-term", ALL, rank(signal.SIGTERM), blames="rank", cause="SIGTERM: the rank was"),
    Fault("rank-stop", ALL, for_a_while(rank), attempts=(1,),
          said="rank {rank} was stopped .SIGSTOP"),
    Fault("rank-twice", ALL, rank_twice, attempts=(3,), blames="rank", cause=KILLED),
    Fault("rank-last", ALL, rank(signal.SIGKILL), State.FAILED, (1,), "rank", KILLED, restarts=0),
    Fault("two-ranks", ALL, two_ranks, cause=KILLED),
    Fault("exception", ALL, mischief="exception", blames="rank", cause="ValueError: injected, as"),
    Fault("exit", ALL, mischief="exit", blames="rank",
          cause="exit code 7; last output: about to leave"),
    Fault("hang", ALL, mischief="hang", hang_timeout=3.0,
          cause="rank {rank} on node {node} is at train.py:[0-9]+ in misbehave"),
    Fault("memory", "local compose kubernetes", memory_limit, mischief="memory", blames="rank",
          cause="memory"),
    Fault("long-log", "local slurm", long_log, blames="rank", cause=KILLED, long=True),
    Fault("torn", ALL, tear, blames="rank", cause=KILLED, said="skipped step-"),
    Fault("launcher-kill", ALL, fork_server, blames="node",
          cause="forks the ranks ended: SIGKILL"),
    Fault("agent-kill", "local ssh slurm", agent(signal.SIGKILL), blames="node", cause=SILENT),
    Fault("agent-stop", "local compose slurm", for_a_while(agent), attempts=(1,)),
    Fault("agent-term", "local ssh slurm", agent(signal.SIGTERM), blames="node",
          cause="stopped by"),
    Fault("agent-deaf", "local ssh slurm", agent(signal.SIGKILL), blames="node", cause=SILENT,
          mischief="deaf"),
    Fault("node-kill", "local", whole_node, blames="node", cause=SILENT),
    Fault("supervisor-kill", ALL, supervisor(signal.SIGKILL), attempts=(1,)),
    Fault("supervisor-term", ALL, supervisor(signal.SIGTERM), attempts=(1,)),
    Fault("supervisor-stop", ALL, for_a_while(supervisor), attempts=(1,)),
    Fault("supervisor-rank", ALL, supervisor_and_rank),
    Fault("submitter-kill", ALL, submitter(signal.SIGKILL), attempts=(1,)),
    Fault("submitter-early", ALL, killed_and_attached, attempts=(1, 2), early=True),
    Fault("submitter-int", ALL, submitter(signal.SIGINT), State.CANCELLED, (1,), early=True),
    Fault("cancel", ALL, cancel, State.CANCELLED, (1,)),
    Fault("cancel-early", ALL, cancel, State.CANCELLED, (1,), early=True),
    Fault("twice", ALL, twice, attempts=(1,), early=True),
    Fault("port", "local", squat, attempts=(2, 3), blames="rank", rank=0),
    Fault("port-early", "local", squat, attempts=(1, 2), said="port .* was taken", early=True),
    Fault("disk", "local", fill("home"), attempts=(1,), traced=False),
    # The agents start nothing on a full disk; the supervisor tries it seven times.
    Fault("disk-rank", "local", full_and_killed, State.FAILED, (8,), "rank", KILLED,
          traced=False),
    Fault("disk-saving", "local", fill("checkpoints"), State.FAILED, (1, 2, 3), "rank",
          "No space left on device", rank=0),
    Fault("disk-attach", "ssh", full_and_attached, traced=False),
    Fault("host-crash", "ssh", host("crash"), State.FAILED, (1,), "node", "host h{node}",
          on_node_loss="fail"),
    Fault("host-cut", "ssh", host("cut"), State.FAILED, (1,), "node", "host h{node}",
          on_node_loss="fail"),
    Fault("host-freeze", "ssh", host("freeze"), State.FAILED, (1,), "node", "host h{node}",
          on_node_loss="fail"),
    Fault("host-back", "ssh", host("cut", "heal", seconds=12.0),
          cause="host h{node}|node [01] (does not answer|has not answered)"),
    Fault("host-blink", "ssh", host("cut", "heal"), attempts=(1,)),
    Fault("host-offline", "ssh", host("cut", "heal", seconds=60.0), attempts=(1,), nodes=1),
    Fault("host-refuses", "ssh", sshd_refuses, attempts=(2, 3, 4), blames="node", cause=SILENT),
    Fault("host-shared", "ssh", rank(signal.SIGKILL), blames="rank", cause=KILLED,
          entry=lambda there: {"workdir": "/srv/shared/ck"}),
    Fault("host-sshd", "ssh", host("restart-sshd"), attempts=(1,)),
    Fault("host-slow", "ssh", host("slow 1mbit"), attempts=(1,)),
    # The ranks fail as often as there are restarts, or the nodes cannot be started: seven tries.
    Fault("host-disk", "ssh", host("full-disk"), State.FAILED, (1, 2, 3, 8, 9, 10), "rank",
          "No space left on device", rank=0),
    Fault("container-kill", "compose", container("kill", "{container}"), blames="node",
          cause="killed from outside"),
    Fault("container-stop", "compose", container("stop", "{container}"), blames="node",
          cause="stopped"),
    Fault("container-pause", "compose", container("pause", "{container}"), blames="node",
          cause="paused"),
    Fault("container-cut", "compose",
          container("network", "disconnect", "{network}", "{container}"), blames="node",
          cause="cut off"),
    Fault("pod-delete", "kubernetes", pod("delete", "pod", "{pod}", "--wait=false"), attempts=(1,),
          blames="lost", said="node {node} (was lost|is back)"),
    Fault("pod-force", "kubernetes", pod("delete", "pod", "{pod}", "--force", "--grace-period=0"),
          attempts=(1,), blames="lost", said="node {node} (was lost|is back)"),
    Fault("pod-kill", "kubernetes", pod_killed, attempts=(1,), blames="lost",
          said="node {node} (was lost|is back)"),
    Fault("node-crash", "kubernetes", node_of_cluster("crash", "restore"), attempts=(1,),
          blames="lost", said="node {node} (was lost|is back)"),
    Fault("node-cut", "kubernetes", node_of_cluster("cut", "join"), attempts=(1,), blames="lost",
          said="node {node} (was lost|is back)"),
    Fault("api-away", "kubernetes", api_away, blames="rank", cause=KILLED),
    Fault("api-html", "kubernetes", api_html, attempts=(1,),
          entry=lambda there: {"kubeconfig": str(there.proxy.kubeconfig)}),
    Fault("scancel", "slurm", scancel, State.CANCELLED, (1,)),
    Fault("slurmctld", "slurm", slurmctld, blames="rank", cause=KILLED),
    # Slurm itself ends the job then, agents and all.
    Fault("slurmd-kill", "slurm", slurm_node(crash=False), cause="slurmstepd|Slurm requeued its"),
    Fault("slurm-node", "slurm", slurm_node(crash=True), blames="node",
          cause="Slurm requeued its job"),
)  # fmt: skip
