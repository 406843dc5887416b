"""The entries of docs/troubleshooting.md: message, meaning, remedy.

Messages and remedies come from the code, so that they are those on the reader's screen: of failed
ranks from `diagnose`, which gets what such a rank leaves behind; of refusals from the source of the
errors. Meanings are written here. A test holds that no cause that `diagnose` knows is left out.
"""

from __future__ import annotations

import ast
import signal
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

import clusterkit
from clusterkit.backends.node_status import observed
from clusterkit.output.diagnose import diagnose
from clusterkit.run.logs import LogLine
from clusterkit.run.status import Failure, NodeStatus, RankExit, State

PACKAGE = Path(clusterkit.__file__).parent
GAP = "..."
"""Stands for a value in a message."""


class Entry(NamedTuple):
    message: str
    meaning: str
    remedy: str


# ---------------------------------------------------------------- what diagnose says


def raised(message: str, nodes: int = 1) -> Failure:
    """The failure of a run whose rank 0 raised an exception."""
    text = f'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n{message}'
    lines = [LogLine(1.0, 0, 0, line) for line in text.splitlines()]
    return _failure(lines, [RankExit(0, 0, 1, 1.1, asked=False)], nodes)


def printed(line: str, code: int) -> Failure:
    """The failure of a run whose rank 0 printed a line and ended with this code."""
    lines = [LogLine(1.0, 0, 0, line)] if line else []
    return _failure(lines, [RankExit(0, 0, code, 1.1, asked=False)])


def killed(number: int, oom_kills: int = 0) -> Failure:
    """The failure of a run whose rank 0 was ended by a signal."""
    return _failure([], [RankExit(0, 0, -number, 1.1, asked=False)], oom_kills=oom_kills)


def recorded(cause: str) -> Failure:
    """The failure of a run of which a node's agent recorded a cause."""
    record = msgspec.json.encode({"exit_code": 137, "causes": [cause]})
    nodes = [_node(0, 137)]
    return diagnose(nodes, [], causes=observed(nodes, {0: record}).causes)


def left_early() -> Failure:
    """The failure of a run of which one rank ended before the others."""
    waited = "RuntimeError: Timed out waiting 1800000ms for recv operation to complete"
    text = f'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n{waited}'
    lines = [LogLine(2.0, 0, 0, line) for line in text.splitlines()]
    ends = [RankExit(0, 1, 0, 1.0, asked=False), RankExit(0, 0, 1, 2.1, asked=False)]
    return diagnose([_node(0, 1)], lines, rank_exits=ends, nproc_per_node=2)


def of_node(
    code: int | None, reason: str | None = None, state: State = State.FAILED, oom_kills: int = 0
) -> Failure:
    """The failure of a run of which no rank said anything."""
    node = NodeStatus(node=0, host="gpu1", state=state, exit_code=code, reason=reason)
    return diagnose([node], [], oom_kills=oom_kills)


def _node(number: int, code: int) -> NodeStatus:
    return NodeStatus(node=number, host=f"gpu{number + 1}", state=State.FAILED, exit_code=code)


def _failure(
    lines: list[LogLine], ends: list[RankExit], nodes: int = 1, oom_kills: int = 0
) -> Failure:
    states = [_node(number, ends[0].exit_code) for number in range(nodes)]
    return diagnose(states, lines, rank_exits=ends, oom_kills=oom_kills)


