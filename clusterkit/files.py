"""Files: reading one that somebody named, which may be a device or a pipe; writing one whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from clusterkit.errors import BadInput, RunFolderError

BIGGEST = 4 << 20
"""Bytes of the largest file that a person writes."""
SOURCE_BYTES = 1 << 20
"""Of a program's text that is read."""


def read_file(path: Path | str, most: int = BIGGEST, *, whole: bool = True) -> bytes:
    """A regular file's contents.

    Args:
        path: a pipe is not opened for reading, so that one without a writer holds nobody up.
        most: of more bytes than these nothing is read.
        whole: False for the first ``most`` bytes of a file of any size.

    Raises:
        OSError: with a `strerror` for people: missing, a folder, not a regular file, too large.
    """
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "a path cannot hold NUL", str(path))
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


def source_of(path: Path) -> str:
    """The beginning of a program's text; empty where it is no file."""
    with contextlib.suppress(OSError):
        return read_file(path, SOURCE_BYTES, whole=False).decode(errors="replace")
    return ""


def why(error: OSError) -> str:
    """What the system says, to stand behind a colon."""
    said = error.strerror or "unreadable"
    return said[0].lower() + said[1:]


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file under a temporary name and rename it.

    Raises:
        RunFolderError: no space, no permission; nothing is left of the attempt.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        temporary.chmod(mode)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RunFolderError(
            f"cannot write {path}: {error.strerror}",
            hint=f"{path.parent} belongs to another user"
            if isinstance(error, PermissionError)
            else f"make room on the disk that holds {path.parent}, or set CLUSTERKIT_HOME",
        ) from error


def write_new(contents: Mapping[Path, bytes]) -> list[Path]:
    """Write files that are not there yet; one that holds the same already is left as it is.

    Returns:
        Those that were written.

    Raises:
        BadInput: one of them holds something else; nothing is written.
        RunFolderError: no space, no permission.
    """
    missing = []
    for path, content in contents.items():
        if not os.path.lexists(path):
            missing.append(path)
        elif not path.is_file() or path.read_bytes() != content:
            raise BadInput(f"{path} is there already", hint="move it away, or go elsewhere")
    for path in missing:
        write_atomic(path, contents[path])
    return missing


def size_of(path: Path) -> int:
    """Its bytes; 0 where there is no such file."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def locked(file: IO[bytes], *, shared: bool = False) -> bool:
    """Lock an open file for as long as it is open here or in a process that inherited it.

    Returns:
        False: somebody else has locked it.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
