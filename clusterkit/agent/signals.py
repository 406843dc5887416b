"""Signals to the agent, with who sent them; what the kernel does for it when processes end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
from collections.abc import Collection
from pathlib import Path

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # signals that ask an agent to end
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def signal_handle(signals: Collection[int]) -> int:
    """Have these signals come through a file, for `read_signals`, and not otherwise; signalfd(2).

    To be called before there are other threads; children inherit that the signals are blocked.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    for signum in signals:  # a shell ignores SIGINT for what it starts in the background
        signal.signal(signum, signal.SIG_DFL)
    mask = (ctypes.c_ulong * 16)()
    _libc.sigemptyset(mask)
    for signum in signals:
        _libc.sigaddset(mask, signum)
    handle: int = _libc.signalfd(-1, mask, os.O_NONBLOCK | os.O_CLOEXEC)
    if handle < 0:
        raise OSError(ctypes.get_errno(), "signalfd")
    return handle


def read_signals(handle: int) -> list[tuple[int, int, int]]:
    """The signals that have come: number, and process and user id of whoever sent it."""
    with contextlib.suppress(BlockingIOError):
        data = os.read(handle, 32 * 128)
        found = (struct.unpack_from("=IiiII", data, at) for at in range(0, len(data), 128))
        return [(signum, pid, uid) for signum, _, _, pid, uid in found]
    return []


def sender(signum: int, pid: int, uid: int) -> tuple[str, bool]:
    """Who sent a signal, and whether it says what for (``stop --reason``): then that, instead."""
    words: list[str] = []
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if "--reason" in words[:-1]:
        return words[words.index("--reason") + 1], True
    name = signal.Signals(signum).name
    if not pid:
        return f"{name} from the kernel, or from outside of this container", False
    command = " ".join(words).strip()[:200]
    return f"{name} from process {pid} of user {uid}{f' ({command})' if command else ''}", False


def adopt_orphans(on: bool = True) -> None:
    """Become the parent of every descendant that loses its own."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def take_signals() -> None:
    """In a process that the agent starts: take them as usual."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOPS, signal.SIGCONT))


def end_with_parent() -> None:
    """In a new launcher: take signals as usual, and SIGTERM if the agent is killed with -9."""
    take_signals()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
