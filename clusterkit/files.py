"""Read files that a user named, which may be devices or pipes; write files atomically."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import grp
import os
import pwd
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from clusterkit.errors import BadInput, RunFolderError

MAX_BYTES = 4 << 20
"""Size of the largest file that `read_file` accepts."""
SOURCE_BYTES = 1 << 20
"""How much of a program's text is read."""
DRAFT_SECONDS = 60.0
_DRAFT = re.compile(r"\..+\.([0-9]{1,9})\.[0-9a-f]{8}\Z")
"""The name of a temporary file of `write_atomic`, with its writer's process id."""


def read_file(path: Path | str, most: int = MAX_BYTES, *, whole: bool = True) -> bytes:
    """Return the contents of a regular file.

    Args:
        path: the file; opening a pipe that has no writer does not block.
        most: limit in bytes; a larger file is an error.
        whole: False: return the first ``most`` bytes of a file of any size instead.

    Raises:
        OSError: missing, a folder, not a regular file, too large; `strerror` is readable.
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
    """Return the first `SOURCE_BYTES` of a program's text, or "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return read_file(path, SOURCE_BYTES, whole=False).decode(errors="replace")
    return ""


def reason(error: OSError) -> str:
    """Return the operating system's message in lower case, to follow a colon."""
    message = error.strerror or "unreadable"
    return message[0].lower() + message[1:]


def write_atomic(path: Path, data: bytes, mode: int | None = None, *, output: bool = False) -> None:
    """Write a file under a temporary name and rename it.

    Args:
        mode: the file's, whatever the umask is; None: what the umask leaves of 666.
        output: the user has named it. A device or a pipe is written to, not replaced.

    Raises:
        RunFolderError: no space, no permission; the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        if output and path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600
        )
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        elsewhere = "" if output else ", or set CLUSTERKIT_HOME"
        hint = f"name another folder{elsewhere}"
        if isinstance(error, PermissionError):
            owner = other_owner(path.parent)
            hint = f"{path.parent} belongs to {owner}" if owner else f"{path.parent} is read-only"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = f"make room on the disk that holds {path.parent}{elsewhere}"
        raise RunFolderError(f"cannot write {path}: {error.strerror}", hint) from error


def other_owner(path: Path) -> str | None:
    """Return the user to whom a path belongs; None: it is this one, or cannot be found out."""
    try:
        owner = path.stat().st_uid
    except OSError:
        return None
    if owner == os.geteuid():
        return None
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return f"user {owner}"


def check_output(path: Path, *, force: bool = True) -> None:
    """Check that a file can be written where a user wants it.

    Raises:
        BadInput: it is a folder, or exists and there is no ``force``; its folder does not exist,
            which a typing mistake would make.
    """
    if not path.parent.is_dir():
        raise BadInput(f"{path}: there is no folder {path.parent}", f"mkdir -p {path.parent}")
    if os.path.isdir(path):  # not pathlib's, which raises where a folder is closed to this user
        raise BadInput(f"{path} is a folder", "name a file in it")
    if os.path.isfile(path) and not force:
        raise BadInput(f"{path} exists already", hint="--force replaces it")


def remove_drafts(folder: Path) -> None:
    """Remove the temporary files in a folder whose writers were killed in `write_atomic`."""
    for path in folder.glob(".*"):
        if (draft := _DRAFT.match(path.name)) is None:
            continue
        with contextlib.suppress(OSError):
            # A process id may be another container's: no writer takes so long.
            if time.time() - path.stat().st_mtime > DRAFT_SECONDS and not _exists(int(draft[1])):
                path.unlink()


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def write_new(contents: Mapping[Path, bytes]) -> list[Path]:
    """Write files that do not exist yet; keep those that already have the same contents.

    Returns:
        The files that were written.

    Raises:
        BadInput: one exists with other contents; nothing is written.
        RunFolderError: no space, no permission.
    """
    missing = []
    for path, content in contents.items():
        if not os.path.lexists(path):
            missing.append(path)
        elif not path.is_file() or path.read_bytes() != content:
            raise BadInput(f"{path} already exists", hint="remove it, or change to another folder")
    for path in missing:
        write_atomic(path, contents[path])
    return missing


def writable_by_others(path: Path) -> str | None:
    """Return who besides this user and root may change what is in a folder; compare sshd(8).

    A group that has only this user, as Debian makes one for each, is this user.
    """
    status, user = path.stat(), os.getuid()
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if status.st_uid not in (user, 0) and user != 0:
        return f"user {status.st_uid}"
    if status.st_mode & stat.S_IWGRP and status.st_gid != 0:
        with contextlib.suppress(KeyError):
            group, name = grp.getgrgid(status.st_gid), pwd.getpwuid(user).pw_name
            if group.gr_name == name and set(group.gr_mem) <= {name}:
                return None
        return f"group {status.st_gid}"
    return None


def user_name() -> str | None:
    """Return this user's name; None for a user id without one, as in many a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # OSError: Python 3.13
        return None


def size_of(path: Path) -> int:
    """Return a file's size in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def locked(file: IO[bytes], *, shared: bool = False) -> bool:
    """Lock an open file until it is closed, by this process and all that inherited it.

    Returns:
        False if another process holds the lock.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
