"""Every node's side of how nodes watch each other: a `Peer` and its connection to node 0."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

from clusterkit.agent import clock, limits
from clusterkit.agent.connections import Line, Listener
from clusterkit.agent.coordinator import Server
from clusterkit.agent.member import Terms
from clusterkit.agent.membership import Membership
from clusterkit.agent.peer import Peer
from clusterkit.agent.protocol import Document


class Client(threading.Thread):
    """One node's connection to the server, kept up until there is nothing more to say.

    Where nobody waits for lost nodes (``wait`` 0), the launcher has been started before this is,
    and the node leaves when that has ended.

    Args:
        address: node 0's.
        node: this one's rank.
        terms: what all nodes go by.
        run: what all nodes of an attempt say of themselves.
        token: the run's own.
        spare: as of `Peer`.
        order: takes an order for this node, as of `Peer.orders`.
        say: takes a line for this node's log.
        warn: takes a sentence for people, when the nodes cannot watch each other.
        hears: takes what another node, which comes first, has for this one's `watch`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        node: int,
        terms: Terms,
        run: dict[str, str],
        token: bytes,
        spare: bool = False,
        order: Callable[[str, str], None],
        say: Callable[[str], None],
        warn: Callable[[str], None],
        hears: Callable[[int, Document], None] = lambda node, message: None,
    ) -> None:
        super().__init__(daemon=True)
        self._host, self._port = address
        self._node, self._terms, self._run, self._token = node, terms, run, token
        self._order, self._hears, self._say, self._warn = order, hears, say, warn
        self.peer = Peer(node, terms.lost_after, terms.wait, clock.awake(), spare)
        self._server: Server | None = None
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._messages: queue.SimpleQueue[Document] = queue.SimpleQueue()
        self._wake, self._waker = socket.socketpair()

    # -- from the node's main loop

    def ended(self, code: int, **how: Any) -> None:
        """This node's launcher has, as of `Peer.ended`."""
        self._tell_thread(lambda: self.peer.ended(code, clock.awake(), **how))

    def leave(self) -> None:
        """This node was asked to end, by nobody of the run."""
        self._tell_thread(self.peer.leave)

    def late(self) -> None:
        """The run is over its time limit."""
        self._tell_thread(self.peer.late)

    def send(self, message: Document) -> None:
        """To the `watch` of node 0, if that can be reached; from there to those of all others."""
        if self._server is not None:
            self._server.messages.put(message)
        elif self._node:
            self._messages.put(message)
            with contextlib.suppress(OSError):
                self._waker.send(b".")

    def close(self) -> None:
        """Return when the others know what this node had to say, or after some seconds."""
        if self._terms.again:
            self._tell_thread(self.peer.close)
        self.join(limits.PEER_SECONDS)
        if self._server is not None and self._server.decided:
            # The others hear of it from this node.
            self._server.join(limits.PEER_SECONDS)

    def _tell_thread(self, news: Callable[[], None]) -> None:
        self._news.put(news)
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    # -- the thread

    def run(self) -> None:
        with self._wake, self._waker, selectors.DefaultSelector() as self._selector:
            self._selector.register(self._wake, selectors.EVENT_READ)
            try:
                if self._node == 0:
                    everyone = self._terms.nodes + self._terms.spares
                    listener = Listener(self._port, self._run, self._token, everyone)
                    self._server = Server(listener, Membership(self._terms), self._hears)
                    self._server.start()
                    self._host, self._port = "127.0.0.1", listener.port
            except OSError as error:
                # Without what `socket.create_server` adds.
                why = os.strerror(error.errno) if error.errno else str(error)
                self.peer.alone(f"port {self._port}: {why}")
                return self._carry_out()
            while not self.peer.done:
                if (line := self._connect()) is not None:
                    self._talk(line)
                    line.flush(limits.PEER_SECONDS)
                    line.close()
                    self.peer.disconnected(clock.awake())
                self._take_news()
                self.peer.turn(clock.awake())
                self._carry_out()
                if not self.peer.done:
                    self._wait_for_news()
        return None

    def _connect(self) -> Line | None:
        seconds = limits.FIRST_SECONDS if self.peer.new else limits.PEER_SECONDS
        try:
            connection = socket.create_connection((self._host, self._port), seconds)
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            self.peer.disconnected(clock.awake(), str(error), refused)
            return None
        self.peer.connected(clock.awake())
        line = Line(connection, self._selector)
        line.introduce(self._token, {**self._run, "node": self._node, **self.peer.statement()})
        return line

    def _talk(self, line: Line) -> None:
        """Until the connection or the run comes to an end."""
        peer, beat = self.peer, clock.awake() + limits.PEER_SECONDS
        while not (line.closed or peer.done or peer.silent(clock.awake())):
            try:
                for message in line.messages(self._wait_for_news()):
                    if "do" in message:
                        peer.hears(message, clock.awake())
                    else:
                        self._hears(0, message)
            except (KeyError, TypeError, ValueError):
                line.close()  # it speaks of something else
            self._take_news()
            peer.turn(clock.awake())
            self._carry_out()
            if peer.news or clock.awake() >= beat:
                beat = clock.awake() + limits.PEER_SECONDS
                line.write(peer.statement())
            while not self._messages.empty():
                line.write(self._messages.get())

    def _take_news(self) -> None:
        """What the main loop says; where nothing starts again, a node that has ended leaves."""
        while not self._news.empty():
            self._news.get()()
        # Node 0 stays until its own server has heard of it, as does a failure nobody was told of:
        # the first try may have come before node 0 listened.
        over = self.peer.code == 0 or (self.peer.code is not None and self.peer.met != "")
        self.peer.done |= over and not self._terms.again and self._server is None

    def _carry_out(self) -> None:
        orders, self.peer.orders = self.peer.orders, []
        for what, why in orders:
            if what == "say":
                self._say(why)
            elif what == "warn":
                self._warn(why)
            else:
                self._order(what, why)

    def _wait_for_news(self) -> int:
        """Wait for the main loop or the connection; what has happened on that, if anything."""
        found = 0
        for key, events in self._selector.select(limits.PEER_AGAIN_SECONDS):
            if key.data is None:
                self._wake.recv(4096)
            else:
                found = events
        return found
