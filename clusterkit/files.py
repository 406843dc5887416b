"""Reading a file that somebody named: it may be anything, also a device or a pipe."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

BIGGEST = 4 << 20
"""Bytes of the largest file that a person writes."""


def read_file(path: Path | str, most: int = BIGGEST, *, whole: bool = True) -> bytes:
    """A regular file's contents.

    Args:
        path: a pipe is not opened for reading, so that one without a writer holds nobody up.
        most: of more bytes than these nothing is read.
        whole: False for the first ``most`` bytes of a file of any size.

    Raises:
        OSError: with a `strerror` for people: missing, a folder, not a regular file, too large.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        data = file.read(most + 1)
    if whole and len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", str(path))
    return data[:most]


def why(error: OSError) -> str:
    """What the system says, to stand behind a colon."""
    said = error.strerror or "unreadable"
    return said[0].lower() + said[1:]
