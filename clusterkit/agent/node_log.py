"""A node's log."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from clusterkit.agent import limits
from clusterkit.agent.failure import Words
from clusterkit.agent.processes import identity
from clusterkit.agent.protocol import NODE_FILE, Document


class NodeLog:
    """Appends ``TIME RANK TEXT`` lines; a full disk loses lines, never the training."""

    def __init__(self, folder: Path, *, echo: bool = False) -> None:
        self._echo = echo
        self._handle = _open(folder)
        self._begin(folder)

    def move(self, folder: Path) -> None:
        """Go on in that folder, with the next attempt."""
        handle = _open(folder)
        os.dup2(handle, self._handle)  # at no moment is there none, for another thread's lines
        os.close(handle)
        self._begin(folder)

    def _begin(self, folder: Path) -> None:
        self.folder, self._ranks = folder, folder / "ranks.jsonl"
        self.ranks: list[Document] = []  # identities of the ranks that have started
        self.rank_ends: list[Document] = []
        """How ranks failed that this agent is not the parent of, by their own words."""
        self.words = Words()
        self.lost = 0  # lines that the disk had no room for
        self._size = os.fstat(self._handle).st_size
        self._missing = 0  # of these, the ones whose place in the log does not say so yet

    def lines(self, rank: str, texts: list[bytes]) -> None:
        """Append them; without any, only say how many are missing, where some are."""
        stamp = _stamp()
        head = f"{stamp} {rank} ".encode()
        data = b"".join(head + text + b"\n" for text in texts)
        if self._echo:
            self._print(data)
        gap = f"{stamp} - {lines_lost(self._missing)}\n".encode() if self._missing else b""
        kept = self._append(gap + data)
        lost = data.count(b"\n", max(0, kept - len(gap)))
        self.lost += lost
        self._missing = lost + (0 if kept >= len(gap) else self._missing)

    def tell(self, name: str, document: bytes) -> None:
        """Whoever reads this node's output, where somebody does, of one of its files."""
        if self._echo:
            head = f"{_stamp()} - {NODE_FILE.decode()} {name} "
            self._print(head.encode() + document + b"\n")

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
        if len(self.rank_ends) < limits.RANK_ENDS:
            pid = next((each["pid"] for each in self.ranks if each["rank"] == rank), None)
            end = {"pid": pid, "rank": rank, "exit_code": code, "at": time.time()}
            self.rank_ends.append(end)


def _stamp() -> str:
    now = time.time()
    return time.strftime(f"%Y-%m-%dT%H:%M:%S.{int(now % 1 * 1e6):06d}Z", time.gmtime(now))


def _open(folder: Path) -> int:
    return os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def lines_lost(number: int) -> str:
    return f"{number} log line{'s' if number > 1 else ''} lost: disk full"
