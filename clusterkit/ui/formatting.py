"""Text for terminals: a run's state, failures, log lines and times as people read them."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import TextIO

from msgspec.structs import asdict

from clusterkit.errors import join_some
from clusterkit.run.logs import LogLine, readable
from clusterkit.run.status import Goodput, RunStatus, State

_SEQUENCE = re.compile(
    r"(\x1b\[[0-9;:]*m)"  # colours
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # cursor, screen, modes
    r"|\x1b[]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # titles, links, clipboard
    r"|\x1b[ -/]*[0-~]?"
)
# With U+202A to U+202E and U+2066 to U+2069, which reverse the order of the text after them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str, *, colours: bool = True) -> str:
    """Remove from a program's output everything that a terminal would act on.

    Colours are kept unless NO_COLOR is set, and reset at the end; other escape sequences are
    removed, and other control characters replaced by their code: ``\\x07``.
    """
    if "\x1b" in text:
        kept = r"\1" if colours and not os.environ.get("NO_COLOR") else ""
        text = _SEQUENCE.sub(kept, text)
        text += "\x1b[0m" if "\x1b" in text else ""
    return _CONTROL.sub(lambda found: _escaped(ord(found[0])), text)


def _escaped(number: int) -> str:
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def terminal_filter(stream: TextIO, *, colours: bool = True) -> Callable[[str], str]:
    """Return `printable` if the stream is a terminal; a file or pipe gets the text unchanged."""
    return partial(printable, colours=colours) if stream.isatty() else str


def fold(text: str, width: float) -> list[str]:
    """Break text at spaces into lines of at most ``width`` columns.

    Further lines are indented more than the first. A longer word stays whole: an id, a number and
    a path can be copied.
    """
    if cells(text) <= width:
        return [text]
    indent = len(text) - len(text.lstrip(" "))
    margin = " " * min(indent + 2, int(width) // 2)
    lines, line, used = [], "", 0
    for word in re.findall(r" +|[^ ]+", text):
        size = cells(word)
        if used + size > width and line.strip():
            lines.append(line.rstrip(" "))
            line, used = margin, len(margin)
        if line != margin or not word.isspace():
            line, used = line + word, used + size
    return [*lines, line]


def prose(text: str) -> str:
    """Return a text for stderr: on a terminal in lines of its width, by `fold`."""
    if not sys.stderr.isatty():
        return text
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else 0
    with suppress(OSError):
        width = width or os.get_terminal_size(sys.stderr.fileno()).columns
    return "\n".join(part for line in text.split("\n") for part in fold(line, width or 80))


def cells(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if "\x1b" in text:
        text = _SEQUENCE.sub("", text)
    if text.isascii():
        return len(text) if "\t" not in text else len(text.expandtabs())
    from rich.cells import cell_len

    return cell_len(text)


def log_text(line: LogLine) -> str:
    """Format a log line with its time, node and rank; a marked line as words, not JSON."""
    event = line.event
    text = line.text if event is None else readable(event)
    return f"{clock(line.time)} {source(line)} {text}"


def source(line: LogLine) -> str:
    """Name the origin of a line: ``n0 r3`` is node 0, rank 3; ``n0 -`` the launcher of node 0."""
    return f"n{line.node} {'-' if line.rank is None else f'r{line.rank}'}"


def clock(moment: float) -> str:
    """Format a Unix time as local time with milliseconds."""
    second = int(moment)
    # A third faster than an f-string, and called for each line of a log.
    return "%s.%03d" % (_second(second), (moment - second) * 1000)  # noqa: UP031


@lru_cache(maxsize=1024)
def _second(moment: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))


def failure_text(status: RunStatus, *, with_hint: bool = True) -> str:
    """Format which rank failed first, the cause, its traceback and, ``with_hint``, the remedy.

    Empty if the run has not failed.
    """
    failure = status.failure
    if failure is None:
        return ""
    known = failure.exit_code is None or failure.cause.startswith("exit code")
    code = "" if known else f" (exit code {failure.exit_code})"
    # The traceback ends with the whole of the cause.
    cause, *more = [failure.summary] if failure.traceback else failure.cause.split("\n")
    lines = [f"{failure.headline}: {cause}{code}", *(f"  {line}" for line in more)]
    if failure.traceback:
        lines += [f"  {line}" for line in failure.traceback.splitlines()]
    if failure.hint and with_hint:
        lines.append(f"hint: {failure.hint}")
    return "\n".join(lines)


def pending_reason(status: RunStatus) -> str | None:
    """Return why nodes have not started yet; None if all have, or it is not known."""
    waiting = (node for node in status.nodes if node.state is State.PENDING)
    return next((node.reason for node in waiting if node.reason), None)


def start_text(reason: str | None = None) -> str:
    """Describe a run whose nodes have not started, with `pending_reason`."""
    return "starting" if reason is None else f"waits: {reason}"


def goodput_text(goodput: Goodput) -> str:
    """Format as ``93 % of the time was training; the rest: 12 s start, 30 s restart``."""
    names = {"waiting": "waiting", "start": "start", "restart": "restart",
             "again": "steps done again", "end": "since the last step"}  # fmt: skip
    rest = [(getattr(goodput, name), label) for name, label in names.items()]
    shown = ", ".join(f"{duration(seconds)} {label}" for seconds, label in rest if seconds >= 0.5)
    head = f"{100 * goodput.share:.0f} % of the time was training"
    return f"{head}; the rest: {shown}" if shown else head


def remark_lines(status: RunStatus) -> list[str]:
    """Return the remarks of the nodes, then ranks that do not end, hang or are slow."""
    nodes: dict[str, list[str]] = {}
    for node in status.nodes:
        for text in node.remarks:
            nodes.setdefault(text, []).append(str(node.node))
    found = [
        f"node{'s' if len(of) > 1 else ''} {join_some(of)}: {text}" for text, of in nodes.items()
    ]
    found += [left] if (left := left_text(status)) else []
    if not any(node.hang or node.slow for node in status.nodes):
        return found
    from clusterkit.agent import HANG_NOTE, SLOW_NOTE  # `ls` and `status` start without it

    found += [f"{HANG_NOTE}{node.hang}" for node in status.nodes if node.hang]
    return found + [f"{SLOW_NOTE}{node.slow}" for node in status.nodes if node.slow]


def left_text(status: RunStatus) -> str:
    """Return which ranks neither run nor end although others have ended; empty: none is known."""
    running = [node for node in status.nodes if node.state is State.RUNNING]
    if not any(node.idle for node in running):
        return ""
    from clusterkit.agent import limits
    from clusterkit.agent.left import describe

    now = time.time()
    return describe(
        {node.node: [asdict(each) for each in node.idle] for node in running if node.idle},
        {node.node: node.ended for node in running if node.ended},
        [
            node.node
            for node in status.nodes
            # One that has just ended: what the others have recorded may be older.
            if node.state is State.SUCCEEDED and now - (node.ended_at or now) > limits.LEFT_SECONDS
        ],
        now,
        many=len(status.nodes) > 1,
    )


def loss_text(loss: float) -> str:
    """Format with four decimals, or with four digits if it is below 0.001."""
    return f"{loss:.4f}" if abs(loss) >= 0.001 else f"{loss:.4g}"


def duration(seconds: float) -> str:
    """Format as ``45 s``, ``2 min 05 s`` or ``1 h 02 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
