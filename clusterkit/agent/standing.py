"""How a rank of this node stands: asked of torch in it, of its Python and of the kernel.

What a record holds says `hangs`. Torch answers from threads of its own (`rank` starts them), so a
rank need not come to anything for it. Where the interpreter does not answer, code outside of it
does, on a signal.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import time
import zlib
from pathlib import Path

from clusterkit.agent import limits
from clusterkit.agent.hangs import WORLD, median
from clusterkit.agent.processes import is_alive, is_stopped
from clusterkit.agent.protocol import TRACE_FILE, TRACE_SIGNAL, WORKER_SOCKET, Document

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
"""How faulthandler writes what is not ASCII in a file's name."""
_LIBRARY = re.compile(r"^<|/(site|dist)-packages/|/lib(64)?/python3")
_BUSY = re.compile(
    r"torch/serialization\.py|/distributed/checkpoint/|/safetensors/"
    r"| (\w+_)?(save|checkpoint|eval|evaluate|evaluation|valid|validate|validation)(_\w+)?$"
)
"""Frames of a checkpoint that is written or read, and of an evaluation."""
_KEPT = 8  # process groups of which a record tells the newest collective


def moves(pid: int) -> bytes:
    """What changes when the main thread of a process runs."""
    with contextlib.suppress(OSError):
        _, _, switches = Path(f"/proc/{pid}/status").read_bytes().partition(b"\nvoluntary_ctxt")
        return switches
    return b""


def record(rank: Document, folder: Path, *, place: bool = True) -> Document:
    """One rank's record; ``rank`` is its line of ``ranks.jsonl``. Without its ``place`` it comes
    at once, whatever its interpreter does."""
    found: Document = {"rank": rank["rank"]}
    if not is_alive(rank):
        return {**found, "state": "ended"}
    if is_stopped(rank):
        return {**found, "state": "stopped"}
    path = folder / WORKER_SOCKET.format(RANK=rank["rank"])
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found.update(recorded(json.loads(_ask(path, "fr_trace_json")), time.time()))
    if not place:
        return found
    trace = b""
    with contextlib.suppress(OSError):
        trace = _ask(path, "dump_traceback")
    if b"File" not in trace:
        with contextlib.suppress(OSError):
            trace = _by_signal(int(rank["pid"]))
    return {**found, **placed(trace.decode(errors="replace"), os.getcwd())}


def arrived(rank: Document, folder: Path, until: dict[str, int]) -> Document:
    """When one rank came to its newest collectives, as of `came`; nothing if it does not say."""
    found: Document = {"rank": rank["rank"]}
    path = folder / WORKER_SOCKET.format(RANK=rank["rank"])
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found.update(came(json.loads(_ask(path, "fr_trace_json")), time.time(), until))
    return found


def came(dump: Document, now: float, until: dict[str, int]) -> Document:
    """When a rank came to the newest collectives of the group that it came to most.

    ``group``; ``first``: the number of the first; ``since``: when that was, Unix time; ``steps``:
    tenths of milliseconds from the one before to each, 0 for the first.

    Args:
        now: Unix time.
        until: by group, the newest collective that counts; takes this rank's where it has none, so
            that all ranks tell of the same ones.
    """
    groups: dict[str, dict[int, int]] = {}
    for entry in dump["entries"]:
        if not entry["is_p2p"]:
            times = groups.setdefault(_group(entry), {})
            times[int(entry["collective_seq_id"])] = int(entry["time_created_ns"])
    group, times = max(groups.items(), key=lambda item: len(item[1]))
    number = min(until.setdefault(group, max(times)), max(times))
    found: list[int] = []
    while number in times and len(found) < limits.ARRIVALS_MOST:
        old = times[number] / 1e9 < now - limits.ARRIVALS_SECONDS
        if old and len(found) >= limits.ARRIVALS_LEAST:
            break
        found.insert(0, times[number])
        number -= 1
    tenths = [round((at - found[0]) / 1e5) for at in found]
    steps = [later - earlier for earlier, later in itertools.pairwise([0, *tenths])]
    return {"group": group, "first": number + 1, "since": found[0] / 1e9, "steps": steps}


