"""Finds the rank that failed first, the cause and a remedy, from exit codes and log lines.

When one rank dies, its peers fail a moment later with errors of their own, here called echoes (see
`ECHOES`). The first failure is the earliest that is no echo, or the earliest if all are echoes.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from clusterkit.agent import STARTING_AGAIN
from clusterkit.agent.failure import ECHOES, TIMED_OUT, shell_code
from clusterkit.errors import join_some
from clusterkit.output.tracebacks import REPORT, Output
from clusterkit.run.logs import LogLine
from clusterkit.run.status import Failure, NodeCause, NodeStatus, RankExit, State

# "failed (exitcode: -9) local_rank: 0 (pid: 123) of binary: sh", torch 2.13, multiprocessing/api.py
_TORCHRUN = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
# "mpirun noticed that process rank 1 with PID 12 on node x exited on signal 9", Open MPI 4.1
_MPIRUN = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
# "[...] exits with return code = 7", deepspeed 0.19, launcher/launch.py
_DEEPSPEED = re.compile(r"exits with return code = (-?\d+)")
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals that a program causes itself."""
_NEVER_PRIMARY = frozenset({-signal.SIGTERM, 128 + signal.SIGTERM})

PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_HINTS = (
    (re.compile(r"CUDA out of memory|OutOfMemoryError"),
     "a smaller batch.micro (accumulation grows with it), a higher ZeRO stage, or offload"),
    (re.compile(r"DefaultCPUAllocator: can't allocate|MemoryError"),
     "a smaller batch.micro, fewer ranks on this machine, or a smaller model"),
    (re.compile(r"No module named '?[\w.]+"),
     "install it for the ranks' Python interpreter (`clusterkit plan` and facts.json name it)"),
    (PORT_TAKEN,
     "another program, or an earlier run of this one, listens on that port"),
    (re.compile(r"No space left on device"), "free space on that disk"),
    (re.compile(r"Timed out waiting \d+ms|Watchdog caught collective"),
     "a rank timed out waiting for its peers: find the rank that is behind (logs --rank)"),
    (re.compile(r"Error building extension|Ninja is required"),
     "DeepSpeed compiles its operators on this node: install a C++ compiler and ninja"),
    (re.compile(r"Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device"),
     "the program needs CUDA, but this node has no GPU that its ranks can use"),
    (re.compile(r"not compiled with CUDA enabled|compiled without CUDA support|_cuda_setDevice"
                r"|doesn't have NCCL built in"),
     "the program needs CUDA, but this node has no GPU or a CPU-only torch"),
    (re.compile(r"Duplicate GPU detected"),  # NCCL
     "two ranks use one GPU: each must use that of its LOCAL_RANK, or start fewer (--gpus)"),
    (re.compile(r"loss is (nan|-?inf)|returned nan values in its|non-?finite", re.I),
     "lower the learning rate or clip gradients, and resume from a checkpoint before that step"),
    (re.compile(r"PytorchStreamReader failed|inline_container|archive is corrupted|Ran out of input"
                r"|SafetensorError|pickle data was truncated|checkpoint .* cannot be read"),
     "the file is damaged or not a checkpoint: remove it and resume from an earlier one"),
    (re.compile(r"DDP expects same model across all ranks|[Mm]ismatch between collectives"
                r"|appears not to match (sizes|strides) of the same param"
                r"|[Mm]ismatched? (NCCL|CUDA|torch) version|incompatible NCCL version"),
     "ranks run different code or versions: `clusterkit doctor` compares the nodes' packages"),
    (re.compile(r"exec: \S*/.*: not found"),
     "the file does not exist, or the interpreter in its first line (#!) does not"),
    (re.compile(r"exec: .*Permission denied"), "chmod +x makes a file executable"),
    (re.compile(r"exec: .*not found"),
     "the command is not on the ranks' PATH, which begins with the folder of their Python"),
)  # fmt: skip

