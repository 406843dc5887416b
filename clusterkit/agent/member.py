"""The nodes of a run as node 0 knows them: their agents' states, their ranks, the spares."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clusterkit.agent import limits
from clusterkit.agent.messages import AgentState
from clusterkit.agent.protocol import Document


class RestartPolicy(NamedTuple):
    """The options of a run that all of its nodes share."""

    nodes: int
    lost_after: float = 30.0
    """Seconds of silence after which a node is lost."""
    wait: float = 0.0
    """Seconds that a lost node has to come back; 0: it ends the run."""
    restarts: int = 0
    retry_on: Collection[int] = ()
    """As of `Retries`."""
    min_nodes: int | None = None
    """The fewest nodes that the run may continue with; None: all."""
    spares: int = 0
    """How many more nodes there are, to replace those that are lost."""

    @property
    def restartable(self) -> bool:
        """Whether a launcher is ever started again."""
        return self.wait > 0 or self.restarts > 0

    @property
    def can_lose_nodes(self) -> bool:
        """Whether the run may continue without a lost node."""
        return self.spares > 0 or self.min_nodes is not None


@dataclass
class Ending:
    """A round that is over; its launchers end until the next one begins."""

    reason: str
    since: float
    failed: int | None  # the node whose launcher failed; None: a node was lost, or joins
    restart_at: float  # when the next round may begin
    until: float | None  # when it does, or how long a lost node is waited for; None: not known
    free: str = ""  # why it uses no restart, although a launcher failed


class Member:
    """One node as its agent reported it last."""

    def __init__(self, state: AgentState) -> None:
        self.state = state
        self.received_at = 0.0  # when that came
        self.disconnected_at: float | None = None  # None: there is a connection
        self.present = True  # whether it is not lost
        self.ready = False  # whether it waits for the next round, and will start no older one
        self.exit_code: int | None = None  # of its launcher, where that ended in this round
        self.failure: Document | None = None  # how its ranks failed by themselves in this round
        self.step: int | None = None  # the last that they reported
        self.rejoined = False  # whether it was in this run before this coordinator was
        self.early = False  # whether its launcher was started before it met any coordinator

    @property
    def connected(self) -> bool:
        return self.present and self.disconnected_at is None

    @property
    def failed_by_itself(self) -> bool:
        """Whether an exception ended a rank that does not tell of another one's end."""
        failure = self.state.failure
        return failure is not None and bool(failure["error"]) and not failure["echo"]

    def update(self, state: AgentState, now: float, current: bool) -> bool:
        """Take the agent's new state; return whether that is news.

        Args:
            current: whether the agent knows of this round.
        """
        before = self.present, self.state.running, self.ready
        self.state, self.received_at, self.disconnected_at = state, now, None
        self.present, self.ready = not state.leaving, state.waiting and current
        return before != (self.present, state.running, self.ready)

    def disconnected(self, now: float) -> None:
        if self.disconnected_at is None:
            self.disconnected_at = now

    def lost_reason(self, now: float, lost_after: float) -> str | None:
        """Return why it is lost, empty where its connection broke off; None: it is not."""
        since = self.disconnected_at
        if since is not None and now - since > limits.PEER_GONE_SECONDS:
            return ""
        silent = now - self.received_at > lost_after
        return f"has not answered node 0 for {lost_after:g} s" if silent else None