def _group(entry: Document) -> str:
    short, described = entry["process_group"]
    group = WORLD if described == "default_pg" else str(short)[:40]
    backend = str(entry["profiling_name"]).rpartition(":")[0]
    return f"{backend} {group}" if backend and backend not in ("gloo", "nccl") else group


def recorded(dump: Document, now: float) -> Document:
    """``last`` and ``waits`` of what torch's flight recorder holds. ``now``: Unix time."""
    last: dict[str, int] = {}
    began: dict[tuple[str, str, str], list[float]] = {}
    pending = []
    for entry in dump["entries"]:
        group, name = _group(entry), str(entry["profiling_name"]).rpartition(":")[2]
        number = int(entry["collective_seq_id"])
        like = began.setdefault((group, name, str(entry["input_sizes"])), [])
        like.append(int(entry["time_created_ns"]) / 1e9)
        if entry["is_p2p"]:
            continue
        last.pop(group, None)
        last[group] = number  # the newest group stands last
        if not (entry["retired"] or entry["state"] == "completed"):
            pending.append((group, number, name[:40], like, len(like)))
    waits = []
    for group, number, name, like, count in pending[:2]:
        before = [later - earlier for earlier, later in itertools.pairwise(like[:count])]
        every = median(before) if len(before) > 1 else 0.0
        waits.append((group, number, name, round(max(0.0, now - like[count - 1]), 1), every))
    newest = dict(list(last.items())[-_KEPT:])
    wanted = (WORLD, *(wait[0] for wait in waits))
    newest.update((group, last[group]) for group in wanted if group in last)
    return {"last": newest, "waits": waits}


def placed(trace: str, folder: str) -> Document:
    """``at``, ``busy``, ``doing`` of what faulthandler writes; its last thread is the main one."""
    trace = _ESCAPED.sub(lambda code: chr(int(code[code.lastindex or 0], 16)), trace)
    frames = _FRAME.findall(trace.rpartition("(most recent call first):")[2])
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
        if not file.endswith("torch/utils/checkpoint.py")  # that is of every step
    )
    doing = zlib.crc32(repr([(file, function) for file, _, function in frames]).encode())
    return {"at": f"{file[-80:]}:{line}{inside[:60]}", "busy": busy, "doing": doing}


def _ask(path: Path, what: str) -> bytes:
    """What torch's worker server in a rank answers.

    Raises:
        OSError: it does not.
    """
    folder = os.open(path.parent, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(limits.ANSWER_SECONDS)
            # A socket's name may have 107 bytes.
            connection.connect(f"/proc/self/fd/{folder}/{path.name}")
            request = f"POST /handler/{what} HTTP/1.0\r\nHost: rank\r\nContent-Length: 0\r\n\r\n"
            connection.sendall(request.encode())
            answer = bytearray()
            while data := connection.recv(1 << 18):
                answer += data
    finally:
        os.close(folder)
    return bytes(answer).partition(b"\r\n\r\n")[2]


def _by_signal(pid: int) -> bytes:
    """What faulthandler writes into the file that `rank` has opened for that.

    A process that has none, because it became another program, would die of the signal.

    Raises:
        OSError: it is gone.
    """
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(link).startswith(f"/memfd:{TRACE_FILE} "):
            break
    else:
        return b""
    file = os.open(link, os.O_RDWR)
    try:
        os.ftruncate(file, 0)
        os.kill(pid, TRACE_SIGNAL)
        size, deadline = 0, time.monotonic() + limits.ANSWER_SECONDS
        while time.monotonic() < deadline:
            time.sleep(limits.ANSWER_SECONDS / 20)
            if size and os.fstat(file).st_size == size:
                break
            size = os.fstat(file).st_size
        return os.pread(file, size, 0)
    finally:
        os.close(file)
