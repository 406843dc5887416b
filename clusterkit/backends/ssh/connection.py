"""Makes an authenticated connection to a host, with paramiko."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import re
import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from functools import cache
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm

from clusterkit import shell
from clusterkit.backends.ssh.config import HostUnreachable, LoginRefused, Target
from clusterkit.backends.ssh.known_hosts import certified, check_key, known_keys

KEEPALIVE_SECONDS = 5
SILENT_SECONDS = 20
"""A connection ends when data or keep-alives stay unacknowledged for so long (TCP_USER_TIMEOUT)."""
IDLE_SECONDS = 2.0
"""How often a connection's thread wakes without data: paramiko's own 0.1 s would take a processor
core for a thousand idle hosts."""
BANNER_TRIES = 4
"""A busy sshd drops connections before it greets (MaxStartups)."""
_DROPPED = ("Exceeded MaxStartups", "Not allowed at this time")
"""What OpenSSH's sshd says in place of a greeting when it drops a connection."""
AGENT_SECONDS = 60.0
"""For the agent's answer: it may ask its user, or wait for a security key to be touched."""
WINDOW_BYTES = 1 << 24
# Authenticated ciphers first: they are the fastest, as they need no separate HMAC.
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes256-ctr")
_Keys = Generator[tuple[paramiko.PKey, str], None, None]
"""Keys, each with a name for messages."""
# Our errors report what goes wrong; paramiko's threads would also print it through this logger.
_LOG = "clusterkit.paramiko"
logging.getLogger(_LOG).addHandler(logging.NullHandler())
logging.getLogger(_LOG).propagate = False


