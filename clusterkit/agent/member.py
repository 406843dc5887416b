"""What node 0 knows of one node."""

from __future__ import annotations

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


def not_back(nodes: list[int], seconds: float) -> str:
    """That these nodes were lost and have not come back in time."""
    names = f"nodes {', '.join(map(str, nodes))} were" if len(nodes) > 1 else f"node {nodes[0]} was"
    return f"{names} lost and did not come back within {seconds:g} s"
