"""The node agent: starts one node's launcher, keeps its log, ends all of it.

One file, standard library only, copied into the run folder and run there by the job's
own Python, so that a node needs nothing installed.

    python agent.py run --nproc 2 --workdir DIR -- torchrun ...
    python agent.py stop RUN_DIR

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
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

RANK_HEADER = b"@clusterkit-rank"
_RANK_HEADER = re.compile(re.escape(RANK_HEADER) + rb" ([0-9]{1,9}) ([0-9]{1,9})\Z")
LONGEST_LINE = 1 << 16
RESERVE_BYTES = 8192
"""Kept free for ``exit.json``, so that a disk full of logs does not hide how it ended."""
PEERS_GRACE = 2.0
"""Seconds that other ranks have to fail by themselves once one has failed."""
LAUNCHER_GRACE = 1.0
"""Seconds that a launcher has which is asked to stop and has no ranks left: torchrun may sit in
its exit barrier, where it does not hear."""
LEFTOVER_GRACE = 3.0
"""Seconds that processes have which outlive their launcher."""
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

    def __init__(self, folder: Path) -> None:
        self._handle = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._ranks = folder / "ranks.jsonl"
        self.ranks: list[dict[str, Any]] = []
        """Identities of the ranks that have started."""
        self._size = os.fstat(self._handle).st_size
        self._lost = 0

    def lines(self, rank: str, texts: list[bytes]) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        stamp = f"{stamp}.{int(now % 1 * 1e6):06d}Z"
        head = f"{stamp} {rank} ".encode()
        data = b"".join(head + text + b"\n" for text in texts)
        if self._lost:
            data = f"{stamp} - {self._lost} lines lost: disk full\n".encode() + data
        if self._append(data):
            self._lost = 0
        else:
            self._lost += len(texts)

    def _append(self, data: bytes) -> bool:
        """All of it, or, where the disk fills up half way, nothing."""
        try:
            if os.write(self._handle, data) == len(data):
                self._size += len(data)
                return True
        except OSError:
            return False
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, self._size)
        return False

    def rank_started(self, rank: int, pid: int) -> None:
        record = {"rank": rank, "at": time.time(), **identity(pid)}
        self.ranks.append(record)
        with contextlib.suppress(OSError), self._ranks.open("a") as file:
            file.write(json.dumps(record) + "\n")


class Stream:
    """One source of output: a rank's named pipe, or the launcher's own."""

    def __init__(self, handle: int, log: NodeLog) -> None:
        self.handle = handle
        self.rank = "-"
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

    def _readable(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self.handle, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _emit(self, lines: list[bytes]) -> None:
        run: list[bytes] = []
        for line in lines:
            if header := _RANK_HEADER.match(line):
                if run:
                    self._log.lines(self.rank, run)
                    run = []
                self.rank = header[1].decode()
                self._log.rank_started(int(header[1]), int(header[2]))
            else:
                run.append(line)
        if run:
            self._log.lines(self.rank, run)


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

    def main(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        started = _read_json(self.folder / "started.json")
        if started and is_alive(started):
            print(f"this node already runs as process {started['pid']}", file=sys.stderr)
            return 75
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        wake_read, wake_write = os.pipe()
        for handle in (wake_read, wake_write):
            os.set_blocking(handle, False)
        signal.set_wakeup_fd(wake_write)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, lambda *_: None)
        self.oom_kills_before = _oom_kills()
        write_json(
            self.folder / "started.json",
            {**identity(os.getpid()), "at": time.time(), "host": socket.gethostname()},
        )
        with contextlib.suppress(OSError):
            (self.folder / ".reserve").write_bytes(bytes(RESERVE_BYTES))
        self.log = NodeLog(self.folder)
        self.selector = selectors.DefaultSelector()
        self.selector.register(wake_read, selectors.EVENT_READ, "signal")
        self.streams: list[Stream] = []
        try:
            self._open_pipes()
            os.chdir(self.options.workdir)
            self._start()
        except OSError as error:
            what = f": {error.filename}" if error.filename else ""
            self.reason = f"{error.strerror}{what}"
            kill_all_below()
            return self._finish(127 if isinstance(error, FileNotFoundError) else 126)
        while self.children:
            self._turn(wake_read)
        self._end_leftovers()
        return self._finish(self._exit_code())

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
            stream = Stream(read, self.log)
            self.streams.append(stream)
            self.selector.register(read, selectors.EVENT_READ, stream)
            self.children[child.pid] = child
            self.selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ, child)

    def _turn(self, wake: int) -> None:
        due = [moment for moment in (self.deadline, self.stop_at) if moment is not None]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        if self.deadline is not None and timeout is not None:
            timeout = min(timeout, LAUNCHER_GRACE / 4)
            if not any(map(is_alive, self.log.ranks)):
                self.deadline = min(self.deadline, time.monotonic() + LAUNCHER_GRACE)
        for key, _ in self.selector.select(timeout):
            if isinstance(key.data, Stream):
                if not key.data.pump():
                    self.selector.unregister(key.fileobj)
            elif isinstance(key.data, subprocess.Popen):
                self.selector.unregister(key.fileobj)
                os.close(key.fd)
                self._child_ended(key.data)
            else:
                numbers = os.read(wake, 512)
                wanted = set(numbers) & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
                if wanted and self.reason is None:
                    self._stop("stopped on request", self.options.grace)
        now = time.monotonic()
        if self.stop_at is not None and now >= self.stop_at:
            self.stop_at = None
            self._stop(None, self.options.grace)
        if self.deadline is not None and now >= self.deadline:
            self.deadline = now + 1
            send(descendants(os.getpid()), signal.SIGKILL)

    def _stop(self, reason: str | None, grace: float) -> None:
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
        for stream in self.streams:
            stream.drain()
        for slot in range(self.options.nproc):
            with contextlib.suppress(OSError):
                os.unlink(self.folder / f"pipe-{slot}")
        with contextlib.suppress(OSError):
            (self.folder / ".reserve").unlink()
        with contextlib.suppress(OSError):
            write_json(
                self.folder / "exit.json",
                {
                    "exit_code": code,
                    "at": time.time(),
                    "reason": self.reason,
                    "processes": self.ended,
                    "oom_kills": _oom_kills() - self.oom_kills_before,
                },
            )
        return code


def _end_with_parent() -> None:
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

    Returns:
        ``{"asked": [...], "killed": [...]}``: process ids that got SIGTERM, and of those and
        their children the ones that needed SIGKILL.
    """
    agents = []
    for path in Path(run_dir).glob("attempts/*/node-*/started.json"):
        started = _read_json(path)
        if started and is_alive(started):
            agents.append(int(started["pid"]))
    send(agents, signal.SIGTERM)
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
    run.add_argument("argv", nargs="+", help="the command, after --")
    end = verbs.add_parser("stop", help="end every process of a run on this host")
    end.add_argument("run_dir")
    end.add_argument("--grace", type=float, default=10.0, help="seconds from TERM to KILL")
    options = parser.parse_args(arguments)
    if options.verb == "stop":
        print(json.dumps(stop(options.run_dir, options.grace)))
        return 0
    return Node(options).main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