def connect(
    target: Target, timeout: float, through: paramiko.Transport | None = None
) -> paramiko.Transport:
    """Return an authenticated connection to a host.

    Args:
        timeout: seconds for the host to answer.
        through: a connection to the jump host.

    Raises:
        HostUnreachable: the host does not answer, or refuses the login.
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
                raise _no_handshake(target, error, timeout) from None
            time.sleep(0.1 * 2**attempt)
    raise AssertionError


def _no_handshake(target: Target, error: Exception, timeout: float) -> HostUnreachable:
    said = ""
    if target.jump is None and target.proxy_command is None:
        # paramiko keeps what the server says only where it is a greeting.
        place, wait = (target.address, target.port), min(timeout, 3.0)
        with contextlib.suppress(OSError), socket.create_connection(place, wait) as plain:
            said = plain.recv(256).decode(errors="replace").partition("\n")[0].strip()[:100]
    term = re.sub(r"(?<=banner)(?=\S)", ": ", str(error)) or "connection closed by the host"
    proxy = f" through {target.proxy_command!r}" if target.proxy_command else ""
    reason = f"{target}: the SSH connection{proxy} failed: {term}"
    look = f"`ssh -v -p {target.port} {target.login} true` shows where it ends"
    if said and not said.startswith(("SSH-", *_DROPPED)):
        reason += f": what answers at port {target.port} is not an SSH server, it sent {said!r}"
        look = "name the port of its sshd: `ansible_port` in the inventory, Port in ~/.ssh/config"
    elif isinstance(error, (EOFError, ConnectionResetError)) or "banner" in str(error):
        reason += f": it dropped {BANNER_TRIES} connections in a row" + (
            f" ({said})" if said.startswith(_DROPPED) else ""
        )
        look = (
            "sshd does so while many log in (MaxStartups in its sshd_config, PerSourcePenalties), "
            f"firewalls too; `journalctl -u ssh` on the host, or {look}"
        )
    return HostUnreachable(reason, hint=look)


def _connect(
    target: Target, timeout: float, through: paramiko.Transport | None
) -> paramiko.Transport:
    # As in OpenSSH, a key that is known for the address alone is valid for any port.
    known = known_keys(target, target.key_name) or known_keys(target, target.address)
    kinds = {key.kind for key in known if not key.marker}
    transport = paramiko.Transport(_socket(target, timeout, through), WINDOW_BYTES)
    transport.set_log_channel(_LOG)
    try:
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = timeout
        options = transport.get_security_options()
        options.ciphers = [name for name in CIPHERS if name in options.ciphers]
        plain = {kind: "ssh-rsa" if "rsa-sha2" in kind else kind for kind in options.key_types}
        options.key_types = sorted(plain, key=lambda kind: plain[kind] not in kinds)
        if any(key.authority for key in known):
            options.key_types = [*certified(options.key_types), *options.key_types]
        transport.start_client(timeout=timeout)
        check_key(target, transport.get_remote_server_key(), known)
        _authenticate(target, transport)
        transport.set_keepalive(KEEPALIVE_SECONDS)
        transport.sock.settimeout(IDLE_SECONDS)
    except BaseException:
        transport.close()
        raise
    return transport


def close_now(transport: paramiko.Transport) -> None:
    """Close a connection so that the host notices at once."""
    if isinstance(transport.sock, socket.socket):
        with contextlib.suppress(OSError):  # wakes the reading thread, which holds the socket open
            transport.sock.shutdown(socket.SHUT_RDWR)
    transport.close()
    transport.sock.close()  # waits until a ProxyCommand has ended


def _socket(
    target: Target, timeout: float, through: paramiko.Transport | None
) -> socket.socket | paramiko.Channel:
    address = (target.address, target.port)
    if through is not None:
        try:
            return through.open_channel("direct-tcpip", address, ("127.0.0.1", 0), timeout=timeout)
        except (paramiko.SSHException, EOFError) as error:
            raise HostUnreachable(
                f"{target}: jump host {target.jump} cannot reach it: {error}"
            ) from None
    if target.proxy_command is not None:
        return _Proxy(target.proxy_command)
    try:
        connected = socket.create_connection(address, timeout)
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
    except ConnectionResetError:
        raise  # tried again
    except OSError as error:
        raise HostUnreachable(f"{target}: {(error.strerror or str(error)).lower()}") from None
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)
    return connected


class _Proxy(socket.socket):
    """A socket to a ProxyCommand.

    paramiko's own does not notice that the command ends, and does not end it.
    """

    def __init__(self, command: str) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(fileno=ours.detach())
        with theirs:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"], stdin=theirs.fileno(), stdout=theirs.fileno()
            )

    def close(self) -> None:
        super().close()
        self._process.kill()
        self._process.wait()


def _authenticate(target: Target, transport: paramiko.Transport) -> None:
    tried: list[str] = []
    problems: list[str] = []
    with contextlib.closing(_keys(target, problems)) as keys:
        for key, name in keys:
            tried.append(name)
            with contextlib.suppress(paramiko.AuthenticationException):
                transport.auth_publickey(target.user, key)
                if transport.is_authenticated():
                    return
    detail = "; ".join([*problems, f"tried {', '.join(tried)}" if tried else "no key to try"])
    raise _refused(target, detail)


def _keys(target: Target, problems: list[str]) -> _Keys:
    """Yield the keys named for the host, then those of the SSH agent, then the default files.

    Args:
        problems: collects why the key of a file cannot be used.
    """

    def of_files(paths: Sequence[str], needed: bool) -> _Keys:
        for path in map(Path, paths):
            if _is_public(path) and target.agent:
                continue  # the file says which of the agent's keys is meant
            if (key := _private_key(path, target, problems, needed=needed)) is not None:
                yield from _with_certificates(key, str(path), target)

    yield from of_files(target.identities, target.host.identity is not None)
    if target.agent:
        with contextlib.suppress(paramiko.SSHException, OSError), _Agent(target.agent) as agent:
            for key in agent.chosen(target):
                name = f"the agent's {key.get_name()} {key.fingerprint}"
                yield from _with_certificates(key, name, target)
    existing = [path for path in target.default_identities if os.path.exists(path)]
    yield from of_files(existing, needed=False)


def _with_certificates(key: paramiko.PKey, name: str, target: Target) -> _Keys:
    """Yield a key with each CertificateFile that certifies it, then the key itself."""
    for path in target.certificates:
        with contextlib.suppress(OSError, ValueError, paramiko.SSHException):
            both: paramiko.PKey = object.__new__(type(key))
            vars(both).update(vars(key))  # copy.copy fails for a key of an agent
            both.load_certificate(path)
            assert both.public_blob is not None
            message = paramiko.Message(both.public_blob.key_blob)
            message.get_text(), message.get_binary()  # its type, and a nonce
            # Behind them is what is behind the type of the key.
            if message.get_remainder().startswith(key.asbytes()[4 + len(key.get_name()) :]):
                yield both, f"{name} with {path}"
    yield key, name


class _Agent(paramiko.agent.AgentSSH):
    """The SSH agent at a socket; paramiko's own only knows the one of SSH_AUTH_SOCK."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(AGENT_SECONDS)
        self._path = path

    def __enter__(self) -> _Agent:
        self._socket.connect(self._path)
        self._connect(self._socket)  # type: ignore[attr-defined]  # as paramiko's Agent does
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def chosen(self, target: Target) -> list[paramiko.PKey]:
        """Return its keys; with IdentitiesOnly, only those of the files."""
        files = map(Path, (*target.identities, *target.default_identities))
        public = {text for path in files if (text := _public_text(path))}
        keys = self.get_keys()
        return [key for key in keys if not target.identities_only or key.get_base64() in public]


