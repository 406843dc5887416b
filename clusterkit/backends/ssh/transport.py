"""Commands and files over SSH: one connection per host, made when first needed, kept for all.

Built on paramiko. What a command needs, its environment with secrets included, travels on its
standard input, so that it stands in no argument list and no login shell can misread it: what
the login shell sees is always ``exec /bin/sh -c 'eval "$(head -c N)"'``.
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import hashlib
import logging
import os
import re
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import paramiko

from clusterkit import shell
from clusterkit.backends.ssh.files import KnownHosts, KnownKey, config_text
from clusterkit.cluster import Host
from clusterkit.errors import BadInput, ClusterkitError, SubmitFailed, Unavailable
from clusterkit.transport import START, Completed, Put, Stream, free_port_program

Result = TypeVar("Result")
KEEPALIVE_SECONDS = 5
SILENT_SECONDS = 20
"""Unacknowledged data or keep-alives for so long end a connection (TCP_USER_TIMEOUT)."""
BANNER_TRIES = 4
"""A busy sshd drops connections before it greets (MaxStartups)."""
OPEN_SECONDS = 10.0
"""To open a channel or start a command on a connection that stands."""
WINDOW_BYTES = 1 << 24
# Authenticated ciphers first: they are the fast ones, and need no HMAC of their own.
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes256-ctr")
_BEGIN = b"@clusterkit-begin\n"
_NO_SUCH_FILE = 44
# Our connections log here: what goes wrong is said by our own errors, not by paramiko's threads.
_LOG = "clusterkit.paramiko"
logging.getLogger(_LOG).addHandler(logging.NullHandler())
logging.getLogger(_LOG).propagate = False


class HostUnreachable(Unavailable):
    """A host does not answer, or lets nobody in; the message names it."""


class HostKeyProblem(HostUnreachable):
    """A host's key is not known, or another than before."""


@dataclass(frozen=True)
class Target:
    """Where and as whom to connect: a `Host` with the SSH configuration applied."""

    host: Host
    address: str
    port: int
    user: str
    identities: tuple[str, ...]
    identities_only: bool
    known_hosts: tuple[str, ...]
    key_name: str
    """Under which name the host's key is known."""
    jump: str | None = None
    proxy_command: str | None = None

    @property
    def login(self) -> str:
        """User and address as a word of a shell command, for hints that people copy."""
        return shell.quote(f"{self.user}@{self.address}")

    def __str__(self) -> str:
        at = "" if self.address == self.host.name and self.port == 22 else self._at()
        return f"host {self.host.name}{at}"

    def _at(self) -> str:
        return f" ({self.address}{'' if self.port == 22 else f' port {self.port}'})"


