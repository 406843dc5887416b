"""Sentences about a run, for terminals."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TextIO

from clusterkit.output.logs import LogLine, readable
from clusterkit.run.status import Goodput, RunStatus, State

_SEQUENCE = re.compile(
    r"(\x1b\[[0-9;:]*m)"  # colours
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # cursor, screen, modes
    r"|\x1b[]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # titles, links, clipboard
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")


def printable(text: str, *, colours: bool = True) -> str:
    """What a program printed, so that a terminal shows it and does nothing else.

    Colours stay, unless NO_COLOR is set, and end with the text; other escape sequences are left
    out. Other control characters are shown as ``\\x07``.
    """
    if "\x1b" in text:
        kept = r"\1" if colours and not os.environ.get("NO_COLOR") else ""
        text = _SEQUENCE.sub(kept, text)
        text += "\x1b[0m" if "\x1b" in text else ""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def shown_on(stream: TextIO, *, colours: bool = True) -> Callable[[str], str]:
    """`printable` for a terminal; a file or pipe gets a program's words as they were written."""
    return partial(printable, colours=colours) if stream.isatty() else str


def log_text(line: LogLine) -> str:
    """One log line with its time, node and rank; marked lines in words."""
    event = line.event
    text = line.text if event is None else readable(event)
    return f"{clock(line.time)} {source(line)} {text}"


def source(line: LogLine) -> str:
    """``n0 r3``: node 0, rank 3; ``n0 -``: what the launcher of node 0 says."""
    return f"n{line.node} {'-' if line.rank is None else f'r{line.rank}'}"


def clock(moment: float) -> str:
    """Local time with milliseconds."""
    second = int(moment)
    # A third quicker than an f-string, and asked for each line of a log.
    return "%s.%03d" % (_second(second), (moment - second) * 1000)  # noqa: UP031


@lru_cache(maxsize=1024)
def _second(moment: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))


def failure_text(status: RunStatus) -> str:
    """Who failed first, why, its traceback and the remedy."""
    failure = status.failure
    if failure is None:
        return ""
    known = failure.exit_code is None or failure.cause.startswith("exited with")
    code = "" if known else f" (exit code {failure.exit_code})"
    # The traceback ends with the whole of the cause.
    cause, *more = [failure.summary] if failure.traceback else failure.cause.split("\n")
    lines = [f"{failure.blame}: {cause}{code}", *(f"  {line}" for line in more)]
    if failure.traceback:
        lines += [f"  {line}" for line in failure.traceback.splitlines()]
    if failure.hint:
        lines.append(f"hint: {failure.hint}")
    return "\n".join(lines)


def waits_for(status: RunStatus) -> str | None:
    """Why its nodes have not started, where that is known."""
    waiting = (node for node in status.nodes if node.state is State.PENDING)
    return next((node.reason for node in waiting if node.reason), None)


def start_text(reason: str | None = None) -> str:
    """What a run does until its nodes have started, or why they have not."""
    return "starting" if reason is None else f"waits: {reason}"


def goodput_text(goodput: Goodput) -> str:
    """``93 % of the time was training; the rest: 12 s start, 30 s restart``."""
    names = {"waiting": "waiting", "start": "start", "restart": "restart",
             "again": "steps done again", "end": "since the last step"}  # fmt: skip
    rest = [(getattr(goodput, name), words) for name, words in names.items()]
    shown = ", ".join(f"{duration(seconds)} {words}" for seconds, words in rest if seconds >= 0.5)
    head = f"{100 * goodput.share:.0f} % of the time was training"
    return f"{head}; the rest: {shown}" if shown else head


def remark_lines(status: RunStatus) -> list[str]:
    """What the nodes remark, a line each."""
    found = [f"node {node.node}: {text}" for node in status.nodes for text in node.remarks]
    if not any(node.hang or node.slow for node in status.nodes):
        return found
    from clusterkit.agent import SLOW, STILL  # `ls` and `status` start without it

    found += [f"{STILL}{node.hang}" for node in status.nodes if node.hang]
    return found + [f"{SLOW}{node.slow}" for node in status.nodes if node.slow]


def loss_text(loss: float) -> str:
    """Four decimals, or four digits of a small one."""
    return f"{loss:.4f}" if abs(loss) >= 0.001 else f"{loss:.4g}"


def duration(seconds: float) -> str:
    """``45 s``, ``2 min 05 s``, ``1 h 02 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
