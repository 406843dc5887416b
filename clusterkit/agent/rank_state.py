"""The state of a rank on this node: its collectives, and the line of code it runs.

The sources are torch's worker server and flight recorders (`rank` starts both), faulthandler and
/proc. The worker server has its own threads, so it answers while the main thread is blocked. Its
tracebacks need the interpreter's lock; without it faulthandler writes them from a signal handler.
`standstill` documents the fields of a record.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from clusterkit.agent import limits
from clusterkit.agent.processes import is_alive, is_stopped
from clusterkit.agent.protocol import TRACE_FILE, TRACE_SIGNAL, WORKER_SOCKET, Document
from clusterkit.agent.recorder import arrival_times, from_flight_recorder, joined

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
"""How faulthandler escapes characters beyond ASCII."""
_LIBRARY = re.compile(r"^<|/(site|dist)-packages/|/lib(64)?/python3")
_BUSY = re.compile(
    r"torch/serialization\.py|/distributed/checkpoint/|/safetensors/"
    r"| (\w+_)?(save|checkpoint|eval|evaluate|evaluation|valid|validate|validation)(_\w+)?$"
)
"""Frames of saving or loading a checkpoint, and of an evaluation."""


def context_switches(pid: int) -> bytes:
    """Return the context switch counters of a process's main thread: they change while it runs."""
    with contextlib.suppress(OSError):
        _, _, switches = Path(f"/proc/{pid}/status").read_bytes().partition(b"\nvoluntary_ctxt")
        return switches
    return b""


