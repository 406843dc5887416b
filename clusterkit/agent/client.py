"""Every node's side of how nodes watch each other: has done what node 0's `Membership` decides."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import threading
from collections.abc import Callable

from clusterkit.agent import clock, limits
from clusterkit.agent.connections import Line, Listener
from clusterkit.agent.coordinator import Server
from clusterkit.agent.membership import Membership, not_back
from clusterkit.agent.protocol import Document


class Client(threading.Thread):
    """One node's connection to the server, kept up until there is nothing more to say.

    Where nobody waits for lost nodes (``wait`` 0), the launcher has been started before this is,
    and the node leaves when that has ended.

    Args:
        address: node 0's.
        node: this one's rank.
        nodes: how many there are.
        run: what all nodes of an attempt say of themselves.
        token: the run's own.
        lost_after: seconds of silence after which a node is lost.
        wait: seconds that a lost node has to come back.
        order: takes an order for this node: ``start`` (the launcher), ``wait`` (end it, and be
            ready), ``stop`` (end, for the reason given), ``exit`` (end as the launcher has).
        say: takes a line for this node's log.
        warn: takes a sentence for people, when the nodes cannot watch each other.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        node: int,
        nodes: int,
        run: dict[str, str],
        token: bytes,
        lost_after: float,
        wait: float,
        order: Callable[[str, str], None],
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(daemon=True)
        self._host, self._port = address
        self._node, self._nodes, self._run, self._token = node, nodes, run, token
        self._lost_after, self._wait = lost_after, wait
        self._order, self._say, self._warn = order, say, warn
        self._agent = os.urandom(8).hex()
        self._met = ""  # which coordinator was met last
        self._round = 0
        self._running = not wait
        self._code: int | None = None
        self._ended_at: float | None = None
        self._heard = 0.0
        self._given_up_at: float | None = None  # since when node 0 is lost
        self._waiting = ""  # why the launcher may not run
        self._done = False
        self._leaving = False
        self._server: Server | None = None
        self._news: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._wake, self._waker = socket.socketpair()

    # -- from the node's main loop

    def ended(self, code: int) -> None:
        """This node's launcher has."""
        self._tell_thread("ended", code)

    def leave(self) -> None:
        """This node was asked to end, by nobody of the run."""
        self._tell_thread("leave", 0)

    def close(self) -> None:
        """Return when the others know what this node had to say, or after some seconds."""
        if self._wait:
            self._tell_thread("close", 0)
        self.join(limits.PEER_SECONDS)
        if self._server is not None and self._server.decided:
            # The others hear of it from this node.
            self._server.join(limits.PEER_SECONDS)

    def _tell_thread(self, what: str, code: int) -> None:
        self._news.put((what, code))
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    # -- the thread

    def run(self) -> None:
        with self._wake, self._waker, selectors.DefaultSelector() as self._selector:
            self._selector.register(self._wake, selectors.EVENT_READ)
            try:
                if self._node == 0:
                    listener = Listener(self._port, self._run, self._token, self._nodes)
                    membership = Membership(self._nodes, self._lost_after, self._wait)
                    self._server = Server(listener, membership)
                    self._server.start()
                    self._host = "127.0.0.1"
            except OSError as error:
                # Without what `socket.create_server` adds.
                why = os.strerror(error.errno) if error.errno else str(error)
                return self._go_on_alone(f"port {self._port}: {why}")
            self._until_done()

    def _until_done(self) -> None:
        began = gone = self._heard = clock.awake()
        while True:
            if self._take_news(None):
                return
            trouble: OSError | None = None
            seconds = limits.FIRST_SECONDS if self._new else limits.PEER_SECONDS
            before = self._heard
            try:
                connection = socket.create_connection((self._host, self._port), seconds)
            except OSError as error:
                trouble = error
            else:
                line = Line(connection, self._selector)
                self._talk(line)
                line.close()
            now = clock.awake()
            if self._heard != before or not self._met:
                gone = now
            if self._done:
                return
            if not self._met:
                self._not_met(trouble, now - began)
            elif now - gone > limits.PEER_GONE_SECONDS:
                refused = isinstance(trouble, ConnectionRefusedError)
                if refused or self._wait or now - self._heard > self._lost_after:
                    self._give_up("the launcher of node 0 is gone" if refused else self._silent)
            if self._given_up_at is not None and clock.awake() - self._given_up_at > self._wait:
                self._end("stop", not_back([0], self._wait))
            if not self._done:
                self._wait_for_news()

    @property
    def _new(self) -> bool:
        """Whether nothing was started yet, and nobody met who could say whether it may be."""
        return not self._met and not self._running and self._code is None

    @property
    def _silent(self) -> str:
        return f"node 0 does not answer for {self._lost_after:g} s"

    def _not_met(self, trouble: OSError | None, seconds: float) -> None:
        if self._new:
            self._start(0)
        elif seconds > limits.PEER_MEET_SECONDS:
            why = trouble or "another program listens there"
            self._go_on_alone(f"node 0 cannot be reached: {why}")
        elif self._ended_at and clock.awake() > self._ended_at + limits.PEER_GONE_SECONDS:
            self._end("exit", "")  # nobody was ever met who could say more

    def _go_on_alone(self, why: str) -> None:
        self._warn(f"the other nodes are not watched: {why}")
        if self._new:
            self._start(0)
        self._end("exit", "")

    def _give_up(self, why: str) -> None:
        """Node 0 is lost. ``why``: what to say where nobody waits for it."""
        if not self._wait:
            self._end("stop", why)
        elif self._given_up_at is None:
            self._given_up_at = clock.awake()
            self._hold("node 0 was lost")

    def _talk(self, line: Line) -> None:
        """Until the connection or the run comes to an end."""
        line.introduce(self._token, {
            **self._run, "node": self._node, "agent": self._agent, "coordinator": self._met,
            "round": self._round, "running": self._running, "code": self._code,
            "lost": self._given_up_at is not None, "leaving": self._leaving,
        })  # fmt: skip
        heard = beat = began = clock.awake()
        while not line.closed:
            events = self._wait_for_news()
            now = clock.awake()
            for message in line.messages(events):
                heard = self._heard = now
                self._hear(message)
            if self._take_news(line):
                return line.flush(limits.PEER_SECONDS)
            if self._new and now > began + limits.FIRST_SECONDS:
                self._start(0)
            if now >= beat:
                line.write({})
                beat = now + limits.PEER_SECONDS
            if now - heard > self._lost_after:
                return self._give_up(self._silent) if self._met else None
        return None

    def _hear(self, message: Document) -> None:
        if "coordinator" in message:
            other = self._met not in ("", message["coordinator"])
            if other and self._running and not self._waiting:
                self._hold("node 0 was lost")
            self._met, self._given_up_at = str(message["coordinator"]), None
        if message.get("say"):
            self._say(str(message["say"]))
        if "start" in message:
            if self._running:
                self._round = int(message["start"])
            else:
                self._start(int(message["start"]))
        if "wait" in message:
            self._hold(str(message["wait"]))
        for verdict in ("stop", "exit"):
            if verdict in message:
                self._end(verdict, str(message[verdict]))

    def _take_news(self, line: Line | None) -> bool:
        """Pass on what the main loop says, or have the next connection's first line say it.

        Returns:
            Whether there is nothing more to say.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                what, code = self._news.get_nowait()
                if what == "ended":
                    self._running, self._code, self._ended_at = False, code, clock.awake()
                    if line is not None:
                        line.write({"ended": code, "round": self._round})
                    # Node 0 stays until its own server has heard of it.
                    self._done = self._done or (not self._wait and self._server is None)
                elif what == "leave":
                    self._leaving = True
                    if line is not None:
                        line.write({"leaving": True})
                else:
                    self._done = True
        return self._done

    def _start(self, number: int) -> None:
        self._round, self._code, self._running, self._waiting = number, None, True, ""
        self._order("start", "")

    def _hold(self, why: str) -> None:
        """Have the launcher end, and wait."""
        if why != self._waiting:
            self._say(f"{why}; waiting for it")
        self._waiting = why
        self._order("wait", why)

    def _end(self, order: str, why: str) -> None:
        self._done = True
        self._order(order, why)

    def _wait_for_news(self) -> int:
        """Wait for the main loop or the connection; what has happened on that, if anything."""
        found = 0
        for key, events in self._selector.select(limits.PEER_AGAIN_SECONDS):
            if key.data is None:
                self._wake.recv(4096)
            else:
                found = events
        return found
