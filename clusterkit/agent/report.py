"""Send the files of a node's folder to another machine (`clusterkit.output.mirror` reads them)."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import BinaryIO

from clusterkit.agent import limits
from clusterkit.agent.files import next_attempt, read_json
from clusterkit.agent.processes import boot_id, is_alive, start_ticks
from clusterkit.agent.protocol import Document


def report(folder: Path, out: BinaryIO, *, log: int, ranks: int, follow: bool) -> None:
    """Write the files of a node's folder as frames, once or until the node has ended.

    A frame is one line of JSON, followed by as many bytes as its ``bytes``.
    ``{"file": NAME, "bytes": N}`` has a file's new bytes (``log``, ``ranks.jsonl``) or all of it;
    ``{"begun": .., "alive": .., "ended": ..}``, the node's state, follows the files.

    Args:
        log, ranks: bytes of ``log`` and ``ranks.jsonl`` that the reader has already; -1: do not
            send that file.
        follow: continue until the node has ended; the state is sent every HEARTBEAT_SECONDS.
    """
    sent: dict[str, bytes] = {}
    offsets = {"log": log, "ranks.jsonl": ranks}
    last: Document = {}
    due = 0.0

    def send_whole(name: str, data: bytes | None) -> None:
        if data is not None and sent.get(name) != data:
            sent[name] = data
            _frame(out, {"file": name}, data)

    def send_new(name: str) -> bool:
        found = False
        while offsets[name] >= 0 and (data := read_from(folder / name, offsets[name])):
            # The agent takes an unfinished line back where the disk has no room for the rest of it.
            whole = data.rfind(b"\n") + 1
            if not whole and len(data) < limits.REPORT_BYTES and state["alive"]:
                break
            data = data[: whole or None] if state["alive"] else data
            if "started.json" not in sent:
                # It began after `node_state`; the reader must know its process before its lines.
                send_whole("started.json", read_from(folder / "started.json"))
            offsets[name] += len(data)
            _frame(out, {"file": name}, data)
            found = True
        return found

    while True:
        # In this order: if the node has ended in ``state``, its log is complete.
        state, exit_json = node_state(folder)
        send_whole("started.json", read_from(folder / "started.json"))
        send_whole("usage.json", read_from(folder / "usage.json"))
        news = [send_new("log"), send_new("ranks.jsonl")]
        if not state["alive"]:
            send_whole("agent.log", read_from(folder / "agent.log"))
            if state["ended"] and exit_json is None and not sent.get("agent.log"):
                send_whole("agent.log", full_disk(folder))
        send_whole("exit.json", exit_json)
        if any(news) or state != last or time.monotonic() >= due:
            _frame(out, state)
            last, due = state, time.monotonic() + limits.HEARTBEAT_SECONDS
        out.flush()
        if not follow or state["ended"]:
            return
        time.sleep(limits.REPORT_SECONDS)


def node_state(folder: Path) -> tuple[Document, bytes | None]:
    """Return whether a node has begun, is alive, has ended; and its ``exit.json``.

    ``exit.json`` is read here, before the log: when there is one, the log is complete.
    """
    started = read_json(folder / "started.json")
    exit_json = read_from(folder / "exit.json")
    if started is not None:
        guard = started.get("guard") or {}
        # Its guard still ends what an agent that was killed has left.
        alive = (is_alive(started) or is_alive(guard)) and not next_attempt(exit_json)
    else:
        # node.sh has recorded its process; the agent in it is about to start.
        pid, *boot = (read_from(folder / "pid") or b"").split() or [b""]
        here = [boot_id().encode()]
        alive = boot == here and pid.isdigit() and start_ticks(int(pid)) is not None
    begun = started is not None or exit_json is not None or (folder / "pid").exists()
    if not alive and begun and exit_json is None:
        exit_json = read_from(folder / "exit.json")  # it ended meanwhile
    return {"begun": begun, "alive": alive, "ended": begun and not alive}, exit_json


def full_disk(folder: Path) -> bytes:
    """Return what an agent could not write where its disk has no room; empty: it has."""
    found = os.statvfs(folder)
    blocks, files = found.f_bavail, found.f_favail
    if os.geteuid() == 0:
        blocks, files = found.f_bfree, found.f_ffree
    full = not blocks or (not files and found.f_files)
    return f"{os.strerror(errno.ENOSPC)}: {folder}\n".encode() if full else b""


def read_from(path: Path, offset: int = 0) -> bytes | None:
    """Return at most REPORT_BYTES of a file from ``offset``; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(limits.REPORT_BYTES)
    except OSError:
        return None


def _frame(out: BinaryIO, header: Document, data: bytes = b"") -> None:
    out.write(json.dumps({**header, "bytes": len(data)}).encode() + b"\n" + data)
