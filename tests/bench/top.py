"""``python -m tests.bench.top``: first paint and load of `clusterkit top` in a terminal of its own.

A run of 200 nodes with 8 ranks each is written by the classes that write a real one: every rank
writes a line, and rank 0 a step, five times a second. What `clusterkit top` costs is its processor
time, which another's work makes longer by far less than the time on the clock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

from tests.recorded import Recorded

NODES, NPROC, HERTZ, SECONDS = 200, 8, 5, 20
SIZES = ((24, 80), (80, 300))
BIN = Path(sys.executable).parent


def main() -> None:
    with tempfile.TemporaryDirectory() as base:
        os.environ["CLUSTERKIT_HOME"] = base
        run = Recorded(Path(base), nodes=NODES, nproc=NPROC)
        stop = threading.Event()
        writer = threading.Thread(target=_write, args=(run, stop))
        writer.start()
        try:
            for rows, columns in SIZES:
                paint, first, load = _watch(rows, columns)
                print(
                    f"{columns}x{rows}: first paint after {paint:.2f} s of processor time, all of "
                    f"it after {first:.2f} s; then {load:.1%} of a core"
                )
        finally:
            stop.set()
            writer.join()
            run.close()


def _write(run: Recorded, stop: threading.Event) -> None:
    step = 0
    while not stop.wait(1 / HERTZ):
        step += 1
        run.step(step, loss=100.0 / step, tokens_per_second=1e6, step_seconds=1 / HERTZ)
        for rank in range(NODES * NPROC):
            run.says(rank, f"step {step} of rank {rank} is done")


def _watch(rows: int, columns: int) -> tuple[float, float, float]:
    """Processor seconds to the first paint and to Textual's, and the share of a core after that."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.environ["TERM"] = "xterm-256color"
        os.execv(BIN / "clusterkit", ["clusterkit", "top", "last"])
    seen = b""
    while b"RUNNING" not in seen:
        seen += os.read(terminal, 1 << 16)
    paint = _spent(pid)
    while b"RUNNING" not in seen.rpartition(b"\x1b[?1049h")[2] or seen.count(b"\x1b[?1049h") < 2:
        seen += os.read(terminal, 1 << 16)
    first = _spent(pid)
    begun = time.monotonic()
    while time.monotonic() < begun + SECONDS:
        os.read(terminal, 1 << 16)
    load = (_spent(pid) - first) / (time.monotonic() - begun)
    os.write(terminal, b"q")
    with contextlib.suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass
    os.waitpid(pid, 0)
    os.close(terminal)
    return paint, first, load


def _spent(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
