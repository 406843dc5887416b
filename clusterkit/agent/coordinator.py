"""Node 0's side of how nodes watch each other: a `Membership` and the connections to all agents.

To the server, after what `Listener` asks for: `Peer.statement`; from it: `Membership.says`. Both at
once when something changed, and every PEER_SECONDS.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from clusterkit.agent import clock, limits
from clusterkit.agent.connections import Line, Listener
from clusterkit.agent.membership import Membership
from clusterkit.agent.protocol import Document


class Server(threading.Thread):
    """Runs on node 0 until the run's end is decided and every node that is there knows it.

    ``watch`` takes what other nodes have for this one's `watch`.
    """

    def __init__(
        self, listener: Listener, membership: Membership, watch: Callable[[int, Document], None]
    ) -> None:
        super().__init__(daemon=True)
        self._listener = listener
        self._membership, self._watch = membership, watch
        self.messages: queue.SimpleQueue[Document] = queue.SimpleQueue()
        """For the `watch` of every other node."""
        self._lines: dict[int, Line] = {}
        self._told = 0  # the newest decision that all nodes were told of

    @property
    def decided(self) -> bool:
        """Whether the run is over."""
        return self._membership.decided

    def run(self) -> None:
        membership = self._membership
        with contextlib.closing(self._listener):
            beat = due = look = 0.0
            news = False
            while not self.decided or any(membership.members.said[n].present for n in self._lines):
                wait = max(0.0, due - clock.awake()) if news else limits.PEER_AGAIN_SECONDS
                news = self._listener.receive(wait, self._hear) or news
                while not self.messages.empty():
                    # `watch` compares clocks by when it goes.
                    message = {**self.messages.get(), "sent": time.time()}
                    for line in (line for node, line in self._lines.items() if node):
                        line.write(message)
                # What follows looks at every node: not once for every word of one of a thousand.
                if clock.awake() < due:
                    continue
                news = False
                for node in [node for node, line in self._lines.items() if line.closed]:
                    del self._lines[node]
                    membership.closed(node, clock.awake())
                if clock.awake() >= look:
                    look = clock.awake() + limits.PEER_AGAIN_SECONDS
                    membership.turn(clock.awake())
                elif membership.news:
                    membership.settle(clock.awake())
                if self._told < membership.count:
                    self._watch(0, {"places": list(membership.members.ranks)})
                if clock.awake() >= beat or self._told < membership.count:
                    self._told, beat = membership.count, clock.awake() + limits.PEER_SECONDS
                    for node, line in self._lines.items():
                        line.write(membership.says(node))
                due = clock.awake() + limits.TURN_SECONDS

    def _hear(self, line: Line, message: Document) -> None:
        node = line.node or 0
        if "stands" in message:
            # To a `watch` a node is the place of its ranks in this round.
            self._watch(self._membership.members.ranks.get(node, node), message)
        elif not self._membership.hears(node, message, clock.awake()):
            line.write(self._membership.turned_away(node))
            line.close()
        elif self._lines.get(node) is not line:
            if node in self._lines:
                self._lines[node].close()
            self._lines[node] = line
            line.write(self._membership.says(node))
