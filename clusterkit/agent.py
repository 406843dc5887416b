"""The node agent: starts one node's launcher, keeps its log, ends all of it.

One file, standard library only, copied into the run folder and run there by the job's
own Python, so that a node needs nothing installed.

    python agent.py run --nproc 2 --workdir DIR -- torchrun ...
    python agent.py stop RUN_DIR
    python agent.py report NODE_DIR

`run` keeps, in the folder that CLUSTERKIT_NODE_DIR names
(``RUN_DIR/attempts/ATTEMPT/node-RANK``):

    started.json   process id, start time in clock ticks, boot id: who may be ended later
    ranks.jsonl    rank and process id of every rank, as they start
    log            one line per line of output: ``TIME RANK TEXT``; RANK is ``-`` for the launcher
    exit.json      exit code, time, and why, once everything has ended
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hmac
import json
import os
import queue
import re
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

RANK_HEADER = b"@clusterkit-rank"
_RANK_HEADER = re.compile(re.escape(RANK_HEADER) + rb" ([0-9]{1,9}) ([0-9]{1,9})\Z")
RANK_ENDED = b"@clusterkit-rank-ended"
_RANK_ENDED = re.compile(re.escape(RANK_ENDED) + rb" ([0-9]{1,9}) ([0-9]{1,3})\Z")
_TAG_OR_END = re.compile(rb"\[[^],\n]{1,40},([0-9]{1,9})\]<std(?:out|err|diag)>:|\n")
_HALF_TAG = re.compile(rb"\[(?:[^]\n]{0,50}|[^]\n]{1,50}\](?:<[a-z]{0,7}>?)?)\Z")
LONGEST_LINE = 1 << 16
RESERVE_BYTES = 8192
"""Kept free for ``exit.json``, so that a disk full of logs does not hide how it ended."""
STOPPED = "stopped on request"
"""Why a node ended that was asked to by a signal."""
LAUNCHER_WAITED = "its ranks had ended; its launcher waited for those of the other nodes"
"""Why a node's launcher was stopped whose ranks have done their work."""
STOPPED_BY_PEERS = "stopped: "
"""How the reason begins of a node that ended because another did."""
PEERS_GRACE = 2.0
"""Seconds that other ranks have to fail by themselves once one has failed."""
LAUNCHER_GRACE = 1.0
"""Seconds that a launcher has which is asked to stop and has no ranks left: torchrun may sit in
its exit barrier, where it does not hear."""
LOOK_SECONDS = 2.0
"""How often an agent looks whether ranks were stopped (SIGSTOP)."""
RECENT_SECONDS = 60.0
"""For how long a stop of the agent itself may be why the run ends."""
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask an agent to end."""
LEFTOVER_GRACE = 3.0
"""Seconds that processes have which outlive their launcher."""
REPORT_SECONDS = 0.1
"""How often `report` looks for news."""
HEARTBEAT_SECONDS = 2.0
"""How often `report` says something although there is no news."""
REPORT_BYTES = 1 << 18
PEER_SECONDS = 2.0
"""How often nodes tell each other that they live."""
PEER_GONE_SECONDS = 5.0
"""How long a node whose connection was closed has to come back."""
PEER_MEET_SECONDS = 120.0
"""How long node 0 may take to be there."""
PEER_QUIET_SECONDS = 5.0
"""A node that said nothing for so long may be lost: what fails meanwhile may fail of that."""
PEER_AGAIN_SECONDS = 0.5
"""Pause before a node 0 that is not there is sought again."""
FIRST_SECONDS = 1.0
"""How long a node waits, before it starts, for a node 0 that is there to say whether it may."""
PEER_TOKEN = "CLUSTERKIT_PEER_TOKEN"
"""Environment variable with the secret by which the nodes of a run know each other."""
GAP_SECONDS = 5.0
"""Longer than a step of any loop that uses an `Awake`."""
HELLO_SECONDS = 5.0
"""How long a connection may take to say which node it is."""
STRANGERS = 64
"""How many connections may be open that have not said it yet."""
NOT_NODE_0 = "another program listens there"
LINE_BYTES = 4096
"""The longest line that nodes send each other."""
UNSENT_BYTES = 1 << 16
"""How much may wait for a node that does not read; beyond that its connection is closed."""
LEFT = 143
"""Exit code of an agent whose node was taken away, and of no other whose node can come back."""
AGAIN = "starting again"
"""Ends the line by which a node's log tells that its launcher is started once more."""
TOLD_ENDS = 8
"""How many ranks' own word of how they failed is kept; the first one matters."""
LAST_WORDS_BYTES = 4096
"""What Kubernetes takes of a container's last words."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


# ---------------------------------------------------------------- processes


def start_ticks(pid: int) -> int | None:
    """When a living process started, in clock ticks since boot; None: gone, or a zombie.

    With the boot id this tells a process from a later one of the same number (proc(5),
    /proc/pid/stat fields 3 and 22).
    """
    try:
        return process_start(Path(f"/proc/{pid}/stat").read_bytes())
    except OSError:
        return None


def process_start(stat: bytes | None) -> int | None:
    """The start time in the contents of ``/proc/PID/stat``; None for no process or a zombie."""
    if stat is None:
        return None
    fields = stat.rpartition(b")")[2].split()
    return None if len(fields) < 20 or fields[0] in (b"Z", b"X") else int(fields[19])


def is_stopped(recorded: dict[str, Any]) -> bool | None:
    """Whether a recorded process is stopped (SIGSTOP); None: it is not there any more."""
    try:
        stat = Path(f"/proc/{recorded['pid']}/stat").read_bytes()
    except OSError:
        return None
    if process_start(stat) != recorded.get("start_ticks"):
        return None
    return stat.rpartition(b")")[2].split()[0] == b"T"


def signal_handle(signals: Iterable[int]) -> int:
    """Have these signals come through a file, each as a `Signal`, and not otherwise; signalfd(2).

    To be called before there are other threads; children inherit that the signals are blocked.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    mask = (ctypes.c_ulong * 16)()
    _libc.sigemptyset(mask)
    for signum in signals:
        _libc.sigaddset(mask, signum)
    handle: int = _libc.signalfd(-1, mask, os.O_NONBLOCK | os.O_CLOEXEC)
    if handle < 0:
        raise OSError(ctypes.get_errno(), "signalfd")
    return handle


def read_signals(handle: int) -> list[tuple[int, int, int]]:
    """The signals that have come: number, and process and user id of whoever sent it."""
    with contextlib.suppress(BlockingIOError):
        data = os.read(handle, 32 * 128)
        found = (struct.unpack_from("=IiiII", data, at) for at in range(0, len(data), 128))
        return [(signum, pid, uid) for signum, _, _, pid, uid in found]
    return []


def sender(signum: int, pid: int, uid: int) -> tuple[str, bool]:
    """Who sent a signal, and whether it says what for (``stop --reason``): then that, instead."""
    words: list[str] = []
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if "--reason" in words[:-1]:
        return words[words.index("--reason") + 1], True
    name = signal.Signals(signum).name
    if not pid:
        return f"{name} from the kernel, or from outside of this container", False
    command = " ".join(words).strip()[:200]
    return f"{name} from process {pid} of user {uid}{f' ({command})' if command else ''}", False


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def identity(pid: int) -> dict[str, Any]:
    """What must be recorded of a process to end it, and no other, later."""
    return {"pid": pid, "start_ticks": start_ticks(pid), "boot_id": boot_id()}


def is_alive(recorded: dict[str, Any]) -> bool:
    """Whether the very process that `identity` described still runs."""
    ticks = recorded.get("start_ticks")
    return (
        ticks is not None
        and recorded.get("boot_id") == boot_id()
        and start_ticks(int(recorded["pid"])) == ticks
    )