def resolve(host: Host) -> Target:
    """Apply ``~/.ssh/config`` (or the host's own file) to what the inventory says of a host."""
    asked = host.address or host.name
    found = _looked_up(host, asked)
    address = found.get("hostname", asked)
    port = host.port or _port(host, found.get("port", "22"))
    identities = [host.identity] if host.identity else list(found.get("identityfile", ()))
    known = [host.known_hosts] if host.known_hosts else _paths(
        found.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2")
    )  # fmt: skip
    shared = _paths(found.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts"))
    proxy = found.get("proxycommand")
    jump = host.jump or found.get("proxyjump")
    alias = found.get("hostkeyalias")
    return Target(
        host=host,
        address=address,
        port=port,
        user=host.user or found.get("user") or getpass.getuser(),
        identities=tuple(os.path.expanduser(path) for path in identities),
        identities_only=bool(host.identity) or found.get("identitiesonly", "no") == "yes",
        known_hosts=tuple(os.path.expanduser(path) for path in [*known, *shared]),
        key_name=alias or (address if port == 22 else f"[{address}]:{port}"),
        jump=None if jump == "none" else jump,
        proxy_command=None if host.jump or proxy == "none" else proxy,
    )


def _paths(text: str) -> list[str]:
    """Several files in one value; a path with spaces is quoted there."""
    with contextlib.suppress(BadInput):
        return shell.split(text)
    return text.split()


def _port(host: Host, text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16:
        return int(text)
    raise Unavailable(
        f"host {host.name}: {text!r} is not a port", hint=f"Port in {host.ssh_config or _CONFIG}"
    )


_CONFIG = "~/.ssh/config"


def _looked_up(host: Host, asked: str) -> Mapping[str, Any]:
    path = host.ssh_config or _CONFIG
    try:
        text = _config_text(os.path.expanduser(path))
        found = _config(text).lookup(asked)
        if "proxycommand" in found and (host.port or host.user):
            # Its %p and %r are what the inventory says.
            first = f"Port {host.port}\n" if host.port else ""
            first += f"User {host.user}\n" if host.user else ""
            found = _config(f"{first}Host *\n{text}").lookup(asked)
        return found
    except FileNotFoundError:
        if host.ssh_config is None:
            return {}
        raise Unavailable(f"{path}: no such file", hint="the hosts' ssh_config names it") from None
    except (OSError, ValueError, KeyError, paramiko.SSHException) as error:
        raise Unavailable(f"{path}: cannot be read as an SSH configuration: {error}") from None


@cache
def _config_text(path: str) -> str:
    return config_text(Path(path))


class _Config(paramiko.SSHConfig):
    """Runs the command of a ``Match exec`` itself: paramiko's way would read our standard input."""

    # This and _tokenize are methods of paramiko 5.1 that it neither documents nor types.
    def _does_match(
        self, criteria: Any, target: str, canonical: Any, final: Any, options: Any
    ) -> Any:
        commands = [one for one in criteria if one["type"] == "exec"]
        others = [one for one in criteria if one["type"] != "exec"]
        if others or not commands:
            matched = super()._does_match(others, target, canonical, final, options)  # type: ignore[misc]
            if not matched or not commands:
                return matched
        return all(
            _succeeds(self._tokenize(options, target, "match-exec", one["param"])) != one["negate"]  # type: ignore[attr-defined]
            for one in commands
        )


def _succeeds(command: str) -> bool:
    nothing = subprocess.DEVNULL
    words = ["/bin/sh", "-c", command]
    return subprocess.run(words, stdin=nothing, stdout=nothing).returncode == 0


@cache
def _config(text: str) -> paramiko.SSHConfig:
    return _Config.from_text(text)


@cache
def _known(path: str, changed: float) -> KnownHosts:
    try:
        return KnownHosts(Path(path).read_text(errors="replace"))
    except OSError:
        return KnownHosts("")


def known_keys(target: Target, name: str | None = None) -> list[KnownKey]:
    """The keys under which a host is known."""
    found = []
    for path in target.known_hosts:
        with contextlib.suppress(OSError):
            found += _known(path, os.stat(path).st_mtime).keys(name or target.key_name)
    return found


# ---------------------------------------------------------------- one connection


def connect(target: Target, timeout: float, through: paramiko.Transport | None = None) -> (
    paramiko.Transport
):  # fmt: skip
    """A connection that is authenticated.

    Args:
        timeout: seconds until the host must have answered.
        through: a connection to the jump host.

    Raises:
        HostUnreachable: it does not answer or does not let us in.
        HostKeyProblem: its key is not known, or has changed.
    """
    for attempt in range(BANNER_TRIES):
        began = time.monotonic()
        try:
            return _connect(target, timeout, through)
        except (EOFError, ConnectionResetError, paramiko.SSHException) as error:
            if isinstance(error, paramiko.AuthenticationException):
                raise _refused(target, error) from None
            if time.monotonic() - began > 0.9 * timeout:
                raise HostUnreachable(
                    f"{target} takes connections, but no sshd answers within {timeout:g} s",
                    hint="the machine hangs or is overloaded, or another service has that port",
                ) from None
            busy = isinstance(error, (EOFError, ConnectionResetError)) or "banner" in str(error)
            if attempt + 1 == BANNER_TRIES or not busy:
                way = f" through {target.proxy_command!r}" if target.proxy_command else ""
                raise HostUnreachable(
                    f"{target}: the SSH connection{way} failed: "
                    f"{str(error) or 'closed by the host'}"
                ) from None
            time.sleep(0.1 * 2**attempt)
    raise AssertionError


def _connect(
    target: Target, timeout: float, through: paramiko.Transport | None
) -> paramiko.Transport:
    # A key kept for the address alone counts for any port, as it does for OpenSSH.
    known = known_keys(target) or known_keys(target, target.address)
    kinds = {key.kind for key in known if not key.revoked}
    transport = paramiko.Transport(_socket(target, timeout, through), WINDOW_BYTES)
    transport.set_log_channel(_LOG)
    try:
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = timeout
        options = transport.get_security_options()
        options.ciphers = [name for name in CIPHERS if name in options.ciphers]
        options.key_types = sorted(
            options.key_types, key=lambda kind: _plain_type(kind) not in kinds
        )
        transport.start_client(timeout=timeout)
        _check_key(target, transport.get_remote_server_key(), known)
        _authenticate(target, transport)
        transport.set_keepalive(KEEPALIVE_SECONDS)
    except BaseException:
        transport.close()
        raise
    return transport


def _plain_type(kind: str) -> str:
    return "ssh-rsa" if kind.startswith("rsa-sha2") else kind


def _socket(
    target: Target, timeout: float, through: paramiko.Transport | None
) -> socket.socket | paramiko.Channel:
    where = (target.address, target.port)
    if through is not None:
        try:
            return through.open_channel("direct-tcpip", where, ("127.0.0.1", 0), timeout=timeout)
        except (paramiko.SSHException, EOFError) as error:
            raise HostUnreachable(
                f"{target}: jump host {target.jump} cannot reach it: {error}"
            ) from None
    if target.proxy_command is not None:
        return _Proxy(target.proxy_command)
    try:
        found = socket.create_connection(where, timeout)
    except (socket.gaierror, UnicodeError):
        raise HostUnreachable(
            f"{target}: the name {target.address} cannot be resolved",
            hint="give it `ansible_host: ADDRESS` in the inventory",
        ) from None
    except TimeoutError:
        raise HostUnreachable(
            f"{target} does not answer within {timeout:g} s",
            hint=f"is it up? ssh -p {target.port} {target.login} true",
        ) from None
    except ConnectionRefusedError:
        raise HostUnreachable(
            f"{target} refuses connections on port {target.port}", hint="is sshd running there?"
        ) from None
    except OSError as error:
        raise HostUnreachable(f"{target}: {(error.strerror or str(error)).lower()}") from None
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)
    return found


class _Proxy(socket.socket):
    """The way through a ProxyCommand. paramiko's own does not notice when the command ends, and
    leaves it behind."""

    def __init__(self, command: str) -> None:
        ours, its = socket.socketpair()
        super().__init__(fileno=ours.detach())
        with its:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"], stdin=its.fileno(), stdout=its.fileno()
            )

    def close(self) -> None:
        super().close()
        self._process.kill()
        self._process.wait()