RANKS: tuple[tuple[Failure, str], ...] = (
    (raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
     "The GPU's memory is full. `clusterkit estimate JOB` computes what fits."),
    (raised("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate "
            "8589934592 bytes."),
     "The node's memory is full."),
    (killed(signal.SIGKILL, oom_kills=1),
     "The kernel ended the rank because the machine, or the container, was out of memory."),
    (killed(signal.SIGKILL),
     "Somebody or something sent SIGKILL: a person, a batch system, or a container's memory limit "
     "that the node's kernel does not show."),
    (printed("", 137),
     "The program, or a shell in front of it, reported a signal: 128 + 9 is SIGKILL."),
    (killed(signal.SIGSEGV), "Native code (a library in C++ or CUDA) accessed wrong memory."),
    (killed(signal.SIGABRT),
     "Native code gave up. With gloo it sometimes happens when the interpreter ends, after the "
     "training."),
    (raised("ModuleNotFoundError: No module named 'einops'"),
     "The Python that runs the ranks is not the one in which the package is installed."),
    (raised("FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'"),
     "The program does not find a file. Its relative paths start from the project's folder on the "
     "node; files that git ignores are not copied."),
    (raised("FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'", nodes=2),
     "The file is on some of the nodes. Only the project's own files are copied."),
    (raised("OSError: [Errno 28] No space left on device"), "A disk of that node is full."),
    (raised("RuntimeError: The server socket has failed to listen on any local network address. "
            "port: 29500, EADDRINUSE: address already in use"),
     "With `port: auto`, the default, a taken rendezvous port is replaced before the start."),
    (raised("RuntimeError: Timed out waiting 1800000ms for recv operation to complete"),
     "A collective waited for a rank until its timeout was over."),
    (left_early(), "The ranks do not all take part in the same collectives."),
    (raised("RuntimeError: Error building extension 'cpu_adam'"),
     "DeepSpeed compiles some of its operations when they are used first."),
    (raised("RuntimeError: Found no NVIDIA driver on your system."),
     "The program calls CUDA, and sees no GPU."),
    (raised("AssertionError: Torch not compiled with CUDA enabled"),
     "The program calls CUDA, and its torch is a build for CPUs."),
    (raised("torch.distributed.DistBackendError: NCCL error: Duplicate GPU detected : rank 0 and "
            "rank 1 both on CUDA device 1b000"),
     "The program did not select its GPU, or a node has fewer GPUs than ranks."),
    (raised("ValueError: the loss is nan at step 120"), "The training has diverged."),
    (raised("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central "
            "directory"),
     "A checkpoint was not written to its end, or is another kind of file."),
    (raised("RuntimeError: DDP expects same model across all ranks, but Rank 0 has 4 params, while "
            "rank 1 has inconsistent 0 params."),
     "The ranks do not compute the same program."),
    (printed("/files/rank.sh: 14: exec: ./train.sh: not found", 127),
     "The job's command names a file that a node does not have."),
    (printed("/files/rank.sh: 14: exec: ./train.sh: Permission denied", 126),
     "The job's command is a file that may not be executed."),
    (printed("/files/rank.sh: 14: exec: trainer: not found", 127),
     "The job's command is on no folder of the ranks' PATH."),
    (recorded("hang: rank 3 on node 1 has not entered all_reduce #60, which ranks 0-2 wait in"),
     "A rank does something else than the others, or nothing; the message has the line that it "
     "executes. [More](reliability.md#ranks-that-hang)"),
    (recorded("rank 3 was stopped (SIGSTOP)"), "Somebody stopped the process: Ctrl-Z, a debugger."),
    (recorded("stopped by SIGTERM from process 7 of user 0 (bash)"),
     "Another process asked this node's agent to end."),
    (of_node(None, "host gpu1 does not answer within 10 s", State.UNKNOWN),
     "The host is down, or the network between it and this machine is. Its ranks may still run; "
     "`clusterkit cancel` ends them once it answers."),
    (of_node(7), "torchrun, deepspeed or mpirun failed, and no rank reported anything."),
    (of_node(137, oom_kills=1), "The memory of the node was full, and the launcher was chosen."),
)  # fmt: skip
"""Failures, and what they mean where the message does not say it."""


# ---------------------------------------------------------------- what platforms report

