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
    """Return whether no process listens at a port of this host."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


class Line:
    """A connection that carries lines of JSON; the data of its socket in a selector.

    What the socket does not accept at once is buffered, and sent by `receive` later. The connection
    is closed when the other side is gone, does not read, or sends too long a line.
    """

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self.node: int | None = None  # at the other end; None: not known yet
        self.trusted = False  # whether the other end has sent the run's token
        self.opened_at = time.monotonic()
        self.closed = False
        self._socket = connection
        self._selector = selector
        self._received = self._unsent = b""
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, self)

    def receive(self, events: int) -> list[bytes]:
        """Send and receive what the selector's ``events`` allow; return the received lines."""
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
        self._send(json.dumps(message).encode() + b"\n")

    def introduce(self, token: bytes, message: Document) -> None:
        """Send what a `Listener` requires first; ``message`` identifies the run and the node."""
        self._send(token + b"\n")
        self.write(message)

    def flush(self, seconds: float) -> None:
        """Send what is buffered, in at most ``seconds``."""
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
    """Node 0's port, which any host can reach: accepts only nodes of the run.

    A node first sends the run's token on a line of its own; before that nothing is parsed. Its
    first message then names the run, the attempt and the node. A connection that sends anything
    else, or nothing for HELLO_SECONDS, is closed and has no other effect.

    Args:
        run: fields that a node's first message must have.
        nodes: how many nodes there are.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, run: dict[str, str], token: bytes, nodes: int) -> None:
        allow_open_files(nodes)
        host = "" if nodes > 1 else "127.0.0.1"  # only node 0 itself connects
        self._server = socket.create_server((host, port), backlog=1024)
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
        ready = self.selector.select(seconds)
        for key, events in ready:
            if key.fileobj is self._server:
                with contextlib.suppress(OSError):
                    self._unidentified.append(Line(self._server.accept()[0], self.selector))
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

    def _read(self, line: Line, events: int, on_message: Callable[[Line, Document], None]) -> None:
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
