"""The streams of a command in a pod: channels of a WebSocket (v4.channel.k8s.io)."""

from __future__ import annotations

import contextlib
import json
import select
import threading
import time
from typing import TYPE_CHECKING

from clusterkit.errors import SubmitFailed, Unavailable
from clusterkit.transport import Stream

if TYPE_CHECKING:
    from websocket import WebSocket

_STDIN, _STDOUT, _STDERR, _STATUS = range(4)
_CHUNK = 1 << 15


class ExecStream(Stream):
    """A command in a pod; see `clusterkit.transport.Stream`."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._socket.settimeout(None)
        # OpenSSL's connections are not for two threads at once, of which one writes.
        self._lock = threading.Lock()
        self._errors = b""
        self._status: bytes | None = None
        self._ended = False

    def write(self, data: bytes) -> None:
        import websocket

        with contextlib.suppress(OSError, websocket.WebSocketException):  # `read` tells of it
            for start in range(0, len(data), _CHUNK):
                with self._lock:
                    self._socket.send_binary(bytes([_STDIN]) + data[start : start + _CHUNK])

    def close_input(self) -> None:
        """End the connection: this protocol cannot end an input alone."""
        with contextlib.suppress(Exception), self._lock:
            self._socket.send_close()

    def read(self, timeout: float | None = None) -> bytes:
        import websocket

        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended:
            self._wait(deadline)
            try:
                with self._lock:
                    kind, data = self._socket.recv_data()
            except (OSError, websocket.WebSocketException):
                self._ended = True
                return b""
            if kind == websocket.ABNF.OPCODE_CLOSE:
                self._ended = True
                return b""
            channel, body = data[0] if data else _STDOUT, data[1:]
            if channel == _STDOUT and body:
                return bytes(body)
            if channel == _STDERR:
                self._errors += body
            elif channel == _STATUS:
                self._status = body
                self._ended = True
        return b""

    def _wait(self, deadline: float | None) -> None:
        """Wait until there is something to read."""
        plain = self._socket.sock
        if plain is None or getattr(plain, "pending", lambda: 0)():
            return
        waiting = select.poll()
        waiting.register(plain, select.POLLIN)
        left = None if deadline is None else max(0.0, 1000 * (deadline - time.monotonic()))
        if not waiting.poll(left):
            raise SubmitFailed("the command in the pod no longer answers")

    @property
    def stderr(self) -> str:
        words = self._errors.decode(errors="replace")
        status = self._outcome()
        own = status.get("reason") == "NonZeroExitCode"  # of the command
        return words if own else words + str(status.get("message", ""))

    def _outcome(self) -> dict[str, object]:
        with contextlib.suppress(ValueError):
            found = json.loads(self._status or b"")
            if isinstance(found, dict):
                return found
        return {}

    def exit_code(self, timeout: float | None = None) -> int:
        while self.read(timeout):
            pass
        outcome = self._outcome()
        if not outcome:
            raise Unavailable("the connection to the pod was lost")
        if outcome.get("status") == "Success":
            return 0
        details = outcome.get("details")
        causes = details.get("causes", ()) if isinstance(details, dict) else ()
        codes = [each.get("message", "") for each in causes if each.get("reason") == "ExitCode"]
        return int(codes[0]) if codes and codes[0].isdigit() else 1

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._socket.shutdown()  # type: ignore[no-untyped-call]