def _refused(target: Target, detail: object) -> LoginRefused:
    key = f"-i {shell.quote(target.identities[0])} " if target.identities else ""
    shared = (
        f" (the connection that ssh holds open at {target.control_path} is not used: clusterkit "
        "makes its own, for which a key must do)"
    )
    return LoginRefused(
        f"{target} refuses user {target.user}: Permission denied: {detail}"
        + (shared if target.control_path else ""),
        hint=f"ssh-copy-id {key}-p {target.port} {target.login}, "
        "or name the right `ansible_user` and `ansible_ssh_private_key_file`",
    )


def _is_public(path: Path) -> bool:
    return path.suffix == ".pub" and path.exists()


def _public_text(path: Path) -> str | None:
    """Return the public half of a key in base64, if a file has it in clear."""
    with contextlib.suppress(OSError, IndexError, UnicodeDecodeError):
        public = path if _is_public(path) else path.with_name(f"{path.name}.pub")
        return public.read_text().split()[1]
    with contextlib.suppress(OSError, ValueError):
        # Also a private key with a passphrase has it (PROTOCOL.key of OpenSSH).
        body = base64.b64decode("".join(path.read_text().splitlines()[1:-1]))
        magic, _, rest = body.partition(b"\0")
        message = paramiko.Message(rest)
        message.get_string(), message.get_string(), message.get_string(), message.get_int()
        if magic == b"openssh-key-v1":
            return base64.b64encode(message.get_string()).decode()
    return None


def _private_key(
    path: Path, target: Target, problems: list[str], *, needed: bool
) -> paramiko.PKey | None:
    """Return the key of a file; None: no such file, or ``problems`` has why it cannot be used.

    Raises:
        HostUnreachable: ``needed``, and the key cannot be used.
    """
    try:
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            problem = f"key {path} can be read by others (mode {mode:04o})"
            remedy = f"chmod 600 {shell.quote(str(path))}"
        else:
            return _load_key(str(path), path.stat().st_mtime)
    except (paramiko.PasswordRequiredException, TypeError):  # TypeError: cryptography's
        problem = f"key {path} is protected by a passphrase"
        remedy = f"ssh-add {shell.quote(str(path))} adds it to your SSH agent"
        needed = needed and not target.agent  # the agent may hold it
    except FileNotFoundError:
        if not needed:
            return None
        problem, remedy = f"key {path} does not exist", "ssh-keygen -t ed25519 makes one"
    except OSError as error:
        problem = f"key {path}: {(error.strerror or 'unreadable').lower()}"
        remedy = "it must belong to you"
    except UnsupportedAlgorithm as error:  # a security key's: sk-ssh-ed25519 or sk-ecdsa
        problem = f"key {path} can only be used through an SSH agent ({error})"
        remedy = f"ssh-add {shell.quote(str(path))} adds it to your SSH agent"
        needed = needed and not target.agent
    except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, ValueError):
        problem = f"{path} is not a private key"
        remedy = "give the private key, not the .pub file"
    if needed:
        raise HostUnreachable(f"{target}: {problem}", hint=remedy)
    problems.append(f"{problem} ({remedy})")
    return None


@cache
def _load_key(path: str, changed: float) -> paramiko.PKey:
    return paramiko.PKey.from_path(path)
