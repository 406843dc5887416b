"""Runs commands and writes files over SSH, with one connection per host, made at first use.

A command and its environment, secrets included, are sent on standard input: so they are in no
argument list, and no login shell can misread them. The login shell is always given the same
command, which reads N bytes and runs them if they are the whole script: a start file of the shell
(.bashrc) that reads standard input may have taken some.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import paramiko

from clusterkit import shell
from clusterkit.agent.files import allow_open_files
from clusterkit.backends.ssh.config import HostUnreachable, LoginRefused, Target, jump_host, resolve
from clusterkit.backends.ssh.connection import close_now, connect
from clusterkit.cluster import Host
from clusterkit.errors import SubmitFailed
from clusterkit.hosts import host_probe
from clusterkit.transport import START, Completed, Environment, Put, Stream, Transport

Result = TypeVar("Result")
OPEN_SECONDS = 10.0
"""Timeout for opening a channel on an existing connection."""
PYTHON_SECONDS = 60.0
"""Timeout for a command that does little: a Python on NFS that is not cached starts slowly."""
NEAR_SECONDS = 0.002
"""Round trip below which a host is near: in the same network, not across the internet."""
WRITE_BYTES = 1 << 18
WRITE_SECONDS = 120.0
"""For a host to read some of what is sent; behind a jump host, TCP does not notice a stall."""
LOGINS = 64
"""Logins at the same time: each takes processor time here, and has a timeout."""
MOST_HOPS = 16
FILES_PER_HOST = 8
"""File descriptors per host: the connection, a pipe for each channel, files in the run folder."""
_BEGIN = b"@clusterkit-begin\n"
_SCRIPT = "#clusterkit\nprintf '%s\\n' @clusterkit-begin\n{}#clusterkit-end"
_READ = """exec /bin/sh -c 's=$(head -c {}); case $s in \
"#clusterkit"*"#clusterkit-end") eval "$s";; *) exit 97;; esac'"""
_TAKEN = 97
_START_FILES = "a start file of the login shell (.bashrc, .profile) reads standard input or waits"
_MIN_RTT = 148
"""Offset of tcpi_min_rtt in Linux's struct tcp_info (linux/tcp.h)."""


