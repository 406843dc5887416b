"""A port of a run's node on this machine: `clusterkit forward`.

Each connection is a command of its own on the node, which connects to the port there: so it works
wherever `exec` does, opens no port on the node, and one slow connection does not hold up others.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from clusterkit.errors import BadInput, ClusterkitError
from clusterkit.lifecycle.inside import Place
from clusterkit.run.folder import RunFolder

_CHUNK = 1 << 16
_RELAY = """\
import os, socket, sys, threading
try:
    there = socket.create_connection(("localhost", int(sys.argv[1])), 10)
except OSError as error:
    sys.exit(f"port {sys.argv[1]}: {error.strerror or error}")
if len(sys.argv) > 2:
    sys.exit()
there.settimeout(None)
def send():
    try:
        while data := os.read(0, 1 << 16):
            there.sendall(data)
        there.shutdown(socket.SHUT_WR)
    except OSError:
        pass
threading.Thread(target=send, daemon=True).start()
try:
    while data := there.recv(1 << 16):
        while data:
            data = data[os.write(1, data):]
except OSError:
    pass
os._exit(0)
"""


class Forward:
    """Listens on this machine's loopback, and passes connections on; a context manager.

    Attributes:
        port: where it listens.
    """

    def __init__(
        self,
        folder: RunFolder,
        port: int,
        local: int,
        node: int | None,
        report: Callable[[str], object],
    ) -> None:
        """Begin to listen.

        Args:
            port: on the node; a program listens there on its loopback or on all addresses.
            local: on this machine; 0: any that is free.
            report: takes what a person should know, such as that nothing listens there yet.

        Raises:
            BadInput: the run has ended or has no such node, or the port here is taken.
            Unavailable: the node does not answer.
        """
        self._remote, self._report = port, report
        self._threads = contextlib.ExitStack()
        self._place = self._threads.enter_context(Place(folder))
        try:
            self._node = self._place.node_of(node, None)
            self._way = self._place.ways([self._node])[self._node]
            words = self._look()
            self._listener = self._threads.enter_context(socket.socket())
            try:
                self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._listener.bind(("127.0.0.1", local))
                self._listener.listen()
            except (OSError, OverflowError) as error:
                raise BadInput(
                    f"127.0.0.1:{local} on this machine: {error}",
                    hint=f"PORT alone: any free one: {port}",
                ) from None
        except BaseException:
            self._threads.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        if words:
            report(f"node {self._node}: {words}; it is tried again for each connection")

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.close()

    def serve_forever(self) -> None:
        """Pass connections on, each in a thread of its own, until this is interrupted."""
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._pass_on, args=(connection,), daemon=True).start()

    def _look(self) -> str:
        """Return why the port cannot be connected to now; empty: it can."""
        words = bytearray()
        command = self._place.start(
            self._way, self._node, python=True, argv=["-c", _RELAY, str(self._remote), "look"]
        )
        command.send(b"e")
        command.run(lambda data, error: words.extend(data))
        return words.decode(errors="replace").strip()

    def _pass_on(self, connection: socket.socket) -> None:
        words = bytearray()

        def take(data: bytes, error: bool) -> None:
            if error:
                words.extend(data)
            else:
                connection.sendall(data)

        def read() -> bytes:
            with contextlib.suppress(OSError):
                return connection.recv(_CHUNK)
            return b""

        with connection, contextlib.suppress(OSError):  # whoever connected has gone
            try:
                command = self._place.start(
                    self._way, self._node, python=True, argv=["-c", _RELAY, str(self._remote)]
                )
                command.feed(read)
                if command.run(take):
                    self._report(f"node {self._node}: {words.decode(errors='replace').strip()}")
            except ClusterkitError as error:
                self._report(str(error))
            with contextlib.suppress(OSError):  # wakes the thread that reads
                connection.shutdown(socket.SHUT_RDWR)
