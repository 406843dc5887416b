"""What a node leaves on disk of an attempt: ``started.json``, its log, ``exit.json``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path

from clusterkit.agent import limits
from clusterkit.agent.files import read_json, write_json
from clusterkit.agent.node_log import NodeLog, lines_lost
from clusterkit.agent.processes import identity
from clusterkit.agent.protocol import EVEN, GOES_ON, SLOW, STILL, Document


class Record:
    """One node's, from attempt to attempt; each has a folder of its own."""

    def __init__(self, folder: Path, attempt: int, *, echo: bool, spare: bool = False) -> None:
        self.folder, self.attempt, self._echo = folder, attempt, echo
        self.remarks: list[str] = []  # what a person should know of this node, however it ends
        self._started = {**identity(os.getpid()), "host": socket.gethostname()}
        self._started |= {"spare": True} if spare else {}
        self._oom_kills = _oom_kills()
        self._begin(folder)
        self.log = NodeLog(folder, echo=echo)

    def _begin(self, folder: Path) -> None:
        self._started["at"] = time.time()
        for key in ("waits", "hang", "slow"):
            self._started.pop(key, None)
        write_json(folder / "started.json", self._started)
        with contextlib.suppress(OSError):
            (folder / "exit.json").unlink(missing_ok=True)  # of an agent that was here before
            (folder / _RESERVE).write_bytes(bytes(limits.RESERVE_BYTES))

    def has_room(self) -> bool:
        """Whether the disk takes what another attempt begins with; if not, that is a remark."""
        about = os.statvfs(self.folder)
        if about.f_bavail * about.f_frsize >= 4 * limits.RESERVE_BYTES:
            return True
        self.remarks.append("not started again: its disk is full")
        return False

    def seconds(self) -> float:
        """How long ago this node began with the run's first attempt, whichever agent did."""
        starts = self.folder.parents[1].glob(f"*/{self.folder.name}/started.json")
        began = [(read_json(path) or {}).get("at") for path in starts]
        now = time.time()
        return max(0.0, now - min((at for at in began if isinstance(at, float)), default=now))

    def next_attempt(self, number: int, ended: Document) -> None:
        """This attempt has ended so; go on in that one's folder."""
        with contextlib.suppress(OSError):
            (self.folder / _RESERVE).unlink()
        folder = self.folder.parents[1] / str(number) / self.folder.name
        folder.mkdir(parents=True, exist_ok=True)
        self._begin(folder)  # whoever reads that the other has ended finds this one
        self.log.tell("exit.json", brief(self.end({**ended, "next": number})))
        self.folder, self.attempt, self.remarks = folder, number, []
        self._oom_kills = _oom_kills()
        self.log.move(folder)

    def warn(self, text: str) -> None:
        """A line of the log that `clusterkit status` shows as well."""
        self.log.lines("-", [text.encode()])
        self.remarks.append(text)
        self._tell()

    def notes(self, key: str, text: str | None) -> None:
        """Ranks ``hang`` or are ``slow``, as the text says; None: no more. `status` shows it."""
        if text != self._started.get(key):
            self._started[key] = text
            self._tell()
            head, over = (STILL, GOES_ON) if key == "hang" else (SLOW, EVEN)
            self.log.lines("-", [(over if text is None else f"{head}{text}").encode()])

    def waits(self, why: str, seconds: float) -> None:
        """Nothing runs here until the next start, which may take so many seconds to come."""
        self._started["waits"] = {"why": why, "until": time.time() + seconds}
        self._tell()

    def goes_on(self) -> None:
        """The next start has come."""
        if any([self._started.pop(key, None) for key in ("waits", "spare")]):
            self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(OSError):
            document = {**self._started, "remarks": self.remarks}
            self.log.tell("started.json", brief(document))
            write_json(self.folder / "started.json", document)

    def end(self, ended: Document) -> Document:
        """Write down that this attempt has ended so; all that is written."""
        with contextlib.suppress(OSError):
            (self.folder / _RESERVE).unlink()
        log = self.log
        log.lines("-", [])
        if log.lost and not self._echo:
            self.remarks.append(lines_lost(log.lost))
        whole = {
            "at": time.time(),
            "oom_kills": _oom_kills() - self._oom_kills,
            "remarks": self.remarks,
            **ended,
        }
        ranks = {rank["pid"]: rank["rank"] for rank in log.ranks}
        own = [{**end, "rank": ranks.get(end["pid"])} for end in ended["processes"]]
        whole["processes"] = own + log.rank_ends
        with contextlib.suppress(OSError):
            write_json(self.folder / "exit.json", whole)
        return whole


def brief(document: Document) -> bytes:
    """It in JSON, without its processes where Kubernetes would not take so much."""
    whole = json.dumps(document).encode()
    if len(whole) <= limits.LAST_WORDS_BYTES:
        return whole
    return json.dumps({**document, "processes": []}).encode()


def restarts_left(given: int, folder: Path) -> int:
    """Of those that the plan gives, how many the agents of a node's earlier attempts have left."""
    ends = folder.parents[1].glob(f"*/{folder.name}/exit.json")
    said = [(read_json(path) or {}).get("restarts_left") for path in ends]
    return min((given, *(left for left in said if isinstance(left, int))))


_RESERVE = ".reserve"  # room for exit.json on a disk full of logs


def _oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since boot."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
