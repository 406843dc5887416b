"""When launchers start, end and start again, on all nodes: events and a clock in, orders out."""

from __future__ import annotations

import os

from clusterkit.agent import limits
from clusterkit.agent.protocol import AGAIN, Document


class Member:
    """One node's place in the run, and the agent that has it at the moment."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.heard = 0.0
        self.closed: float | None = None  # when its connection broke off; None: there is one
        self.present = True  # whether it is not lost
        self.leaving = False
        self.running = False  # whether its launcher runs
        self.joined = False  # whether its launcher was started in this round
        self.code: int | None = None  # how that ended by itself


class Membership:
    """Decides for all nodes when launchers start, end and start again.

    A round is one start of all launchers. The first is open: each node joins it as it comes.

    Where lost nodes come back: when a member is lost, the round is over. Everyone ends its
    launcher; once all nodes are here and none of them runs, the next round begins for all at once.
    A launcher that fails while no node is lost ends the run; so does one that ends with 0 on every
    node.

    Where they do not (``wait`` 0), there is one round. A launcher that fails ends the run at once,
    and so does a lost node. A node that ended leaves, and is not lost; when node 0 ends with 0, the
    others go on by themselves.

    Touches neither sockets nor clocks: ``now`` is a moment of a monotonic clock, in seconds.

    Args:
        nodes: how many there are.
        lost_after: seconds of silence after which a node is lost.
        wait: seconds that a lost node has to come back.
    """

    def __init__(self, nodes: int, lost_after: float, wait: float) -> None:
        self.identity = os.urandom(8).hex()
        self.round = 1
        self.members: dict[int, Member] = {}
        self.orders: list[tuple[int, Document]] = []
        """Messages to nodes that nobody has sent yet; for the caller to take."""
        self.verdict: Document = {}  # what ends the run, once that is decided
        self._nodes = nodes
        self._lost_after = lost_after
        self._wait = wait
        self._why = ""
        self._over_at: float | None = None
        """When a node was lost for the last time; None: the round goes on."""
        self._failed: tuple[int, float] | None = None
        self._replaced_at: float | None = None
        """When it was known that this node 0 replaces one that was lost."""

    @property
    def decided(self) -> bool:
        """Whether the run is over."""
        return bool(self.verdict)

    def arrives(self, node: int, hello: Document, now: float) -> None:
        """An agent has connected, for the first time or once more."""
        if self.verdict:
            return self._order(node, self.verdict)
        before, agent = self.members.get(node), str(hello.get("agent"))
        member = before if before is not None and before.agent == agent else Member(agent)
        if member is not before:
            self.members[node] = member
            over = self._over_at is not None
            if before is not None and before.present and (before.joined or over):
                self._end_round(node, now)
                if self.decided:
                    return None
        member.heard, member.closed, member.present, member.leaving = now, None, True, False
        member.running = bool(hello.get("running"))
        met, code = str(hello.get("coordinator") or ""), hello.get("code")
        if met not in ("", self.identity):
            self._replaces(now)
        elif met and hello.get("lost") and member.joined:
            # It had given this node 0 up, and ended its launcher.
            self._end_round(node, now)
        if hello.get("leaving"):
            return self.leaves(node, now)
        if self._over_at is not None:
            if member.running:
                self._order(node, {"wait": self._why})
        elif member.joined:
            # One that started before it met anyone did so in the first round.
            number = int(hello.get("round") or 0) or int(code is not None)
            if not member.running and number < self.round:
                self._start(node)  # that was said to a connection which broke off
            elif not member.running and code is not None:
                self.ended(node, self.round, int(code), now)
        elif not member.running and not met and code is not None:
            member.joined = True  # it had ended before it met anyone
            self.ended(node, 0, int(code), now)
        elif not member.running:
            late = node == 0 and self._replaced_at is not None
            self._start(node, _REPLACES if late else "node 0 is back" if met else "")
        elif met:
            # Its ranks may have reached those that were started here.
            self._end_round(0, now)
        else:
            member.joined = True  # the first to come do not wait for node 0
        return None

    def hears(self, node: int, now: float) -> None:
        """It has said anything."""
        member = self.members[node]
        member.heard = now
        member.present = not member.leaving

    def closed(self, node: int, now: float) -> None:
        """Its connection is gone."""
        member = self.members[node]
        if member.closed is None:
            member.closed = now
        if member.leaving:
            member.running = False

    def leaves(self, node: int, now: float) -> None:
        """It was asked to: its pod is being removed."""
        self.members[node].leaving = True
        self._lose(node, now)

    def ended(self, node: int, number: int, code: int, now: float) -> None:
        """Its launcher has, in the round of that number (0: before it had met anyone)."""
        member = self.members[node]
        member.running = False
        if self._over_at is not None or not member.joined or number not in (0, self.round):
            return
        member.code = code
        if not self._wait and (code or node == 0):
            self._decide({"stop": f"node {node} failed"} if code else {"exit": 0})
        elif code and self._failed is None:
            self._failed = (node, now)

    def turn(self, now: float) -> None:
        """What has become due."""
        if self.decided:
            return
        for node, member in sorted(self.members.items()):
            if not member.present or (member.code is not None and not self._wait):
                continue
            if member.closed is not None and now - member.closed > limits.PEER_GONE_SECONDS:
                self._lose(node, now)
            elif now - member.heard > self._lost_after:
                silent = f"node {node} does not answer node 0 for {self._lost_after:g} s"
                self._lose(node, now, silent)
        missing = [
            node for node in range(self._nodes)
            if node not in self.members or not self.members[node].present
        ]  # fmt: skip
        if self._over_at is not None:
            running = [node for node, each in self.members.items() if each.running and each.present]
            if not missing and not running:
                self._next_round()
            elif now - self._over_at > self._wait:
                self._decide({"stop": not_back(missing or running, self._wait)})
        elif self._failed is not None:
            node, at = self._failed
            quiet = (
                each.closed is not None or now - each.heard > limits.PEER_QUIET_SECONDS
                for each in self.members.values() if each.joined
            )  # fmt: skip
            if now - at > limits.FAILURE_GRACE and not any(quiet):
                self._decide({"stop": f"node {node} failed"})
        elif self._replaced_at is not None and now - self._replaced_at > self._wait:
            if missing:
                self._decide({"stop": not_back(missing, self._wait)})
            self._replaced_at = None
        if len(self.members) == self._nodes and all(
            member.joined and member.code == 0 for member in self.members.values()
        ):
            self._decide({"exit": 0})

    def _order(self, node: int, message: Document) -> None:
        self.orders.append((node, message))

    def _start(self, node: int, say: str = "") -> None:
        member = self.members[node]
        member.running, member.joined, member.code = True, True, None
        self._order(node, {"start": self.round, "say": f"{say}; {AGAIN}" if say else ""})

    def _next_round(self) -> None:
        self.round += 1
        self._over_at = self._failed = self._replaced_at = None
        for node in sorted(self.members):
            self._start(node, f"all {self._nodes} nodes are here")

    def _lose(self, node: int, now: float, why: str = "") -> None:
        member = self.members[node]
        member.present = False
        if member.joined or self._over_at is not None:
            self._end_round(node, now, why)

    def _end_round(self, lost: int, now: float, why: str = "") -> None:
        """``why``: what to say where nobody waits for the lost node, besides that it is gone."""
        if self.decided:
            return
        if not self._wait:
            return self._decide({"stop": why or f"the launcher of node {lost} is gone"})
        self._why, self._over_at, self._failed = f"node {lost} was lost", now, None
        for node, member in sorted(self.members.items()):
            member.joined, member.code = False, None
            if (member.running or node != lost) and not member.leaving:
                self._order(node, {"wait": self._why})

    def _replaces(self, now: float) -> None:
        if self._replaced_at is None:
            self._replaced_at = now
            if 0 in self.members:
                self._order(0, {"say": f"{_REPLACES}; {AGAIN}"})

    def _decide(self, verdict: Document) -> None:
        if not self.decided:
            self.verdict = verdict
            for node in sorted(self.members):
                self._order(node, verdict)


_REPLACES = "this node takes the place of one that was lost"


def not_back(nodes: list[int], seconds: float) -> str:
    """That these nodes were lost and have not come back in time."""
    names = f"nodes {', '.join(map(str, nodes))} were" if len(nodes) > 1 else f"node {nodes[0]} was"
    return f"{names} lost and did not come back within {seconds:g} s"
