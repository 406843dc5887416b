"""How commands and files reach a host; a backend touches the world through nothing else."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clusterkit.errors import RunFolderError, SubmitFailed

# Below Linux's ephemeral range (32768 and up): no outgoing connection takes such a port.
PORTS = range(20000, 32000)


_START = """command -v "$1" >/dev/null || { echo "$1: not found" >&2; exit 127; }
"$@" </dev/null >/dev/null 2>&1 &"""


@dataclass(frozen=True)
class Completed:
    """A command that has ended."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str


class Transport(Protocol):
    """Reaches every host of one cluster. Paths are absolute paths on that host."""

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Completed:
        """Run a command to its end.

        Raises:
            SubmitFailed: it cannot be started, or did not end within ``timeout`` seconds.
        """
        ...

    def start(
        self, host: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> None:
        """Start a command that outlives this process, in a session of its own, without output.

        Raises:
            SubmitFailed: it cannot be started.
        """
        ...

    def put(self, host: str, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file, whole or not at all; its folder is made.

        Raises:
            RunFolderError: no space, no permission.
        """
        ...

    def get(self, host: str, path: str, offset: int = 0, limit: int | None = None) -> bytes | None:
        """A file's bytes from ``offset`` on, at most ``limit``; None when there is no such file."""
        ...

    def free_port(self, host: str, wanted: int | None = None) -> int:
        """``wanted`` if nothing listens there, otherwise (or without it) another free TCP port."""
        ...


class LocalTransport:
    """This machine; every host name means it."""

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Completed:
        try:
            done = subprocess.run(
                list(argv), env={**os.environ, **(env or {})}, timeout=timeout,
                stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise SubmitFailed(f"{argv[0]} on {host} did not end within {timeout:g} s") from error
        except OSError as error:
            raise SubmitFailed(f"cannot start {argv[0]} on {host}: {error.strerror}") from error
        return Completed(tuple(argv), done.returncode, done.stdout, done.stderr)

    def start(
        self, host: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> None:
        # The shell starts it and ends at once, so that it is nobody's child and leaves no zombie.
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", _START, "sh", *argv],
                env={**os.environ, **(env or {})}, start_new_session=True,
                stdin=subprocess.DEVNULL, capture_output=True, text=True,
            )  # fmt: skip
        except OSError as error:
            raise SubmitFailed(f"cannot start {argv[0]} on {host}: {error.strerror}") from error
        if done.returncode:
            raise SubmitFailed(f"cannot start {argv[0]} on {host}: {done.stderr.strip()}")

    def put(self, host: str, path: str, data: bytes, mode: int = 0o644) -> None:
        write_atomic(Path(path), data, mode)

    def get(self, host: str, path: str, offset: int = 0, limit: int | None = None) -> bytes | None:
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                return file.read(-1 if limit is None else limit)
        except (FileNotFoundError, ProcessLookupError, NotADirectoryError, IsADirectoryError):
            return None

    def free_port(self, host: str, wanted: int | None = None) -> int:
        if wanted is not None and _is_free(wanted):
            return wanted
        # At random, so that two submits at the same moment do not get the same one.
        for port in random.sample(PORTS, 200):
            if _is_free(port):
                return port
        raise SubmitFailed(f"no free TCP port between {PORTS.start} and {PORTS.stop} on {host}")


def _is_free(port: int) -> bool:
    # Without SO_REUSEADDR: a port in TIME_WAIT is left alone too. Both families, because
    # torch's store listens on [::] where there is IPv6.
    families = [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
    for family, address in families:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                return False
    return True


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file under a temporary name and rename it.

    Raises:
        RunFolderError: no space, no permission; nothing is left of the attempt.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{random.randrange(1 << 32):08x}")
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
