"""Nodes around a table, who say and hear what a test decides."""

from clusterkit.agent.member import RestartPolicy
from clusterkit.agent.membership import Membership
from clusterkit.agent.messages import (
    AgentState,
    CountRestarts,
    EndLauncher,
    Finish,
    Log,
    Pause,
    Start,
    Warn,
)
from clusterkit.agent.peer import Peer

NAMES = {CountRestarts: "follow", Start: "start", EndLauncher: "wait"}


def brief(node, order):
    """The node, what it is ordered to do, and why it ends."""
    if isinstance(order, Finish):
        return node, "stop" if order.stop else "exit", order.reason
    return node, NAMES[type(order)], ""


class Table:
    """Peers around a membership, at a moment that the test chooses; what is said is heard."""

    def __init__(self, nodes=2, wait=60.0, restarts=0, retry_on=(), least=None, spares=0):
        self.retry_on, self.least, self.spares = retry_on, least, spares
        self.now, self.nodes, self.wait, self.restarts = 0.0, nodes, wait, restarts
        self.peers = {}
        self.warned = []
        self.away = set()  # nodes without a connection
        self.new_node_0()

    def new_node_0(self):
        terms = RestartPolicy(
            self.nodes, 30.0, self.wait, self.restarts, self.retry_on, self.least, self.spares
        )
        self.membership = Membership(terms)

    def arrives(self, node, running=False):
        """Another agent does."""
        self.peers[node] = Peer(node, 30.0, self.wait, self.now, node >= self.nodes)
        if running and self.wait:
            self.peers[node].disconnected(self.now, "nobody there")
            self.peers[node].orders.clear()
        return self.returns(node)

    def returns(self, node):
        """Its connection does."""
        self.away.discard(node)
        self.peers[node].connected(self.now)
        return self.talk(node)

    def all_arrive(self):
        for node in range(self.nodes + self.spares):
            self.arrives(node)
        return self

    def ended(self, node, code):
        self.peers[node].launcher_ended(code, self.now)
        return self.talk(node)

    def leaves(self, node):
        self.peers[node].leave()
        return self.talk(node)

    def breaks(self, node):
        self.away.add(node)
        self.peers[node].disconnected(self.now)
        self.membership.disconnected(node, self.now)
        return self.talk()

    def turn(self, seconds, but=()):
        """Time goes by, and all but these say that they live."""
        self.now += seconds
        return self.talk(*(node for node in self.peers if node not in but))

    def talk(self, *nodes):
        """What these say, and all that follows of it: the last order to each node."""
        found, told = [], 0
        waiting = [node for node in nodes if node not in self.away]
        while waiting or told != self.membership.sequence:
            for node in waiting:
                self.membership.receive(node, state_of(self.peers[node]), self.now)
            self.membership.tick(self.now)
            told = self.membership.sequence
            for node, peer in sorted(self.peers.items()):
                if node not in self.away:
                    peer.receive(self.directive(node), self.now)
            waiting = [
                n for n, peer in self.peers.items() if peer.report_due and n not in self.away
            ]
        for node, peer in sorted(self.peers.items()):
            peer.tick(self.now)
            logs = [order for order in peer.orders if isinstance(order, Log)]
            pauses = [order for order in peer.orders if isinstance(order, Pause)]
            warnings = [order for order in peer.orders if isinstance(order, Warn)]
            self.warned += [order.text for order in warnings]
            others = [order for order in peer.orders if order not in logs + pauses + warnings]
            found += [brief(node, order) for order in others[-1:]]
            self.said = [order.text for order in logs]
            self.pauses = pauses
            peer.orders.clear()
        return found

    def directive(self, node):
        return self.membership.directive(node, self.now)


def state_of(peer):
    return AgentState.parse(peer.report())


def to_all(*order, nodes=2):
    return [(node, *order) for node in range(nodes)]


def start(*nodes):
    return [(node, "start", "") for node in nodes]


def wait(*nodes):
    return [(node, "wait", "") for node in nodes]


def stop(failed, nodes=3):
    """What all are told then: the one that failed ends by itself."""
    words = f"node {failed} failed"
    return [(node, "exit" if node == failed else "stop", words) for node in range(nodes)]