def descendants(root: int) -> list[int]:
    """Living processes below ``root``, children first."""
    children: dict[int, list[int]] = {}
    for pid in _all_pids():
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X"):
            children.setdefault(int(fields[1]), []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def processes_of(run_dir: str) -> list[int]:
    """Living processes that carry this run's folder in the environment they started with.

    The folder's name was made for the run alone, and every process of the run inherits it:
    this finds the ones that lost their parent before anybody recorded them.
    """
    mark = b"CLUSTERKIT_RUN_DIR=" + os.fsencode(run_dir)
    spared = {os.getpid(), *_ancestors(os.getpid())}
    found = []
    for pid in _all_pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if mark in environment.split(b"\0") and pid not in spared and start_ticks(pid) is not None:
            found.append(pid)
    return found


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except OSError:
            return
        yield pid


def send(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def kill_all_below() -> None:
    """SIGKILL for every descendant of this process, until none is left."""
    while left := descendants(os.getpid()):
        send(left, signal.SIGKILL)
        wait_gone(left, 1.0)


def wait_gone(pids: Iterable[int], seconds: float) -> None:
    """Return when all of them have ended, or after ``seconds``."""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for pid in pids:
            try:
                handle = os.pidfd_open(pid)
            except OSError:
                continue
            stack.callback(os.close, handle)
            selector.register(handle, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for key, _ in ready:
                selector.unregister(key.fileobj)


# ---------------------------------------------------------------- the log


class NodeLog:
    """Appends ``TIME RANK TEXT`` lines; a full disk loses lines, never the training."""

    def __init__(self, folder: Path, *, echo: bool = False) -> None:
        self._echo = echo
        self._handle = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._ranks = folder / "ranks.jsonl"
        self.ranks: list[dict[str, Any]] = []
        """Identities of the ranks that have started."""
        self.told_ends: list[dict[str, Any]] = []
        """How ranks failed that nobody here is the parent of."""
        self.lost = 0
        """Lines that the disk had no room for."""
        self._size = os.fstat(self._handle).st_size
        self._missing = 0
        """Of these, the ones whose place in the log does not say so yet."""

    def lines(self, rank: str, texts: list[bytes]) -> None:
        """Append them; without any, only say how many are missing, where some are."""
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        stamp = f"{stamp}.{int(now % 1 * 1e6):06d}Z"
        head = f"{stamp} {rank} ".encode()
        data = b"".join(head + text + b"\n" for text in texts)
        if self._echo:
            self._print(data)
        gap = f"{stamp} - {lines_lost(self._missing)}\n".encode() if self._missing else b""
        kept = self._append(gap + data)
        lost = data.count(b"\n", max(0, kept - len(gap)))
        self.lost += lost
        self._missing = lost + (0 if kept >= len(gap) else self._missing)

    @staticmethod
    def _print(data: bytes) -> None:
        with contextlib.suppress(OSError):  # whoever listened is gone
            while data:
                data = data[os.write(1, data) :]

    def _append(self, data: bytes) -> int:
        """How many bytes of it the log has now: all, or the whole lines that there was room for."""
        try:
            written = os.write(self._handle, data)
        except OSError:
            return 0
        kept = data.rfind(b"\n", 0, written) + 1
        if kept < written:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._size + kept)
        self._size += kept
        return kept

    def rank_started(self, rank: int, pid: int) -> None:
        record = {"rank": rank, "at": time.time(), **identity(pid)}
        self.ranks.append(record)
        with contextlib.suppress(OSError), self._ranks.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def rank_ended(self, rank: int, code: int) -> None:
        if len(self.told_ends) < TOLD_ENDS:
            pid = next((each["pid"] for each in self.ranks if each["rank"] == rank), None)
            end = {"pid": pid, "rank": rank, "exit_code": code, "at": time.time()}
            self.told_ends.append(end)


def lines_lost(number: int) -> str:
    return f"{number} log line{'s' if number > 1 else ''} lost: disk full"


class Tagged:
    """Takes apart what Open MPI's ``--tag-output`` sends: ``[JOB,RANK]<stdout>:TEXT``.

    A line that is written in pieces, or is longer than one of its messages, has a tag before each
    piece, and the pieces of other ranks may come between them.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._speaker = "-"
        self._begun: dict[str, bytes] = {}

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Ranks (``-``: the launcher itself) and lines, those that end here, without their ends."""
        data = self._rest + data
        # Half of a tag, or of a line's end, may have come.
        half = _HALF_TAG.search(data, max(0, len(data) - 64))
        cut = half.start() if half else len(data) - data.endswith(b"\r")
        data, self._rest = data[:cut].replace(b"\r\n", b"\n").replace(b"\r", b"\n"), data[cut:]
        lines = []
        at = 0
        for mark in _TAG_OR_END.finditer(data):
            self._add(data[at : mark.start()])
            at = mark.end()
            if mark[1] is not None:
                self._speaker = mark[1].decode()
            else:
                lines.append((self._speaker, self._begun.pop(self._speaker, b"")))
                self._speaker = "-"
        self._add(data[at:])
        long = [name for name, text in self._begun.items() if len(text) > LONGEST_LINE]
        return lines + [(speaker, self._begun.pop(speaker)) for speaker in long]

    def end(self) -> list[tuple[str, bytes]]:
        """What was begun and has no end."""
        self._add(self._rest.removesuffix(b"\r"))
        left, self._begun, self._rest = list(self._begun.items()), {}, b""
        return left

    def _add(self, text: bytes) -> None:
        if text:
            self._begun[self._speaker] = self._begun.get(self._speaker, b"") + text


class Stream:
    """One source of output: a rank's named pipe, or the launcher's own.

    Args:
        tagged: output of ranks on other hosts comes through it, as `Tagged` says.
    """

    def __init__(self, handle: int, log: NodeLog, *, tagged: bool = False) -> None:
        self.handle = handle
        self.rank = "-"
        self._tagged = Tagged() if tagged else None
        self._log = log
        self._rest = b""

    def pump(self) -> bool:
        """Move what is there to the log; False at the end of the stream."""
        try:
            data = os.read(self.handle, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        if self._tagged is not None:
            self._tell_apart(self._tagged.feed(data))
            return True
        data = self._rest + data
        # A carriage return at the end may be the first half of a line's end.
        whole = data[:-1] if data.endswith(b"\r") else data
        pieces = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = pieces.pop() + data[len(whole) :]
        if len(self._rest) > LONGEST_LINE:
            pieces.append(self._rest)
            self._rest = b""
        self._emit(pieces)
        return True

    def drain(self) -> None:
        """All that is left, a last line without its newline included."""
        os.set_blocking(self.handle, False)
        before = -1
        while before != (size := len(self._rest)) or self._readable():
            before = size
            if not self.pump():
                break
        if self._rest:
            self._emit([self._rest.removesuffix(b"\r")])
            self._rest = b""
        if self._tagged is not None:
            self._tell_apart(self._tagged.end())

    def _readable(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self.handle, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _tell_apart(self, lines: list[tuple[str, bytes]]) -> None:
        for rank, line in lines:
            if rank == "-":
                self._emit([line])
            elif (said := self._without_end(line)) is not None:
                self._log.lines(rank, [said])

    def _without_end(self, line: bytes) -> bytes | None:
        """A line without a rank's word of how it ended; None: it was that alone."""
        if (end := _RANK_ENDED.search(line)) is None:
            return line
        self._log.rank_ended(int(end[1]), int(end[2]))
        # Before it may stand a last line that had no end of its own.
        return line[: end.start()] or None

    def _emit(self, lines: list[bytes]) -> None:
        run: list[bytes] = []
        for line in lines:
            if header := _RANK_HEADER.match(line):
                if run:
                    self._log.lines(self.rank, run)
                    run = []
                self.rank = header[1].decode()
                self._log.rank_started(int(header[1]), int(header[2]))
            elif (said := self._without_end(line)) is not None:
                run.append(said)
        if run:
            self._log.lines(self.rank, run)


# ---------------------------------------------------------------- connections between nodes


class Awake:
    """Seconds that this process has been running: a pause of it (SIGSTOP, a suspended machine) does
    not count, so that nobody seems to have been silent while it was this process that did not hear.

    A step of GAP_SECONDS or more from one call to the next is such a pause.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last = clock()
        self._awake = 0.0

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            if now - self._last < GAP_SECONDS:
                self._awake += now - self._last
            self._last = now
            return self._awake


awake = Awake()
"""By it, the other nodes are silent."""


class Line:
    """Lines of JSON over a socket that a selector watches, with this as its data.

    What the socket does not take at once is kept and sent when it does (`turn`). The connection
    is closed when the other side is gone, does not read, or sends too long a line.
    """

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self.node: int | None = None
        """Which node is at the other end, once it has said so."""
        self.trusted = False
        """Whether it has sent the run's token."""
        self.since = time.monotonic()
        self.closed = False
        self._socket = connection
        self._selector = selector
        self._received = self._unsent = b""
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, self)

    def turn(self, events: int) -> list[bytes]:
        """Send and receive what the selector's ``events`` allow; the lines that have come."""
        if events & selectors.EVENT_WRITE:
            self._send(b"")
        if self.closed or not events & selectors.EVENT_READ:
            return []
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._received = (self._received + data).split(b"\n")
        if not data or max(map(len, (*lines, self._received))) > LINE_BYTES:
            self.close()
            return []
        return lines

    def messages(self, events: int) -> list[dict[str, Any]]:
        """`turn`, for a side that is trusted; what cannot be read closes the connection."""
        try:
            found = [json.loads(line) for line in self.turn(events)]
            if all(isinstance(message, dict) for message in found):
                return found
        except (ValueError, RecursionError):
            pass
        self.close()
        return []

    def write(self, message: dict[str, Any]) -> None:
        self._send(json.dumps(message).encode() + b"\n")

    def introduce(self, token: bytes, message: dict[str, Any]) -> None:
        """The first that a node sends."""
        self._send(token + b"\n")
        self.write(message)

    def flush(self, seconds: float) -> None:
        """Send what is left to be sent, unless that takes longer."""
        if self._unsent and not self.closed:
            self._socket.settimeout(max(0.001, seconds))
            with contextlib.suppress(OSError):
                self._socket.sendall(self._unsent)
            self._unsent = b""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._selector.unregister(self._socket)
            self._socket.close()

    def _send(self, data: bytes) -> None:
        if self.closed:
            return
        self._unsent += data
        try:
            if self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            return self.close()
        if len(self._unsent) > UNSENT_BYTES:
            return self.close()
        wanted = selectors.EVENT_WRITE if self._unsent else 0
        self._selector.modify(self._socket, selectors.EVENT_READ | wanted, self)
        return None


class Listener:
    """Node 0's port, which anybody can reach: tells the run's nodes from everybody else.

    A node first sends the run's token on a line of its own; before that nothing is parsed. Then it
    says which run, attempt and node it is. A connection that does anything else, or nothing for
    HELLO_SECONDS, is closed and has no other effect.

    Args:
        run: what a node's first message must hold.
        nodes: how many there are.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, run: dict[str, str], token: bytes, nodes: int) -> None:
        self._server = socket.create_server(("", port), backlog=1024)
        self._server.setblocking(False)
        self._run_of = run
        self._token = token
        self._nodes = nodes
        self._strangers: list[Line] = []
        """Connections that have not said who they are, the oldest first."""
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._server, selectors.EVENT_READ)

    def turn(self, seconds: float, hear: Callable[[Line, dict[str, Any]], None]) -> None:
        """Wait for at most ``seconds``; hand over what nodes say, with ``node`` in the first."""
        for key, events in self.selector.select(seconds):
            if key.fileobj is self._server:
                with contextlib.suppress(OSError):
                    self._strangers.append(Line(self._server.accept()[0], self.selector))
            elif isinstance(key.data, Line) and not key.data.closed:
                try:
                    self._read(key.data, events, hear)
                except Exception:  # whatever it was that came, the other nodes are watched
                    key.data.close()
        latest = time.monotonic() - HELLO_SECONDS
        for line in self._strangers[:-STRANGERS]:
            line.close()
        for line in self._strangers:
            if line.since < latest:
                line.close()
        self._strangers = [line for line in self._strangers if not line.closed]

    def _read(self, line: Line, events: int, hear: Callable[[Line, dict[str, Any]], None]) -> None:
        for text in line.turn(events):
            if not line.trusted:
                if not hmac.compare_digest(text, self._token):
                    return line.close()
                line.trusted = True
                continue
            message = json.loads(text)
            if line.node is None:
                node = message["node"]
                ours = self._run_of.items() <= message.items()
                if not ours or type(node) is not int or node not in range(self._nodes):
                    return line.close()
                line.node = node
                self._strangers.remove(line)
            hear(line, message)
        return None

    def close(self) -> None:
        """Listen no more; what has been written is sent first."""
        deadline = time.monotonic() + PEER_SECONDS
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, Line):
                key.data.flush(deadline - time.monotonic())
                key.data.close()
        self.selector.close()
        self._server.close()


def run_of_node() -> dict[str, str]:
    """What all nodes of an attempt say of themselves."""
    return {
        "run": os.environ["CLUSTERKIT_RUN_ID"],
        "attempt": os.environ["CLUSTERKIT_ATTEMPT"],
    }


# ---------------------------------------------------------------- peers


class Peers(threading.Thread):
    """Has the nodes of a run end together although nobody else watches them.

    Every node keeps a connection to node 0 and says every PEER_SECONDS that it lives, and at
    its end with which code. When one fails, goes away without a word or falls silent, node 0
    tells the others to stop; when node 0 does, each of them stops by itself. After what `Listener`
    asks for come ``{}`` as a sign of life, ``{"exit": CODE}``, and from node 0 ``{"stop": WHY}``.

    Args:
        nodes: how many there are.
        token: the run's own.
        stop: called once with the reason, when this node must end.
        warn: takes a sentence for people, when the nodes cannot watch each other.
    """

    def __init__(
        self,
        address: tuple[str, int],
        nodes: int,
        token: bytes,
        lost_after: float,
        stop: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._nodes = nodes
        self._token = token
        self._lost_after = lost_after
        self._end = stop
        self._warn = warn
        self._node = int(os.environ["NODE_RANK"])
        self._run_of = run_of_node()
        self._code: int | None = None
        self._peers: dict[int, dict[str, Any]] = {}
        self._wake, self._waker = socket.socketpair()

    def ended(self, code: int) -> None:
        """This node has ended: let the others know."""
        self._code = code
        with contextlib.suppress(OSError):
            self._waker.send(b".")
        self.join(PEER_SECONDS)

    def run(self) -> None:
        with self._wake, self._waker:
            try:
                if self._node == 0:
                    self._lead()
                else:
                    self._follow()
            except OSError as error:
                self._warn(unwatched(f"port {self._address[1]}: {plainly(error)}"))

    # -- node 0

    def _lead(self) -> None:
        listener = Listener(self._address[1], self._run_of, self._token, self._nodes)
        with contextlib.closing(listener):
            listener.selector.register(self._wake, selectors.EVENT_READ)
            beat = 0.0
            while True:
                listener.turn(PEER_SECONDS / 2, self._hear)
                now = awake()
                if self._code is not None:
                    return self._tell({"stop": "node 0 failed"} if self._code else {"exit": 0})
                why = self._lost(now)
                if why is not None:
                    self._tell({"stop": why})
                    return self._end(why)
                if now >= beat:
                    self._tell({})
                    beat = now + PEER_SECONDS

    def _hear(self, line: Line, message: dict[str, Any]) -> None:
        if "node" in message:
            self._peers[message["node"]] = {"line": line, "exit": None, "closed": None}
        peer = self._peers[line.node or 0]
        peer["heard"] = awake()
        if "exit" in message:
            peer["exit"] = int(message["exit"])

    def _lost(self, now: float) -> str | None:
        for node, peer in sorted(self._peers.items()):
            if peer["exit"] is not None:
                if peer["exit"]:
                    return f"node {node} failed"
                continue
            if peer["line"].closed:
                peer["closed"] = peer["closed"] or now
                if now - peer["closed"] > PEER_GONE_SECONDS:
                    return f"the launcher of node {node} is gone"
            if now - peer["heard"] > self._lost_after:
                return f"node {node} does not answer node 0 for {self._lost_after:g} s"
        return None

    def _tell(self, message: dict[str, Any]) -> None:
        for peer in self._peers.values():
            peer["line"].write(message)

    # -- the others

    def _follow(self) -> None:
        began = awake()
        heard: float | None = None
        """When node 0 was last heard; before that, nothing that happens to it is its end."""
        gone: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            while self._code is None:
                trouble: OSError | None = None
                last: float | None = None
                try:
                    line = Line(socket.create_connection(self._address, PEER_SECONDS), selector)
                except OSError as error:
                    trouble = error
                else:
                    done, last = self._listen(line, selector)
                    line.close()
                    if done:
                        return
                now = awake()
                if last is not None or gone is None:
                    heard, gone = last or heard, now
                if heard is None:
                    if now - began > PEER_MEET_SECONDS:
                        why = trouble or NOT_NODE_0
                        return self._warn(unwatched(f"node 0 cannot be reached: {why}"))
                elif now - gone > PEER_GONE_SECONDS:
                    if isinstance(trouble, ConnectionRefusedError):
                        return self._end("the launcher of node 0 is gone")
                    if now - heard > self._lost_after:
                        return self._end(f"node 0 does not answer for {self._lost_after:g} s")
                selector.select(1.0)

    def _listen(self, line: Line, selector: selectors.BaseSelector) -> tuple[bool, float | None]:
        """Whether there is nothing more to watch, and when node 0 was last heard."""
        line.introduce(self._token, {**self._run_of, "node": self._node})
        heard: float | None = None
        began = beat = awake()
        while not line.closed:
            ready = selector.select(PEER_SECONDS / 2)
            if self._code is not None:
                line.write({"exit": self._code})
                line.flush(PEER_SECONDS)
                return True, heard
            for message in (m for key, events in ready if key.data is line
                            for m in line.messages(events)):  # fmt: skip
                heard = awake()
                if "stop" in message:
                    self._end(str(message["stop"]))
                    return True, heard
                if "exit" in message:
                    return True, heard
            if awake() >= beat:
                line.write({})
                beat = awake() + PEER_SECONDS
            if awake() - (heard or began) > self._lost_after:
                if heard is not None:
                    self._end(f"node 0 does not answer for {self._lost_after:g} s")
                return heard is not None, heard
        return False, heard


def plainly(error: OSError) -> str:
    """What happened, without what `socket.create_server` adds to it."""
    return os.strerror(error.errno) if error.errno else str(error)


def unwatched(why: str) -> str:
    """What a person is told when the nodes cannot watch each other."""
    return f"the other nodes are not watched: {why}"


# ---------------------------------------------------------------- peers that come back


class Seat:
    """One node's place in the run, and the agent that has it at the moment."""

    def __init__(self, agent: str, now: float) -> None:
        self.agent = agent
        self.heard = now
        self.closed: float | None = None
        """When its connection broke off; None: there is one."""
        self.here = True
        self.leaving = False
        self.up = False
        """Whether its launcher runs."""
        self.member = False
        """Whether its launcher was started in this round."""
        self.code: int | None = None
        """How that ended by itself."""


class Muster:
    """Decides for all nodes when launchers start, end and start again, where lost nodes come back.

    A round is one start of all launchers. The first is open: each node joins it as it comes. When a
    member is lost, the round is over: everyone ends its launcher, and once all nodes are here and
    none of them runs, the next round begins for all at once. A launcher that fails while no node is
    lost ends the run; so does one that ends with 0 on every node.

    Touches neither sockets nor clocks: told are moments of a monotonic clock, in seconds.

    Args:
        nodes: how many there are.
        lost_after: seconds of silence after which a node is lost.
        wait: seconds that a lost node has to come back.
        tell: hands a message to a node, if it can be reached.
    """

    def __init__(
        self,
        nodes: int,
        lost_after: float,
        wait: float,
        tell: Callable[[int, dict[str, Any]], None],
    ) -> None:
        self.identity = os.urandom(8).hex()
        self.round = 1
        self.seats: dict[int, Seat] = {}
        self.verdict: dict[str, Any] | None = None
        """What ends the run, once that is decided."""
        self._nodes = nodes
        self._lost_after = lost_after
        self._wait = wait
        self._tell = tell
        self._why = ""
        self._over_at: float | None = None
        """When a node was lost for the last time; None: the round goes on."""
        self._failed: tuple[int, float] | None = None
        self._replaces_at: float | None = None
        """When it was known that this node 0 replaces one that was lost."""

    def arrives(self, node: int, hello: dict[str, Any], now: float) -> None:
        """An agent has connected, for the first time or once more."""
        if self.verdict is not None:
            return self._tell(node, self.verdict)
        met, seat = str(hello.get("hub") or ""), self.seats.get(node)
        if seat is None or seat.agent != hello.get("agent"):
            before, seat = seat, Seat(str(hello.get("agent")), now)
            self.seats[node] = seat
            if before is not None and before.here and (before.member or self._over_at):
                self._end_round(node, now)  # nobody had noticed
        seat.heard, seat.closed, seat.here, seat.leaving = now, None, True, False
        seat.up = bool(hello.get("up"))
        if met not in ("", self.identity):
            self._replaces(now)
        elif met and hello.get("lost") and seat.member:
            self._end_round(node, now)  # it had given this node 0 up, and ended its launcher
        if hello.get("leaving"):
            return self.leaves(node, now)
        if self._over_at is not None:
            if seat.up:
                self._tell(node, {"again": self._why})
        elif seat.member:
            if not seat.up and int(hello.get("round") or 0) < self.round:
                self._start(node)  # that was said to a connection which broke off
            elif not seat.up and hello.get("code") is not None:
                self.ended(node, self.round, int(hello["code"]), now)
        elif not seat.up and not met and hello.get("code") is not None:
            seat.member = True  # it had ended before it met anyone
            self.ended(node, 0, int(hello["code"]), now)
        elif not seat.up:
            late = node == 0 and self._replaces_at is not None
            self._start(node, _REPLACES if late else "node 0 is back" if met else "")
        elif met:
            # Its ranks may have reached those that were started here.
            self._end_round(0, now)
        else:
            seat.member = True  # the first to come do not wait for node 0
        return None

    def hears(self, node: int, now: float) -> None:
        seat = self.seats[node]
        seat.heard = now
        seat.here = not seat.leaving

    def closed(self, node: int, now: float) -> None:
        """Its connection is gone."""
        seat = self.seats[node]
        if seat.closed is None:
            seat.closed = now
        if seat.leaving:
            seat.up = False

    def leaves(self, node: int, now: float) -> None:
        """It was asked to: its pod is being removed."""
        self.seats[node].leaving = True
        self._lose(node, now)

    def ended(self, node: int, number: int, code: int, now: float) -> None:
        """Its launcher has, in the round of that number (0: before it had met anyone)."""
        seat = self.seats[node]
        seat.up = False
        if self._over_at is None and seat.member and number in (0, self.round):
            seat.code = code
            if code and self._failed is None:
                self._failed = (node, now)

    def turn(self, now: float) -> None:
        """What has become due."""
        if self.verdict is not None:
            return
        for node, seat in sorted(self.seats.items()):
            gone = seat.closed is not None and now - seat.closed > PEER_GONE_SECONDS
            if seat.here and (gone or now - seat.heard > self._lost_after):
                self._lose(node, now)
        missing = [n for n in range(self._nodes) if n not in self.seats or not self.seats[n].here]
        if self._over_at is not None:
            running = [node for node, seat in self.seats.items() if seat.up and seat.here]
            if not missing and not running:
                self._next_round()
            elif now - self._over_at > self._wait:
                named = missing or running
                return self._decide({"stop": f"{_lost_words(named)} within {self._wait:g} s"})
        elif self._failed is not None:
            node, at = self._failed
            quiet = (s.closed is not None or now - s.heard > PEER_QUIET_SECONDS
                     for s in self.seats.values() if s.member)  # fmt: skip
            if now - at > PEERS_GRACE and not any(quiet):
                return self._decide({"stop": f"node {node} failed"})
        elif self._replaces_at is not None and now - self._replaces_at > self._wait:
            if missing:
                self._decide({"stop": f"{_lost_words(missing)} within {self._wait:g} s"})
            self._replaces_at = None
        if len(self.seats) == self._nodes and all(
            seat.member and seat.code == 0 for seat in self.seats.values()
        ):
            self._decide({"exit": 0})

    def _start(self, node: int, say: str = "") -> None:
        seat = self.seats[node]
        seat.up, seat.member, seat.code = True, True, None
        self._tell(node, {"go": self.round, "say": f"{say}; {AGAIN}" if say else ""})

    def _next_round(self) -> None:
        self.round += 1
        self._over_at = self._failed = self._replaces_at = None
        for node in sorted(self.seats):
            self._start(node, f"all {self._nodes} nodes are here")

    def _lose(self, node: int, now: float) -> None:
        seat = self.seats[node]
        seat.here = False
        if seat.member or self._over_at is not None:
            self._end_round(node, now)

    def _end_round(self, lost: int, now: float) -> None:
        if self.verdict is not None:
            return
        self._why, self._over_at, self._failed = f"node {lost} was lost", now, None
        for node, seat in sorted(self.seats.items()):
            seat.member, seat.code = False, None
            if (seat.up or node != lost) and not seat.leaving:
                self._tell(node, {"again": self._why})

    def _replaces(self, now: float) -> None:
        if self._replaces_at is None:
            self._replaces_at = now
            if 0 in self.seats:
                self._tell(0, {"say": f"{_REPLACES}; {AGAIN}"})

    def _decide(self, verdict: dict[str, Any]) -> None:
        self.verdict = verdict
        for node in sorted(self.seats):
            self._tell(node, verdict)


_REPLACES = "this node takes the place of one that was lost"


def _lost_words(nodes: list[int]) -> str:
    if len(nodes) == 1:
        return f"node {nodes[0]} was lost and did not come back"
    return f"nodes {', '.join(map(str, nodes))} were lost and did not come back"


class Hub(threading.Thread):
    """Node 0's ear and mouth: brings a `Muster` together with the nodes' connections."""

    def __init__(self, listener: Listener, muster: Callable[..., Muster]) -> None:
        super().__init__(daemon=True)
        self._listener = listener
        self._lines: dict[int, Line] = {}
        self._muster = muster(self._tell)

    @property
    def decided(self) -> bool:
        """Whether the run is over."""
        return self._muster.verdict is not None

    def run(self) -> None:
        muster = self._muster
        with contextlib.closing(self._listener):
            beat = 0.0
            while muster.verdict is None or self._lines:
                self._listener.turn(PEER_AGAIN_SECONDS, self._hear)
                for node in [node for node, line in self._lines.items() if line.closed]:
                    del self._lines[node]
                    muster.closed(node, awake())
                muster.turn(awake())
                if awake() >= beat:
                    for node in list(self._lines):
                        self._tell(node, {})
                    beat = awake() + PEER_SECONDS

    def _tell(self, node: int, message: dict[str, Any]) -> None:
        if node in self._lines:
            self._lines[node].write(message)

    def _hear(self, line: Line, message: dict[str, Any]) -> None:
        now = awake()
        node = line.node or 0
        if "node" in message:
            line.write({"hub": self._muster.identity})
            if node in self._lines:
                self._lines[node].close()
            self._lines[node] = line
            return self._muster.arrives(node, message, now)
        self._muster.hears(node, now)
        if "ended" in message:
            self._muster.ended(node, int(message["round"]), int(message["ended"]), now)
        if "leaving" in message:
            self._muster.leaves(node, now)
        return None


class Comrades(threading.Thread):
    """As `Peers`, where lost nodes come back: what node 0's `Muster` decides, for this node.

    To node 0, after what `Listener` asks for, and how things stand: ``{}`` as a sign of life,
    ``{"ended": CODE, "round": N}``, ``{"leaving": true}``. From it: ``{"hub": ID}``, ``{}``,
    ``{"go": N, "say": TEXT}``, ``{"again": WHY}``, ``{"stop": WHY}``, ``{"exit": 0}``.

    Args:
        nodes: how many there are.
        token: the run's own.
        lost_after: seconds of silence after which a node is lost.
        wait: seconds that a lost node has to come back.
        tell: takes an order for this node: ``go`` (start the launcher), ``again`` (end it, and be
            ready), ``stop`` (end, for the reason given), ``exit`` (end as the launcher has).
        say: takes a line for this node's log.
        warn: takes a sentence for people, when the nodes cannot watch each other.
    """

    def __init__(
        self,
        address: tuple[str, int],
        nodes: int,
        token: bytes,
        lost_after: float,
        wait: float,
        tell: Callable[[str, str], None],
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._nodes = nodes
        self._token = token
        self._warn = warn
        self._lost_after = lost_after
        self._limit = wait
        self._order = tell
        self._say = say
        self._node = int(os.environ["NODE_RANK"])
        self._run_of = run_of_node()
        self._agent = os.urandom(8).hex()
        self._hub = ""
        self._round = 0
        self._up = False
        self._code: int | None = None
        self._ended_at: float | None = None
        self._lost_at: float | None = None
        """When node 0 was given up."""
        self._waiting = ""
        """Why the launcher may not run."""
        self._done = False
        self._leaving = False
        self._served: Hub | None = None
        self._news: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._wake, self._waker = socket.socketpair()

    # -- from the node's main loop

    def ended(self, code: int) -> None:
        """This node's launcher has."""
        self._tell_thread("ended", code)

    def leave(self) -> None:
        """This node was asked to end, by nobody of the run."""
        self._tell_thread("leave", 0)

    def close(self) -> None:
        """Nothing more will be said."""
        self._tell_thread("close", 0)
        self.join(PEER_SECONDS)
        if self._served is not None and self._served.decided:
            # The others hear of it from this node.
            self._served.join(PEER_SECONDS)

    def _tell_thread(self, what: str, code: int) -> None:
        self._news.put((what, code))
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    # -- the thread

    def run(self) -> None:
        with self._wake, self._waker:
            self._until_done()

    def _until_done(self) -> None:
        host, port = self._address
        if self._node == 0:
            try:
                self._served = Hub(
                    Listener(port, self._run_of, self._token, self._nodes),
                    lambda tell: Muster(self._nodes, self._lost_after, self._limit, tell),
                )
            except OSError as error:
                return self._alone(f"port {port}: {plainly(error)}")
            self._served.start()
            host = "127.0.0.1"
        began = awake()
        gone: float | None = None
        while not self._done:
            why, spoke = NOT_NODE_0, False
            try:
                first = not self._hub and not self._up and self._code is None
                seconds = FIRST_SECONDS if first else PEER_SECONDS
                connection = socket.create_connection((host, port), seconds)
            except OSError as error:
                why = str(error)
            else:
                with selectors.DefaultSelector() as selector:
                    line = Line(connection, selector)
                    spoke = self._talk(line, selector)
                    line.close()
            now = awake()
            if spoke or gone is None:
                gone = now
            if not self._done:
                if not self._hub:
                    self._first(why, now - began)
                elif now - gone > PEER_GONE_SECONDS:
                    self._give_up(now)
            if self._lost_at is not None and awake() - self._lost_at > self._limit:
                self._end("stop", f"{_lost_words([0])} within {self._limit:g} s")
            if not self._done:
                self._take(None)
                self._pause()
        return None

    def _first(self, why: str, seconds: float) -> None:
        """Node 0 is not there yet, and was never met."""
        if not self._up and self._code is None:
            self._go(0)
        elif seconds > PEER_MEET_SECONDS:
            self._alone(f"node 0 cannot be reached: {why}")
        elif self._ended_at is not None and awake() > self._ended_at + PEER_GONE_SECONDS:
            self._end("exit", "")  # nobody was ever met who could say more

    def _alone(self, why: str) -> None:
        self._warn(unwatched(why))
        if not self._up and self._code is None:
            self._go(0)
        self._end("exit", "")

    def _give_up(self, now: float) -> None:
        if self._lost_at is None:
            self._lost_at = now
            self._again("node 0 was lost")

    def _talk(self, line: Line, selector: selectors.BaseSelector) -> bool:
        """Whether node 0 said anything before the connection or the run came to an end."""
        line.introduce(self._token, {
            **self._run_of, "node": self._node, "agent": self._agent, "hub": self._hub,
            "round": self._round, "up": self._up, "code": self._code,
            "lost": self._lost_at is not None, "leaving": self._leaving,
        })  # fmt: skip
        heard = beat = began = awake()
        spoke = False
        selector.register(self._wake, selectors.EVENT_READ)
        while not line.closed:
            ready = selector.select(PEER_AGAIN_SECONDS)
            now = awake()
            for key, events in ready:
                if key.data is not line:
                    self._wake.recv(4096)
                    continue
                for message in line.messages(events):
                    heard, spoke = now, True
                    self._hear(message)
            self._take(line)
            if self._done:
                line.flush(PEER_SECONDS)
                break
            new = not self._hub and not self._up and self._code is None
            if new and now > began + FIRST_SECONDS:
                self._go(0)
            if now >= beat:
                line.write({})
                beat = now + PEER_SECONDS
            if now - heard > self._lost_after:
                if self._hub:
                    self._give_up(now)
                break
        return spoke

    def _hear(self, message: dict[str, Any]) -> None:
        if "hub" in message:
            if self._hub and self._hub != message["hub"] and self._up and not self._waiting:
                self._again("node 0 was lost")
            self._hub, self._lost_at = str(message["hub"]), None
        if message.get("say"):
            self._say(str(message["say"]))
        if "go" in message:
            if self._up:
                self._round = int(message["go"])
            else:
                self._go(int(message["go"]))
        if "again" in message:
            self._again(str(message["again"]))
        for verdict in ("stop", "exit"):
            if verdict in message:
                self._end(verdict, str(message[verdict]))

    def _take(self, line: Line | None) -> None:
        """What the main loop has to say; without a connection the next one's first line says it."""
        with contextlib.suppress(queue.Empty):
            while True:
                what, code = self._news.get_nowait()
                if what == "ended":
                    self._up, self._code, self._ended_at = False, code, awake()
                    if line is not None:
                        line.write({"ended": code, "round": self._round})
                elif what == "leave":
                    self._leaving = True
                    if line is not None:
                        line.write({"leaving": True})
                else:
                    self._done = True

    def _go(self, number: int) -> None:
        self._round, self._code, self._up, self._waiting = number, None, True, ""
        self._order("go", "")

    def _again(self, why: str) -> None:
        if why != self._waiting:
            self._say(f"{why}; waiting for it")
        self._waiting = why
        self._order("again", why)

    def _end(self, order: str, why: str) -> None:
        self._done = True
        self._order(order, why)

    def _pause(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            if selector.select(PEER_AGAIN_SECONDS):
                self._wake.recv(4096)


# ---------------------------------------------------------------- run


class Node:
    """One node's launcher (or, with ``spawn``, its ranks) from start to end."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = Path(os.environ["CLUSTERKIT_NODE_DIR"])
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.ended: list[dict[str, Any]] = []
        self.reason: str | None = None
        self.deadline: float | None = None
        """When what still runs is killed."""
        self.stop_at: float | None = None
        """When the others are asked to stop, after one rank failed."""
        self.stopped_by: str | None = None
        """Who asked this node to end, or what for."""
        self.stray: str | None = None
        """The same in a sentence, where it was nobody of the run."""
        self.alone = False
        """Whether the launcher had no ranks left when it was asked to stop."""
        self.suspended: set[int] = set()
        """Ranks that are stopped (SIGSTOP), or were when they were last there."""
        self.look_at = 0.0
        self.turned, self.late = time.monotonic(), 0.0
        """When the last `select` returned, and by how many seconds too late."""
        self.frozen: tuple[float, float] | None = None
        """Until when (monotonic), and for how many seconds, this process itself was stopped."""
        self.stops: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Reasons for which the peers end this node."""
        self.peers: Peers | None = None
        self.comrades: Comrades | None = None
        self.orders: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        """Of the comrades, by the name of the verb."""
        self.left = False
        """Whether this node is being taken away from a run that goes on with another one."""
        self.told = False
        """Whether the launcher ends because the comrades said so."""
        self.trouble: str | None = None
        """Why the launcher could not be started."""
        self.remarks: list[str] = []
        """What a person should know of this node, however it ends."""
        # The ranks have no use for it.
        self.token = os.environ.pop(PEER_TOKEN, "").encode()

    def main(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        started = _read_json(self.folder / "started.json")
        if started and is_alive(started):
            print(f"this node already runs as process {started['pid']}", file=sys.stderr)
            return 75
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.signals = signal_handle((*STOPS, signal.SIGCONT))
        for signum in STOPS:  # a shell ignores SIGINT for what it starts in the background
            signal.signal(signum, signal.SIG_DFL)
        self.wake, self.waker = os.pipe()
        for handle in (self.wake, self.waker):
            os.set_blocking(handle, False)
        self.oom_kills_before = _oom_kills()
        self.started = {**identity(os.getpid()), "at": time.time(), "host": socket.gethostname()}
        write_json(self.folder / "started.json", self.started)
        with contextlib.suppress(OSError):
            (self.folder / ".reserve").write_bytes(bytes(RESERVE_BYTES))
        self.log = NodeLog(self.folder, echo=self.options.echo)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.signals, selectors.EVENT_READ)
        self.selector.register(self.wake, selectors.EVENT_READ)
        self.streams: list[Stream] = []
        self.launchers: list[Stream] = []
        try:
            self._open_pipes()
            os.chdir(self.options.workdir)
            if self.options.rejoin is not None:
                return self._rounds()
            self._start()
        except OSError as error:
            code, self.reason = _no_start(error)
            kill_all_below()
            return self._finish(code)
        if self.options.peers:
            self.peers = Peers(
                self._address(), self.options.nodes, self.token, self.options.lost_after,
                self._stopped_by_peers, self._warn,
            )  # fmt: skip
            self.peers.start()
        while self.children:
            self._turn()
        self._end_leftovers()
        code = self._exit_code()
        if self.alone and code == 128 + signal.SIGKILL:
            code, self.reason = 0, LAUNCHER_WAITED
        return self._finish(code)

    def _address(self) -> tuple[str, int]:
        host, _, port = self.options.peers.rpartition(":")
        return host, int(port)

    def _say(self, text: str) -> None:
        self.log.lines("-", [text.encode()])

    def _warn(self, text: str) -> None:
        """A line of the log that `clusterkit status` shows as well."""
        self._say(text)
        self.remarks.append(text)
        with contextlib.suppress(OSError):
            write_json(self.folder / "started.json", {**self.started, "remarks": self.remarks})

    def _rounds(self) -> int:
        """The launcher from its first start to the run's end, once more after each lost node."""

        def order(what: str, why: str) -> None:
            self.orders.put((what, why))
            self._wake_up()

        if self.options.peers:
            self.comrades = Comrades(
                self._address(), self.options.nodes, self.token, self.options.lost_after,
                self.options.rejoin, order, self._say, self._warn,
            )  # fmt: skip
            self.comrades.start()
        else:
            order("go", "")
        up = False
        end: str | None = None
        while end is None or self.children:
            self._turn()
            while not self.left and not self.orders.empty():
                what, why = self.orders.get()
                if what == "go":
                    self._start_anew()
                    up = True
                elif what == "again":
                    self.told = True
                    if up:
                        self._stop(None, self.options.grace)
                else:
                    end = what
                    if what == "stop" and (up or self.told):
                        self.told = True
                        self._stop(f"{STOPPED_BY_PEERS}{why}", self.options.grace)
            if up and not self.children:
                up = False
                self._end_leftovers()
                self._close_launchers()
                self.deadline = self.stop_at = None
                if not self.told and not self.left:
                    self.trouble, self.reason = self.trouble or self.reason, None
                if self.comrades is not None:
                    self.comrades.ended(self._exit_code())
                else:
                    end = end or "exit"
            if self.left:
                end = "left"
        if self.left:
            return self._finish(LEFT)
        code = self._exit_code()
        if self.told:
            code = code or LEFT
        else:
            self.reason = self.trouble
        self._finish(code)
        # From 128 on Kubernetes' operators take it for the end of a pod that is to be replaced.
        return code if code < 128 else 1

    def _start_anew(self) -> None:
        self.ended, self.told, self.reason, self.trouble = [], False, None, None
        self.deadline = self.stop_at = None
        try:
            self._start()
        except OSError as error:
            code, self.trouble = _no_start(error)
            self.ended.append({"pid": 0, "exit_code": code, "at": time.time()})
            kill_all_below()

    def _stopped_by_peers(self, why: str) -> None:
        self.stops.put(why)
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self.waker, b".")

    def _open_pipes(self) -> None:
        for slot in range(self.options.nproc):
            path = self.folder / f"pipe-{slot}"
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            # Read and write: no waiting for a writer, and no end of file between writers.
            stream = Stream(os.open(path, os.O_RDWR | os.O_NONBLOCK), self.log)
            self.streams.append(stream)
            self.selector.register(stream.handle, selectors.EVENT_READ, stream)

    def _start(self) -> None:
        env = {**os.environ, "CLUSTERKIT_PIPE": str(self.folder / "pipe")}
        ranks: list[int | None] = [*range(self.options.nproc)] if self.options.spawn else [None]
        for local_rank in ranks:
            if local_rank is not None:
                env["LOCAL_RANK"] = str(local_rank)
            read, write = os.pipe()
            try:
                child = subprocess.Popen(
                    self.options.argv, env=env, stdin=subprocess.DEVNULL, stdout=write,
                    stderr=write, process_group=0, preexec_fn=_end_with_parent,
                )  # fmt: skip
            finally:
                os.close(write)
            stream = Stream(read, self.log, tagged=self.options.tagged)
            self.launchers.append(stream)
            self.selector.register(read, selectors.EVENT_READ, stream)
            self.children[child.pid] = child
            self.selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ, child)

    def _close_launchers(self) -> None:
        for stream in self.streams:
            stream.drain()
        for stream in self.launchers:
            stream.drain()
            with contextlib.suppress(KeyError):  # it has come to its end
                self.selector.unregister(stream.handle)
            os.close(stream.handle)
        self.launchers = []

    def _turn(self) -> None:
        before = time.monotonic()
        due = [moment for moment in (self.deadline, self.stop_at) if moment is not None]
        timeout = max(0.0, min([before + LOOK_SECONDS, *due]) - before)
        if self.deadline is not None:
            timeout = min(timeout, LAUNCHER_GRACE / 4)
            if not any(map(is_alive, self.log.ranks)):
                self.deadline = min(self.deadline, time.monotonic() + LAUNCHER_GRACE)
        ready = self.selector.select(timeout)
        # Of a select that came to its end meanwhile, only the next one knows what has come.
        late, turned = self.late, self.turned
        self.turned = time.monotonic()
        self.late = self.turned - turned - timeout
        for key, _ in ready:
            if isinstance(key.data, Stream):
                if not key.data.pump():
                    self.selector.unregister(key.fileobj)
            elif isinstance(key.data, subprocess.Popen):
                self.selector.unregister(key.fileobj)
                os.close(key.fd)
                self._child_ended(key.data)
            elif key.fd == self.wake:
                os.read(self.wake, 512)
                if not self.stops.empty() and self.reason is None:
                    self._stop(f"{STOPPED_BY_PEERS}{self.stops.get()}", self.options.grace)
            else:
                for signum, pid, uid in read_signals(self.signals):
                    self._signalled(signum, pid, uid, max(late, self.late))
        now = time.monotonic()
        if now >= self.look_at:
            self.look_at = now + LOOK_SECONDS
            self._look()
        if self.stop_at is not None and now >= self.stop_at:
            self.stop_at = None
            self._stop(None, self.options.grace)
        if self.deadline is not None and now >= self.deadline:
            self.deadline = now + 1
            send(descendants(os.getpid()), signal.SIGKILL)

    def _signalled(self, signum: int, pid: int, uid: int, late: float) -> None:
        if signum == signal.SIGCONT:
            if late > LOOK_SECONDS:
                self.frozen = time.monotonic(), late
                self._warn(f"this node's agent was stopped (SIGSTOP) for {late:.0f} s")
        elif self.reason is None:
            self.stopped_by, meant = sender(signum, pid, uid)
            if not meant and pid > 1:  # nor a container's own init, which passes it on
                self.stray = f"stopped by {self.stopped_by}"
                self.remarks.append(self.stray)
            self.left = self.options.rejoin is not None
            if self.comrades is not None:
                self.comrades.leave()
            self._stop(STOPPED, self.options.grace)

    def _look(self) -> None:
        """Tell of ranks that were stopped, and of those that go on."""
        if self.options.tagged:
            return  # they are processes of other hosts
        for rank in self.log.ranks:
            stopped, number = is_stopped(rank), rank["rank"]
            if stopped and number not in self.suspended:
                self.suspended.add(number)
                self._say(f"rank {number} was stopped (SIGSTOP)")
            elif stopped is False and number in self.suspended:
                self.suspended.remove(number)
                self._say(f"rank {number} goes on")

    def _causes(self) -> list[str]:
        """What was done to this node that it, and others, may have failed of."""
        found = [f"rank {number} was stopped (SIGSTOP)" for number in sorted(self.suspended)]
        if self.frozen is not None and time.monotonic() < self.frozen[0] + RECENT_SECONDS:
            found.append(f"its agent was stopped (SIGSTOP) for {self.frozen[1]:.0f} s")
        return [*found, self.stray] if self.stray else found

    def _stop(self, reason: str | None, grace: float) -> None:
        self._look()
        there = self.log.ranks
        self.alone = (
            not self.options.spawn
            and len(there) >= self.options.nproc
            and not any(map(is_alive, there))
        )
        self.reason = reason or self.reason
        self.deadline = time.monotonic() + grace
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)

    def _child_ended(self, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        del self.children[child.pid]
        self.ended.append({"pid": child.pid, "exit_code": code, "at": time.time()})
        if code and self.options.spawn and self.deadline is None and self.stop_at is None:
            self.stop_at = time.monotonic() + PEERS_GRACE

    def _exit_code(self) -> int:
        codes = [end["exit_code"] for end in self.ended]
        first = next((code for code in codes if code), 0)
        return 128 - first if first < 0 else int(first)

    def _end_leftovers(self) -> None:
        """A launcher that is gone may leave ranks behind (torchrun killed with -9 does)."""
        left = descendants(os.getpid())
        if not left:
            return
        ranks = _recorded_pids(self.folder / "ranks.jsonl")
        if ranks & set(left) and self._exit_code() == 0:
            self.reason = "the launcher ended with 0 but left ranks running"
            self.ended.append({"pid": 0, "exit_code": 1, "at": time.time()})
        send(left, signal.SIGTERM)
        seconds = min(LEFTOVER_GRACE, self.options.grace)
        if self.deadline is not None:
            # Ranks whose launcher left them when it was asked to stop keep the whole grace.
            seconds = max(seconds, self.deadline - time.monotonic())
        wait_gone(left, seconds)
        kill_all_below()

    def _finish(self, code: int) -> int:
        for stream in (*self.streams, *self.launchers):
            stream.drain()
        for slot in range(self.options.nproc):
            with contextlib.suppress(OSError):
                os.unlink(self.folder / f"pipe-{slot}")
        if self.peers is not None:
            self.peers.ended(code)
        if self.comrades is not None:
            self.comrades.close()
        with contextlib.suppress(OSError):
            (self.folder / ".reserve").unlink()
        self.log.lines("-", [])
        if self.log.lost and not self.options.echo:
            self.remarks.append(lines_lost(self.log.lost))
        ranks = {rank["pid"]: rank["rank"] for rank in self.log.ranks}
        own = [{**end, "rank": ranks.get(end["pid"])} for end in self.ended]
        ended = {
            "exit_code": code,
            "at": time.time(),
            "reason": self.reason,
            "processes": own + self.log.told_ends,
            "oom_kills": _oom_kills() - self.oom_kills_before,
            "remarks": self.remarks,
            "stopped_by": self.stopped_by,
            "causes": self._causes(),
        }
        with contextlib.suppress(OSError):
            write_json(self.folder / "exit.json", ended)
        if self.options.last_words:
            # Only where such a place is there already.
            with contextlib.suppress(OSError), self.options.last_words.open("r+b") as file:
                file.write(self._last_words(ended))
        return code

    def _last_words(self, ended: dict[str, Any]) -> bytes:
        """How it ended, short enough for a place that takes little."""
        whole = json.dumps(ended).encode()
        short = json.dumps({**ended, "processes": []}).encode()
        return whole if len(whole) <= LAST_WORDS_BYTES else short


def _no_start(error: OSError) -> tuple[int, str]:
    """The exit code, as a shell gives it, and the reason of what could not be started."""
    what = f": {error.filename}" if error.filename else ""
    return 127 if isinstance(error, FileNotFoundError) else 126, f"{error.strerror}{what}"


def _end_with_parent() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOPS, signal.SIGCONT))
    # If this agent is killed with -9, its launcher is told to end.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since boot."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


# ---------------------------------------------------------------- stop


def stop(run_dir: str, grace: float) -> dict[str, Any]:
    """End every process of a run on this host; safe to repeat.

    Agents look for the reason in the command line of whoever signals them (`sender`).

    Returns:
        ``{"asked": [...], "killed": [...]}``: process ids that got SIGTERM, and of those and
        their children the ones that needed SIGKILL.
    """
    agents: list[int] = []
    frozen: list[int] = []
    for path in Path(run_dir).glob("attempts/*/node-*/started.json"):
        started = _read_json(path)
        if started and is_alive(started):
            agents.append(int(started["pid"]))
            if is_stopped(started):
                frozen.append(int(started["pid"]))
    send(agents, signal.SIGTERM)
    send(frozen, signal.SIGCONT)  # they end as the others do, and say so
    wait_gone(agents, grace + LEFTOVER_GRACE + 2.0)
    orphans = [pid for pid in processes_of(run_dir) if pid not in agents]
    send(orphans, signal.SIGTERM)
    wait_gone(orphans, grace)
    killed: set[int] = set()
    for _ in range(20):
        left = processes_of(run_dir)
        if not left:
            break
        killed |= set(left)
        send(left, signal.SIGKILL)
        wait_gone(left, 1.0)
    return {"asked": agents + orphans, "killed": sorted(killed)}


# ---------------------------------------------------------------- report


def report(folder: Path, out: BinaryIO, *, log: int, ranks: int, follow: bool) -> None:
    """Tell what a node's folder holds, from here on or once: what `clusterkit.mirror` reads.

    Written are frames: one line of JSON, and as many bytes after it as its ``bytes`` says.
    ``{"file": NAME, "bytes": N}`` brings a file's new bytes (``log``, ``ranks.jsonl``) or all of
    it; ``{"begun": .., "alive": .., "ended": ..}`` closes every round and says how the node is.

    Args:
        log, ranks: bytes of ``log`` and ``ranks.jsonl`` that the reader has already; -1: it
            wants none.
        follow: go on until the node has ended; a round at least every HEARTBEAT_SECONDS.
    """
    sent: dict[str, bytes | None] = {}
    offsets = {"log": log, "ranks.jsonl": ranks}
    last: dict[str, Any] = {}
    due = 0.0

    def tell(name: str, whole: bytes | None) -> None:
        if whole is not None and sent.get(name) != whole:
            sent[name] = whole
            _frame(out, {"file": name}, whole)

    while True:
        told = _tell(folder)
        # In this order: when the node has ended, its log is whole.
        said = False
        for name in ("started.json", "log", "ranks.jsonl", "agent.log", "exit.json"):
            if name == "agent.log" and told["alive"]:
                continue
            if name in offsets:
                more = offsets[name] >= 0
                while more and (data := _tail(folder / name, offsets[name])):
                    if "started.json" not in sent:
                        # It began after we looked: whoever has its lines knows its process.
                        tell("started.json", _tail(folder / "started.json", 0))
                    offsets[name] += len(data)
                    _frame(out, {"file": name}, data)
                    said = True
                continue
            tell(name, told["exit"] if name == "exit.json" else _tail(folder / name, 0))
        state = {key: told[key] for key in ("begun", "alive", "ended")}
        if said or state != last or time.monotonic() >= due:
            _frame(out, state)
            last, due = state, time.monotonic() + HEARTBEAT_SECONDS
        out.flush()
        if not follow or told["ended"]:
            return
        time.sleep(REPORT_SECONDS)


def _tell(folder: Path) -> dict[str, Any]:
    """Whether a node has begun, lives, has ended; and its ``exit.json``, read before its log."""
    started = _read_json(folder / "started.json")
    exit_json = _tail(folder / "exit.json", 0)
    if started is not None:
        alive = is_alive(started)
    else:
        # node.sh has recorded its process; the agent in it is about to start.
        text = (_tail(folder / "pid", 0) or b"").strip()
        alive = text.isdigit() and start_ticks(int(text)) is not None
    begun = started is not None or exit_json is not None or (folder / "pid").exists()
    if not alive and begun and exit_json is None:
        exit_json = _tail(folder / "exit.json", 0)  # it ended while we looked
    return {"begun": begun, "alive": alive, "ended": begun and not alive, "exit": exit_json}


def _tail(path: Path, offset: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(REPORT_BYTES)
    except OSError:
        return None


def _frame(out: BinaryIO, header: dict[str, Any], data: bytes = b"") -> None:
    out.write(json.dumps({**header, "bytes": len(data)}).encode() + b"\n" + data)


# ---------------------------------------------------------------- files


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _recorded_pids(path: Path) -> set[int]:
    try:
        return {json.loads(line)["pid"] for line in path.read_text().splitlines()}
    except (OSError, ValueError, KeyError):
        return set()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="agent.py", description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="run this node's launcher to its end")
    run.add_argument("--nproc", type=int, required=True, help="ranks that get a log of their own")
    run.add_argument("--workdir", required=True, help="folder the ranks start in")
    run.add_argument("--grace", type=float, default=10.0, help="seconds from TERM to KILL")
    run.add_argument("--spawn", action="store_true", help="start the command once per rank")
    run.add_argument("--tagged", action="store_true", help="the launcher tags lines with ranks")
    run.add_argument("--peers", metavar="ADDRESS:PORT", help="where node 0 watches the others")
    run.add_argument("--lost-after", type=float, default=30.0, help="seconds without a sign")
    run.add_argument("--rejoin", type=float, metavar="SECONDS", help="wait for lost nodes")
    run.add_argument("--nodes", type=int, default=1, help="how many there are (--peers)")
    run.add_argument("--echo", action="store_true", help="print the log's lines as well")
    run.add_argument("--last-words", type=Path, metavar="FILE", help="exit.json goes there, too")
    run.add_argument("argv", nargs="+", help="the command, after --")
    end = verbs.add_parser("stop", help="end every process of a run on this host")
    end.add_argument("run_dir")
    end.add_argument("--grace", type=float, default=10.0, help="seconds from TERM to KILL")
    end.add_argument("--reason", help="why; the agents write it down")
    tell = verbs.add_parser("report", help="tell what a node's folder holds")
    tell.add_argument("folder", type=Path)
    tell.add_argument("--log", type=int, default=0, help="bytes of the log that are known")
    tell.add_argument("--ranks", type=int, default=0, help="bytes of ranks.jsonl that are known")
    tell.add_argument("--follow", action="store_true", help="until the node has ended")
    options = parser.parse_args(arguments)
    if options.verb == "report":
        with contextlib.suppress(BrokenPipeError):
            report(
                options.folder, sys.stdout.buffer, log=options.log, ranks=options.ranks,
                follow=options.follow,
            )  # fmt: skip
        # Whoever listened may be gone: nothing is left to flush.
        os._exit(0)
    if options.verb == "stop":
        print(json.dumps(stop(options.run_dir, options.grace)))
        return 0
    return Node(options).main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