class SshStream(Stream):
    """A command that runs on a host; see `clusterkit.transport.Stream`."""

    def __init__(self, host: str, channel: paramiko.Channel) -> None:
        self._host = host
        self._channel = channel
        self._stderr = b""
        self._begun = b""
        self._started = False

    @property
    def low_latency(self) -> bool:
        return _round_trip(self._channel.get_transport()) < NEAR_SECONDS

    def write(self, data: bytes) -> None:
        deadline = time.monotonic() + WRITE_SECONDS
        at = 0
        while at < len(data):
            # The timeout is that of a thread which may read meanwhile, too, and sets it shorter.
            self._channel.settimeout(WRITE_SECONDS)
            try:
                # In parts, because paramiko copies all unsent data for every packet.
                sent = self._channel.send(data[at : at + WRITE_BYTES])
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise SubmitFailed(f"host {self._host} no longer answers") from None
                continue
            except OSError:
                return  # it has closed its input; its exit code and stderr tell why
            if not sent:
                return  # likewise
            at, deadline = at + sent, time.monotonic() + WRITE_SECONDS

    def close_input(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def read(self, timeout: float | None = None) -> bytes:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            data = self._receive(deadline)
            if self._started or not data:
                return data
            # A login shell may print something before the command does.
            self._begun += data
            _, found, rest = self._begun.partition(_BEGIN)
            if found:
                self._started = True
                self._begun = b""
                if rest:
                    return rest

    def _receive(self, deadline: float | None) -> bytes:
        while True:
            self._read_stderr()  # else it fills the window that it shares with stdout
            left = 1.0 if deadline is None else deadline - time.monotonic()
            self._channel.settimeout(min(1.0, max(0.0, left)))
            try:
                return self._channel.recv(1 << 20)
            except TimeoutError:
                if left <= 0 and not self._started:
                    raise SubmitFailed(
                        f"host {self._host}: the login shell did not run the command",
                        hint=f"possible cause: {_START_FILES}",
                    ) from None
                if left <= 0:
                    raise SubmitFailed(f"host {self._host} no longer answers") from None

    def _read_stderr(self) -> None:
        with contextlib.suppress(OSError):
            while self._channel.recv_stderr_ready():
                self._stderr += self._channel.recv_stderr(1 << 16)

    @property
    def stderr(self) -> str:
        self._read_stderr()
        return self._stderr.decode(errors="replace")

    def exit_code(self, timeout: float | None = 10.0) -> int:
        if not self._channel.status_event.wait(timeout):
            raise SubmitFailed(f"host {self._host} did not report how the command ended")
        status = self._channel.recv_exit_status()
        if status == -1 and not self._channel.eof_received:
            raise HostUnreachable(f"host {self._host}: the connection was lost")
        if not self._started:
            raise self._not_run(status)
        # A command ended by a signal has no exit code: 255, as with OpenSSH's client.
        return 255 if status == -1 else status

    def _not_run(self, status: int) -> LoginRefused:
        said = (self.stderr + self._begun.decode(errors="replace")).strip()
        why = _START_FILES if status == _TAKEN else f"it ended with {status}"
        return LoginRefused(
            f"host {self._host}: the login shell does not run commands: {why}"
            + (f": {said.splitlines()[-1][:200]}" if said else ""),
            hint="`ssh HOST true` must work without a terminal: an `exit` in the start file where "
            "the shell is not interactive, or another login shell (usermod -s /bin/bash USER)",
        )

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._channel.close()


class SshTransport(Transport):
    """Reaches the hosts of one cluster by their names. Thread-safe.

    Args:
        hosts: the cluster's hosts.
        python: the interpreter on hosts whose entry names none.
        connect_timeout: seconds for a host to answer.
    """

    def __init__(
        self, hosts: Iterable[Host], *, python: str = "python3", connect_timeout: float = 10.0
    ) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._python = python
        self._timeout = connect_timeout
        self._connections: dict[str, paramiko.Transport] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._failed: dict[str, tuple[float, HostUnreachable]] = {}
        """When a connection could not be made last, and why."""
        self._lock = threading.Lock()
        self._logins = threading.BoundedSemaphore(LOGINS)
        allow_open_files(FILES_PER_HOST * len(self._hosts))
        self._closed = 0
        """How often `close` was called."""

    def connection(self, name: str) -> paramiko.Transport:
        """Return the host's connection; make one if there is none, or if it is dead.

        Raises:
            HostUnreachable: the host cannot be connected to.
        """

        def make() -> paramiko.Transport:
            target = resolve(self._hosts[name])
            through = self._jump(target) if target.jump else None
            return self._login(target, through)

        return self._cached(name, make)

    def _login(self, target: Target, through: paramiko.Transport | None) -> paramiko.Transport:
        with self._logins:
            return connect(target, self._timeout, through)

    def _cached(self, key: str, make: Callable[[], paramiko.Transport]) -> paramiko.Transport:
        asked = time.monotonic()
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            connection = self._connections.get(key)
            if connection is None or not connection.is_active():
                failed_at, error = self._failed.get(key, (-math.inf, None))
                if error is not None and failed_at >= asked:
                    # Else hundreds of hosts behind a jump host that stalls would each try it.
                    raise error
                closed = self._closed
                try:
                    connection = self._connections[key] = make()
                except HostUnreachable as error:
                    self._failed[key] = time.monotonic(), error
                    raise
                if self._closed != closed:  # `close` was called meanwhile, by another thread
                    self.drop(key, connection)
                    raise HostUnreachable(f"host {key}: the transport was closed")
            return connection

    def _jump(self, target: Target) -> paramiko.Transport | None:
        """Return a connection to the last jump host. Each is reached through the one before it,
        the first one as its own configuration says."""
        hops = _hops(target, target.host)
        while hops[0][1].jump:
            if len(hops) > MOST_HOPS:
                raise HostUnreachable(f"{target}: its jump hosts are reached through each other")
            hops = _hops(hops[0][1], target.host) + hops
        through: paramiko.Transport | None = None
        route = ""
        for hop, jump in hops:
            route += f">{hop}"
            through = self._cached(route, partial(self._login, jump, through))
        return through

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            self._closed += 1
            connections, self._connections = self._connections, {}
        # Newest first: closing a connection through a jump host uses the jump host's connection.
        for connection in reversed(connections.values()):
            close_now(connection)

    def drop(self, name: str, connection: paramiko.Transport) -> None:
        """Close a host's connection, which no longer answers. Another thread may have made a new
        one meanwhile."""
        with self._lock:
            if self._connections.get(name) is connection:
                del self._connections[name]
        close_now(connection)

    def open(
        self, host: str, argv: Sequence[str], *, env: Environment = None, own_group: bool = False
    ) -> Stream:
        return self._script(host, f"{shell.exports(env or {})}exec {shell.join(argv)}\n")

    def _script(self, host: str, script: str) -> SshStream:
        """Run a shell script on a host; what is written to the stream is its standard input."""
        text = _SCRIPT.format(script).encode()
        command = _READ.format(len(text))
        stream = self._with_connection(host, lambda connection: _execute(connection, command, host))
        stream.write(text)
        return stream

    def _with_connection(self, name: str, work: Callable[[paramiko.Transport], Result]) -> Result:
        """Call ``work`` with the host's connection; if that is dead, once more with a new one."""
        for last in (False, True):
            connection = self.connection(name)
            try:
                return work(connection)
            except (paramiko.SSHException, EOFError, OSError) as error:
                if isinstance(error, paramiko.ChannelException) and connection.is_active():
                    raise LoginRefused(
                        f"host {name} refuses another session: {error}",
                        hint="MaxSessions in its sshd_config",
                    ) from None
                self.drop(name, connection)
                if last:
                    reason = str(error) or type(error).__name__
                    raise HostUnreachable(
                        f"host {name}: the connection was lost: {reason}"
                    ) from None
        raise AssertionError

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Environment = None,
        timeout: float | None = None,
        stdin: bytes = b"",
    ) -> Completed:
        return _complete(self.open(host, argv, env=env), host, argv, timeout, stdin)

    def start(self, host: str, argv: Sequence[str], *, env: Environment = None) -> None:
        script = (
            f"{shell.exports(env or {})}set -- {shell.join(argv)}\n"
            "if command -v setsid >/dev/null; then detach=setsid; else detach=; fi\n"
            f"cd /\n{START}\n"
        )
        done = _complete(self._script(host, script), host, argv, PYTHON_SECONDS)
        if done.exit_code:
            raise SubmitFailed(f"cannot start {argv[0]} on host {host}: {done.stderr.strip()}")

    def put_all(self, host: str, files: Sequence[Put]) -> None:
        # The mask is for folders that are made: only the owner can read a run.
        # noclobber, and drafts of our own: in a shared folder many hosts write the same files.
        lines = ["set -Ce\numask 077\n"]
        token = f"{re.sub('[^A-Za-z0-9.-]', '-', host)[:64]}.{secrets.token_hex(8)}"
        for number, file in enumerate(files):
            folder, _, name = file.path.rpartition("/")
            draft = shell.quote(f"{folder}/.{name}.{token}.{number}")
            lines.append(
                f"mkdir -p {shell.quote(folder or '/')}\n"
                f"trap 'rm -f '{shell.quote(draft)} EXIT\n"
                f"head -c {len(file.data)} >{draft}\n"
                f'[ "$(wc -c <{draft})" -eq {len(file.data)} ]\n'
                f"chmod {file.mode:04o} {draft}\n"
                f"mv -f {draft} {shell.quote(file.path)}\n"
            )
        stream, data = self._script(host, "".join(lines)), b"".join(file.data for file in files)
        done = _complete(stream, host, ["put"], 60.0, data)
        if done.exit_code:
            reason = done.stderr.strip().rpartition("\n")[2] or "it did not arrive whole"
            raise SubmitFailed(
                f"host {host}: cannot write below {os.path.dirname(files[0].path)}: {reason}",
                hint="make room there, or choose another `workdir` that this user may write to",
            )

    def free_port(self, host: str, wanted: int | None = None) -> int:
        python = self._hosts[host].python or self._python
        argv = [python, "-I", "-S", "-", json.dumps({"port": wanted})]
        program = Path(host_probe.__file__).read_bytes()
        done = self.run(host, argv, stdin=program, timeout=PYTHON_SECONDS)
        if done.exit_code or not done.stdout.strip().isdigit():
            raise SubmitFailed(f"host {host}: no free TCP port found: {done.error}")
        return int(done.stdout)


