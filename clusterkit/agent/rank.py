"""A fork of the fork server as a rank: it becomes the program, and ends as Python does.

Run as text, like `forkserver`.

It does not end by the interpreter's own end, which frees the program's objects: a model that is
freed while gloo's thread drops its last work waits for that thread for ever, and native threads
that outlive the interpreter abort the process (torch 2.13). What a program can see of an end is
done, in Python's order; then the process is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.machinery
import io
import os
import runpy
import signal
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from types import CodeType, SimpleNamespace, TracebackType
from typing import Any

Document = dict[str, Any]
_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_MM_MAP = 1, 35, 14
_CLOSED_WHEN_FREED = {("zipfile", "ZipFile"), ("shelve", "Shelf"), ("h5py._hl.files", "File")}
_libc = ctypes.CDLL(None, use_errno=True)
_kept: list[Any] = []  # what must live as long as the process


class Rank:
    """A program that is about to start: ``start(*arguments)``, then `end`."""

    start: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __init__(self, words: list[str], last: Callable[[int], None]) -> None:
        """``words``: the program's or ``-m`` and the module's, and arguments. ``last``: done at
        the very end, with the exit code."""
        self._words, self._last = words, last
        self.start, self.arguments = self._prepare, ()

    def _prepare(self) -> None:
        """Find and compile the program. It is started in two steps so that no function's frame
        stands below its own."""
        main: dict[str, Any] = vars(sys.modules["__main__"])
        if self._words[0] == "-m":
            module = self._words[1]
            sys.argv[:] = ["-m", *self._words[2:]]
            _put_first(os.getcwd())
            self.start = vars(runpy)["_run_module_as_main"]
            self.arguments = (module,)
            return
        file = os.path.abspath(self._words[0])
        sys.argv[:] = self._words
        if any(_finds(hook, file) for hook in sys.path_hooks):  # a folder, or a zip
            sys.path.insert(0, file)
            self.start = vars(runpy)["_run_module_as_main"]
            self.arguments = ("__main__", False)
            return
        _put_first(os.path.dirname(os.path.realpath(file)))
        loader = importlib.machinery.SourceFileLoader("__main__", file)
        self.start, self.arguments = exec, (self._compiled(file), main)
        main.update(__file__=file, __cached__=None, __loader__=loader)

    def _compiled(self, file: str) -> CodeType:
        try:
            with io.open_code(file) as source:
                text = source.read()
        except OSError as error:
            what = f"can't open file {file!r}: [Errno {error.errno}] {error.strerror}"
            print(f"{sys.executable}: {what}", file=sys.stderr)
            raise SystemExit(2) from None
        return compile(text, file, "exec", dont_inherit=True)

    def end(self, error: BaseException | None) -> None:
        """The process's end, after the program has returned or raised."""
        code = _outcome(error)
        try:
            vars(threading)["_shutdown"]()
        except BaseException as raised:
            _unraisable(raised, threading)
        with contextlib.suppress(Exception):  # 3.9 raises the last one again
            atexit._run_exitfuncs()
        _close_files()
        code = _flush() or code
        with contextlib.suppress(Exception):
            self._last(code)
        if isinstance(error, KeyboardInterrupt) and code == _INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code & 0xFF)


def become(
    order: Document, environment: Mapping[str, str], last: Callable[[int], None], argv: list[str]
) -> Rank:
    """Make a rank of this process.

    Args:
        order: the rank's environment, folder, output and program.
        environment: what the server's was before it imported anything.
        last: see `Rank`.
        argv: the interpreter and its options.
    """
    os.setpgid(0, 0)
    # As a launcher's rank: SIGTERM if the agent, and by that the server, is killed with -9.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != order["server"]:
        os.kill(os.getpid(), signal.SIGTERM)
    env = order["env"]
    os.write(order["output"], f"{order['header']} {env['RANK']} {os.getpid()}\n".encode())
    for number in (1, 2):
        os.dup2(order["output"], number)
    os.close(order["output"])
    os.chdir(order["cwd"])
    words: list[str] = order["argv"]
    _set_environment(environment, env)
    _set_title([*argv, *words], env)
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = [*argv, *words]
    _be_another_process()
    return Rank(words, last if order["number"] == 0 else lambda _: None)


def _set_environment(before: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Make it what is wanted, and keep what imported modules have set."""
    for name in before.keys() - wanted.keys():
        os.environ.pop(name, None)
    for name, value in wanted.items():
        if before.get(name) != value:
            os.environ[name] = value


def _be_another_process() -> None:
    """Draw anew what was drawn when modules were imported, and is a process's own."""
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)
    with contextlib.suppress(AttributeError):
        vars(threading.Thread)["_set_native_id"](threading.main_thread())


def _set_title(argv: list[str], env: Mapping[str, str]) -> None:
    """Have ``/proc/PID/cmdline`` and ``environ`` show the program, to ps, py-spy and `stop`.

    Where the kernel does not take it (PR_SET_MM_MAP; prctl(2)) they show the server's own, whose
    environment names the run as well.
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
    _libc.sbrk.restype = ctypes.c_void_p
    layout = struct.pack(
        "=12QIi", start_code, end_code, start_data, end_data, start_brk, _libc.sbrk(0) or 0, stack,
        at, at + len(words), at + len(words), at + len(block) - 1, 0, 0, -1,
    )  # fmt: skip
    _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, len(layout), 0)


def _put_first(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path.insert(0, folder)


def _finds(hook: Callable[[str], Any], path: str) -> bool:
    try:
        hook(path)
    except ImportError:
        return False
    return True


_INTERRUPTED = 128 + signal.SIGINT


def _outcome(error: BaseException | None) -> int:
    """The exit code; what Python says of an exception is said."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0)
        with contextlib.suppress(Exception):
            print(error.code, file=sys.stderr)
        return 1
    error.__traceback__ = trace = _trimmed(error.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    hook: Any = getattr(sys, "excepthook", None)
    try:
        if hook is None:
            print("sys.excepthook is missing", file=sys.stderr)
            hook = sys.__excepthook__
        hook(type(error), error, trace)
    except SystemExit as ends:
        return _outcome(ends)
    except BaseException as raised:
        raised.__traceback__ = _trimmed(raised.__traceback__)
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(raised), raised, raised.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, trace)
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _trimmed(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames of this file and of the text that runs it."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith("<clusterkit"):
        trace = trace.tb_next
    return trace


def _unraisable(error: BaseException, place: object) -> None:
    trace = error.__traceback__ = _trimmed(error.__traceback__)
    told = SimpleNamespace(
        exc_type=type(error), exc_value=error, exc_traceback=trace, err_msg=None, object=place
    )
    with contextlib.suppress(Exception):
        sys.unraisablehook(told)


def _close_files() -> None:
    """What the interpreter's end does to files that nobody closed, and to the program's objects."""
    for each in gc.get_objects():
        kind = type(each)
        place = getattr(kind, "__module__", None), getattr(kind, "__qualname__", None)
        with contextlib.suppress(Exception):
            if issubclass(kind, io.IOBase):
                if not (each.closed or each in (sys.stdout, sys.stderr, sys.stdin)):
                    each.flush() if place[0] == "_io" else each.close()
            elif place in _CLOSED_WHEN_FREED:
                each.close()
            elif place[0] == "__main__" and hasattr(kind, "__del__"):
                each.__del__()


def _flush() -> int:
    """The exit code where standard output could not be written to its end."""
    code = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception as error:
            if stream is sys.stdout:
                _unraisable(error, stream)
                code = 120
    return code
