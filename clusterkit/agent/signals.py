"""Receive signals with their senders; have the kernel reparent and end processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
from collections.abc import Collection

from clusterkit.agent.processes import command_line

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # signals that ask an agent to end
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def signal_handle(signals: Collection[int]) -> int:
    """Return a handle (signalfd(2)) from which `read_signals` reads these signals; block them.

    To be called before there are other threads; children inherit that the signals are blocked.

    Raises:
        OSError: the kernel gives no handle.
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
    """Return the signals that have arrived: number, and process and user id of the sender."""
    with contextlib.suppress(BlockingIOError):
        data = os.read(handle, 32 * 128)
        found = (struct.unpack_from("=IiiII", data, at) for at in range(0, len(data), 128))
        return [(signum, pid, uid) for signum, _, _, pid, uid in found]
    return []


def sender(signum: int, pid: int, uid: int) -> tuple[str, bool]:
    """Describe the sender of a signal.

    Returns:
        The reason that it gives (``stop --reason``) and True, or its process, user and command
        line and False.
    """
    words = command_line(pid)
    if "--reason" in words[:-1]:
        return words[words.index("--reason") + 1], True
    name = signal.Signals(signum).name
    if not pid:
        return f"{name} from the kernel, or from outside of this container", False
    command = " ".join(words).strip()[:200]
    return f"{name} from process {pid} of user {uid}{f' ({command})' if command else ''}", False


def adopt_orphans(on: bool = True) -> None:
    """Become the parent of every descendant that loses its own, or no longer."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def die_with_parent() -> None:
    """As `fresh_signals`; the child gets SIGTERM if the agent is killed with -9.

    Maybe several times: once for each thread of the agent that dies before the others do, as the
    child then has another thread for a parent (Linux, kernel/exit.c, forget_original_parent). So it
    is for a child that ends at the first one, not for ranks: these are the guard's to end.
    """
    unblock_signals()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def unblock_signals() -> None:
    """Prepare a new child: it ignores and blocks no signal.

    A shell without job control has what it starts in the background ignore SIGINT and SIGQUIT,
    nohup SIGHUP; a rank gets what a launcher in the foreground gives it.
    """
    for signum in signal.valid_signals():
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