_SIGNALS: dict[int, tuple[str, str | None]] = {
    signal.SIGKILL: (
        "SIGKILL: {who} was killed from outside (kill -9); the kernel counted no out-of-memory "
        "kill",
        "check the memory limit of the container or the batch job"),
    signal.SIGSEGV: (
        "SIGSEGV: {who} crashed in native code", "env: {PYTHONFAULTHANDLER: '1'} shows where"),
    signal.SIGABRT: (
        "SIGABRT: {who} aborted in native code",
        "if training had ended: end ranks with a barrier and os._exit, as gpt_ranks.py does"),
}  # fmt: skip
"""Cause and hint by signal."""
_OOM_KILLED = "OOMKilled: {who} was killed by the kernel (SIGKILL) because memory ran out"

_MORE_MEMORY = "a smaller batch.micro, fewer ranks per node, or a machine with more memory"
_NO_FILE = re.compile(r"FileNotFoundError|No such file or directory|NotADirectoryError")

_Source = tuple[int, int | None]
"""Node and rank."""


@dataclass
class _Suspect:
    """A rank (None: a launcher) that may have failed first."""

    node: int
    rank: int | None
    time: float
    exit_code: int | None = None
    asked: bool = True
    """Whether its agent may have stopped it."""
    output: Output = field(default_factory=Output)

    @property
    def message(self) -> str:
        """The message of its last exception; without one its last output that may say why."""
        return self.output.message or self.output.final_lines()[0]

    @property
    def handled(self) -> bool:
        """Whether its end shows that the program itself has printed its last traceback.

        After an exception Python exits with 1; its end may then crash, or hang until it is killed.
        """
        code = self.exit_code or 1
        if number := _signal_number(code):
            return not self.asked and number not in _CRASHES
        return code != 1

    @property
    def echo(self) -> bool:
        if self.output.traceback and not self.output.message:
            return True  # its log was cut off before the message
        # Further lines of a message may quote the error of a peer or a data server.
        message = self.message.partition("\n")[0] if self.output.traceback else self.message
        return bool(ECHOES.search(message)) or (self.asked and self.exit_code in _NEVER_PRIMARY)


def diagnose(
    nodes: Sequence[NodeStatus],
    lines: Iterable[LogLine],
    *,
    rank_exits: Iterable[RankExit] = (),
    nproc_per_node: int = 1,
    oom_kills: int = 0,
    causes: Sequence[NodeCause] = (),
    run: str = "RUN",
) -> Failure:
    """Return the first failure of an attempt that did not succeed.

    Args:
        nodes: how each node ended.
        lines: log lines of all nodes, in order of time; the last few thousand are enough.
        rank_exits: how ranks ended, as far as known.
        nproc_per_node: ranks per node, to number the local ranks that torchrun reports.
        oom_kills: how many processes the kernel killed meanwhile because memory ran out.
        causes: why nodes or their ranks were killed, if the backend knows.
        run: the run's id, for hints.
    """
    ends = list(rank_exits)
    failures = [end for end in ends if end.exit_code]
    suspects, outputs = _suspects(lines, nproc_per_node, {end.node for end in failures})
    for end in failures:
        named = _Suspect(end.node, end.rank, end.at)
        suspect = suspects.setdefault((end.node, end.rank), named)
        suspect.exit_code, suspect.asked = end.exit_code, end.asked
    for key, suspect in suspects.items():
        suspect.output = outputs.get(key, suspect.output)
    for end in failures:
        suspect = suspects[end.node, end.rank]
        suspect.time = end.at if suspect.handled else suspect.time
    accused = [s for s in suspects.values() if s.exit_code or s.output.traceback]
    blamed = _blame(accused)
    # A node on a host that no longer answers has failed as well.
    failed = [node for node in nodes if node.state in (State.FAILED, State.UNKNOWN)]
    # A node whose launcher or agent was killed reports nothing; only its peers' echoes do.
    silent = [node for node in failed if node.node not in {s.node for s in accused}]
    known = _known_cause(blamed, causes, nproc_per_node)
    if known is not None:
        rank = None if blamed is None or blamed.echo else blamed.rank
        return Failure(
            node=known.node, rank=rank, exit_code=known.exit_code, cause=known.words,
            hint=known.hint,
        )  # fmt: skip
    if blamed is None or (blamed.echo and silent):
        return _from_nodes(silent or failed or list(nodes), oom_kills, outputs, run)
    exit_code = blamed.exit_code
    if exit_code is None and blamed.node < len(nodes):
        exit_code = nodes[blamed.node].exit_code
    cause, hint = _cause(blamed, exit_code, oom_kills)
    hint = _left_early(blamed, ends) or hint or _missing_file(blamed, accused, nodes)
    return Failure(
        node=blamed.node, rank=blamed.rank, cause=cause, hint=hint,
        exit_code=None if exit_code is None else shell_code(exit_code),
        traceback=blamed.output.traceback_text(),
    )  # fmt: skip