class Members:
    """The nodes of a run: which have ranks, which are spares, and what is known of each."""

    def __init__(self, terms: RestartPolicy) -> None:
        nodes = terms.nodes
        self._places: list[int | None] = list(range(nodes))
        """By place, in the order of ranks, the node that has it; None: it is vacant."""
        self.ranks = {node: node for node in range(nodes)}
        """The rank of each node that is not a spare; their order stays."""
        self.spares = list(range(nodes, nodes + terms.spares))
        self.by_node: dict[int, Member] = {}
        """All nodes that ever reported."""
        self._min_nodes = nodes if terms.min_nodes is None else terms.min_nodes
        self._terms = terms

    @property
    def can_lose_one(self) -> bool:
        """Whether the run may continue without one of its nodes."""
        return bool(self.spares) or self._min_nodes < len(self.ranks)

    def includes(self, node: int) -> bool:
        """Return whether the node belongs to the run."""
        return node in self.ranks or node in self.spares

    def active(self) -> list[Member]:
        """Return the nodes that have ranks and ever reported."""
        return [member for node, member in self.by_node.items() if node in self.ranks]

    def newly_lost(self, now: float) -> Iterator[tuple[int, str]]:
        """Mark each node that is now lost, and yield it with its `Member.lost_reason`."""
        for node in (*self.ranks, *self.spares):
            member = self.by_node.get(node)
            if member is None or not member.present:
                continue
            if member.exit_code is not None and not self._terms.restartable:
                continue  # it has ended, and leaves
            reason = member.lost_reason(now, self._terms.lost_after)
            if reason is not None:
                member.present = False
                yield node, reason

    def never_came(self) -> list[int]:
        """Return the nodes that have ranks and never reported."""
        return sorted(self.ranks.keys() - self.by_node.keys())

    def missing(self) -> list[int]:
        """Return the nodes that are lost, or never came."""
        present = {node for node, member in self.by_node.items() if member.present}
        return sorted(self.ranks.keys() - present)

    def unready(self) -> int | None:
        """Return a node that cannot start the next round yet; None: all can."""
        for node in self.ranks:
            member = self.by_node.get(node)
            if member is None or member.state.running or not (member.ready and member.connected):
                return node
        return None

    def failures(self) -> tuple[list[Document], int | None]:
        """Return how ranks failed by themselves in this round, and the last step of any."""
        members = self.active()
        steps = (each.step for each in members if each.step is not None)
        return [each.failure for each in members if each.failure], max(steps, default=None)

    def drop(self, missing: list[int]) -> str | None:
        """Continue without these nodes; spares that are here replace them, as far as they suffice.

        Returns:
            Who replaces whom, and how many nodes are left; None: too few would be.
        """
        spares = [n for n in self.spares if n in self.by_node and self.by_node[n].present]
        left = [None if node in missing else node for node in self._places]
        if 0 in missing or len(left) - left.count(None) + len(spares) < self._min_nodes:
            return None
        before, replaced = len(self.ranks), self._assign(left, spares)
        changes = [
            f"node {node} joins" if lost is None else f"node {node} replaces node {lost}"
            for node, lost in replaced.items()
        ]
        changes += [f"{len(self.ranks)} of {before} continue"] if len(self.ranks) < before else []
        return ", ".join(changes)

    def joinable(self) -> list[int]:
        """Return the spares that can take a vacant place."""
        present = [(node, self.by_node[node]) for node in self.spares if node in self.by_node]
        # One that had started alone may have ranks that are still ending.
        found = [
            n for n, each in present if each.ready and each.connected and not each.state.running
        ]
        return found[: self._places.count(None)]

    def admit(self) -> str:
        """Give them these places; return a line on which nodes the run has."""
        joined, nodes = self._assign(self._places, self.joinable()), len(self.ranks)
        if joined:
            return f"{node_names([*joined])} can join; {nodes} nodes continue"
        return f"all {nodes} nodes have joined"

    def _assign(self, places: Sequence[int | None], nodes: Sequence[int]) -> dict[int, int | None]:
        """Give these spares the vacant places, each its own if it can.

        Returns:
            Those that got one, each with the node that had it before.
        """
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

    def may_be_mixed(self, member: Member, rejoined: bool) -> bool:
        """Return whether ranks may have reached others that were started around another node 0.

        Args:
            member: a node that just reported.
            rejoined: whether it was in the run of another coordinator.
        """
        members = self.active()
        return any(each.early and each.state.running for each in members) or (
            rejoined
            and (member.state.running or any(each.exit_code is not None for each in members))
        )


def not_returned(nodes: list[int], seconds: float) -> str:
    """Return the reason of a run that ends, or shrinks, because these nodes were lost."""
    verb = "were" if len(nodes) > 1 else "was"
    return f"{node_names(nodes)} {verb} lost and did not come back within {seconds:g} s"


def node_names(nodes: list[int]) -> str:
    """Return ``node 1``, ``nodes 1, 2``."""
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