def _hops(target: Target, final: Host) -> list[tuple[str, Target]]:
    hops = (target.jump or "").split(",")
    return [(hop, resolve(jump_host(hop, final))) for hop in hops]


def _round_trip(connection: paramiko.Transport) -> float:
    """Return the shortest round trip that the kernel has measured, in seconds; or infinity."""
    if isinstance(connection.sock, socket.socket):  # not through a jump host
        with contextlib.suppress(OSError, AttributeError, struct.error):
            info = connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            microseconds: int = struct.unpack_from("I", info, _MIN_RTT)[0]
            return microseconds / 1e6
    return math.inf


def _execute(connection: paramiko.Transport, command: str, host: str) -> SshStream:
    channel = connection.open_session(timeout=OPEN_SECONDS)
    # paramiko waits without a timeout for the answer to exec_command, until the channel is closed.
    guard = threading.Timer(OPEN_SECONDS, channel.close)
    guard.start()
    try:
        channel.exec_command(command)
    except BaseException:
        channel.close()
        raise
    finally:
        guard.cancel()
    return SshStream(host, channel)


def _complete(
    stream: Stream,
    host: str,
    argv: Sequence[str],
    timeout: float | None,
    stdin: bytes = b"",
) -> Completed:
    """Write a command's input, and read its output to the end."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout

    def left() -> float | None:
        return None if timeout is None else max(0.0, deadline - time.monotonic())

    with stream:
        if stdin:
            stream.write(stdin)
        stream.close_input()
        parts = []
        try:
            while data := stream.read(left()):
                parts.append(data)
            code = stream.exit_code(left())
        except SubmitFailed as error:
            raise SubmitFailed(
                f"{argv[0]} on host {host} did not end within {timeout or 0:g} s",
                hint=error.hint,
            ) from None
        out = b"".join(parts).decode(errors="replace")
        return Completed(tuple(argv), code, out, stream.stderr)
