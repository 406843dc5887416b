"""What node 0 knows of the nodes."""

from __future__ import annotations

from collections.abc import Iterable

from clusterkit.agent.protocol import Document


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


class Members:
    """The nodes of a run, and which of them have said something.

    Args:
        nodes: how many the run begins with.
        least: as many it may go on with.
    """

    def __init__(self, nodes: int, least: int) -> None:
        self.ranks = {node: node for node in range(nodes)}
        """Of the nodes with which the run goes on, each one's; their order stays."""
        self.said: dict[int, Member] = {}
        """By node, of all that ever did."""
        self._least = least

    def all(self) -> list[Member]:
        """Those with which the run goes on, that said something."""
        return [member for node, member in self.said.items() if node in self.ranks]

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

    def shrink(self, missing: Iterable[int]) -> bool:
        """Go on without these nodes, if that may be."""
        left = sorted(self.ranks.keys() - set(missing))
        if 0 not in left or len(left) < self._least:
            return False
        self.ranks = {node: rank for rank, node in enumerate(left)}
        return True

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
    names = f"nodes {', '.join(map(str, nodes))} were" if len(nodes) > 1 else f"node {nodes[0]} was"
    return f"{names} lost and did not come back within {seconds:g} s"
