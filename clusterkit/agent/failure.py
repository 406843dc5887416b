"""Read the ranks' steps and errors from their output.

Only what is needed to tell whether a failure repeats that of the last round; the diagnosis for
users is `clusterkit.output.diagnose`.
"""

from __future__ import annotations

import json
import re
import signal
from collections import deque

from clusterkit.agent import clock
from clusterkit.agent.protocol import Document

ECHOES = re.compile(
    r"Connection (closed|reset|refused) by peer|Connection closed by peer|Broken pipe"
    r"|Connection refused|Socket closed|recvValue failed|sendBytes failed|failed to recv"
    r"|Timed out waiting \d+ms|connectFullMesh|remote process exited|NCCL communicator was aborted"
    r"|DistNetworkError|DistStoreError|SignalException|Watchdog caught collective operation timeout"
    r"|ChildFailedError"
    r"|^(Connection\w*|BrokenPipe)Error$"  # ended by SIGTERM while it printed its message
)
"""Messages of ranks that failed because another one did."""
TIMED_OUT = re.compile(
    r"Timed out waiting \d+ms|Application timeout|Watchdog caught collective operation timeout"
)
_CAUGHT = (1, 128 + signal.SIGABRT)  # exit codes after an exception: in Python, in NCCL's watchdog
_MARK = b"@clusterkit {"
# torch 2.13, multiprocessing/api.py: it logs the exit code of a failed rank, and exits with 1
_TORCHRUN = re.compile(rb"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
_WINDOW = 20  # lines of metrics that are kept
_LONGEST = 200  # characters of an error that is sent to node 0
_LAST_LINES = 30  # of a rank that are kept
_WORDS = 3  # of these, that are sent to node 0


class RankOutput:
    """The steps and errors in the output of a node's ranks since they were started."""

    def __init__(self) -> None:
        self.step: int | None = None  # the last that a rank reported
        self.metrics: deque[tuple[float, object]] = deque(maxlen=_WINDOW)
        """When the newest lines of metrics came, by `clock.awake`, and their ``step_seconds``;
        empty once the program has reported that it is about to end."""
        self.codes: dict[int, int] = {}  # exit codes by process id, as torchrun logs them
        self.over_sockets = False  # whether NCCL has said that it sends over TCP
        self._errors: dict[str, str] = {}  # by rank
        self._last: dict[str, deque[bytes]] = {}  # by rank, its last lines
        self._frames: dict[str, str] = {}  # by rank, the newest frame of an unfinished traceback

    def read(self, rank: str, text: bytes) -> None:
        """Take a line of output of a rank, or of the launcher (``-``)."""
        self._last.setdefault(rank, deque(maxlen=_LAST_LINES)).append(text)
        if text.startswith(b"[rank"):  # torch's prefix of each line of a traceback
            text = text.partition(b"]: ")[2]
        if text.startswith(_MARK):
            self._read_event(text)
        elif text.startswith(b"Traceback (most recent call last):"):
            self._frames[rank] = "?"
        elif rank in self._frames:
            if text.startswith(b'  File "'):
                self._frames[rank] = text.decode(errors="replace").strip()
            elif text and not text[:1].isspace():
                error = text.decode(errors="replace")[:_LONGEST]
                self._errors[rank] = f"{error} ({self._frames.pop(rank)[:_LONGEST]})"
        elif b"via NET/Socket" in text:  # with NCCL_DEBUG=INFO; NCCL 2.29, transport/net.cc
            self.over_sockets = True
        elif rank == "-" and (found := _TORCHRUN.search(text)):
            self.codes[int(found[2])] = int(found[1])

    def _read_event(self, text: bytes) -> None:
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
        """Return the failure of a rank (None: the launcher), as it is sent to node 0.

        ``code``: as a shell reports it. ``error``: the exception that ended the rank and the line
        that raised it; empty if none did (after one Python exits with 1). ``echo``: whether the
        rank failed because another one did; ``timed_out``: because another one did not come.
        ``words``: the last lines of a rank that exited by itself without an exception.
        """
        who = "-" if rank is None else str(rank)
        error = self._errors.get(who, "") if code == 1 else ""
        lines = [line.decode(errors="replace") for line in self._last.get(who, ()) if line.strip()]
        said = "\n".join(lines) if not error and code in _CAUGHT else error
        words = "" if error or code >= 128 else " / ".join(lines[-_WORDS:])[-_LONGEST:]
        return {
            "code": code, "error": error, "echo": bool(ECHOES.search(said)),
            "timed_out": bool(TIMED_OUT.search(said)), "words": words,
        }  # fmt: skip


def shell_code(code: int) -> int:
    """Return an exit code as a shell reports it: 128 + N for a process that signal N ended."""
    return 128 - code if code < 0 else code


def start_failure(error: OSError) -> tuple[int, str]:
    """Return the exit code, as a shell gives it, and the reason of a start that failed."""
    place = f": {error.filename}" if error.filename else ""
    return 127 if isinstance(error, FileNotFoundError) else 126, f"{error.strerror}{place}"
