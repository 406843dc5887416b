"""Decide what one node's agent does, from the directives of node 0's `Membership`."""

from __future__ import annotations

import os

from clusterkit.agent import limits
from clusterkit.agent.member import not_returned
from clusterkit.agent.messages import (
    AgentState,
    CountRestarts,
    Directive,
    EndLauncher,
    Finish,
    Log,
    Order,
    Pause,
    Start,
    Warn,
)
from clusterkit.agent.protocol import Document

_NODE_0_LOST = "node 0 was lost; waiting for it"


class Link:
    """What a node knows of its connection to node 0; times as of `Peer`."""

    def __init__(self, now: float) -> None:
        self.connected_at: float | None = None  # None: there is no connection
        self.received_at = now  # when the last directive came
        self.lost_at: float | None = now  # since when no directive could come; None: they come
        self.error: str | None = None  # of the last attempt to connect
        self.refused = False  # whether that was refused: the host is up, and nobody listens

    def connected(self, now: float) -> None:
        self.connected_at, self.error, self.refused = now, None, False

    def disconnected(self, now: float, error: str | None, refused: bool) -> None:
        self.connected_at, self.error, self.refused = None, error, refused
        if self.lost_at is None:
            self.lost_at = now

    def received(self, now: float) -> None:
        self.received_at, self.lost_at = now, None


