"""Make a rank of a fork of the fork server: its environment, output, title, random state.

Run as text, like `forkserver`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import importlib
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Document = dict[str, Any]
_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_MM_MAP = 1, 35, 14
libc = ctypes.CDLL(None, use_errno=True)
_kept: list[Any] = []  # objects that must live as long as the process


def become(order: Document, config: Document, environment: Mapping[str, str]) -> None:
    """Make a rank of this process.

    Args:
        order: the rank's environment, folder, output, CPUs and program.
        config: the server's: ``argv``, the interpreter and its options; ``modules``.
        environment: of the server before it imported anything.
    """
    os.setpgid(0, 0)
    if order["cpus"]:  # before there are threads, which inherit it
        with contextlib.suppress(OSError):  # taken away since the order was written
            os.sched_setaffinity(0, order["cpus"])
    # As a launcher's rank: SIGTERM if the agent, and with it the server, is killed with -9.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != order["server"]:
        os.kill(os.getpid(), signal.SIGTERM)
    env = order["env"]
    os.write(order["output"], f"{order['header']} {env['RANK']} {os.getpid()}\n".encode())
    for number in (1, 2):
        os.dup2(order["output"], number)
    os.close(order["output"])
    os.chdir(order["cwd"])
    argv, words = config["argv"], order["argv"]
    _set_environment(environment, env)
    set_title([*argv, *words], env)
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = [*argv, *words]
    _renew_process_state()
    _dump_traces_on_signal(*order["trace"])


def _set_environment(before: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Set the wanted environment, and keep what imported modules have set."""
    for name in before.keys() - wanted.keys():
        os.environ.pop(name, None)
    for name, value in wanted.items():
        if before.get(name) != value:
            os.environ[name] = value


def _renew_process_state() -> None:
    """Create anew what imported modules, by their names, have created for their process.

    tests/unit/test_process_state.py finds what is missing here. What handles forks itself: Python's
    ``random``, the locks of ``logging``, ``threading`` and ``concurrent.futures``, names of
    ``tempfile``, OpenSSL, ``filelock``.
    """

    def renew(name: str, create: Callable[[Any], object]) -> None:
        if (module := sys.modules.get(name)) is not None:
            create(module)

    # Not torch.seed(), which seeds GPUs as well, and so starts CUDA.
    with contextlib.suppress(AttributeError):  # a torch whose import failed half-way
        renew("torch", lambda torch: torch.default_generator.seed())
    renew("numpy.random", lambda numpy: numpy.seed())
    renew("multiprocessing.process", _renew_authkey)
    with contextlib.suppress(AttributeError):  # what has no public name
        renew("threading", lambda threading: threading.main_thread()._set_native_id())
    with contextlib.suppress(AttributeError):
        renew("logging", _renew_start_time)
    with contextlib.suppress(AttributeError):
        renew("sympy.core.random", lambda sympy: (sympy.rng.seed(), sympy._assumptions_rng.seed()))
    with contextlib.suppress(AttributeError):
        renew("transformers.utils.hub", _renew_session)


def _renew_authkey(process: Any) -> None:
    process.current_process().authkey = os.urandom(32)


def _renew_start_time(logging: Any) -> None:
    """Set the time that ``%(relativeCreated)d`` counts from: of the import; from 3.13 on in ns."""
    is_float = isinstance(logging._startTime, float)
    logging._startTime = time.time() if is_float else time.time_ns()


def _renew_session(hub: Any) -> None:
    hub.SESSION_ID = hub.uuid4().hex


def set_title(argv: list[str], env: Mapping[str, str]) -> bool:
    """Have ``/proc/PID/cmdline`` and ``environ`` show the program, for ps, py-spy and `stop`.

    Where the kernel does not allow it (PR_SET_MM_MAP; prctl(2)) they show the server's own, whose
    environment names the run as well.

    Returns:
        Whether the kernel allowed it.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    block = ctypes.create_string_buffer(
        words + b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    )
    _kept.append(block)
    at = ctypes.addressof(block)
    with open("/proc/self/stat", "rb") as file:
        fields = [b"", b"", b"", *(file.read().rpartition(b")")[2].split())]
    start_code, end_code, stack = (int(fields[number]) for number in (26, 27, 28))
    start_data, end_data, start_brk = (int(fields[number]) for number in (45, 46, 47))
    libc.sbrk.restype = ctypes.c_void_p
    layout = struct.pack(
        "=12QIi", start_code, end_code, start_data, end_data, start_brk, libc.sbrk(0) or 0, stack,
        at, at + len(words), at + len(words), at + len(block) - 1, 0, 0, -1,
    )  # fmt: skip
    return int(libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, len(layout), 0)) == 0


def _dump_traces_on_signal(name: str, signum: int) -> None:
    """Have a signal write where every thread is, into a file in memory of this name.

    faulthandler does so whatever the interpreter does meanwhile.
    """
    with contextlib.suppress(OSError, AttributeError):
        file = os.memfd_create(name)
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(signum, file)


def start_worker_server(path: str) -> None:
    """Have torch answer on this socket what the rank does.

    It is started without its line on standard error, unless torch was built without it.
    """
    folder, name = os.path.split(path)
    with contextlib.suppress(Exception):
        place = importlib.import_module("torch._C._distributed_c10d")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of the previous start
        handles = [os.open(folder, os.O_PATH), os.open(os.devnull, os.O_WRONLY), os.dup(2)]
        try:
            os.dup2(handles[1], 2)
            # A socket's name may have 107 bytes.
            _kept.append(place._WorkerServer(f"/proc/self/fd/{handles[0]}/{name}"))
        finally:
            os.dup2(handles[2], 2)
            for handle in handles:
                os.close(handle)
