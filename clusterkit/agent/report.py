"""What a node's folder holds, for a reader on another machine (`clusterkit.output.mirror`)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import BinaryIO

from clusterkit.agent import limits
from clusterkit.agent.files import goes_on, read_json
from clusterkit.agent.processes import is_alive, start_ticks
from clusterkit.agent.protocol import Document


def report(folder: Path, out: BinaryIO, *, log: int, ranks: int, follow: bool) -> None:
    """Write what a node's folder holds, once or from here on, as frames.

    A frame is one line of JSON, and as many bytes after it as its ``bytes`` says.
    ``{"file": NAME, "bytes": N}`` brings a file's new bytes (``log``, ``ranks.jsonl``) or all of
    it; ``{"begun": .., "alive": .., "ended": ..}`` closes every round and says how the node is.

    Args:
        log, ranks: bytes of ``log`` and ``ranks.jsonl`` that the reader has already; -1: it
            wants none.
        follow: go on until the node has ended; a round at least every HEARTBEAT_SECONDS.
    """
    sent: dict[str, bytes] = {}
    offsets = {"log": log, "ranks.jsonl": ranks}
    last: Document = {}
    due = 0.0

    def whole(name: str, data: bytes | None) -> None:
        if data is not None and sent.get(name) != data:
            sent[name] = data
            _frame(out, {"file": name}, data)

    def grown(name: str) -> bool:
        found = False
        while offsets[name] >= 0 and (data := read_from(folder / name, offsets[name])):
            if "started.json" not in sent:
                # It began after we looked: whoever has its lines knows its process.
                whole("started.json", read_from(folder / "started.json"))
            offsets[name] += len(data)
            _frame(out, {"file": name}, data)
            found = True
        return found

    while True:
        # In this order: when the node has ended, its log is whole.
        state, exit_json = node_state(folder)
        whole("started.json", read_from(folder / "started.json"))
        whole("usage.json", read_from(folder / "usage.json"))
        news = [grown("log"), grown("ranks.jsonl")]
        if not state["alive"]:
            whole("agent.log", read_from(folder / "agent.log"))
        whole("exit.json", exit_json)
        if any(news) or state != last or time.monotonic() >= due:
            _frame(out, state)
            last, due = state, time.monotonic() + limits.HEARTBEAT_SECONDS
        out.flush()
        if not follow or state["ended"]:
            return
        time.sleep(limits.REPORT_SECONDS)


def node_state(folder: Path) -> tuple[Document, bytes | None]:
    """Whether a node has begun, lives, has ended; and its ``exit.json``, read before its log."""
    started = read_json(folder / "started.json")
    exit_json = read_from(folder / "exit.json")
    if started is not None:
        alive = is_alive(started) and not goes_on(exit_json)
    else:
        # node.sh has recorded its process; the agent in it is about to start.
        text = (read_from(folder / "pid") or b"").strip()
        alive = text.isdigit() and start_ticks(int(text)) is not None
    begun = started is not None or exit_json is not None or (folder / "pid").exists()
    if not alive and begun and exit_json is None:
        exit_json = read_from(folder / "exit.json")  # it ended while we looked
    return {"begun": begun, "alive": alive, "ended": begun and not alive}, exit_json


def read_from(path: Path, offset: int = 0) -> bytes | None:
    """At most REPORT_BYTES of a file; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(limits.REPORT_BYTES)
    except OSError:
        return None


def _frame(out: BinaryIO, header: Document, data: bytes = b"") -> None:
    out.write(json.dumps({**header, "bytes": len(data)}).encode() + b"\n" + data)