def _check_key(target: Target, key: paramiko.PKey, known: Sequence[KnownKey]) -> None:
    file = target.known_hosts[0]
    port = "" if target.port == 22 else f"-p {target.port} "
    kind = key.get_name()
    offered = f"{kind} {key.fingerprint}"
    same = [kept for kept in known if (kept.kind, kept.text) == (kind, key.get_base64())]
    if any(kept.revoked for kept in same):
        raise HostKeyProblem(
            f"{target}: its host key has been revoked: {offered}",
            hint="do not trust a host that has this key; the host needs a new one",
        )
    if same:
        return
    add = f"ssh-keyscan {port}{shell.quote(target.address)} >>{shell.quote(file)}"
    its_own = [kept for kept in known_keys(target) if not kept.revoked]
    if kept_ones := [kept for kept in its_own if kept.kind == kind]:
        fingerprints = ", ".join(_fingerprint(kept) for kept in kept_ones)
        raise HostKeyProblem(
            f"{target}: its host key has changed: known is {kind} {fingerprints}, "
            f"now it offers {offered}",
            hint="another machine answers there, or it was installed anew: only in the second "
            f"case, ssh-keygen -R {shell.quote(target.key_name)} -f {shell.quote(file)} && {add}",
        )
    if its_own:
        kinds = ", ".join(dict.fromkeys(kept.kind for kept in its_own))
        raise HostKeyProblem(
            f"{target}: its host key is not the known one: known_hosts has one of type {kinds}, "
            f"it offers {offered}",
            hint=f"compare the fingerprint on the host, then {add}",
        )
    missing = "" if os.path.exists(file) else f", there is no file {file}"
    raise HostKeyProblem(
        f"{target}: its host key is not known{missing}: it offers {offered}",
        hint=f"compare the fingerprint on the host (ssh-keygen -lf /etc/ssh/ssh_host_*.pub), "
        f"then {add}",
    )


