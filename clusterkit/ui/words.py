"""Sentences about a run, for terminals."""

from __future__ import annotations

import time

from clusterkit.logs import LogLine, readable
from clusterkit.status import RunStatus


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
    return f"{time.strftime('%H:%M:%S', time.localtime(moment))}.{int(moment % 1 * 1000):03d}"


def failure_text(status: RunStatus) -> str:
    """Who failed first, why, its traceback and the remedy."""
    failure = status.failure
    if failure is None:
        return ""
    told = failure.exit_code is None or failure.cause.startswith("exited with")
    code = "" if told else f" (exit code {failure.exit_code})"
    # The traceback ends with the whole of the cause.
    cause, *more = [failure.summary] if failure.traceback else failure.cause.split("\n")
    lines = [f"{failure.who} failed first: {cause}{code}", *(f"  {line}" for line in more)]
    if failure.traceback:
        lines += [f"  {line}" for line in failure.traceback.splitlines()]
    if failure.hint:
        lines.append(f"hint: {failure.hint}")
    return "\n".join(lines)


def remark_lines(status: RunStatus) -> list[str]:
    """What the nodes remark, a line each."""
    return [f"node {node.node}: {text}" for node in status.nodes for text in node.remarks]


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
