"""What the ranks of a node say, while they run, of how far they came and what they fail of.

Only enough to tell whether a failure is that of the last round: for people, see
`clusterkit.output.diagnose`.
"""

from __future__ import annotations

import json
import re
from collections import deque

from clusterkit.agent import clock
from clusterkit.agent.protocol import Document

ECHOES = re.compile(
    r"Connection (closed|reset|refused) by peer|Connection closed by peer|Broken pipe"
    r"|Connection refused|Socket closed|recvValue failed|sendBytes failed|failed to recv"
    r"|Timed out waiting \d+ms|connectFullMesh|remote process exited|NCCL communicator was aborted"
    r"|DistNetworkError|DistStoreError|SignalException|Watchdog caught collective operation timeout"
    r"|ChildFailedError"
)
"""What ranks say that fail because another one did."""
_MARK = b"@clusterkit {"
# torch 2.13, multiprocessing/api.py: it tells of a rank that failed, and exits with 1 itself
_TORCHRUN = re.compile(rb"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
_WINDOW = 20  # lines of metrics that are remembered
_LONGEST = 200  # characters of an error; a line between nodes has a bound


class Words:
    """Of all ranks of a node, from one start of them to the next."""

    def __init__(self) -> None:
        self.step: int | None = None  # the last that a rank reported
        self.metrics: deque[tuple[float, object]] = deque(maxlen=_WINDOW)
        """When the newest lines of metrics came, by `clock.awake`, and their ``step_seconds``;
        none once the program has said that it comes to its end."""
        self.codes: dict[int, int] = {}  # exit codes by process id, as torchrun tells them
        self._errors: dict[str, str] = {}  # by rank
        self._places: dict[str, str] = {}  # the last frame of the traceback that a rank writes

    def read(self, rank: str, text: bytes) -> None:
        """A line that a rank has written, or its launcher (``-``)."""
        if text.startswith(b"[rank"):  # torch puts that before each line of a traceback
            text = text.partition(b"]: ")[2]
        if text.startswith(_MARK):
            self._mark(text)
        elif text.startswith(b"Traceback (most recent call last):"):
            self._places[rank] = "?"
        elif rank in self._places:
            if text.startswith(b'  File "'):
                self._places[rank] = text.decode(errors="replace").strip()
            elif text and not text[:1].isspace():
                error = text.decode(errors="replace")[:_LONGEST]
                self._errors[rank] = f"{error} ({self._places.pop(rank)[:_LONGEST]})"
        elif rank == "-" and (found := _TORCHRUN.search(text)):
            self.codes[int(found[2])] = int(found[1])

    def _mark(self, text: bytes) -> None:
        try:
            event = json.loads(text[len(_MARK) - 1 :])
        except ValueError:
            return
        if event.get("event") == "metrics":
            self.metrics.append((clock.awake(), event.get("step_seconds")))
            if isinstance(event.get("step"), int):
                self.step = event["step"]
        elif event.get("event") == "end":
            self.metrics.clear()

    def failure(self, rank: int | None, code: int) -> Document:
        """What the other nodes hear of a rank (None: the launcher) that failed so.

        ``code``: as a shell gives it. ``error``: the exception that ended it, and where; empty if
        none did: Python exits with 1 then. ``echo``: whether it failed of another rank.
        """
        error = self._errors.get("-" if rank is None else str(rank), "") if code == 1 else ""
        return {"code": code, "error": error, "echo": bool(ECHOES.search(error))}


def shell_code(code: int) -> int:
    """An exit code as a shell gives it: 128 + N for a process that signal N ended."""
    return 128 - code if code < 0 else code
