"""What node 0 knows of the nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from clusterkit.agent import limits
from clusterkit.agent.protocol import Document


class Terms(NamedTuple):
    """What the nodes of a run go by."""

    nodes: int
    """As many ranks' places there are."""
    lost_after: float = 30.0
    """Seconds of silence after which a node is lost."""
    wait: float = 0.0
    """Seconds that a lost node has to come back; 0: it ends the run."""
    restarts: int = 0
    retry_on: Collection[int] = ()
    """As of `Retries`."""
    least: int | None = None
    """With as many nodes the run may go on; None: with no fewer."""
    spares: int = 0
    """How many nodes more there are to take the place of those that are lost."""

    @property
    def again(self) -> bool:
        """Whether anything is ever started again."""
        return self.wait > 0 or self.restarts > 0

    @property
    def may_miss(self) -> bool:
        """Whether the others may go on without a node that is lost."""
        return self.spares > 0 or self.least is not None


class Member:
    """One node's place in the run, as the agent that has it said last."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.count = 0  # of its statements: the newest that was heard
        self.heard = 0.0
        self.closed: float | None = None  # when its connection broke off; None: there is one
        self.present = True  # whether it is not lost
        self.running = False  # whether its launcher runs
        self.ready = False  # whether it waits for the next round, and will start no older one
        self.code: int | None = None  # how its launcher ended by itself in this round
        self.failure: Document | None = None  # how its ranks failed by themselves in this round
        self.step: int | None = None  # that they came to
        self.met = False  # whether it was in this run before this coordinator was
        self.early = False  # whether its launcher was started before it met anyone

    @property
    def reached(self) -> bool:
        """Whether there is a connection to it."""
        return self.present and self.closed is None

    def says(self, said: Document, now: float, current: bool) -> bool:
        """Its agent says this; whether that is news. ``current``: it knows of this round."""
        before = self.present, self.running, self.ready
        self.count, self.heard, self.closed = int(said["count"]), now, None
        self.present, self.running = not said["leaving"], bool(said["running"])
        self.ready = bool(said["waiting"]) and current
        return before != (self.present, self.running, self.ready)

    def gone(self, now: float, lost_after: float) -> str | None:
        """What to say of it if it is lost: nothing, where its connection broke off."""
        if self.closed is not None and now - self.closed > limits.PEER_GONE_SECONDS:
            return ""
        silent = now - self.heard > lost_after
        return f"does not answer node 0 for {lost_after:g} s" if silent else None


class Members:
    """The nodes of a run, and which of them have said something."""

    def __init__(self, terms: Terms) -> None:
        nodes = terms.nodes
        self._places: list[int | None] = list(range(nodes))
        """By place, in the order of ranks, the node that has it; None: the run goes on without."""
        self.ranks = {node: node for node in range(nodes)}
        """Of the nodes with which the run goes on, each one's; their order stays."""
        self.spares = list(range(nodes, nodes + terms.spares))
        """Nodes that wait for a place."""
        self.said: dict[int, Member] = {}
        """By node, of all that ever did."""
        self._least = nodes if terms.least is None else terms.least

    @property
    def may_miss(self) -> bool:
        """Whether the run may go on without a node."""
        return bool(self.spares) or self._least < len(self.ranks)

    def knows(self, node: int) -> bool:
        """Whether it belongs to the run."""
        return node in self.ranks or node in self.spares

    def all(self) -> list[Member]:
        """Those with which the run goes on, that said something."""
        return [member for node, member in self.said.items() if node in self.ranks]

    def never_came(self) -> list[int]:
        """The nodes that have never said anything."""
        return sorted(self.ranks.keys() - self.said.keys())

    def missing(self) -> list[int]:
        """The nodes that are lost, or never came."""
        here = {node for node, member in self.said.items() if member.present}
        return sorted(self.ranks.keys() - here)

    def busy(self) -> int | None:
        """A node whose launcher runs, or may; None: all are here and wait for the next round."""
        for node in self.ranks:
            member = self.said.get(node)
            if member is None or member.running or not member.ready or not member.reached:
                return node
        return None

    def failures(self) -> tuple[list[Document], int | None]:
        """How ranks failed by themselves in this round, and to what step any had come."""
        members = self.all()
        steps = (each.step for each in members if each.step is not None)
        return [each.failure for each in members if each.failure], max(steps, default=None)

    def without(self, missing: list[int]) -> str | None:
        """Go on without these nodes: spares that are here take vacant places, as far as they
        suffice; how, or None where that may not be."""
        here = [node for node in self.spares if node in self.said and self.said[node].present]
        left = [None if node in missing else node for node in self._places]
        if 0 in missing or len(left) - left.count(None) + len(here) < self._least:
            return None
        before, taken = len(self.ranks), self._fill(left, here)
        how = [
            f"node {node} joins" if lost is None else f"node {node} takes the place of node {lost}"
            for node, lost in taken.items()
        ]
        how += [f"{len(self.ranks)} of {before} go on"] if len(self.ranks) < before else []
        return ", ".join(how)

    def joining(self) -> list[int]:
        """Spares that can take a place that nobody has."""
        here = [(node, self.said[node]) for node in self.spares if node in self.said]
        # One that had started alone may have ranks that are still ending.
        found = [node for node, each in here if each.ready and each.reached and not each.running]
        return found[: self._places.count(None)]

    def join(self) -> str:
        """They take it; with whom the run goes on."""
        found, nodes = self._fill(self._places, self.joining()), len(self.ranks)
        return (
            f"{named([*found])} can join; {nodes} nodes go on"
            if found
            else f"all {nodes} nodes are here"
        )

    def _fill(self, places: Sequence[int | None], nodes: Sequence[int]) -> dict[int, int | None]:
        """Have spares take the vacant ones of these places, each its own if it can; those that got
        one, each with the node that had it."""
        new, taken = list(places), {}
        for node in nodes[: new.count(None)]:
            own = node < len(new) and new[node] is None
            place = node if own else new.index(None)
            new[place], taken[node] = node, self._places[place]
        self._places = new
        self.ranks = {
            node: rank for rank, node in enumerate(node for node in new if node is not None)
        }
        self.spares = [node for node in self.spares if node not in taken]
        return taken

    def mixed(self, member: Member, other: bool) -> bool:
        """Whether ranks may have reached others that were started around another node 0.

        Args:
            other: whether the member says that it was in the run of another one.
        """
        members = self.all()
        return any(each.early and each.running for each in members) or (
            other and (member.running or any(each.code is not None for each in members))
        )


def not_back(nodes: list[int], seconds: float) -> str:
    """That these nodes were lost and have not come back in time."""
    verb = "were" if len(nodes) > 1 else "was"
    return f"{named(nodes)} {verb} lost and did not come back within {seconds:g} s"


def named(nodes: list[int]) -> str:
    """``node 1``, ``nodes 1, 2``."""
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
