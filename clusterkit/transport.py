"""Runs commands and writes files on hosts; backends reach the outside world only through it."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from clusterkit.errors import ClusterkitError, SubmitFailed, pluralize
from clusterkit.files import write_atomic
from clusterkit.hosts.host_probe import PORTS, free_port

START = """command -v "$1" >/dev/null || { echo "$1: not found" >&2; exit 127; }
${detach:-} "$@" </dev/null >/dev/null 2>&1 &"""
"""Starts ``"$@"`` as a child of init; with ``detach=setsid`` in a session of its own."""
Result = TypeVar("Result")
Environment = Mapping[str, str] | None
"""Variables that a command gets in addition to those of its host."""


@dataclass(frozen=True)
class Completed:
    """A command that has ended."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The last line of its standard error; its exit code if it wrote none."""
        return self.stderr.strip().rpartition("\n")[2] or f"exit code {self.exit_code}"


@dataclass(frozen=True)
class Put:
    """One file to write."""

    path: str
    data: bytes
    mode: int = 0o644


class Stream(Protocol):
    """The input and output of a command that runs on a host; a context manager."""

    @property
    def low_latency(self) -> bool:
        """Whether the host is this machine: compressing what is sent takes longer than it saves."""
        return False

    def write(self, data: bytes) -> None:
        """Write to its standard input. Does nothing if the command has closed that.

        Raises:
            SubmitFailed: the host does not read it.
        """

    def close_input(self) -> None:
        """End its standard input."""

    def read(self, timeout: float | None = None) -> bytes:
        """Return some of its output; ``b""`` at the end.

        Raises:
            SubmitFailed: no output for ``timeout`` seconds.
        """

    @property
    def stderr(self) -> str:
        """Its standard error so far."""

    def exit_code(self, timeout: float | None = None) -> int:
        """Wait until it exits, after its output has ended. Return its exit code.

        Raises:
            ClusterkitError: not within ``timeout`` seconds, or the connection was lost.
        """

    def close(self) -> None:
        """Close its input and output; a remote command ends when it next reads or writes."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Transport(Protocol):
    """Reaches every host of one cluster. Paths are absolute paths on that host."""

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Environment = None,
        timeout: float | None = None,
        stdin: bytes = b"",
    ) -> Completed:
        """Run a command to its end.

        Raises:
            SubmitFailed: it cannot be started, or did not end within ``timeout`` seconds.
            Unavailable: the host cannot be reached.
        """

    def open(
        self, host: str, argv: Sequence[str], *, env: Environment = None, own_group: bool = False
    ) -> Stream:
        """Start a command whose input and output are a stream.

        Args:
            own_group: a terminal's Ctrl-C reaches this process alone, and not the command too.

        Raises:
            SubmitFailed: it cannot be started.
            Unavailable: the host cannot be reached.
        """

    def start(self, host: str, argv: Sequence[str], *, env: Environment = None) -> None:
        """Start a command that outlives this process, in a session of its own, without output.

        Raises:
            SubmitFailed: it cannot be started.
        """

    def put(self, host: str, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file atomically; makes its folder.

        Raises:
            ClusterkitError: no space, no permission.
        """
        self.put_all(host, [Put(path, data, mode)])

    def put_all(self, host: str, files: Sequence[Put]) -> None:
        """`put` several files, in this order."""

    def free_port(self, host: str, wanted: int | None = None) -> int:
        """Return ``wanted`` if nothing listens there, otherwise another free TCP port.

        The port after a port that was chosen is free as well, for the connections between nodes.
        """

    def close(self) -> None:
        """Close all connections; a later call connects again."""