class Peer:
    """One node's side of a run, from the first attempt to reach node 0 to the run's end.

    Touches neither sockets nor clocks: ``now`` is a time of a monotonic clock, in seconds.

    Args:
        node: its rank.
        lost_after: seconds of silence after which node 0 is lost.
        wait: seconds that a lost node has to come back; 0: the launcher runs already.
        spare: it waits for another node to be lost.
    """

    def __init__(
        self, node: int, lost_after: float, wait: float, now: float, spare: bool = False
    ) -> None:
        self.orders: list[Order] = []  # for the caller to take
        self.done = False  # whether there is nothing more to report or receive
        self.report_due = False  # whether something is to be reported at once
        self.link = Link(now)
        self.state = AgentState(os.urandom(8).hex(), running=not wait, waiting=spare)
        self._node, self._lost_after, self._wait, self._spare = node, lost_after, wait, spare
        self._began = now
        self._ended_at: float | None = None  # when the launcher ended
        self._node_0_lost_at: float | None = None
        self._directive_sequence = 0  # the newest that came of this coordinator
        self._logged: object = None

    @property
    def undecided(self) -> bool:
        """Whether nothing was started yet, and no node 0 was met that could direct it."""
        started = self.state.running or self.state.exit_code is not None
        return not (self.state.coordinator or started or self._spare)

    def report(self) -> Document:
        """Return this agent's state as the next message to node 0."""
        self.state.sequence, self.report_due = self.state.sequence + 1, False
        return dict(vars(self.state))

    def connected(self, now: float) -> None:
        """Handle a new connection to whatever listens at node 0's port."""
        self.link.connected(now)

    def disconnected(self, now: float, error: str | None = None, refused: bool = False) -> None:
        """Handle the end of the connection, or an attempt to connect that failed."""
        self.link.disconnected(now, error, refused)
        if self.undecided:
            self._start(0, "")

    def is_silent(self, now: float) -> bool:
        """Return whether nothing comes over a connection that seems to be open."""
        link = self.link
        return link.connected_at is not None and (
            now - max(link.connected_at, link.received_at) > self._lost_after
        )

    def launcher_ended(
        self,
        code: int,
        now: float,
        *,
        cannot_restart: bool = False,
        failure: Document | None = None,
        step: int | None = None,
    ) -> None:
        """Handle the end of this node's launcher.

        Args:
            cannot_restart, failure, step: as of `AgentState`.
        """
        state = self.state
        state.failure, state.step, state.cannot_restart = failure, step, cannot_restart
        state.running, state.exit_code = False, None if state.waiting else code
        self._ended_at, self.report_due = now, True

    def leave(self) -> None:
        """Handle a request to end, by nobody of the run."""
        self.state.leaving = self.report_due = True

    def time_limit_reached(self) -> None:
        """Have the run end: it is over its time limit."""
        self.state.timed_out = self.report_due = True

    def close(self) -> None:
        """Report and receive nothing more."""
        self.done = True

    def receive(self, directive: Directive, now: float) -> None:
        """Follow a directive of node 0's."""
        state = self.state
        self.link.received(now)
        self._node_0_lost_at = None
        if directive.coordinator != state.coordinator:
            if state.coordinator:
                state.round, state.exit_code = 0, None
                if state.running:
                    self._end_launcher(_NODE_0_LOST, self._wait)
            state.coordinator, self._directive_sequence = directive.coordinator, 0
        if directive.sequence < self._directive_sequence or state.leaving or self.done:
            return
        # Every decision is answered.
        self.report_due |= directive.sequence > self._directive_sequence
        self._directive_sequence = directive.sequence
        if directive.restarts_used > state.restarts_used:
            state.restarts_used = directive.restarts_used
            if self._spare and directive.action != "start":
                self.orders.append(CountRestarts(state.restarts_used))
        if directive.action == "start":
            if state.running or (state.exit_code is not None and not state.round):
                if not state.waiting and not state.round:
                    state.round = directive.round  # a first launcher is of that round
                self._log(directive.round, "start", directive.text)
            elif directive.round > state.round:
                if directive.free:
                    free = f"restarted without using a restart: {directive.free}"
                    self.orders.append(Warn(free))
                self._start(directive.round, directive.text, directive.rank, directive.nodes)
        elif directive.action == "wait":
            state.round = directive.round
            self._end_launcher(directive.text, directive.seconds)
        else:
            ours = directive.failed == self._node
            final = directive.final if ours or directive.final is None else ""
            stop = directive.action == "stop" and not ours
            self._finish(Finish(stop, directive.text, final))

    def tick(self, now: float) -> None:
        """Do what has become due."""
        if self.done:
            return
        link = self.link
        if not self.state.coordinator:
            self._seek_node_0(now)
        elif self._node_0_lost_at is None:
            lost = link.lost_at is not None and now - link.lost_at > limits.PEER_GONE_SECONDS
            silent = now - link.received_at > self._lost_after
            if silent or (lost and (link.refused or self._wait)):
                self._node_0_lost(now)
        elif now - self._node_0_lost_at > self._wait:
            self._finish(Finish(stop=True, reason=not_returned([0], self._wait)))

    def _seek_node_0(self, now: float) -> None:
        link = self.link
        if self.undecided:
            connected = link.connected_at
            if connected is not None and now - connected > limits.FIRST_SECONDS:
                self._start(0, "")
        elif now - self._began > limits.PEER_MEET_SECONDS:
            self.run_unwatched(
                f"node 0 cannot be reached: {link.error or 'another program listens there'}"
            )
        elif self._ended_at is not None and (
            now - self._ended_at > max(self._wait, limits.PEER_GONE_SECONDS)
        ):
            self._finish(Finish(stop=False))  # no node 0 was ever met that could direct more

    def run_unwatched(self, reason: str) -> None:
        """Go on without node 0, or end where that is a spare: it can never be reached."""
        if self._spare:
            return self._finish(Finish(stop=True, reason=reason))
        self.orders.append(Warn(f"the other nodes are not watched: {reason}"))
        if self.undecided:
            self._start(0, "")
        return self._finish(Finish(stop=False))

    def _node_0_lost(self, now: float) -> None:
        if not self._wait:
            silent = f"node 0 has not answered for {self._lost_after:g} s"
            reason = "the launcher of node 0 is gone" if self.link.refused else silent
            return self._finish(Finish(stop=True, reason=reason))
        self._node_0_lost_at, self.state.gave_up = now, True
        return self._end_launcher(_NODE_0_LOST, self._wait)

    def _start(
        self, number: int, text: str, rank: int | None = None, nodes: int | None = None
    ) -> None:
        self._log(number, "start", text)
        state = self.state
        state.round, state.exit_code, state.failure, state.running = number, None, None, True
        state.waiting = state.gave_up = self._spare = False
        self.report_due = True
        self.orders.append(Start(state.restarts_used, rank, nodes))

    def _end_launcher(self, reason: str, seconds: float) -> None:
        """Have the launcher end, and wait."""
        if seconds and (0, "wait", reason) != self._logged:
            self.orders.append(Pause(reason, seconds))
        self._log(0, "wait", reason)
        if not self.state.waiting:
            self.state.waiting, self.state.exit_code, self.report_due = True, None, True
            self.orders.append(EndLauncher(reason))

    def _log(self, number: int, action: str, text: str) -> None:
        if text and (number, action, text) != self._logged:
            self.orders.append(Log(text))
        self._logged = (number, action, text)

    def _finish(self, order: Finish) -> None:
        self.done = True
        self.orders.append(order)
