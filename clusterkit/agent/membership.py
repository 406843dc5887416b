"""When launchers start, end and start again on all nodes: agents' states in, directives out."""

from __future__ import annotations

import os
from typing import Any

from clusterkit.agent import limits
from clusterkit.agent.member import Ending, Member, Members, RestartPolicy, node_names, not_returned
from clusterkit.agent.messages import AgentState, Directive
from clusterkit.agent.protocol import STARTING_AGAIN
from clusterkit.agent.retries import Retries


class Membership:
    """Decides for all nodes when launchers start, end and start again.

    A round is one start of all launchers. The first is open: each node joins it as it comes. A
    round is over when a launcher fails while ``restarts`` are left, or a node is lost that may come
    back. Everyone ends its launcher then; once all nodes are here and each has reported that none
    of an older round runs or will, the next round begins for all at once. A node that is found lost
    meanwhile is why the launcher failed: that costs no restart. Every launcher that ended with 0
    ends the run, and so does one that failed when no restart is left, or when a node can start no
    other.

    Nodes that were lost and have not come back in time are replaced by spares, with the same ranks.
    Where there are none the run ends, unless node 0 and ``min_nodes`` in all are left: these
    continue as a smaller run, with their ranks counted anew in the order that they had. Any other
    agent has to end. A node that never came is noticed when the run can continue without it.

    A node without which the run continues may come again, by another agent: as a spare. If there
    is a vacant place, the round ends for it, as for a lost node: ranks that are asked to end save
    their work. The next one begins with it; that costs no restart.

    Where lost nodes do not come back (``wait`` 0), one ends the run. Where nothing is ever started
    again (``restarts`` 0 as well), a launcher that fails ends it at once; a node that ended leaves,
    and is not lost; when node 0 ends with 0, the others go on by themselves.

    Touches neither sockets nor clocks: ``now`` is a time of a monotonic clock, in seconds.
    """

    def __init__(self, terms: RestartPolicy) -> None:
        self.identity = os.urandom(8).hex()
        self.round = 1
        self.members = Members(terms)
        self.verdict: Directive | None = None  # what ends the run, once that is decided
        self.sequence = 1  # of the last decision; all nodes get each at once
        self.changed = False  # whether `advance` has something to do
        self._terms = terms
        self._timeout = terms.wait or limits.PEER_MEET_SECONDS  # for a node that is not here
        self._retries = Retries(terms.restarts, terms.retry_on)
        self._text = self._free = ""  # what all nodes log of this round; why it used no restart
        self._ending: Ending | None = None  # None: this round goes on
        self._dropped = ""  # which nodes were lost for good since the last round
        self._cannot_restart = False  # whether that is so on a node in this round
        self._first_tick: float | None = None
        self._began = self._last_exit = 0.0  # when this round did; when a launcher ended last
        self._replaced_agents: set[str] = set()
        self._replaced_at: float | None = None  # when it was known that another node 0 was here

    @property
    def decided(self) -> bool:
        return self.verdict is not None

    def directive(self, node: int, now: float) -> Directive:
        """Return what this node's agent is to do."""
        if not self.members.includes(node):
            return self.rejection(node)
        if self.verdict is not None:
            return self.verdict
        if node in self.members.spares:
            return self._directive("wait", "spare: waits until a node is lost")
        if (ending := self._ending) is not None:
            seconds = 0.0 if ending.until is None else max(0.0, ending.until - now)
            return self._directive("wait", ending.reason, seconds=seconds)
        text, member = self._text, self.members.by_node.get(node)
        if not text and self._replaced_at is not None:
            if node == 0:
                text = f"this node replaces a lost node; {STARTING_AGAIN}"
            elif member is not None and member.rejoined:
                text = f"node 0 is back; {STARTING_AGAIN}"
        ranks = self.members.ranks
        return self._directive("start", text, rank=ranks[node], nodes=len(ranks), free=self._free)

    def rejection(self, node: int) -> Directive:
        """Return the directive for an agent whose state `receive` refused."""
        replaced = self.members.includes(node)
        reason = "another agent has replaced it" if replaced else "the run continues without it"
        return self._directive("stop", reason)

    def _directive(self, action: str, text: str, **fields: Any) -> Directive:
        used = self._retries.used
        return Directive(self.identity, self.sequence, self.round, used, action, text, **fields)

    def receive(self, node: int, state: AgentState, now: float) -> bool:
        """Take an agent's state. Return False if another agent has replaced this one, or the run
        continues without its node."""
        member = self.members.by_node.get(node)
        if state.agent in self._replaced_agents:
            return False
        if member is None or member.state.agent != state.agent:
            member = self._new_agent(node, member, state, now)
        elif state.sequence <= member.state.sequence:
            return True  # late, or doubled
        leaves, ours = state.leaving and member.present, state.coordinator == self.identity
        current = ours and state.round == self.round
        self.changed |= member.update(state, now, current)
        self._retries.used = max(self._retries.used, state.restarts_used)
        if self.decided:
            return True
        if state.timed_out:
            self._decide("stop", "the run is over its time limit", final="")
        elif leaves:
            self._lose(node, now)
        if not (leaves or self.decided or node in self.members.spares):
            self._judge_launcher(node, member, current, now)
        return True

    def _new_agent(self, node: int, before: Member | None, state: AgentState, now: float) -> Member:
        """Take the first state of an agent; ``before``: the node with its last one."""
        self.members.by_node[node] = Member(AgentState(state.agent))
        if before is not None:
            self._replaced_agents.add(before.state.agent)
            lost = before.present
        else:
            # One that waits and met no node 0 found files of an agent that never reported.
            lost = state.waiting and not state.coordinator
        if lost:
            self._lose(node, now)
        if not self.members.includes(node):
            self.members.spares.append(node)
        return self.members.by_node[node]

    def _judge_launcher(self, node: int, member: Member, current: bool, now: float) -> None:
        """Decide what follows of the launcher's state on a node that has ranks."""
        state = member.state
        ours = state.coordinator == self.identity
        rejoined = bool(state.coordinator) and not ours
        if rejoined:
            member.rejoined = True
            if self._replaced_at is None:
                self._replaced_at = now
                self.sequence += 1
        member.early |= state.running and not state.coordinator
        if current:
            self._cannot_restart |= state.cannot_restart
            member.failure, member.step = state.failure, state.step
        if self._ending is not None and state.gave_up:
            self._ending.failed = None  # whoever failed may have failed of that
        if self._ending is not None or state.leaving:
            return
        if self._replaced_at is not None and self.members.may_be_mixed(member, rejoined):
            self._lose(0, now)
        elif state.coordinator and not current:
            if state.running:
                self._lose(node, now)
        elif state.exit_code is not None and not state.running:
            self._launcher_ended(node, member, state.exit_code, now, ours)
        elif member.ready and not state.running:
            self._lose(node, now)  # it had given this node 0 up, and ended its launcher

    def disconnected(self, node: int, now: float) -> None:
        """Handle the end of a node's connection."""
        self.members.by_node[node].disconnected(now)

    def tick(self, now: float) -> None:
        """Look for silent nodes, then do all that has become due."""
        for node, reason in self.members.newly_lost(now) if not self.decided else ():
            self._lose(node, now, reason and f"node {node} {reason}")
            if self.decided:
                break
        self._first_tick = now if self._first_tick is None else self._first_tick
        waited = now - self._first_tick > limits.PEER_MEET_SECONDS
        opening = not (self._text or self._ending or self.decided)
        absent = self.members.never_came() if waited and opening else []
        if absent and self.members.can_lose_one:
            self._lose(absent[0], now)
        elif absent:
            self._text = f"{node_names(absent)} did not join within {limits.PEER_MEET_SECONDS:g} s"
            self.sequence += 1
        elif self._should_admit(now):
            who = node_names(self.members.joinable())
            self._end_round(None, f"{who} can join; the ranks save their work and end", now)
        self.advance(now)

    def _should_admit(self, now: float) -> bool:
        """Return whether spares can join a round in which all has gone well for a while."""
        over = self.decided or self._ending is not None or self._replaced_at is not None
        if over or now - self._began <= limits.JOIN_SECONDS or not self.members.joinable():
            return False
        return all(each.state.running and each.connected for each in self.members.active())

    def advance(self, now: float) -> None:
        """Decide what follows of received states: `tick` without the look for silent nodes."""
        self.changed = False
        members = self.members.active()
        if self.decided or not members:
            return
        complete = len(members) == len(self.members.ranks)
        if (complete or now - self._last_exit > self._timeout) and all(
            member.exit_code == 0 for member in members
        ):
            # A node that never came may have ended before this coordinator began.
            self._decide("exit", "")
        elif self._ending is not None:
            self._between_rounds(self._ending, now)
        elif self._replaced_at is not None and now - self._replaced_at > self._timeout:
            self._drop(self.members.missing())
            self._replaced_at = None

    def _between_rounds(self, ending: Ending, now: float) -> None:
        seconds = now - ending.since
        if (unready := self.members.unready()) is not None:
            if seconds > self._timeout and (missing := self.members.missing()):
                self._drop(missing)
            elif seconds > max(self._timeout, limits.END_SECONDS):
                self._decide("stop", f"node {unready} did not end within {seconds:.0f} s")
        elif ending.failed is not None and ending.until is None and self._is_final(ending):
            return
        elif now >= ending.restart_at:
            self._begin_round(ending, now)
        elif ending.until is None:
            ending.until, self.sequence = ending.restart_at, self.sequence + 1
            ending.reason = f"{self._retries.next} waits {ending.restart_at - now:.0f} s"

    def _is_final(self, ending: Ending) -> bool:
        """End the run if no round may follow one in which a node's launcher failed."""
        final = None  # with another port the supervisor may start all nodes again
        if not self._cannot_restart:
            failures, lasted = self.members.failures(), ending.since - self._began
            final = self._retries.reason_not_to_restart(*failures, lasted) or ""
            if not final and self._retries.left:
                return False
        self._decide("stop", f"node {ending.failed} failed", failed=ending.failed, final=final)
        return True

    def _drop(self, missing: list[int]) -> None:
        """Continue without these nodes, if any, which have not come back in time."""
        if not missing:
            return
        reason, agents = not_returned(missing, self._timeout), self.members.by_node
        if (changes := self.members.drop(missing)) is None:
            self._decide("stop", reason)
            return
        self._replaced_agents |= {agents[node].state.agent for node in missing if node in agents}
        self._dropped = f"{reason}; {changes}"
        if self._ending is not None:
            self._ending.failed = None  # whoever failed may have failed of that
        self.sequence, self.changed = self.sequence + 1, True

    def _launcher_ended(self, node: int, member: Member, code: int, now: float, met: bool) -> None:
        """Handle a launcher that ended by itself; ``met``: its node had met this coordinator."""
        if member.exit_code is None:
            member.exit_code, self._last_exit, self.changed = code, now, True
        if not self._terms.wait and code and not self._retries.left:
            self._decide("stop", f"node {node} failed", failed=node)
        elif not self._terms.restartable and node == 0:
            self._decide("exit", "")
        elif code:
            # Else it may have failed of a node 0 that was lost before it met that.
            own = met or not self._terms.wait or member.failed_by_itself
            text, pause = f"node {node} failed", self._retries.pause(now - self._began)
            self._end_round(node if own else None, text, now, pause)
            if self._ending is not None and not own:
                self._ending.free = f"{text} before it had met node 0"

    def _lose(self, node: int, now: float, reason: str = "") -> None:
        """Handle the loss of a node, or of its launcher; ``reason``: if that ends the run."""
        if self.decided or node not in self.members.ranks:
            return
        if self._terms.wait:
            pause = 0.0 if self._ending else self._retries.lost(now - self._began)
            text = f"node {node} was lost; waiting for it"
            self._end_round(node if pause is None else None, text, now, pause or 0.0)
        else:
            self._decide("stop", reason or f"the launcher of node {node} is gone")

    def _end_round(self, failed: int | None, reason: str, now: float, pause: float = 0.0) -> None:
        until = now + self._timeout if failed is None else None
        self._ending = Ending(reason, now, failed, now + pause, until)
        self.sequence += 1
        for member in self.members.active():
            member.ready, member.early, member.exit_code = False, False, None

    def _begin_round(self, ending: Ending, now: float) -> None:
        nodes = self.members.admit()
        self._text, self._free = f"{self._dropped or nodes}; {STARTING_AGAIN}", ending.free
        if ending.failed is not None:
            self._text = self._retries.use()
        self.round, self.sequence, self._began = self.round + 1, self.sequence + 1, now
        self._ending, self._replaced_at, self._cannot_restart, self._dropped = None, None, False, ""
        for member in self.members.active():
            member.ready, member.failure, member.step = False, None, None

    def _decide(
        self, action: str, reason: str, failed: int | None = None, final: str | None = None
    ) -> None:
        """End the run; arguments as of `Directive`."""
        self.sequence += 1
        self.verdict = self._directive(action, reason, failed=failed, final=final)
