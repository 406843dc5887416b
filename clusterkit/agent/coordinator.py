"""Node 0's thread that decides for all nodes: a `Membership` and the connections to all agents.

After what `Listener` asks for, agents send `Peer.report` and get a `Directive`: at once when
something changed, and every PEER_SECONDS.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from clusterkit.agent import clock, limits
from clusterkit.agent.connections import Line, Listener
from clusterkit.agent.membership import Membership
from clusterkit.agent.messages import AgentState
from clusterkit.agent.protocol import Document
from clusterkit.agent.worker import Worker


class Server:
    """Runs on node 0 until the run's end is decided and every connected node knows it.

    Args:
        on_message: takes what other nodes send to this one's `watch`, with the sender.
        on_failure: as of `Worker`.
    """

    def __init__(
        self,
        listener: Listener,
        membership: Membership,
        on_message: Callable[[int, Document], None],
        on_failure: Callable[[str], object],
    ) -> None:
        worker = Worker(self.run, "the coordination of all nodes", on_failure)
        self.start, self.join = worker.start, worker.join
        self._listener = listener
        self._membership, self._on_message = membership, on_message
        self.messages: queue.SimpleQueue[Document] = queue.SimpleQueue()
        """For the `watch` of every other node."""
        self._lines: dict[int, Line] = {}
        self._sent = 0  # the newest decision that all nodes have got
        self._beat = self._tick_at = 0.0  # when directives are sent again, when `tick` is due

    @property
    def decided(self) -> bool:
        """Whether the run is over."""
        return self._membership.decided

    def run(self) -> None:
        """Decide until nothing is left to decide, in the thread that `start` starts."""
        due, news = 0.0, False
        nodes = self._membership.members.by_node
        while not self.decided or any(nodes[node].present for node in self._lines):
            wait = max(0.0, due - clock.awake()) if news else limits.PEER_AGAIN_SECONDS
            news = self._listener.receive(wait, self._receive) or news
            self._forward()
            # What follows looks at every node: not once for each message of a thousand nodes.
            if clock.awake() >= due:
                news = False
                self._decide()
                due = clock.awake() + limits.TURN_SECONDS
        self._listener.close()

    def _forward(self) -> None:
        while not self.messages.empty():
            # `watch` compares clocks by when it is sent.
            message = {**self.messages.get(), "sent": time.time()}
            for node, line in self._lines.items():
                if node:
                    line.write(message)

    def _decide(self) -> None:
        membership = self._membership
        for node in [node for node, line in self._lines.items() if line.closed]:
            del self._lines[node]
            membership.disconnected(node, clock.awake())
        if clock.awake() >= self._tick_at:
            self._tick_at = clock.awake() + limits.PEER_AGAIN_SECONDS
            membership.tick(clock.awake())
        elif membership.changed:
            membership.advance(clock.awake())
        if self._sent < membership.sequence:
            self._on_message(0, {"places": list(membership.members.ranks)})
        elif clock.awake() < self._beat:
            return
        self._sent, self._beat = membership.sequence, clock.awake() + limits.PEER_SECONDS
        for node, line in self._lines.items():
            line.write(vars(membership.directive(node, clock.awake())))

    def _receive(self, line: Line, message: Document) -> None:
        node, now = line.node or 0, clock.awake()
        if "records" in message:
            # `watch` knows a node by the place of its ranks in this round.
            self._on_message(self._membership.members.ranks.get(node, node), message)
        elif not self._membership.receive(node, AgentState.parse(message), now):
            line.write(vars(self._membership.rejection(node)))
            line.close()
        elif self._lines.get(node) is not line:
            if node in self._lines:
                self._lines[node].close()
            self._lines[node] = line
            line.write(vars(self._membership.directive(node, now)))
