"""Node 0's side of how nodes watch each other: a `Membership` and the connections to all agents.

To the server, after what `Listener` asks for, and how things stand: ``{}`` as a sign of life,
``{"ended": CODE, "round": N}``, ``{"leaving": true}``. From it: ``{"coordinator": ID}``, ``{}``,
``{"start": N, "say": TEXT}``, ``{"wait": WHY}``, ``{"stop": WHY}``, ``{"exit": 0}``.
"""

from __future__ import annotations

import contextlib
import threading

from clusterkit.agent import clock, limits
from clusterkit.agent.connections import Line, Listener
from clusterkit.agent.membership import Membership
from clusterkit.agent.protocol import Document


class Server(threading.Thread):
    """Runs on node 0 until the run's end is decided and every node that is there knows it."""

    def __init__(self, listener: Listener, membership: Membership) -> None:
        super().__init__(daemon=True)
        self._listener = listener
        self._membership = membership
        self._lines: dict[int, Line] = {}

    @property
    def decided(self) -> bool:
        """Whether the run is over."""
        return self._membership.decided

    def run(self) -> None:
        membership = self._membership
        with contextlib.closing(self._listener):
            beat = due = 0.0
            news = False
            while not self.decided or any(membership.members[n].present for n in self._lines):
                wait = max(0.0, due - clock.awake()) if news else limits.PEER_AGAIN_SECONDS
                news = self._listener.receive(wait, self._hear) or news
                # What follows looks at every node: not once for every word of one of a thousand.
                if clock.awake() < due:
                    continue
                news = False
                for node in [node for node, line in self._lines.items() if line.closed]:
                    del self._lines[node]
                    membership.closed(node, clock.awake())
                membership.turn(clock.awake())
                self._send_orders()
                if clock.awake() >= beat:
                    for line in self._lines.values():
                        line.write({})
                    beat = clock.awake() + limits.PEER_SECONDS
                due = clock.awake() + limits.TURN_SECONDS

    def _hear(self, line: Line, message: Document) -> None:
        now, node = clock.awake(), line.node or 0
        if "node" in message:
            line.write({"coordinator": self._membership.identity})
            if node in self._lines:
                self._lines[node].close()
            self._lines[node] = line
            self._membership.arrives(node, message, now)
        else:
            self._membership.hears(node, now)
            if "ended" in message:
                self._membership.ended(node, int(message["round"]), int(message["ended"]), now)
            if "leaving" in message:
                self._membership.leaves(node, now)
        self._send_orders()

    def _send_orders(self) -> None:
        orders, self._membership.orders = self._membership.orders, []
        for node, message in orders:
            if node in self._lines:
                self._lines[node].write(message)
