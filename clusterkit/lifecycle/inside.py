"""Commands beside the ranks of a run, on every backend: `exec`, and what is built on it.

A backend starts ``agent.pyz inside`` where a node's agent runs (`Backend.inside`); this is the
other end of that stream, whose frames `clusterkit.agent.protocol` describes.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import queue
import re
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from clusterkit import backends
from clusterkit.agent import standstill
from clusterkit.agent.archive import ARCHIVE
from clusterkit.agent.files import read_lines
from clusterkit.agent.protocol import INSIDE_BEGIN, INSIDE_WINDOW, frame, take_frames
from clusterkit.backends.base import Inside
from clusterkit.errors import EXIT_REFUSED, BadInput, ClusterkitError, Unavailable
from clusterkit.lifecycle import control
from clusterkit.lifecycle.control import Connections
from clusterkit.plan import Plan
from clusterkit.run.folder import RunFolder, RunHandle, Submission
from clusterkit.run.status import RunStatus
from clusterkit.transport import Completed, Stream, fan_out

BEGIN_SECONDS = 60.0
"""For a node to start the command; Slurm may take long to start a step."""
END_SECONDS = 10.0
"""For a node to end what a lost terminal has left."""
PING_SECONDS = 20.0
"""Between two signs of life; see `limits.INSIDE_SILENCE`."""
NOT_HANGING_SECONDS = 1.0
"""For which ranks may wait in a collective of a run that makes progress."""
_THREAD = re.compile(r"^(Current )?[Tt]hread .*\n  <no Python frame>\n+", re.MULTILINE)
"""One that runs no Python, as that which answers."""
_CHUNK = 1 << 16
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
Output = Callable[[bytes, bool], None]
"""Takes output of a command, and whether it is of its standard error."""


class Place:
    """The nodes of a run that runs, and how commands are started there; closed with a ``with``."""

    def __init__(self, folder: RunFolder, *, ended: bool = False) -> None:
        """Find them.

        Args:
            ended: the run may have ended, where its hosts still have its files.

        Raises:
            BadInput: the run has ended, or has not started.
            Unavailable: its hosts do not answer.
        """
        self._connections = Connections()
        self.status: RunStatus = control.reconcile(folder, self._connections)
        self.folder, state = folder, self.status.state
        self.ended = state.final
        if state.final and not ended:
            raise BadInput(
                f"run {folder.run_id} has ended ({state}): nothing of it runs any more",
                hint=f"clusterkit logs {folder.run_id} shows what it printed",
            )
        if (host := control.elsewhere(folder)) is not None:
            raise BadInput(f"run {folder.run_id}: its processes run on {host}", hint="ask there")
        self.handle: RunHandle = folder.handle(self.status.attempt)
        self._backend = backends.backend(folder.read_json("run.json", Submission).backend)
        self._transport = self._connections.to(folder.cluster())

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self._connections.close()

    def nodes(self) -> list[int]:
        """Return the nodes that have not ended, and wait for no other one's place."""
        nodes = self.status.nodes
        return [each.node for each in nodes if not each.state.final and not each.spare]

    def node_of(self, node: int | None, rank: int | None) -> int:
        """Return the node that is meant: of this rank, or the first.

        Raises:
            BadInput: the run has no such node or rank, or where the rank is is not known here.
        """
        plan, run = self.handle.plan, self.folder.run_id
        known = {each.node for each in self.status.nodes} or set(range(plan.nodes))
        if node is not None and node not in known:
            raise BadInput(f"node {node}: run {run} has nodes 0 to {max(known)}")
        if rank is not None and not 0 <= rank < plan.world_size:
            raise BadInput(f"rank {rank}: run {run} has ranks 0 to {plan.world_size - 1}")
        if node is not None or rank is None:
            return node or 0
        if (fixed := plan.node_of(rank)) is not None:
            return fixed
        seen = [
            (float(line["at"]), each)
            for each in known
            for line in read_lines(self.folder.node_dir(self.handle.attempt, each) / "ranks.jsonl")
            if line["rank"] == rank
        ]
        if not seen and plan.nodes > 1:
            raise BadInput(f"rank {rank}: its node is not known here", hint="--node N names it")
        return max(seen)[1] if seen else 0

    def ways(self, nodes: Sequence[int]) -> dict[int, Inside]:
        """Return how commands are started beside these nodes' agents.

        Raises:
            BadInput: one of them does not run.
        """
        found = self._backend.inside(self.handle, self._transport, nodes)
        for node in nodes:
            if node not in found:
                raise BadInput(
                    f"node {node} of run {self.folder.run_id} does not run",
                    hint=f"clusterkit status {self.folder.run_id} shows its state",
                )
        return found

    def start(self, way: Inside, node: int, **request: Any) -> Command:
        """As the function."""
        return start(self.handle.plan, way, node, ended=self.ended, **request)


