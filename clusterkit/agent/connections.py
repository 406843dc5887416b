"""Connections between the nodes of a run."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import socket
import time
from collections.abc import Callable

from clusterkit.agent import clock, limits
from clusterkit.agent.files import allow_open_files
from clusterkit.agent.protocol import Document

_NONCE_BYTES = 16
_LOOPBACK = ("127.0.0.1", "::1")


def is_free(port: int) -> bool:
    """Return whether no process listens at a port of this host."""
    try:
        _listen("", port).close()
    except OSError:
        return False
    return True


def _listen(host: str, port: int, backlog: int = 1) -> socket.socket:
    """Listen at an address; an empty ``host`` means all addresses, of IPv4 and of IPv6.

    Raises:
        OSError: the port is taken.
    """
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def _mac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")


class Line:
    """A connection that carries lines of JSON; the data of its socket in a selector.

    Both ends first send a random number (a nonce) of one line. Every later line begins with an
    HMAC-SHA256 (RFC 2104) of itself, its direction and its place in the sequence, under a key made
    of the run's token and both nonces. So neither end obeys, or is obeyed by, a program that does
    not know the token, which itself never leaves this host: another user may have bound the port
    first, or pass the lines on. Lines are not encrypted.

    What the socket does not accept at once, or before the other end's nonce, is buffered, and sent
    by `receive` later. The connection is closed when the other side is gone, does not read, or
    sends a line that is too long or not authentic.

    Args:
        token: the run's own.
        accepted: whether this end has accepted the connection.
    """

    def __init__(
        self,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        token: bytes,
        *,
        accepted: bool,
    ) -> None:
        self.node: int | None = None  # at the other end; None: not known yet
        self.opened_at = time.monotonic()
        self.closed = False
        self._socket = connection
        self._selector = selector
        self._token, self._accepted = token, accepted
        self._nonce = os.urandom(_NONCE_BYTES).hex().encode()
        self._key: bytes | None = None  # None: the other end's nonce has not come yet
        self._sent = self._taken = 0  # lines that have been authenticated in each direction
        self._early: list[bytes] = []  # what is to be sent once there is a key
        self._received = self._unsent = b""
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, self)
        self._send(self._nonce + b"\n")

    def receive(self, events: int) -> list[bytes]:
        """Send and receive what the selector's ``events`` allow; return the authentic lines."""
        if events & selectors.EVENT_WRITE:
            self._send(b"")
        if self.closed or not events & selectors.EVENT_READ:
            return []
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._received = (self._received + data).split(b"\n")
        longest = limits.LINE_BYTES if self._key or lines else 2 * _NONCE_BYTES
        if not data or max(map(len, (*lines, self._received))) > longest:
            self.close()
            return []
        if lines and self._key is None:
            self._agree(lines.pop(0))
        found = [self._authentic(line) for line in lines if not self.closed]
        return [] if self.closed else [line for line in found if line is not None]

    def _agree(self, nonce: bytes) -> None:
        """Make the key with the other end's nonce, and send what has waited for it."""
        if len(nonce) != 2 * _NONCE_BYTES or nonce == self._nonce:
            return self.close()
        nonces = (self._nonce, nonce) if self._accepted else (nonce, self._nonce)
        self._key = _mac(self._token, b" ".join(nonces))
        early, self._early = self._early, []
        for line in early:
            self._send(self._signed(line))
        return None

    def _signed(self, line: bytes) -> bytes:
        assert self._key is not None
        self._sent += 1
        return self._proof(self._sent, line, self._accepted) + b" " + line + b"\n"

    def _authentic(self, line: bytes) -> bytes | None:
        proof, _, text = line.partition(b" ")
        self._taken += 1
        if not hmac.compare_digest(proof, self._proof(self._taken, text, not self._accepted)):
            self.close()
            return None
        return text

    def _proof(self, number: int, line: bytes, accepted: bool) -> bytes:
        """Return the HMAC of a line; ``accepted``: of the end that sends it."""
        assert self._key is not None
        return _mac(self._key, b"%d %d " % (accepted, number) + line).hex().encode()

    def messages(self, events: int) -> list[Document]:
        """Return the messages that `receive` returns; an invalid one closes the connection."""
        try:
            found = [json.loads(line) for line in self.receive(events)]
            if all(isinstance(message, dict) for message in found):
                return found
        except (ValueError, RecursionError):
            pass
        self.close()
        return []

    def write(self, message: Document) -> None:
        line = json.dumps(message).encode()
        if self._key is not None:
            self._send(self._signed(line))
        elif sum(map(len, self._early)) + len(line) > limits.UNSENT_BYTES:
            self.close()
        else:
            self._early.append(line)

    def flush(self, seconds: float) -> None:
        """Send what is buffered, in at most about ``seconds``."""
        if not self.closed:
            self._socket.settimeout(max(0.001, seconds))
        if self._early:
            self.receive(selectors.EVENT_READ)  # the other end's nonce
        if self._unsent and not self.closed:
            with contextlib.suppress(OSError):
                self._socket.sendall(self._unsent)
            self._unsent = b""

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self.closed:
            self.closed = True
            self._selector.unregister(self._socket)
            self._socket.close()

    def _send(self, data: bytes) -> None:
        if self.closed:
            return
        self._unsent += data
        try:
            if self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            return self.close()
        if len(self._unsent) > limits.UNSENT_BYTES:
            return self.close()
        wanted = selectors.EVENT_WRITE if self._unsent else 0
        self._selector.modify(self._socket, selectors.EVENT_READ | wanted, self)
        return None


