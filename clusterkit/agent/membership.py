"""When launchers start, end and start again on all nodes: what agents say in, orders out."""

from __future__ import annotations

import os

from clusterkit.agent import limits
from clusterkit.agent.member import Member, Members, Terms, named, not_back
from clusterkit.agent.protocol import AGAIN, Document
from clusterkit.agent.retries import Retries


class Membership:
    """Decides for all nodes when launchers start, end and start again.

    A round is one start of all launchers. The first is open: each node joins it as it comes. A
    round is over when a launcher fails while ``restarts`` are left, or a node is lost that may come
    back. Everyone ends its launcher then; once all nodes are here and each has said that none of an
    older round runs or will, the next round begins for all at once. A node that is found lost
    meanwhile is why the launcher failed: that costs no restart. Every launcher that ended with 0
    ends the run, and so does one that failed when no restart is left, or when a node can start no
    other.

    In the place of nodes that were lost and have not come back in time come spares, with the same
    ranks. Where there are none the run ends, unless node 0 and ``least`` in all are left: these go
    on as a smaller run, with their ranks counted anew in the order that they had. Any other agent
    has to end. A node that never came is noticed when the run can go on without it.

    A node with which the run does not go on may come again, by another agent: as a spare. If there
    is a place that nobody has, the round ends for it, as for a lost node: ranks that are asked to
    end save what they have. The next one begins with it; that costs no restart.

    Where lost nodes do not come back (``wait`` 0), one ends the run. Where nothing is ever started
    again (``restarts`` 0 as well), a launcher that fails ends it at once; a node that ended leaves,
    and is not lost; when node 0 ends with 0, the others go on by themselves.

    Both sides say how things stand, again and again, and never what has changed: what is lost, late
    or said twice does no harm. Touches neither sockets nor clocks: ``now`` is a moment of a
    monotonic clock, in seconds.
    """

    def __init__(self, terms: Terms) -> None:
        self.identity = os.urandom(8).hex()
        self.round = 1
        self.members = Members(terms)
        self.verdict: Document = {}  # what ends the run, once that is decided
        self.count = 1  # of what was decided: another one is for all to hear
        self.news = False  # whether `turn` has something to do that does not come with time
        self._terms = terms
        self._patience = terms.wait or limits.PEER_MEET_SECONDS  # for a node that is not here
        self._retries = Retries(terms.restarts, terms.retry_on)
        self._without = ""  # which nodes were lost for good since the last round
        self._say = ""  # what all nodes log of this round
        self._over_at: float | None = None  # since when this round is over; None: it goes on
        self._failed: int | None = None  # the node for which it is; None: one was lost
        self._last = False  # whether a node says that none can follow
        self._since: float | None = None  # when it was first looked who is here
        self._began = 0.0
        self._last_end = 0.0  # when the last launcher ended by itself
        self._next_at = 0.0  # when the next one may begin
        self._until: float | None = None  # when it does, or how long a lost node is waited for
        self._now = 0.0  # of what was heard or decided last
        self._past: set[str] = set()  # agents in whose place another one has come
        self._replaced_at: float | None = None  # when it was known that this node 0 is another one

    @property
    def decided(self) -> bool:
        """Whether the run is over."""
        return bool(self.verdict)

    def says(self, node: int) -> Document:
        """How things stand, for this node's agent."""
        if not self.members.knows(node):
            return self.turned_away(node)
        if self.decided:
            what = self.verdict
        elif node in self.members.spares:
            what = {"do": "wait", "say": "a spare: waits for a place", "seconds": 0.0}
        elif self._over_at is not None:
            seconds = 0.0 if self._until is None else max(0.0, self._until - self._now)
            what = {"do": "wait", "say": self._say, "seconds": seconds}
        else:
            say, member = self._say, self.members.said.get(node)
            if not say and self._replaced_at is not None:
                say = "" if node else f"this node takes the place of one that was lost; {AGAIN}"
                if node and member is not None and member.met:
                    say = f"node 0 is back; {AGAIN}"
            ranks = self.members.ranks
            what = {"do": "start", "say": say, "rank": ranks[node], "nodes": len(ranks)}
        return {**self._standing, **what}

    def turned_away(self, node: int) -> Document:
        """What an agent hears that `hears` did not take."""
        replaced = self.members.knows(node)
        why = "another agent has taken its place" if replaced else "the run goes on without it"
        return {**self._standing, "do": "stop", "why": why}

    @property
    def _standing(self) -> Document:
        return {
            "coordinator": self.identity, "count": self.count, "round": self.round,
            "used": self._retries.used,
        }  # fmt: skip

    def hears(self, node: int, said: Document, now: float) -> bool:
        """An agent says how it stands. Whether it is this node's: none has come in its place, and
        the run does not go on without it."""
        agent, met = str(said["agent"]), str(said["coordinator"])
        code = None if said["code"] is None else int(said["code"])
        member = self.members.said.get(node)
        self._now = now
        if agent in self._past:
            return False
        if member is not None and member.agent == agent and int(said["count"]) <= member.count:
            return True  # late, or said twice
        if member is None or member.agent != agent:
            before, member = member, Member(agent)
            self.members.said[node] = member
            if before is not None:
                self._past.add(before.agent)
            # One that waits, and met nobody, found what another left that was lost unheard of.
            if before.present if before is not None else said["waiting"] and not met:
                self._lost(node, now)
            if not self.members.knows(node):
                self.members.spares.append(node)
        gone, ours = said["leaving"] and member.present, met == self.identity
        current = ours and int(said["round"]) == self.round
        self.news |= member.says(said, now, current)
        self._retries.used = max(self._retries.used, int(said["used"]))
        if self.decided:
            return True
        if said["late"]:
            self._decide("stop", "the run is over its time limit", final="")
        elif gone:
            self._lost(node, now)
        if gone or self.decided or node in self.members.spares:
            return True
        if met and not ours:
            member.met = True
            if self._replaced_at is None:
                self._replaced_at = now
                self.count += 1
        member.early |= member.running and not met
        if current:
            self._last |= bool(said["last"])
            member.failure, member.step = said["failure"], said["step"]
        if said["gave_up"]:
            self._failed = None  # whoever failed may have failed of that
        if self._over_at is not None or said["leaving"]:
            return True
        if self._replaced_at is not None and self.members.mixed(member, bool(met) and not ours):
            self._lost(0, now)
        elif met and not current:
            if member.running:
                self._lost(node, now)
        elif code is not None and not member.running:
            self._ended(node, code, now, known=ours)
        elif member.ready and not member.running:
            self._lost(node, now)  # it had given this node 0 up, and ended its launcher
        return True

    def closed(self, node: int, now: float) -> None:
        """Its connection is gone."""
        member = self.members.said[node]
        if member.closed is None:
            member.closed = now

    def turn(self, now: float) -> None:
        """What has become due."""
        again = self._terms.again
        for node in (*self.members.ranks, *self.members.spares):
            member = self.members.said.get(node)
            if self.decided or member is None or (member.code is not None and not again):
                continue
            if member.present and (gone := member.gone(now, self._terms.lost_after)) is not None:
                member.present = False
                self._lost(node, now, gone and f"node {node} {gone}")
        self._since = now if self._since is None else self._since
        late = limits.PEER_MEET_SECONDS  # for a node that nobody ever heard of
        first = now - self._since > late and not (self._say or self.decided)
        if first and (away := self.members.never_came()) and self.members.may_miss:
            self._lost(away[0], now)
        elif first and away:
            self._say, self.count = f"{named(away)} did not come within {late:g} s", self.count + 1
        elif self._may_join(now):
            who = named(self.members.joining())
            self._over(None, f"{who} can join; the ranks save their work and end", now)
        self.settle(now)

    def _may_join(self, now: float) -> bool:
        """Whether nodes can join: then a round ends in which all went well for a while."""
        over = self.decided or self._over_at is not None or self._replaced_at is not None
        if over or now - self._began <= limits.JOIN_SECONDS or not self.members.joining():
            return False
        return all(member.running and member.reached for member in self.members.all())

    def settle(self, now: float) -> None:
        """What follows of what was said (``news``): `turn` without a look at who is silent."""
        self.news, self._now = False, now
        members = self.members.all()
        if self.decided or not members:
            return
        here = len(members) == len(self.members.ranks)
        if (here or now - self._last_end > self._patience) and all(
            member.code == 0 for member in members
        ):
            # Whoever never came may have ended before this coordinator was there.
            self._decide("exit", "")
        elif self._over_at is not None:
            self._between_rounds(now, now - self._over_at)
        elif self._replaced_at is not None and now - self._replaced_at > self._patience:
            self._go_on_without(self.members.missing())
            self._replaced_at = None

    def _between_rounds(self, now: float, seconds: float) -> None:
        if (busy := self.members.busy()) is not None:
            if seconds > self._patience and (missing := self.members.missing()):
                self._go_on_without(missing)
            elif seconds > max(self._patience, limits.END_SECONDS):
                self._decide("stop", f"node {busy} did not end within {seconds:.0f} s")
        elif self._failed is not None and self._until is None and self._is_last():
            return
        elif now >= self._next_at:
            self._next_round(now)
        elif self._until is None:
            self._until, self.count = self._next_at, self.count + 1
            self._say = f"{self._retries.next} waits {self._next_at - now:.0f} s"

    def _is_last(self) -> bool:
        """Whether no round follows this one, in which a launcher failed: that is decided then."""
        final = None  # with another port somebody else may start all nodes again
        if not self._last:
            final = self._retries.refusal(*self.members.failures())
            if final is None and self._retries.left:
                return False
            final = final or ""
        self._decide("stop", f"node {self._failed} failed", failed=self._failed, final=final)
        return True

    def _go_on_without(self, missing: list[int]) -> None:
        """These nodes, if any, have not come back in time."""
        if missing:
            words = not_back(missing, self._patience)
            if (how := self.members.without(missing)) is None:
                return self._decide("stop", words)
            self._past |= {self.members.said[n].agent for n in missing if n in self.members.said}
            self._without = f"{words}; {how}"
            self._failed = None  # whoever failed may have failed of that
            self.count, self.news = self.count + 1, True
        return None

    def _ended(self, node: int, code: int, now: float, known: bool) -> None:
        """Its launcher has, by itself, in this round. ``known``: after it had met this node 0."""
        member = self.members.said[node]
        if member.code is None:
            member.code, self._last_end, self.news = code, now, True
        if not self._terms.wait and code and not self._retries.left:
            self._decide("stop", f"node {node} failed", failed=node)
        elif not self._terms.again and node == 0:
            self._decide("exit", "")
        elif code:
            self._next_at = now + self._retries.pause(now - self._began)
            # Else it may have failed of a node 0 that was lost before it met that.
            self._over(node if known or not self._terms.wait else None, f"node {node} failed", now)

    def _lost(self, node: int, now: float, why: str = "") -> None:
        """The node is, or what ran there. ``why``: what to say where nobody waits for it."""
        if self.decided or node not in self.members.ranks:
            return
        if self._terms.wait:
            self._next_at = now
            self._over(None, f"node {node} was lost; waiting for it", now)
        else:
            self._decide("stop", why or f"the launcher of node {node} is gone")

    def _over(self, failed: int | None, say: str, now: float) -> None:
        self._failed, self._say, self._over_at = failed, say, now
        self._until = now + self._patience if failed is None else None
        self.count += 1
        for member in self.members.all():
            member.ready, member.early, member.code = False, False, None

    def _next_round(self, now: float) -> None:
        here = self.members.join()
        self._say, self._without = f"{self._without or here}; {AGAIN}", ""
        if self._failed is not None:
            self._say = self._retries.use()
        self.round, self.count = self.round + 1, self.count + 1
        self._began, self._over_at, self._failed, self._replaced_at = now, None, None, None
        self._last = False
        for member in self.members.all():
            member.ready, member.failure, member.step = False, None, None

    def _decide(
        self, what: str, why: str, failed: int | None = None, final: str | None = None
    ) -> None:
        """The run's end. ``final``: nobody may start it again, for this reason if there is one."""
        self.verdict = {"do": what, "why": why, "failed": failed, "final": final}
        self.count += 1