def start(plan: Plan, way: Inside, node: int, **request: Any) -> Command:
    """Start a command by a request of `clusterkit.agent.inside`.

    Raises:
        ClusterkitError: it cannot be started there.
    """
    archive = posixpath.join(plan.run_dir, "files", ARCHIVE)
    given: dict[str, Any] = {"run_dir": plan.run_dir, "node": node, "ended": False, "rank": None}
    given |= {"argv": [], "python": False, "terminal": None}
    stream = way.open([plan.python, "-I", archive, "inside"])
    return Command(stream, f"node {node}", {**given, **request})


class Command:
    """A command that runs beside a node's ranks."""

    def __init__(self, stream: Stream, where: str, request: dict[str, Any]) -> None:
        self._stream, self._where = stream, where
        self._frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._under_way = 0  # bytes of input that it has not taken
        self._room = threading.Condition()
        stream.write(json.dumps(request).encode() + b"\n")
        threading.Thread(target=self._write, daemon=True).start()

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Send a frame; from any thread, and from a handler of signals."""
        self._frames.put(frame(kind, data))

    def _write(self) -> None:
        # One thread writes: frames stay whole, and a handler of signals never waits.
        with contextlib.suppress(ClusterkitError, OSError, ValueError):  # `run` tells of it
            while True:
                try:
                    each = self._frames.get(timeout=PING_SECONDS)
                except queue.Empty:
                    each = frame(b"p")
                if not each:
                    return
                self._stream.write(each)

    def feed(self, read: Callable[[], bytes]) -> None:
        """Give it input, in a thread of its own, until ``read`` returns nothing."""

        def work() -> None:
            while data := read():
                with self._room:
                    self._room.wait_for(lambda: self._under_way < INSIDE_WINDOW)
                    self._under_way += len(data)
                self.send(b"i", data)
            self.send(b"e")

        threading.Thread(target=work, daemon=True).start()

    def run(self, output: Output) -> int:
        """Take its output until it has ended; return its exit code.

        Raises:
            BadInput: there is no such node or rank, or it has ended.
            Unavailable: it could not be started there, or the connection was lost.
        """
        try:
            for kind, data in self._received():
                if kind == b"x":
                    return int(data)
                if kind == b"!":
                    raise BadInput(f"{self._where}: {data.decode(errors='replace')}")
                if kind == b"a":
                    with self._room:
                        self._under_way -= int(data)
                        self._room.notify_all()
                else:
                    output(data, kind == b"r")
            raise AssertionError
        finally:
            self._frames.put(b"")
            # The end of its input ends the other side, and with it what is left there. It is waited
            # for: `close` kills what runs here of docker and srun, or of the other side itself.
            self._stream.close_input()
            with contextlib.suppress(ClusterkitError, OSError):
                while self._stream.read(END_SECONDS):
                    pass
            self._stream.close()

    def _received(self) -> Iterator[tuple[bytes, bytes]]:
        data, begun = bytearray(), False
        while True:
            part = self._stream.read(None if begun else BEGIN_SECONDS)
            if not part:
                raise self._lost(begun)
            data += part
            if not begun:
                before, begin, after = bytes(data).partition(INSIDE_BEGIN)
                begun, data = bool(begin), bytearray(after if begin else before)
            if begun:
                yield from take_frames(data)

    def _lost(self, begun: bool) -> Unavailable:
        with contextlib.suppress(ClusterkitError):
            self._stream.exit_code(2.0)
        said = self._stream.stderr.strip()
        line = said.rpartition("\n")[2][:300]
        if "invalid choice: 'inside'" in said or "can't open file" in said:
            return Unavailable(
                f"{self._where}: the agent of this run is of an older clusterkit, or gone",
                hint="runs that are submitted from now on have it",
            )
        what = "the connection was lost" if begun else "no command can be started there"
        return Unavailable(f"{self._where}: {what}{f': {line}' if line else ''}")


# ---------------------------------------------------------------- exec and shell


def completed(folder: RunFolder, argv: Sequence[str], node: int | None, rank: int | None,
              stdin: bytes) -> Completed:  # fmt: skip
    """Run a command to its end. Raises as `execute`."""
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    given = iter([stdin[at : at + _CHUNK] for at in range(0, len(stdin), _CHUNK)])
    with Place(folder) as place:
        where = place.node_of(node, rank)
        command = place.start(place.ways([where])[where], where, rank=rank, argv=[*argv])
        command.feed(lambda: next(given, b""))
        code = command.run(lambda data, error: parts[error].append(data))
    out, err = (b"".join(parts[error]).decode(errors="replace") for error in (False, True))
    return Completed(tuple(argv), code, out, err)


def execute(
    folder: RunFolder, argv: Sequence[str], node: int | None, rank: int | None, *,
    terminal: bool,
) -> int:  # fmt: skip
    """Run a command with this process's standard input and output; return its exit code.

    Args:
        argv: its words; none: the user's shell.
        terminal: it gets a terminal, which this process has.

    Raises:
        BadInput: the run has ended, or has no such node or rank; or there is no terminal.
        Unavailable: nothing can be started there.
    """
    if terminal and not (os.isatty(0) and os.isatty(1)):
        raise BadInput(
            "standard input or output is not a terminal",
            hint="clusterkit exec RUN -- COMMAND needs none",
        )
    with Place(folder) as place:
        where = place.node_of(node, rank)
        size = [*_size()] if terminal else None
        command = place.start(
            place.ways([where])[where], where, rank=rank, argv=[*argv],
            terminal=size, term=os.environ.get("TERM", "dumb"),
        )  # fmt: skip
        with _signals([command]), _raw(command) if terminal else contextlib.nullcontext():
            command.feed(lambda: os.read(0, _CHUNK))
            return command.run(_write)


def execute_on_all(
    folder: RunFolder, argv: Sequence[str], report: Callable[[ClusterkitError], object]
) -> int:
    """Run a command on all nodes that run, without input; lines of its output begin with the node.

    Args:
        report: takes the error of a node on which it could not be run.

    Returns:
        The highest exit code.
    """
    lock, codes, lost = threading.Lock(), [], list[OSError]()
    with Place(folder) as place:
        nodes = place.nodes()
        ways = place.ways(nodes)
        commands = [place.start(ways[node], node, argv=[*argv]) for node in nodes]

        def follow(node: int, command: Command) -> None:
            lines = {False: bytearray(), True: bytearray()}

            def take(data: bytes, error: bool, end: bool = False) -> None:
                *whole, rest = (lines[error] + data).split(b"\n")
                if rest and (end or len(rest) > _CHUNK):
                    whole, rest = [*whole, rest], bytearray()
                lines[error] = bytearray(rest)
                with lock:
                    _write(b"".join(b"n%d %s\n" % (node, line) for line in whole), error)

            try:
                command.send(b"e")
                codes.append(command.run(take))
            except ClusterkitError as error:
                codes.append(EXIT_REFUSED)
                report(error)
            except OSError as error:  # of the output
                return lost.append(error)
            for of_errors in lines:
                take(b"", of_errors, end=True)
            return None

        with _signals(commands):
            threads = [
                threading.Thread(target=follow, args=each, daemon=True)
                for each in zip(nodes, commands, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    if lost:
        raise lost[0]
    return max(codes, default=EXIT_REFUSED)


def _write(data: bytes, error: bool) -> None:
    file = sys.stderr.buffer if error else sys.stdout.buffer
    file.write(data)
    file.flush()


def _size() -> tuple[int, int]:
    columns, rows = os.get_terminal_size(1)
    return rows, columns


@contextlib.contextmanager
def _signals(commands: Sequence[Command]) -> Iterator[None]:
    """Pass signals on to commands; the third Ctrl-C ends the wait for one that ignores it."""
    interrupts = 0

    def pass_on(signum: int, frame: object) -> None:
        nonlocal interrupts
        interrupts += signum == signal.SIGINT
        if interrupts > 2:
            raise KeyboardInterrupt
        for command in commands:
            command.send(b"s", str(signum).encode())

    before = {signum: signal.signal(signum, pass_on) for signum in _PASSED_ON}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def _raw(command: Command) -> Iterator[None]:
    """Leave all keys to the terminal that the command has, and tell that one of changes of size."""

    def resized(*_: object) -> None:
        command.send(b"w", json.dumps(_size()).encode())

    saved = termios.tcgetattr(0)
    before = signal.signal(signal.SIGWINCH, resized)
    try:
        tty.setraw(0)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, saved)
        signal.signal(signal.SIGWINCH, before)


# ---------------------------------------------------------------- stack


class RankStack(Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Where a rank is."""

    rank: int
    node: int
    pid: int
    at: str | None = None
    """The line of the program that its main thread executes."""
    state: str = ""
    """``stopped`` (SIGSTOP), ``ended``, or empty."""
    waits: tuple[tuple[str, int, str, float], ...] = ()
    """The collectives that it has entered and that are not complete: process group, number, name,
    and for how many seconds."""
    trace: str = ""
    """The traceback of each of its threads, the main one last."""