class LocalTransport(Transport):
    """Runs everything on this machine, whatever the host."""

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Environment = None,
        timeout: float | None = None,
        stdin: bytes = b"",
    ) -> Completed:
        try:
            done = subprocess.run(
                list(argv), env={**os.environ, **(env or {})}, timeout=timeout,
                input=stdin, capture_output=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise SubmitFailed(f"{argv[0]} on {host} did not end within {timeout:g} s") from error
        except OSError as error:
            raise SubmitFailed(f"cannot start {argv[0]} on {host}: {error.strerror}") from error
        out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        return Completed(tuple(argv), done.returncode, out, err)

    def open(
        self, host: str, argv: Sequence[str], *, env: Environment = None, own_group: bool = False
    ) -> Stream:
        return LocalStream(host, argv, {**os.environ, **(env or {})}, 0 if own_group else None)

    def start(self, host: str, argv: Sequence[str], *, env: Environment = None) -> None:
        # The shell exits at once, so the command is a child of init and leaves no zombie.
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", START, "sh", *argv],
                env={**os.environ, **(env or {})}, start_new_session=True,
                stdin=subprocess.DEVNULL, capture_output=True, text=True,
            )  # fmt: skip
        except OSError as error:
            raise SubmitFailed(f"cannot start {argv[0]} on {host}: {error.strerror}") from error
        if done.returncode:
            raise SubmitFailed(f"cannot start {argv[0]} on {host}: {done.stderr.strip()}")

    def put_all(self, host: str, files: Sequence[Put]) -> None:
        for file in files:
            write_atomic(Path(file.path), file.data, file.mode)

    def free_port(self, host: str, wanted: int | None = None) -> int:
        if (port := free_port(wanted)) is not None:
            return port
        raise SubmitFailed(f"no free TCP port between {PORTS.start} and {PORTS.stop} on {host}")

    def close(self) -> None:
        pass


class LocalStream(Stream):
    """A command on this machine; see `Stream`."""

    def __init__(
        self, host: str, argv: Sequence[str], env: Mapping[str, str], group: int | None = None
    ) -> None:
        import tempfile

        self._host = host
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the stream)
        try:
            self._process = subprocess.Popen(
                list(argv), env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self._errors, process_group=group,
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise SubmitFailed(f"cannot start {argv[0]} on {host}: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    @property
    def low_latency(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.write(data)
            self._input.flush()

    def close_input(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def read(self, timeout: float | None = None) -> bytes:
        # Not select(), which takes no handle above 1023.
        waiting = select.poll()
        waiting.register(self._output, select.POLLIN)
        if not waiting.poll(None if timeout is None else timeout * 1000):
            raise SubmitFailed(f"host {self._host} no longer answers")
        return os.read(self._output.fileno(), 1 << 16)

    @property
    def stderr(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def exit_code(self, timeout: float | None = None) -> int:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise SubmitFailed(f"{self._host} did not report how the command ended") from None

    def close(self) -> None:
        self.close_input()
        self._output.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._errors.close()


def fan_out(
    hosts: Sequence[str],
    work: Callable[[str], Result],
    limit: int = 64,
) -> dict[str, Result | ClusterkitError]:
    """Call ``work(host)`` for all hosts in parallel, ``limit`` at a time. Return results and errors
    by host, in the order of ``hosts``."""

    def guarded(host: str) -> Result | ClusterkitError:
        try:
            return work(host)
        except ClusterkitError as error:
            return error

    if len(hosts) <= 1:
        return {host: guarded(host) for host in hosts}
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(limit, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(guarded, hosts), strict=True))


def in_order(outcomes: Mapping[str, Result | ClusterkitError]) -> dict[str, Result]:
    """Return the results of `fan_out` if there was no error.

    Raises:
        ClusterkitError: the first host's error; the message names the other hosts that failed.
    """
    errors = {host: found for host, found in outcomes.items() if isinstance(found, ClusterkitError)}
    for error in errors.values():
        if len(errors) > 1:
            others = ", ".join(list(errors)[1:4]) + (", ..." if len(errors) > 4 else "")
            error.message += f" (and {pluralize(len(errors) - 1, 'further host')}: {others})"
        raise error
    return {h: found for h, found in outcomes.items() if not isinstance(found, ClusterkitError)}
