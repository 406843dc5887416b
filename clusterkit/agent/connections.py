"""Connections between the nodes of a run."""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import time
from collections.abc import Callable

from clusterkit.agent import limits
from clusterkit.agent.files import allow_open_files
from clusterkit.agent.protocol import Document


def is_free(port: int) -> bool:
    """Whether nobody listens at a port of this host."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


class Line:
    """Lines of JSON over a socket that a selector watches, with this as its data.

    What the socket does not take at once is kept and sent when it does (`receive`). The connection
    is closed when the other side is gone, does not read, or sends too long a line.
    """

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self.node: int | None = None  # which node is at the other end, once it has said so
        self.trusted = False  # whether it has sent the run's token
        self.since = time.monotonic()
        self.closed = False
        self._socket = connection
        self._selector = selector
        self._received = self._unsent = b""
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, self)

    def receive(self, events: int) -> list[bytes]:
        """Send and receive what the selector's ``events`` allow; the lines that have come."""
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
        if not data or max(map(len, (*lines, self._received))) > limits.LINE_BYTES:
            self.close()
            return []
        return lines

    def messages(self, events: int) -> list[Document]:
        """`receive`, from a side that is trusted; what cannot be read closes the connection."""
        try:
            found = [json.loads(line) for line in self.receive(events)]
            if all(isinstance(message, dict) for message in found):
                return found
        except (ValueError, RecursionError):
            pass
        self.close()
        return []

    def write(self, message: Document) -> None:
        self._send(json.dumps(message).encode() + b"\n")

    def introduce(self, token: bytes, message: Document) -> None:
        """Send what a `Listener` wants first."""
        self._send(token + b"\n")
        self.write(message)

    def flush(self, seconds: float) -> None:
        """Send what is left to be sent, unless that takes longer."""
        if self._unsent and not self.closed:
            self._socket.settimeout(max(0.001, seconds))
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
    """Node 0's port, which anybody can reach: tells the run's nodes from everybody else.

    A node first sends the run's token on a line of its own; before that nothing is parsed. Then it
    says which run, attempt and node it is. A connection that does anything else, or nothing for
    HELLO_SECONDS, is closed and has no other effect.

    Args:
        run: what a node's first message must hold.
        nodes: how many there are.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, run: dict[str, str], token: bytes, nodes: int) -> None:
        allow_open_files(nodes)
        host = "" if nodes > 1 else "127.0.0.1"  # a node alone speaks to itself
        self._server = socket.create_server((host, port), backlog=1024)
        self.port: int = self._server.getsockname()[1]
        self._server.setblocking(False)
        self._run = run
        self._token = token
        self._nodes = nodes
        self._strangers: list[Line] = []
        """Connections that have not said who they are, the oldest first."""
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._server, selectors.EVENT_READ)

    def receive(self, seconds: float, hear: Callable[[Line, Document], None]) -> bool:
        """Wait for at most ``seconds``; hand over what nodes say, with ``node`` in the first.

        Returns:
            Whether anything has happened.
        """
        ready = self.selector.select(seconds)
        for key, events in ready:
            if key.fileobj is self._server:
                with contextlib.suppress(OSError):
                    self._strangers.append(Line(self._server.accept()[0], self.selector))
            elif not key.data.closed:
                try:
                    self._read(key.data, events, hear)
                except Exception:  # whatever it was that came, the other nodes are watched
                    key.data.close()
        latest = time.monotonic() - limits.HELLO_SECONDS
        for number, line in enumerate(reversed(self._strangers)):
            if number >= limits.STRANGERS or line.since < latest:
                line.close()
        self._strangers = [line for line in self._strangers if not line.closed]
        return bool(ready)

    def _read(self, line: Line, events: int, hear: Callable[[Line, Document], None]) -> None:
        for text in line.receive(events):
            if not line.trusted:
                if not hmac.compare_digest(text, self._token):
                    return line.close()
                line.trusted = True
                continue
            message = json.loads(text)
            if line.node is None:
                node = message["node"]
                ours = self._run.items() <= message.items()
                if not ours or type(node) is not int or node not in range(self._nodes):
                    return line.close()
                line.node = node
                self._strangers.remove(line)
            hear(line, message)
        return None

    def close(self) -> None:
        """Listen no more; what has been written is sent first."""
        deadline = time.monotonic() + limits.PEER_SECONDS
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, Line):
                key.data.flush(deadline - time.monotonic())
                key.data.close()
        self.selector.close()
        self._server.close()