class Listener:
    """Node 0's port, which any host can reach: accepts only nodes of the run.

    A node's first message, which `Line` has authenticated, names the run, the attempt and the node.
    A connection that sends anything else, or nothing for HELLO_SECONDS, is closed and has no other
    effect.

    Args:
        address: by which the nodes reach it. A loopback address is the only one that it listens
            at, so that no other machine reaches a run of this one.
        run: fields that a node's first message must have.
        token: the run's own.
        nodes: how many nodes there are.

    Raises:
        OSError: the port is taken.
    """

    def __init__(
        self, address: tuple[str, int], run: dict[str, str], token: bytes, nodes: int
    ) -> None:
        allow_open_files(nodes)
        host, port = address
        self._server = _listen(host if host in _LOOPBACK else "", port, backlog=1024)
        self.port: int = self._server.getsockname()[1]
        self._server.setblocking(False)
        self._run = run
        self._token = token
        self._nodes = nodes
        self._unidentified: list[Line] = []
        """Connections whose node is not known yet, the oldest first."""
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._server, selectors.EVENT_READ)

    def receive(self, seconds: float, on_message: Callable[[Line, Document], None]) -> bool:
        """Wait for at most ``seconds`` and pass on the messages of nodes.

        Returns:
            Whether there was any event.
        """
        ready = clock.ready(self.selector, seconds)
        for key, events in ready:
            if key.fileobj is self._server:
                with contextlib.suppress(OSError):
                    self._unidentified.append(self._line(self._server.accept()[0]))
            elif not key.data.closed:
                try:
                    self._read(key.data, events, on_message)
                except Exception:  # an invalid message must not end the thread that serves all
                    key.data.close()
        latest = time.monotonic() - limits.HELLO_SECONDS
        for number, line in enumerate(reversed(self._unidentified)):
            if number >= limits.UNIDENTIFIED or line.opened_at < latest:
                line.close()
        self._unidentified = [line for line in self._unidentified if not line.closed]
        return bool(ready)

    def _line(self, connection: socket.socket) -> Line:
        return Line(connection, self.selector, self._token, accepted=True)

    def _read(self, line: Line, events: int, on_message: Callable[[Line, Document], None]) -> None:
        for text in line.receive(events):
            message = json.loads(text)
            if line.node is None:
                node = message["node"]
                ours = self._run.items() <= message.items()
                if not ours or type(node) is not int or node not in range(self._nodes):
                    return line.close()
                line.node = node
                self._unidentified.remove(line)
            on_message(line, message)
        return None

    def close(self) -> None:
        """Close the port and all connections, after sending what was written to them."""
        deadline = time.monotonic() + limits.PEER_SECONDS
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, Line):
                key.data.flush(deadline - time.monotonic())
                key.data.close()
        self.selector.close()
        self._server.close()
