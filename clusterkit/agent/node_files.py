"""What a node leaves on disk of an attempt: ``started.json``, its log, ``exit.json``."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import socket
import time
from pathlib import Path

from clusterkit.agent import limits
from clusterkit.agent.files import read_json, write_json
from clusterkit.agent.left import describe
from clusterkit.agent.messages import Left, Note
from clusterkit.agent.node_log import NodeLog, lines_lost
from clusterkit.agent.processes import identity, oom_kills
from clusterkit.agent.protocol import (
    DUMP_FILE,
    HANG,
    HANG_NOTE,
    HANG_OVER,
    SLOW_NOTE,
    SLOW_OVER,
    Document,
)
from clusterkit.agent.recorder import read_dumps
from clusterkit.agent.standstill import compare

_RESERVE = ".reserve"  # room for exit.json on a disk full of logs


class NodeFiles:
    """The files of one node; each attempt has a folder of its own.

    Args:
        folder: of the first attempt, the one with the number ``attempt``.
        echo: the agent's output is all that leaves the node: print what is written.
        spare: the node waits for another one's place.
    """

    def __init__(self, folder: Path, attempt: int, *, echo: bool, spare: bool = False) -> None:
        self.folder, self.attempt, self._echo = folder, attempt, echo
        self.remarks: list[str] = []  # what a person should know of this node, however it ends
        self._started = {**identity(os.getpid()), "host": socket.gethostname()}
        self._started |= {"spare": True} if spare else {}
        self._hang: tuple[float, str] | None = None  # the last that was shown, and until when
        self._begin(folder)
        self.log = NodeLog(folder, echo=echo)
        self.log.warn = self.warn

    def _begin(self, folder: Path) -> None:
        self._started |= {"at": time.time(), "oom_kills": oom_kills()}
        self._hang = None
        self._left: set[int] = set()  # ranks that the log names as not ended
        for key in ("waits", "hang", "slow", "ended", "idle"):
            self._started.pop(key, None)
        write_json(folder / "started.json", self._started)
        with contextlib.suppress(OSError):
            (folder / "exit.json").unlink(missing_ok=True)  # of an agent that was here before
            (folder / _RESERVE).write_bytes(bytes(limits.RESERVE_BYTES))

    def has_room(self) -> bool:
        """Return whether the disk has room for another attempt's files; add a remark if not."""
        disk = os.statvfs(self.folder)
        if disk.f_bavail * disk.f_frsize >= 4 * limits.RESERVE_BYTES:
            return True
        self.remarks.append("not started again: its disk is full")
        return False

    def seconds_run(self) -> float:
        """Return how long the attempts before this one have run, as far as their files are here.

        On whichever node, and without the time between them: a requeued Slurm job waits.
        """
        longest: dict[str, float] = {}
        for path in self.folder.parents[1].glob("*/node-*/started.json"):
            began = (read_json(path) or {}).get("at")
            ended = (read_json(path.with_name("exit.json")) or {}).get("at")
            if ended is None:  # its agent was killed
                with contextlib.suppress(OSError):
                    ended = path.with_name("log").stat().st_mtime
            if isinstance(began, float) and isinstance(ended, float):
                attempt = path.parts[-3]
                longest[attempt] = max(longest.get(attempt, 0.0), ended - began)
        return sum(seconds for attempt, seconds in longest.items() if attempt != str(self.attempt))

    def deadline(self, limit: float | None) -> float | None:
        """Return when, by `time.monotonic`, the run is over its time limit; None: it has none."""
        if limit is None:
            return None
        return time.monotonic() + max(0.0, limit - self.seconds_run())

    def next_attempt(self, number: int, ended: Document) -> None:
        """End this attempt, with ``ended`` in its ``exit.json``, and begin that one's folder."""
        folder = self.folder.parents[1] / str(number) / self.folder.name
        with contextlib.suppress(OSError):
            (self.folder / _RESERVE).unlink()
        folder.mkdir(parents=True, exist_ok=True)
        self._begin(folder)  # first: a reader of the exit.json looks for it
        self.log.print_file("exit.json", brief_json(self.end({**ended, "next": number})))
        self.folder, self.attempt, self.remarks = folder, number, []
        self.log.move(folder)

    def warn(self, text: str) -> None:
        """Log a line that `clusterkit status` shows as well."""
        self.log.line(text)
        if text not in self.remarks:
            self.remarks.append(text)
            self._write_started()

    def show(self, order: Note | Left) -> None:
        """Show what `watch` has found."""
        if isinstance(order, Left):
            self.set_left(order.ended, order.idle)
        else:
            self.set_note(order.subject, order.text or None)

    def set_note(self, key: str, text: str | None) -> None:
        """Show ``text``: that ranks ``hang`` or are ``slow``; None: they no longer are."""
        if text != self._started.get(key):
            if key == "hang":
                until = time.monotonic() if text is None else math.inf
                self._hang = until, text or str(self._started.get(key) or "")
            self._started[key] = text
            self._write_started()
            begins, over = (HANG_NOTE, HANG_OVER) if key == "hang" else (SLOW_NOTE, SLOW_OVER)
            self.log.line(over if text is None else f"{begins}{text}")

    def set_left(self, ended: list[int], idle: list[Document]) -> None:
        """Record these ranks; log once each that neither runs nor ends although others have ended.

        `clusterkit status` compares the records of all nodes.
        """
        self._started |= {"ended": ended, "idle": idle}
        self._write_started()
        text = describe({0: idle}, {0: ended}, (), time.time())
        ranks = {each["rank"] for each in idle}
        if text and ranks - self._left:
            self._left |= ranks
            self.log.line(text)

    def hang_ended(self) -> None:
        """Leave it to another node, which ends of the hang that is shown here, to name it."""
        self._hang = None

    def hang_behind(
        self, failure: Document | None, stopped: str | bool | None, options: argparse.Namespace
    ) -> str:
        """Return the hang of which ranks have timed out; empty: they did not fail of any.

        Args:
            failure: how a rank of this node failed, as of `RankOutput.failure`.
            stopped: otherwise, why the other nodes have ended this one's ranks.
            options: of ``agent run``.
        """
        until, text = self._hang or (-math.inf, "")
        failed = failure["timed_out"] if failure else str(stopped).endswith(" failed")
        if failed and text and time.monotonic() - until < limits.HANG_RECENT:
            return f"{HANG}{text}; then the process group's timeout expired"
        if not (failure and failed):
            return ""
        # Nothing was queried, as of ranks of another launcher: what NCCL's watchdog has written.
        ranks: dict[int, Document] = {}
        for folder in self.folder.parent.glob("node-*"):  # of other nodes where they share it
            ranks |= read_dumps(folder)
        found = compare(ranks, range(options.nodes), options.nproc, 0.0, silent=False)
        return f"{HANG}{found.text}; recorded in {self.folder}/{DUMP_FILE}*" if found else ""

    def set_guard(self, identity: Document | None) -> None:
        """Record the process that ends what is left if this one is killed."""
        self._started["guard"] = identity
        self._write_started()

    def set_waiting(self, reason: str, seconds: float) -> None:
        """Show that no rank runs here until the next start, in at most ``seconds``."""
        self._started["waits"] = {"why": reason, "until": time.time() + seconds}
        self._write_started()

    def set_running(self) -> None:
        """Show that the node no longer waits, and is no spare."""
        if any([self._started.pop(key, None) for key in ("waits", "spare")]):
            self._write_started()

    def _write_started(self) -> None:
        with contextlib.suppress(OSError):
            document = {**self._started, "remarks": self.remarks}
            self.log.print_file("started.json", brief_json(document))
            write_json(self.folder / "started.json", document)

    def end(self, ended: Document) -> Document:
        """Write ``exit.json``: ``ended`` and what is known here; return all of it."""
        with contextlib.suppress(OSError):
            (self.folder / _RESERVE).unlink()
        log = self.log
        log.lines("-", [])
        if log.lost and not self._echo:
            self.remarks.append(lines_lost(log.lost))
        ranks = {rank["pid"]: rank["rank"] for rank in log.ranks}
        processes = [{**end, "rank": ranks.get(end["pid"])} for end in ended["processes"]]
        document = {
            "at": time.time(),
            "oom_kills": oom_kills() - self._started["oom_kills"],
            "remarks": self.remarks,
            **ended,
            "processes": processes + log.rank_ends,
        }
        with contextlib.suppress(OSError):
            write_json(self.folder / "exit.json", document)
        return document


def brief_json(document: Document) -> bytes:
    """Return it as JSON, without its processes where Kubernetes would not take so much."""
    whole = json.dumps(document).encode()
    if len(whole) <= limits.LAST_WORDS_BYTES:
        return whole
    return json.dumps({**document, "processes": []}).encode()


def write_last_words(path: Path | None, document: Document) -> None:
    """Write it there as well, but only where such a place is there already."""
    with contextlib.suppress(OSError):
        if path is not None:
            with path.open("r+b") as file:
                file.write(brief_json(document))


def restarts_left(planned: int, folder: Path) -> int:
    """Return how many of the planned restarts the agents of a node's earlier attempts have left."""
    ends = folder.parents[1].glob(f"*/{folder.name}/exit.json")
    recorded = [(read_json(path) or {}).get("restarts_left") for path in ends]
    return min((planned, *(left for left in recorded if isinstance(left, int))))