PLATFORMS: tuple[Entry, ...] = (
    Entry("OOMKilled: its node ran out of memory",
          "Kubernetes ended the container because of a memory limit.",
          "a larger `memory` in the cluster entry, or a smaller batch.micro"),
    Entry("image ... cannot be pulled: ...",
          "Kubernetes: the node's container runtime did not get the image.",
          "check the name in `image`, `image_pull_secrets`, and that the nodes reach the registry"),
    Entry("Unschedulable: ...", "Kubernetes has no node with room for the pod, and says why.",
          "fewer `gpus_per_node`, less `memory`, or tolerations in the cluster entry"),
    Entry("suspended: waits for its Kueue queue", "Kueue has not admitted the job yet.",
          "nothing; `kubectl get workloads` shows the queue"),
    Entry("no controller has updated ...; is its operator running?",
          "The object is there, but no operator has acted on it.",
          "start the operator, or `flavor: job`, which needs none"),
    Entry("Evicted: its node is being drained", "An administrator empties the node.",
          "nothing with restarts left: another pod takes its place"),
    Entry("Preempted: by pod ..., whose priority is higher", "Kubernetes gave the place to "
          "another pod.", "wait, or a PriorityClass in the cluster entry"),
    Entry("its namespace, ..., is being deleted", "All objects in it end.",
          "submit to another namespace"),
    Entry("its container was stopped from outside (docker stop)", "Somebody or docker itself ended "
          "the container.", "`docker events --since 1h` shows what happened"),
    Entry("its container was removed from outside (docker rm)", "Somebody removed the container.",
          "submit again"),
    Entry("job ... left Slurm's queue before it started", "It was cancelled, or cannot run.",
          "`sacct --jobs ID` and `scontrol show job ID` show why"),
    Entry("Slurm requeued its job", "A preemption or a failed node: Slurm "
          "requeued the job.", "nothing; the run continues as another attempt"),
    Entry("its agent ended without reporting an exit code", "The agent was killed, or its host was "
          "restarted.", "`restarts: N` in the job starts the nodes again"),
    Entry("it was stopped at its time_limit", "The run has used up `time_limit` of the job.",
          "raise time_limit; another run can resume from this one's checkpoint"),
    Entry("failed twice with the same error: ...", "Two attempts in a row failed with the same "
          "exception at the same step; a third would, too.", "fix the program; `clusterkit rerun "
          "RUN` starts it again"),
    Entry("no exit code: the run ended and no node reported one", "All records of its end are "
          "missing.",
          "`clusterkit logs RUN` shows the last output"),
    Entry("slow: ...", "The others wait for this rank in every step. What slows its node down "
          "is named if it is known.", "look at that node: `clusterkit doctor`, `clusterkit bench`"),
    Entry("NET/Socket: NCCL sends over TCP, although ...", "NCCL does not use InfiniBand.",
          "[NCCL's network](programs.md#nccls-network)"),
)  # fmt: skip


# ---------------------------------------------------------------- what clusterkit refuses


@cache
def refusals() -> tuple[Entry, ...]:
    """Errors about tools, hosts and files, with their remedy, in order of their modules.

    `BadInput` is about a value that was given: it names the file, the line and the remedy itself.
    """
    found = (
        Entry(message, "", remedy)
        for tree in _modules()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in _kinds()
        for message in [_text(call.args[0] if call.args else None)]
        for remedy in [_text(_hint_of(call))]
        if message.replace(GAP, "").strip(" :") and remedy.replace(GAP, "").strip(" :,")
    )
    return tuple(dict.fromkeys(found))


def literals() -> str:
    """All texts of the package, to find a message's words in."""
    return "\n".join(
        node.value
        for tree in _modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


@cache
def _modules() -> tuple[ast.Module, ...]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return tuple(ast.parse(path.read_text()) for path in paths if "jobs" not in path.parts)


@cache
def _kinds() -> frozenset[str]:
    """Names of the errors that are raised on purpose, and are not about a value that was given."""
    bases = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for tree in _modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def descends(name: str, kind: str) -> bool:
        return name == kind or any(descends(base, kind) for base in bases.get(name, ()))

    return frozenset(
        name
        for name in bases
        if descends(name, "ClusterkitError") and not descends(name, "BadInput")
    )


def _hint_of(call: ast.Call) -> ast.expr | None:
    named = next((keyword.value for keyword in call.keywords if keyword.arg == "hint"), None)
    return named or (call.args[1] if len(call.args) > 1 else None)


def _text(node: ast.expr | None) -> str:
    """A text of the source, with a gap for each value; empty if it has none of its own."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(parts):
            return "".join(map(_text, parts))
        case ast.BinOp(left, ast.Add(), right):
            return _text(left) + _text(right)
        case None:
            return ""
    return GAP
