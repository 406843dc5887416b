"""A node's log, and the file that lists its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from clusterkit.agent import limits
from clusterkit.agent.failure import RankOutput
from clusterkit.agent.processes import identity
from clusterkit.agent.protocol import NODE_FILE, Document


class NodeLog:
    """Append ``TIME RANK TEXT`` lines; a full disk loses lines, never the training.

    Args:
        folder: the node's, of this attempt.
        echo: print the lines as well.
    """

    def __init__(self, folder: Path, *, echo: bool = False) -> None:
        self._echo = echo
        self.warn = self.line
        """Takes lines that `clusterkit status` is to show as well."""
        self.handle = _open(folder)
        self._begin(folder)

    def move(self, folder: Path) -> None:
        """Continue in the folder of the next attempt."""
        handle = _open(folder)
        os.dup2(handle, self.handle)  # other threads log as well: there is always a file
        os.close(handle)
        self._begin(folder)

    def _begin(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: list[Document] = []  # identities of the ranks that have started
        self.rank_ends: list[Document] = []
        """How ranks ended that are no children of this agent, as they reported it."""
        self.output = RankOutput()
        self.lost = 0  # lines that the disk had no room for
        self._size = os.fstat(self.handle).st_size
        self._unreported = 0  # lost lines at the end of the log, which does not say so yet

    def line(self, text: str) -> None:
        """Append a line of the agent's own."""
        self.lines("-", [text.encode()])

    def lines(self, rank: str, texts: list[bytes]) -> None:
        """Append lines; without any, only report the ones that were lost."""
        stamp = _stamp()
        head = f"{stamp} {rank} ".encode()
        data = b"".join(head + text + b"\n" for text in texts)
        if self._echo:
            self._print(data)
        gap = f"{stamp} - {lines_lost(self._unreported)}\n".encode() if self._unreported else b""
        kept = self._append(gap + data)
        lost = data.count(b"\n", max(0, kept - len(gap)))
        self.lost += lost
        self._unreported = lost + (0 if kept >= len(gap) else self._unreported)

    def print_file(self, name: str, document: bytes) -> None:
        """Print one of the node's files as a line, where the output is all that leaves the node."""
        if self._echo:
            head = f"{_stamp()} - {NODE_FILE.decode()} {name} "
            self._print(head.encode() + document + b"\n")

    @staticmethod
    def _print(data: bytes) -> None:
        with contextlib.suppress(OSError):  # the reader is gone
            while data:
                data = data[os.write(1, data) :]

    def _append(self, data: bytes) -> int:
        """Return how many bytes were appended: all, or the whole lines that there was room for."""
        try:
            written = os.write(self.handle, data)
        except OSError:
            return 0
        kept = data.rfind(b"\n", 0, written) + 1
        if kept < written:
            with contextlib.suppress(OSError):
                os.ftruncate(self.handle, self._size + kept)
        self._size += kept
        return kept

    def rank_started(self, rank: int, pid: int) -> None:
        record = {"rank": rank, "at": time.time(), **identity(pid)}
        self.ranks.append(record)
        with contextlib.suppress(OSError), (self.folder / "ranks.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def rank_ended(self, rank: int, code: int) -> None:
        if sum((not end["exit_code"]) == (not code) for end in self.rank_ends) < limits.RANK_ENDS:
            pid = next((each["pid"] for each in self.ranks if each["rank"] == rank), None)
            # Launchers end ranks once one has failed; until then, 0 is a rank's own end.
            end = {"pid": pid, "rank": rank, "exit_code": code, "at": time.time()}
            self.rank_ends.append(end if code else {**end, "asked": False})


def _stamp() -> str:
    now = time.time()
    return time.strftime(f"%Y-%m-%dT%H:%M:%S.{int(now % 1 * 1e6):06d}Z", time.gmtime(now))


def _open(folder: Path) -> int:
    return os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def lines_lost(number: int) -> str:
    return f"{number} log line{'s' if number > 1 else ''} lost: disk full"