def _fingerprint(key: KnownKey) -> str:
    try:
        digest = hashlib.sha256(base64.b64decode(key.text)).digest()
    except ValueError:
        return "(unreadable)"
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def _authenticate(target: Target, transport: paramiko.Transport) -> None:
    """Keys named for the host first, then those of the SSH agent, then the usual files."""
    tried: list[str] = []
    problems: list[str] = []

    def attempt(key: paramiko.PKey, name: str) -> bool:
        tried.append(name)
        try:
            transport.auth_publickey(target.user, key)
        except paramiko.AuthenticationException:
            return False
        return transport.is_authenticated()

    named = [Path(path) for path in target.identities]
    for path in named:
        key = _private_key(path, target, problems, needed=target.host.identity is not None)
        if key is not None and attempt(key, str(path)):
            return
    with contextlib.closing(_agent_keys(target, named)) as keys:
        for key in keys:
            if attempt(key, f"the agent's {key.get_name()} {key.fingerprint}"):
                return
    if not target.identities_only:
        for name in ("id_ed25519", "id_ecdsa", "id_rsa"):
            path = Path("~/.ssh").expanduser() / name
            if path not in named and path.exists():
                key = _private_key(path, target, problems, needed=False)
                if key is not None and attempt(key, str(path)):
                    return
    detail = "; ".join([*problems, f"tried {', '.join(tried)}" if tried else "no key to try"])
    raise _refused(target, detail)


def _refused(target: Target, detail: object) -> HostUnreachable:
    key = f"-i {shell.quote(target.identities[0])} " if target.identities else ""
    return HostUnreachable(
        f"{target} does not let user {target.user} in: {detail}",
        hint=f"ssh-copy-id {key}-p {target.port} {target.login}, "
        "or name the right `ansible_user` and `ansible_ssh_private_key_file`",
    )


def _agent_keys(target: Target, named: Sequence[Path]) -> Generator[paramiko.PKey, None, None]:
    if not os.environ.get("SSH_AUTH_SOCK"):
        return
    try:
        agent = paramiko.Agent()
    except (paramiko.SSHException, OSError):
        return
    # IdentitiesOnly: of the agent's keys those that belong to the files named.
    public = {text for path in named if (text := _public_text(path))}
    try:
        for key in agent.get_keys():
            if not target.identities_only or key.get_base64() in public:
                yield key
    finally:
        agent.close()


def _public_text(path: Path) -> str | None:
    try:
        return path.with_name(f"{path.name}.pub").read_text().split()[1]
    except (OSError, IndexError, UnicodeDecodeError):
        return None


def _private_key(
    path: Path, target: Target, problems: list[str], *, needed: bool
) -> paramiko.PKey | None:
    """A key from its file; what is wrong with it goes to ``problems``, or is raised.

    Raises:
        HostUnreachable: ``needed``, and it cannot be used.
    """
    try:
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            problem = f"key {path} can be read by others (mode {mode:04o})"
            remedy = f"chmod 600 {shell.quote(str(path))}"
        else:
            return _load_key(str(path), path.stat().st_mtime)
    except (paramiko.PasswordRequiredException, TypeError):  # TypeError: cryptography's word for it
        problem = f"key {path} is protected by a passphrase"
        remedy = f"ssh-add {shell.quote(str(path))} hands it to your SSH agent"
        if os.environ.get("SSH_AUTH_SOCK"):
            needed = False  # the agent may hold it
    except FileNotFoundError:
        problem, remedy = f"key {path} does not exist", "ssh-keygen -t ed25519 makes one"
    except OSError as error:
        problem = f"key {path}: {(error.strerror or 'unreadable').lower()}"
        remedy = "it must belong to you"
    except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, ValueError):
        problem = f"{path} is not a private key"
        remedy = "name the private half, not the .pub file"
    if needed:
        raise HostUnreachable(f"{target}: {problem}", hint=remedy)
    if not problem.endswith("does not exist"):
        problems.append(f"{problem} ({remedy})")
    return None


@cache
def _load_key(path: str, changed: float) -> paramiko.PKey:
    return paramiko.PKey.from_path(path)


# ---------------------------------------------------------------- streams


