"""Run the program in a fork of the fork server, and end as Python does.

Run as text, like `forkserver`.

The process does not end by the interpreter's own shutdown, which frees the program's objects: a
model that is freed while gloo's thread drops its last work waits for that thread for ever, and
native threads that outlive the interpreter abort the process (torch 2.13). All that a program can
see of a shutdown is done, in Python's order; then the process exits.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.machinery
import io
import os
import runpy
import signal
import sys
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any

_CLOSED_WHEN_FREED = {
    ("zipfile", "ZipFile"), ("shelve", "Shelf"), ("h5py._hl.files", "File"),
    ("tempfile", "_TemporaryFileWrapper"), ("tempfile", "SpooledTemporaryFile"),
}  # fmt: skip
_INTERRUPTED = 128 + signal.SIGINT


class Program:
    """A program that is about to start: ``start(*arguments)``, then `end`."""

    start: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __init__(
        self, words: list[str], modules: frozenset[str], shadowed: Callable[..., list[str]]
    ) -> None:
        """
        Args:
            words: the program, or ``-m`` and its module; its arguments.
            modules: those that Python itself had imported.
            shadowed: of `module_files`.
        """
        self._words, self._modules, self._shadowed = words, modules, shadowed
        self._flushes = False  # whether Python flushes before it looks at how the program ended
        self.start, self.arguments = self._prepare, ()

    def _prepare(self) -> None:
        """Find and compile the program.

        It is started in a second step, so that its stack holds no frame of this function.
        """
        main: dict[str, Any] = vars(sys.modules["__main__"])
        if self._words[0] == "-m":
            module = self._words[1]
            sys.argv[:] = ["-m", *self._words[2:]]
            self._put_first(os.getcwd())
            self.start = _run_module_as_main()
            self.arguments = (module,)
            return
        file = os.path.join(os.getcwd(), self._words[0])
        sys.argv[:] = self._words
        if any(_finds(hook, file) for hook in sys.path_hooks):  # a folder, or a zip
            self._put_first(file, always=True)
            self.start = _run_module_as_main()
            self.arguments = ("__main__", False)
            return
        self._put_first(os.path.dirname(os.path.realpath(file)))
        loader = importlib.machinery.SourceFileLoader("__main__", file)
        self.start, self.arguments = exec, (self._compiled(file), main)
        self._flushes = True
        main.update(__file__=file, __cached__=None, __loader__=loader)

    def _put_first(self, folder: str, *, always: bool = False) -> None:
        """Put a folder at the head of ``sys.path``; drop modules that the path has others for."""
        if always or not getattr(sys.flags, "safe_path", sys.flags.isolated):
            sys.path.insert(0, folder)
        for name in self._shadowed(sys.modules.keys() - self._modules, sys.path):
            del sys.modules[name]

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
        """End the process, after the program has returned or raised."""
        if self._flushes:
            for stream in (sys.stderr, sys.stdout):
                with contextlib.suppress(Exception):
                    stream.flush()
        code = _outcome(error)
        threading: Any = sys.modules.get("threading")
        if threading is not None:
            try:
                threading._shutdown()
            except BaseException as raised:
                _unraisable(raised, "on threading shutdown", threading)
        with contextlib.suppress(Exception):  # 3.9 raises the last one again
            atexit._run_exitfuncs()
        _close_files()
        code = _flush() or code
        if isinstance(error, KeyboardInterrupt) and code == _INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code & 0xFF)


def _run_module_as_main() -> Callable[..., Any]:
    # Imported anew where the program is to have no module of the server's.
    run: Any = importlib.import_module(runpy.__name__)
    return run._run_module_as_main  # type: ignore[no-any-return]


def _finds(hook: Callable[[str], Any], path: str) -> bool:
    try:
        hook(path)
    except ImportError:
        return False
    return True


def _outcome(error: BaseException | None) -> int:
    """Report an exception as Python does; return the exit code."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            code = int(error.code or 0)
            return code if -(1 << 63) <= code < 1 << 63 else -1
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
    except SystemExit as exits:
        return _outcome(exits)
    except BaseException as raised:
        raised.__traceback__ = _trimmed(raised.__traceback__)
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(raised), raised, raised.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, trace)
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _trimmed(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this file and of the text that runs it."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith("<clusterkit"):
        trace = trace.tb_next
    return trace


def _unraisable(error: BaseException, what: str, place: object) -> None:
    """Pass an exception to the program's ``sys.unraisablehook``.

    Its argument's type has no public name: one is caught from an exception that is raised here.

    Args:
        what: what Python was doing, as 3.13 and newer have it.
        place: what older ones have instead.
    """
    kinds: list[Any] = []

    class Raises:
        def __del__(self) -> None:
            raise ValueError

    hook, sys.unraisablehook = sys.unraisablehook, lambda argument: kinds.append(type(argument))
    Raises()
    sys.unraisablehook = hook
    trace = error.__traceback__ = _trimmed(error.__traceback__)
    names = (f"Exception ignored {what}", None) if sys.version_info >= (3, 13) else (None, place)
    with contextlib.suppress(Exception):
        hook(kinds[0]((type(error), error, trace, *names)))


def _close_files() -> None:
    """Do what the interpreter's shutdown does to open files, and to the program's objects.

    A compressed file may lie on one of Python's, and below another: those are flushed before it is
    closed, for what they hold, and after, for what it has written at its end.
    """
    found = gc.get_objects()
    _flush_files(found)
    for each in found:
        kind = type(each)
        place = getattr(kind, "__module__", None), getattr(kind, "__qualname__", None)
        with contextlib.suppress(Exception):
            if issubclass(kind, io.IOBase):
                if place[0] != "_io" and each not in (sys.stdout, sys.stderr, sys.stdin):
                    each.close()
            elif place in _CLOSED_WHEN_FREED:
                each.close()
            elif place[0] == "__main__" and hasattr(kind, "__del__"):
                each.__del__()
    _flush_files(found)


def _flush_files(objects: list[Any]) -> None:
    for each in objects:
        if type(each).__module__ == "_io" and issubclass(type(each), io.IOBase):
            with contextlib.suppress(Exception):
                if not (each.closed or each in (sys.stdout, sys.stderr)):
                    each.flush()


def _flush() -> int:
    """Flush standard output and error; return 120 where the first fails, as Python does, else 0."""
    code = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception as error:
            if stream is sys.stdout:
                _unraisable(error, "on flushing sys.stdout", stream)
                code = 120
    return code
