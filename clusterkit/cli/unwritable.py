"""Standard output and standard error that cannot be written: full, or closed by their reader."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal


class _Lossy(io.FileIO):
    """A file that keeps its first error instead of raising it, and then writes nothing more."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        if self.error is None:
            try:
                return super().write(data)
            except OSError as error:
                self.error = error
        return len(data)


@contextmanager
def tolerated(name: Literal["stdout", "stderr"]) -> Iterator[None]:
    """Drop what a standard stream does not take, for work that is done all the same.

    An error of standard output that is not its reader's doing is reported at the end.
    """
    stream = getattr(sys, name)
    try:
        file = _Lossy(stream.fileno(), "wb", closefd=False)
    except OSError:  # no file of the system, as in a notebook
        yield
        return
    stream.flush()
    lossy = io.TextIOWrapper(
        io.BufferedWriter(file), stream.encoding, stream.errors, line_buffering=True
    )
    setattr(sys, name, lossy)
    try:
        yield
    finally:
        lossy.flush()
        setattr(sys, name, stream)
        if name == "stdout" and file.error and not isinstance(file.error, BrokenPipeError):
            print(f"note: {file.error.strerror}: standard output", file=sys.stderr)