def _known_cause(
    blamed: _Suspect | None, causes: Sequence[NodeCause], nproc: int
) -> NodeCause | None:
    """Return the backend's cause for the blamed rank, or any if only echoes are blamed."""
    if blamed is None or blamed.echo:
        return causes[0] if causes else None
    if shell_code(blamed.exit_code or 0) != 128 + signal.SIGKILL:
        return None
    # With mpirun, the first node's log has the output of all ranks.
    node = blamed.node if blamed.rank is None else blamed.rank // nproc
    return next((cause for cause in causes if cause.node == node), None)


def _suspects(
    lines: Iterable[LogLine], nproc: int, known: Container[int]
) -> tuple[dict[_Source, _Suspect], dict[_Source, Output]]:
    """Return the ranks with a traceback or named by a launcher, and the output of each rank.

    Args:
        known: nodes of which it is known which rank failed.
    """
    suspects: dict[_Source, _Suspect] = {}
    outputs: dict[_Source, Output] = {}
    for line in lines:
        key = (line.node, line.rank)
        if line.rank is None:
            if line.text.endswith(STARTING_AGAIN):
                # Lost nodes have come back: the output before did not end the attempt.
                for each in (suspects, outputs):
                    for old in [key for key in each if key[0] == line.node]:
                        del each[old]
            _read_launcher(line, nproc, suspects, known)
        output = outputs.setdefault(key, Output())
        output.read(line)
        if output.traceback and line.rank is not None:
            suspect = suspects.setdefault(key, _Suspect(line.node, line.rank, output.began))
            suspect.time = output.began
    return suspects, outputs


def _read_launcher(
    line: LogLine, nproc: int, suspects: dict[_Source, _Suspect], known: Container[int]
) -> None:
    def suspect(rank: int | None) -> _Suspect:
        return suspects.setdefault((line.node, rank), _Suspect(line.node, rank, line.time))

    if match := _TORCHRUN.search(line.text):
        found = suspect(line.node * nproc + int(match[2]))
        found.exit_code = int(match[1])
        found.asked = found.exit_code in _NEVER_PRIMARY  # the first that failed, before any stop
    elif match := _MPIRUN.search(line.text):
        suspect(int(match[1])).exit_code = -int(match[2])
    elif (match := _DEEPSPEED.search(line.text)) and line.node not in known:
        # It does not name the rank: the one whose traceback came first, if any.
        ranks = [s for s in suspects.values() if s.node == line.node and s.rank is not None]
        first = min(ranks, key=lambda s: s.time, default=None) or suspect(None)
        first.exit_code = int(match[1])


def _blame(suspects: Sequence[_Suspect]) -> _Suspect | None:
    real = [suspect for suspect in suspects if not suspect.echo]
    # A traceback without an exit code may be one that its rank survived.
    ended = [suspect for suspect in real if suspect.exit_code]
    return min(ended or real or suspects, key=lambda suspect: suspect.time, default=None)


def _cause(suspect: _Suspect, exit_code: int | None, oom_kills: int) -> tuple[str, str | None]:
    """Return cause and hint."""
    output, code = suspect.output, exit_code or 0
    printed = "" if output.fatal or suspect.rank is None else output.message
    if printed and not suspect.handled:
        return printed, _hint(printed)
    cause, hint, number = f"exit code {code}", None, _signal_number(code)
    if number:
        who = "the launcher" if suspect.rank is None else "the rank"
        cause, hint = _signal_cause(number, oom_kills, who)
        if code > 0 and not oom_kills:  # of a signal the record has -N
            name = _signal_name(number)
            cause = f"exit code {code}: {name} as a shell reports it, or the program's own code"
    if output.fatal and number:
        return cause, None  # its traceback shows where
    if printed:
        return f"{cause}; last traceback printed: {printed}", hint or _hint(printed)
    if suspect.rank is None:
        words, is_error = _launcher_error(output), True
    elif number:
        words, is_error = output.error_line() if number in _CRASHES else "", True
    else:
        words, is_error = output.final_lines()
    if not words:
        return cause, hint
    hint = _hint(words) or hint
    # Of a program that cannot be started, without the script that would become it.
    words = re.sub(r"^(\S*/rank\.sh|sh): (line )?\d+: exec: (?=.*: )", "", words)
    return f"{cause}{': ' if is_error else '; last output: '}{words}", hint