class Stacks(Struct, frozen=True, kw_only=True):
    """Where the ranks of a run are; its text is that of the reports of hangs."""

    run: str
    text: str
    ranks: tuple[RankStack, ...]
    errors: tuple[str, ...] = ()
    """Why some nodes did not answer."""


def stacks(folder: RunFolder, rank: int | None) -> Stacks:
    """Return where the ranks of a run are, or this one, while they go on.

    Raises:
        BadInput: the run has ended, or has no such rank.
        Unavailable: no node answers.
    """
    with Place(folder) as place:
        nodes = place.nodes() if rank is None else [place.node_of(None, rank)]
        ways = place.ways(nodes)
        places: dict[str, list[int]] = {}
        for node in nodes:
            places.setdefault(ways[node].where, []).append(node)

        def look(where: str) -> list[dict[str, Any]]:
            here = places[where]
            out = bytearray()
            command = place.start(ways[here[0]], here[0], stack=True, nodes=here, rank=rank)
            command.run(lambda data, error: out.extend(data))
            return list(json.loads(out))

        answers = fan_out([*places], look)
    errors = [each for each in answers.values() if isinstance(each, ClusterkitError)]
    found = {
        int(each["rank"]): each
        for answer in answers.values()
        if not isinstance(answer, ClusterkitError)
        for each in answer
    }
    if errors and not found:
        raise errors[0]
    if rank is not None and rank not in found:
        raise BadInput(f"rank {rank} has not started, or runs on a host without an agent (mpirun)")
    return Stacks(
        run=folder.run_id, text=described(found, place.handle.plan, whole=rank is None),
        ranks=tuple(
            RankStack(
                rank=number, node=each["node"], pid=each["pid"], at=each.get("at"),
                state=str(each.get("state") or ""), trace=_THREAD.sub("", each.get("trace") or ""),
                waits=tuple(tuple(wait[:4]) for wait in each.get("waits", ())),
            )
            for number, each in sorted(found.items())
        ),
        errors=tuple(error.message for error in errors),
    )  # fmt: skip


def described(found: Mapping[int, dict[str, Any]], plan: Plan, *, whole: bool) -> str:
    """Describe records of ranks in the words of a report of a hang."""
    nproc = plan.topology.get("nproc_per_node", 1)
    world = max(found, default=0) // nproc + 1
    at = {number // nproc: each["node"] for number, each in found.items()}
    nodes = [at.get(place, place) for place in range(world)]
    hang = standstill.compare(found, nodes, nproc, 0.0, silent=False) if whole else None
    if hang is not None and hang.seconds >= NOT_HANGING_SECONDS:
        return hang.text
    named = partial(standstill.names_of, nproc=nproc, nodes=nodes)
    return standstill.places(found, sorted(found), named).removeprefix("; ")
