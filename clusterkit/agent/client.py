"""Every node's thread that follows node 0: a `Peer` and its connection."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

from clusterkit.agent import clock, limits, protocol
from clusterkit.agent.connections import Line, Listener
from clusterkit.agent.coordinator import Server
from clusterkit.agent.member import RestartPolicy
from clusterkit.agent.membership import Membership
from clusterkit.agent.messages import Directive, Order, Warn
from clusterkit.agent.peer import Peer
from clusterkit.agent.protocol import Document
from clusterkit.agent.worker import Worker


class Meeting(NamedTuple):
    """Where a run's agents meet."""

    address: tuple[str, int]
    """Node 0's, and the port at which its agent listens."""
    token: bytes
    others: bool
    """Whether there are other nodes."""


def take_meeting() -> Meeting:
    """Take it out of this process's environment, which other users of the host cannot read."""
    token = os.environ.pop(protocol.PEER_TOKEN, "").encode()
    host, _, port = os.environ.pop(protocol.COORDINATOR, "").rpartition(":")
    if port:
        return Meeting((host, int(port)), token, True)
    # A node alone decides by the same rules, over a connection to itself.
    return Meeting(("127.0.0.1", 0), os.urandom(16), False)


class Client:
    """One node's connection to the server, kept up until nothing is left to report.

    Where lost nodes do not come back (``wait`` 0), the launcher has been started before this is,
    and the node leaves when that has ended. Node 0 listens from here on, before it starts anything,
    so that no program of the run or of another user has the port by then.

    Args:
        address: node 0's.
        node: this one's rank.
        terms: what all nodes share.
        run: the fields that identify the attempt.
        token: the run's own.
        spare: as of `Peer`.
        on_order: takes an order for this node's main loop.
        on_message: takes what another node, which comes first, sends to this one's `watch`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        node: int,
        terms: RestartPolicy,
        run: dict[str, str],
        token: bytes,
        spare: bool = False,
        on_order: Callable[[Order], None],
        on_message: Callable[[int, Document], None] = lambda node, message: None,
    ) -> None:
        self._worker = Worker(self._work, "the connection to node 0", self._warn)
        self.start, self.join, self.is_alive = (
            self._worker.start, self._worker.join, self._worker.is_alive
        )  # fmt: skip
        self._host, self._port = address
        self._node, self._terms, self._run, self._token = node, terms, run, token
        self._on_order, self._on_message = on_order, on_message
        self.peer = Peer(node, terms.lost_after, terms.wait, clock.awake(), spare)
        self._server: Server | None = None
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._messages: queue.SimpleQueue[Document] = queue.SimpleQueue()
        self._wake, self._waker = socket.socketpair()
        self._listener: Listener | None = None
        self._problem: str | None = None  # why node 0 cannot listen
        if node == 0:
            try:
                everyone = terms.nodes + terms.spares
                self._listener = Listener(address, run, token, everyone)
            except OSError as error:
                # Without what `socket.create_server` adds.
                reason = os.strerror(error.errno) if error.errno else str(error)
                self._problem = f"port {self._port}: {reason}"

    # -- from the node's main loop

    def launcher_ended(self, code: int, **details: Any) -> None:
        """Report the end of this node's launcher; arguments as of `Peer.launcher_ended`."""
        self._call(lambda: self.peer.launcher_ended(code, clock.awake(), **details))

    def leave(self) -> None:
        """Report that this node was asked to end, by nobody of the run."""
        self._call(self.peer.leave)

    def time_limit_reached(self) -> None:
        """Have the run end: it is over its time limit."""
        self._call(self.peer.time_limit_reached)

    def send(self, message: Document) -> None:
        """Send to the `watch` of node 0, if that can be reached; from node 0 to all others."""
        if self._server is not None:
            self._server.messages.put(message)
        elif self._node:
            self._messages.put(message)
            self._wake_up()

    def close(self) -> None:
        """Return when the last report is sent and the others know the verdict, or after seconds."""
        if self._terms.restartable:
            self._call(self.peer.close)
        self.join(limits.PEER_SECONDS)
        if self._server is not None and self._server.decided:
            # The others receive the verdict from this node.
            self._server.join(limits.PEER_SECONDS)

    def _call(self, function: Callable[[], None]) -> None:
        """Have the thread call it: nobody else touches `peer`."""
        self._calls.put(function)
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    # -- the thread

    def _warn(self, text: str) -> None:
        self._on_order(Warn(text))

    def _work(self) -> None:
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._wake, selectors.EVENT_READ)
            self._follow()
        self._wake.close()
        self._waker.close()

    def _follow(self) -> None:
        if self._problem is not None:
            self.peer.run_unwatched(self._problem)
            return self._pass_orders()
        if self._listener is not None and self._server is None:
            membership = Membership(self._terms)
            self._server = Server(self._listener, membership, self._on_message, self._warn)
            self._server.start()
            self._host = "::1" if self._host == "::1" else "127.0.0.1"
            self._port = self._listener.port
        while not self.peer.done:
            if (line := self._connect()) is not None:
                self._talk(line)
                line.flush(limits.PEER_SECONDS)
                line.close()
                self.peer.disconnected(clock.awake())
            self._run_calls()
            self.peer.tick(clock.awake())
            self._pass_orders()
            if not self.peer.done:
                self._wait()
        return None

    def _connect(self) -> Line | None:
        seconds = limits.FIRST_SECONDS if self.peer.undecided else limits.PEER_SECONDS
        try:
            connection = socket.create_connection((self._host, self._port), seconds)
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            self.peer.disconnected(clock.awake(), str(error), refused)
            return None
        self.peer.connected(clock.awake())
        line = Line(connection, self._selector, self._token, accepted=False)
        line.write({**self._run, "node": self._node, **self.peer.report()})
        return line

    def _talk(self, line: Line) -> None:
        """Send and receive until the connection or the run ends."""
        peer, beat = self.peer, clock.awake() + limits.PEER_SECONDS
        while not (line.closed or peer.done or peer.is_silent(clock.awake())):
            try:
                for message in line.messages(self._wait()):
                    if "action" in message:
                        peer.receive(Directive(**message), clock.awake())
                    else:
                        self._on_message(0, message)
            except (KeyError, TypeError, ValueError):
                line.close()  # it is not a clusterkit agent
            self._run_calls()
            peer.tick(clock.awake())
            self._pass_orders()
            if peer.report_due or clock.awake() >= beat:
                beat = clock.awake() + limits.PEER_SECONDS
                line.write(peer.report())
            while not self._messages.empty():
                line.write(self._messages.get())

    def _run_calls(self) -> None:
        """Run the main loop's calls; where nothing starts again, a node that has ended leaves."""
        while not self._calls.empty():
            self._calls.get()()
        # Node 0 stays until its own server has heard of it, as does a failure that node 0 has not
        # got: the first try may have come before node 0 listened.
        state = self.peer.state
        over = state.exit_code == 0 or (state.exit_code is not None and state.coordinator != "")
        self.peer.done |= over and not self._terms.restartable and self._server is None

    def _pass_orders(self) -> None:
        orders, self.peer.orders = self.peer.orders, []
        for order in orders:
            self._on_order(order)

    def _wait(self) -> int:
        """Wait for the main loop or the connection; return the events of the connection."""
        found = 0
        for key, events in clock.ready(self._selector, limits.PEER_AGAIN_SECONDS):
            if key.data is None:
                self._wake.recv(4096)
            else:
                found = events
        return found