def _launcher_error(output: Output) -> str:
    """Return the error of a launcher itself; empty if it only reports how its ranks ended."""
    if output.message:
        return "" if REPORT.match(output.message) else output.message
    words, is_error = output.final_lines()
    return words if is_error else ""


def _signal_number(code: int) -> int:
    """Return N for the exit codes -N and 128 + N of signal N; 0 for others."""
    return -code if code < 0 else code - 128 if 128 < code < 160 else 0


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal, or none
        return f"signal {number}"


def _signal_cause(number: int, oom_kills: int, who: str) -> tuple[str, str | None]:
    other = f"{_signal_name(number)}: {{who}} was ended by this signal"
    cause, hint = _SIGNALS.get(number, (other, None))
    if number == signal.SIGKILL and oom_kills:
        cause, hint = _OOM_KILLED, _MORE_MEMORY
    return cause.format(who=who), hint


def _hint(message: str) -> str | None:
    return next((hint for pattern, hint in _HINTS if pattern.search(message)), None)


def _left_early(blamed: _Suspect, ends: Sequence[RankExit]) -> str | None:
    """Return which ranks ended with 0 before one failed that had waited for them, if any."""
    if not (blamed.echo or TIMED_OUT.search(blamed.message)):
        return None
    first = min((end.at for end in ends if end.exit_code), default=math.inf)
    left = [end for end in ends if not (end.exit_code or end.asked) and end.at <= first]
    if not left:
        return None
    ranks = join_some(map(str, sorted({end.rank for end in left})))
    return (
        f"rank{'s' if len(left) > 1 else ''} {ranks} exited with code 0 before that, but a "
        "collective needs every rank: check that all ranks run the same number of steps"
    )


def _missing_file(
    blamed: _Suspect, accused: Sequence[_Suspect], nodes: Sequence[NodeStatus]
) -> str | None:
    """Return a hint if a file may be missing on some nodes only."""
    lacks = {each.node for each in accused if _NO_FILE.search(each.message)}
    if len({node.host for node in nodes}) == 1 or blamed.node not in lacks:
        return None
    if len(lacks) == len(nodes):
        return "the file is missing on every node"
    some = join_some((f"node {node}" for node in sorted(lacks)), len(lacks))
    return f"missing on {some} of {len(nodes)} nodes: copy it to every node, or to a shared disk"


def _from_nodes(
    nodes: Sequence[NodeStatus], oom_kills: int, outputs: Mapping[_Source, Output], run: str
) -> Failure:
    """Return a failure of which no rank reported anything."""
    ended = [node for node in nodes if node.exit_code or node.reason]
    first = min(ended, key=lambda node: node.ended_at or 0.0, default=None)
    if first is None:
        return Failure(
            node=None,
            rank=None,
            exit_code=1,
            cause="no exit code: the run ended and no node reported one",
        )
    code = first.exit_code if first.exit_code is not None else 1
    cause, hint = first.reason, None
    if cause is None and (number := _signal_number(code)):
        cause, hint = _signal_cause(number, oom_kills, "the launcher")
    if (cause or "").startswith("OOMKilled"):
        hint = _MORE_MEMORY
    if first.state is State.UNKNOWN:
        hint = f"check host {first.host} and its network, or leave it out: --exclude {first.host}"
    output = outputs.get((first.node, None), Output())
    error = "" if cause else _launcher_error(output)
    return Failure(
        node=first.node, rank=None, exit_code=code,
        cause=cause or f"exit code {code} of the launcher{f': {error}' if error else ''}",
        hint=hint or _hint(error) or f"clusterkit logs {run} shows its last output",
        traceback=output.traceback_text() if error and output.message else None,
    )  # fmt: skip