def nccl_progress(rank: Document, folder: Path) -> Document:
    """Return torch's counters of NCCL's collectives, by process group; empty: there are none.

    Reading them calls nothing of CUDA; reading the entries does (`record`).
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if is_alive(rank) and not is_stopped(rank):
            path = folder / WORKER_SOCKET.format(RANK=rank["rank"])
            return dict(_read(path, "dump_nccl_trace_json?includecollectives=false")["pg_status"])
    return {}


def has_pending(progress: Document) -> bool:
    """Return whether a collective of NCCL has been queued that is not complete."""
    last = ("last_enqueued_collective", "last_completed_collective")
    return any(each.get(last[0]) != each.get(last[1]) for each in progress.values())


def newest_of_each(ranks: Iterable[Document], nproc: int) -> list[Document]:
    """Return the newest line of each local rank, of lines of ``ranks.jsonl`` in their order."""
    return list({each["rank"] % nproc: each for each in ranks}.values())


def record(
    rank: Document, folder: Path, *, place: bool = True, moves: bool = False, traces: bool = False
) -> Document:
    """Return a rank's record.

    Args:
        rank: its line of ``ranks.jsonl``.
        folder: the node's.
        place: whether to include its line of code, which blocks while the interpreter is blocked.
        moves: NCCL's collectives advance: leave its entries alone. In torch 2.13 the server's
            thread queries the CUDA event of each that its watchdog has not retired yet, as no
            thread may while another one captures a CUDA graph, and without the watchdog's lock.
        traces: include ``trace``: the traceback of each thread.
    """
    found: Document = {"rank": rank["rank"]}
    if not is_alive(rank):
        return {**found, "state": "ended"}
    if is_stopped(rank):
        return {**found, "state": "stopped"}
    path = folder / WORKER_SOCKET.format(RANK=rank["rank"])
    dumps = []
    # Never with onlyactive=true: what is complete tells which collectives a rank has come to.
    for handler in ("fr_trace_json", *([] if moves else ["dump_nccl_trace_json"])):
        try:
            dumps.append(_read(path, handler))
        except OSError:
            break
        except ValueError:
            pass  # a torch without NCCL has no such handler
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found.update(from_flight_recorder(joined(*dumps), time.time()))
    if moves:
        found["moves"] = True
    if not place:
        return found
    trace = b""
    with contextlib.suppress(OSError):
        trace = _query(path, "dump_traceback")
    if b"File" not in trace:
        with contextlib.suppress(OSError):
            trace = _by_signal(int(rank["pid"]))
    text = trace.decode(errors="replace")
    found.update(from_traceback(text, os.getcwd()))
    return {**found, "trace": _unescaped(text)} if traces else found


def arrivals(rank: Document, folder: Path, until: dict[str, int]) -> Document:
    """Return when a rank entered its newest collectives (see `arrival_times`), if it answers.

    Only gloo's: NCCL's recorder knows when the CPU has queued a collective, and with
    TORCH_NCCL_ENABLE_TIMING=1 how long it took on the GPU, but not when it started there: torch
    2.13 notices the start together with the end.
    """
    found: Document = {"rank": rank["rank"]}
    path = folder / WORKER_SOCKET.format(RANK=rank["rank"])
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found.update(arrival_times(_read(path, "fr_trace_json"), time.time(), until))
    return found


def _unescaped(trace: str) -> str:
    return _ESCAPED.sub(lambda code: chr(int(code[code.lastindex or 0], 16)), trace)


def from_traceback(trace: str, folder: str) -> Document:
    """Return ``at`` and ``busy`` of a record: of the last thread, which is the main one.

    Args:
        folder: files in it are named relative to it.
    """
    frames = _FRAME.findall(_unescaped(trace).rpartition("(most recent call first):")[2])
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    if not frames:
        return {"at": None}
    file, line, function = (own or frames)[0]
    if file.startswith(f"{folder}/"):
        file = file[len(folder) + 1 :]
    else:
        file = "/".join(file.split("/")[-2:])
    inside = "" if function == "<module>" else f" in {function}()"
    busy = any(
        _BUSY.search(f"{file} {function}")
        for file, _, function in frames
        if not file.endswith("torch/utils/checkpoint.py")  # activation checkpointing
    )
    return {"at": f"{file[-80:]}:{line}{inside[:60]}", "busy": busy}


def _read(path: Path, handler: str) -> Document:
    """Return the answer of a rank's worker server as JSON.

    Raises:
        OSError: it does not answer.
        ValueError: it knows no such handler.
    """
    return dict(json.loads(_query(path, handler)))


def _query(path: Path, handler: str) -> bytes:
    """Return the answer of a rank's worker server.

    Raises:
        OSError: it does not answer within ANSWER_SECONDS.
    """
    folder = os.open(path.parent, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(limits.ANSWER_SECONDS)
            # The path of a Unix socket has at most 107 bytes.
            connection.connect(f"/proc/self/fd/{folder}/{path.name}")
            request = f"POST /handler/{handler} HTTP/1.0\r\nHost: rank\r\nContent-Length: 0\r\n\r\n"
            connection.sendall(request.encode())
            answer = bytearray()
            while data := connection.recv(1 << 18):
                answer += data
    finally:
        os.close(folder)
    return bytes(answer).partition(b"\r\n\r\n")[2]


def _bears_signal(pid: int) -> bool:
    """Return whether a signal changes nothing of what a process's main thread does.

    A handler of signals, whatever its flags, has poll(2), select(2), epoll_wait(2), nanosleep(2)
    and others return EINTR (signal(7)), which native code may take for an error or for the end of
    its wait. So the thread must wait for a lock, which the kernel resumes, or only compute.
    """
    before = context_switches(pid).partition(b"nonvoluntary")[0]
    for _ in range(4):
        try:
            fields = Path(f"/proc/{pid}/task/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            waits_in = Path(f"/proc/{pid}/task/{pid}/wchan").read_bytes()
        except OSError:
            return False
        if fields[0] != b"R" and not waits_in.startswith(b"futex"):
            return False
        time.sleep(limits.ANSWER_SECONDS / 20)
    return context_switches(pid).partition(b"nonvoluntary")[0] == before


def _by_signal(pid: int) -> bytes:
    """Return the tracebacks that faulthandler writes into the file that `rank` opens for them.

    Empty for a process without that file: it became another program, and the signal would end it.
    Empty as well where the signal could be noticed (`_bears_signal`).

    Raises:
        OSError: the process has ended.
    """
    opened = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            opened[os.readlink(link)] = link
    for name in opened:
        if "/torch-dump_traceback" in name:
            # torch removes it once the interpreter answers. A rank that is killed would leave it.
            Path(name).unlink(missing_ok=True)
    file = next((opened[name] for name in opened if name.startswith(f"/memfd:{TRACE_FILE} ")), None)
    if file is None or not _bears_signal(pid):
        return b""
    with open(file, "r+b", buffering=0) as trace:
        trace.truncate(0)
        os.kill(pid, TRACE_SIGNAL)
        size, deadline = 0, time.monotonic() + limits.ANSWER_SECONDS
        while time.monotonic() < deadline:
            time.sleep(limits.ANSWER_SECONDS / 20)
            if size and os.fstat(trace.fileno()).st_size == size:
                break
            size = os.fstat(trace.fileno()).st_size
        trace.seek(0)
        return trace.read(size)