class SshStream:
    """A command that runs on a host; see `clusterkit.transport.Stream`."""

    def __init__(self, host: str, channel: paramiko.Channel) -> None:
        self._host = host
        self._channel = channel
        self._stderr = b""
        self._begun = b""
        self._started = False

    def write(self, data: bytes) -> None:
        try:
            self._channel.sendall(data)
        except OSError:
            # It has closed its input; why, its exit code and stderr tell.
            return

    def close_input(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def read(self, timeout: float | None = None) -> bytes:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            data = self._receive(deadline)
            if self._started or not data:
                return data
            # A login shell may greet before our first word.
            self._begun += data
            _, found, rest = self._begun.partition(_BEGIN)
            if found:
                self._started = True
                self._begun = b""
                if rest:
                    return rest

    def _receive(self, deadline: float | None) -> bytes:
        channel = self._channel
        while True:
            if channel.recv_stderr_ready():
                self._stderr += channel.recv_stderr(1 << 16)
                continue
            if channel.recv_ready():
                return channel.recv(1 << 20)
            if channel.eof_received or channel.closed:
                if not channel.recv_ready():
                    return b""
                continue
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise SubmitFailed(f"host {self._host} no longer answers")
            poll = select.poll()
            poll.register(channel.fileno(), select.POLLIN)
            # Not for ever: an end that comes without data does not always wake the descriptor.
            poll.poll(1000 if left is None else min(1000, int(left * 1000) + 1))

    @property
    def stderr(self) -> str:
        with contextlib.suppress(OSError):
            while self._channel.recv_stderr_ready():
                self._stderr += self._channel.recv_stderr(1 << 16)
        return self._stderr.decode(errors="replace")

    def exit_code(self, timeout: float | None = 10.0) -> int:
        if not self._channel.status_event.wait(timeout):
            raise SubmitFailed(f"host {self._host} did not report how the command ended")
        status = self._channel.recv_exit_status()
        if status == -1 and not self._channel.eof_received:
            raise HostUnreachable(f"host {self._host}: the connection was lost")
        # What a signal has ended has no exit code: 255, as for OpenSSH's client.
        return 255 if status == -1 else status

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._channel.close()

    def __enter__(self) -> SshStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---------------------------------------------------------------- the transport


class SshTransport:
    """Reaches the hosts of one cluster by their names; safe to use from several threads.

    Args:
        hosts: whom it can reach.
        python: interpreter on hosts that name none of their own.
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
        self._lock = threading.Lock()

    # -- connections --------------------------------------------------------

    def connection(self, name: str) -> paramiko.Transport:
        """The host's connection, made now if there is none (any more).

        Raises:
            HostUnreachable: it cannot be made.
        """
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            there = self._connections.get(name)
            if there is not None and there.is_active():
                return there
            target = resolve(self._hosts[name])
            through = self._jump(target) if target.jump else None
            self._connections[name] = connect(target, self._timeout, through)
            return self._connections[name]

    def _jump(self, target: Target) -> paramiko.Transport:
        """A connection to the last of the jump hosts, each reached through the one before."""
        through: paramiko.Transport | None = None
        route = ""
        for hop in (target.jump or "").split(","):
            route += f">{hop}"
            with self._lock:
                lock = self._locks.setdefault(route, threading.Lock())
            with lock:
                there = self._connections.get(route)
                if there is None or not there.is_active():
                    there = connect(resolve(_jump_host(hop, target.host)), self._timeout, through)
                    self._connections[route] = there
            through = there
        assert through is not None
        return through

    def close(self) -> None:
        """End every connection."""
        with self._lock:
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def drop(self, name: str) -> None:
        """End one host's connection: it no longer answers."""
        there = self._connections.pop(name, None)
        if there is not None:
            there.close()

    # -- commands -----------------------------------------------------------

    def open(
        self, host: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> Stream:
        return self._script(host, f"{shell.exports(env or {})}exec {shell.join(argv)}\n")

    def _script(self, host: str, script: str) -> SshStream:
        """Run shell text on a host; what is written to the stream is its standard input."""
        text = f"printf '%s\\n' {_BEGIN.decode().strip()}\n{script}".encode()
        command = f"exec /bin/sh -c 'eval \"$(head -c {len(text)})\"'"
        stream = self._retried(host, lambda there: _execute(there, command, host))
        stream.write(text)
        return stream

    def _retried(self, name: str, work: Callable[[paramiko.Transport], Result]) -> Result:
        """With the connection that stands, or, where that turns out dead, with a new one."""
        for last in (False, True):
            connection = self.connection(name)
            try:
                return work(connection)
            except (paramiko.SSHException, EOFError, OSError) as error:
                if isinstance(error, paramiko.ChannelException) and connection.is_active():
                    raise HostUnreachable(
                        f"host {name} refuses another session: {error}",
                        hint="MaxSessions in its sshd_config",
                    ) from None
                self.drop(name)
                if last:
                    said = str(error) or type(error).__name__
                    raise HostUnreachable(f"host {name}: the connection was lost: {said}") from None
        raise AssertionError

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: bytes = b"",
    ) -> Completed:
        with self.open(host, argv, env=env) as stream:
            return _finish(host, argv, stream, timeout, stdin)

    def start(
        self, host: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> None:
        script = (
            f"{shell.exports(env or {})}set -- {shell.join(argv)}\n"
            "if command -v setsid >/dev/null; then detach=setsid; else detach=; fi\n"
            f"cd /\n{START}\n"
        )
        with self._script(host, script) as stream:
            done = _finish(host, argv, stream, OPEN_SECONDS, b"")
        if done.exit_code:
            raise SubmitFailed(f"cannot start {argv[0]} on host {host}: {done.stderr.strip()}")

    # -- files --------------------------------------------------------------

    def put(self, host: str, path: str, data: bytes, mode: int = 0o644) -> None:
        self.put_all(host, [Put(path, data, mode)])

    def put_all(self, host: str, files: Sequence[Put]) -> None:
        lines = ["set -e\numask 077\n"]  # the folders: a run is its owner's alone
        for number, file in enumerate(files):
            folder, _, name = file.path.rpartition("/")
            draft = shell.quote(f"{folder}/.{name}.{os.getpid()}.{number}")
            lines.append(
                f"mkdir -p {shell.quote(folder or '/')}\n"
                f"trap 'rm -f '{shell.quote(draft)} EXIT\n"
                f"head -c {len(file.data)} >{draft}\n"
                f'[ "$(wc -c <{draft})" -eq {len(file.data)} ]\n'
                f"chmod {file.mode:04o} {draft}\n"
                f"mv -f {draft} {shell.quote(file.path)}\n"
            )
        with self._script(host, "".join(lines)) as stream:
            done = _finish(host, ["put"], stream, 60.0, b"".join(file.data for file in files))
        if done.exit_code:
            said = done.stderr.strip().rpartition("\n")[2] or "it did not arrive whole"
            raise SubmitFailed(
                f"host {host}: cannot write below {os.path.dirname(files[0].path)}: {said}",
                hint="make room there, or choose another `workdir` that this user may write to",
            )

    def get(self, host: str, path: str, offset: int = 0, limit: int | None = None) -> bytes | None:
        quoted = shell.quote(path)
        cut = "" if limit is None else f" | head -c {limit}"
        script = f"[ -f {quoted} ] || exit {_NO_SUCH_FILE}\ntail -c +{offset + 1} {quoted}{cut}\n"
        with self._script(host, script) as stream:
            stream.close_input()
            data = b"".join(iter(lambda: stream.read(OPEN_SECONDS), b""))
            code = stream.exit_code()
        return None if code == _NO_SUCH_FILE else data

    def free_port(self, host: str, wanted: int | None = None) -> int:
        python = self._hosts[host].python or self._python
        argv = [python, "-I", "-c", free_port_program(wanted)]
        done = self.run(host, argv, timeout=OPEN_SECONDS)
        if done.exit_code or not done.stdout.strip().isdigit():
            said = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.exit_code}"
            raise SubmitFailed(f"host {host}: no free TCP port found: {said}")
        return int(done.stdout)


def _jump_host(hop: str, final: Host) -> Host:
    user, at, rest = hop.removeprefix("ssh://").rpartition("@")
    match = re.fullmatch(r"(?:\[(.+)\]|([^:]+))(?::([0-9]{1,5}))?", rest)
    name, port = (match[1] or match[2], match[3]) if match else (rest, None)
    return Host(
        name=name, user=user if at else None, port=int(port) if port else None,
        known_hosts=final.known_hosts, ssh_config=final.ssh_config, identity=final.identity,
    )  # fmt: skip


def _execute(connection: paramiko.Transport, command: str, host: str) -> SshStream:
    channel = connection.open_session(timeout=OPEN_SECONDS)
    # paramiko waits for ever for the answer to this one; closing the channel wakes it.
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


def _finish(
    host: str, argv: Sequence[str], stream: SshStream | Stream, timeout: float | None, stdin: bytes
) -> Completed:
    """Feed a command, read it to its end."""
    deadline = None if timeout is None else time.monotonic() + timeout

    def left() -> float | None:
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    if stdin:
        stream.write(stdin)
    stream.close_input()
    parts = []
    try:
        while data := stream.read(left()):
            parts.append(data)
        code = stream.exit_code(left())
    except SubmitFailed:
        raise SubmitFailed(
            f"{argv[0]} on host {host} did not end within {timeout or 0:g} s"
        ) from None
    return Completed(tuple(argv), code, b"".join(parts).decode(errors="replace"), stream.stderr)


__all__ = ["ClusterkitError", "HostKeyProblem", "HostUnreachable", "SshTransport", "resolve"]
