"""What one node's agent does about what node 0's `Membership` says, or when it says nothing."""

from __future__ import annotations

import os

from clusterkit.agent import limits
from clusterkit.agent.member import not_back
from clusterkit.agent.protocol import Document

_WAITS = "node 0 was lost; waiting for it"


class Peer:
    """One node's side of a run, from the first attempt to reach node 0 to the run's end.

    Touches neither sockets nor clocks: ``now`` is a moment of a monotonic clock, in seconds.

    Args:
        node: its rank.
        lost_after: seconds of silence after which node 0 is lost.
        wait: seconds that a lost node has to come back; 0: the launcher runs already.
        spare: it waits for another node to be lost.
    """

    def __init__(
        self, node: int, lost_after: float, wait: float, now: float, spare: bool = False
    ) -> None:
        self.orders: list[tuple[str, str]] = []
        """For the caller to take: ``start`` (the launcher; with how many restarts were used, and
        where it is known the node's rank in this round and of how many nodes that is), ``follow``
        (so many restarts were used by the others), ``wait`` (end it, and be ready), ``pause`` (so
        many seconds may go by until the next start; why follows), ``final`` (what comes is for
        good, for the reason given, if any), ``stop`` (end, for the reason given), ``exit`` (end as
        the launcher has); a line to ``say`` in the node's log, or to ``warn`` people with."""
        self.done = False  # whether there is nothing more to hear
        self.news = False  # whether there is something to say at once
        self.met = ""  # which coordinator was met last
        self._node, self._lost_after, self._wait = node, lost_after, wait
        self._agent = os.urandom(8).hex()
        self._said = 0  # statements
        self._count = 0  # of the coordinator's statements, the newest that was heard
        self._logged: object = None
        self._round = 0  # the last one that was heard of: no older one will be started here
        self._used = 0  # restarts, as was heard
        self._running = not wait
        self.code: int | None = None  # how the launcher ended by itself
        self._ended_at: float | None = None
        self._spare = spare
        self._waiting = spare  # whether the launcher may not run
        self._gave_up = False  # whether it ended its launcher because node 0 was lost
        self._last = False  # whether no other launcher can be started here
        self._failure: Document | None = None  # of the launcher's ranks, by themselves
        self._step: int | None = None  # that they came to
        self._leaving = self._late = False
        self._began = self._heard = now
        self._connected: float | None = None  # since when there is a connection
        self._gone: float | None = now  # since when there is none on which anything was heard
        self._trouble: str | None = None  # why there is none, as the system says
        self._refused = False
        self._given_up: float | None = None  # since when node 0 is lost

    @property
    def new(self) -> bool:
        """Whether nothing was started yet, and nobody met who could say whether it may be."""
        started = self._running or self.code is not None
        return not (self.met or started or self._spare)

    def statement(self) -> Document:
        """How things stand here, for the coordinator."""
        self._said, self.news = self._said + 1, False
        return {
            "agent": self._agent, "count": self._said, "coordinator": self.met,
            "round": self._round, "used": self._used, "running": self._running, "code": self.code,
            "waiting": self._waiting, "gave_up": self._gave_up, "leaving": self._leaving,
            "late": self._late, "last": self._last, "failure": self._failure, "step": self._step,
        }  # fmt: skip

    def connected(self, now: float) -> None:
        """There is a connection to whatever listens at node 0's port."""
        self._connected, self._refused, self._trouble = now, False, None

    def disconnected(self, now: float, trouble: str | None = None, refused: bool = False) -> None:
        """It has broken off, or there was none."""
        self._connected, self._refused = None, refused
        self._trouble = trouble
        if self._gone is None:
            self._gone = now
        if self.new:
            self._start(0, "")

    def silent(self, now: float) -> bool:
        """Whether nothing is heard on a connection that is said to be there."""
        return self._connected is not None and (
            now - max(self._connected, self._heard) > self._lost_after
        )

    def ended(
        self,
        code: int,
        now: float,
        *,
        last: bool = False,
        failure: Document | None = None,
        step: int | None = None,
    ) -> None:
        """This node's launcher has.

        Args:
            last: no other can be started here.
            failure: how its ranks failed before they were asked to end (`failure.Words.failure`).
            step: the last that they reported.
        """
        self._failure, self._step = failure, step
        self._running, self._ended_at, self.news, self._last = False, now, True, last
        self.code = None if self._waiting else code

    def leave(self) -> None:
        """This node was asked to end, by nobody of the run."""
        self._leaving = self.news = True

    def late(self) -> None:
        """The run is over its time limit."""
        self._late = self.news = True

    def close(self) -> None:
        """Nothing more is said or heard."""
        self.done = True

    def hears(self, message: Document, now: float) -> None:
        """Node 0 says how things stand."""
        coordinator, count = str(message["coordinator"]), int(message["count"])
        do, number = str(message["do"]), int(message["round"])
        self._heard, self._gone, self._given_up = now, None, None
        if coordinator != self.met:
            if self.met:
                self._round, self.code = 0, None
                if self._running:
                    self._hold(_WAITS, self._wait)
            self.met, self._count = coordinator, 0
        if count < self._count or self._leaving or self.done:
            return
        self.news = self.news or count > self._count  # every decision is answered
        if self._spare and int(message["used"]) > self._used and do != "start":
            self.orders.append(("follow", str(message["used"])))
        self._count, self._used = count, max(self._used, int(message["used"]))
        say = str(message.get("say") or "")
        if do == "start":
            if self._running or (self.code is not None and not self._round):
                if not self._waiting and not self._round:
                    self._round = number  # a first launcher is of that round
                self._log(number, do, say)
            elif number > self._round:
                self._start(number, say, f" {int(message['rank'])} {int(message['nodes'])}")
        elif do == "wait":
            self._round = number
            self._hold(say, float(message["seconds"]))
        else:
            if (final := message.get("final")) is not None:
                self.orders.append(("final", final if message.get("failed") == self._node else ""))
            self._end(do if message.get("failed") != self._node else "exit", str(message["why"]))

    def turn(self, now: float) -> None:
        """What has become due."""
        if self.done:
            return
        if not self.met:
            self._not_met(now)
        elif self._given_up is None:
            gone = self._gone is not None and now - self._gone > limits.PEER_GONE_SECONDS
            if now - self._heard > self._lost_after or (gone and (self._refused or self._wait)):
                silent = f"node 0 does not answer for {self._lost_after:g} s"
                self._give_up("the launcher of node 0 is gone" if self._refused else silent, now)
        elif now - self._given_up > self._wait:
            self._end("stop", not_back([0], self._wait))

    def _not_met(self, now: float) -> None:
        if self.new:
            if self._connected is not None and now - self._connected > limits.FIRST_SECONDS:
                self._start(0, "")
        elif now - self._began > limits.PEER_MEET_SECONDS:
            self.alone(
                f"node 0 cannot be reached: {self._trouble or 'another program listens there'}"
            )
        elif self._ended_at is not None and (
            now - self._ended_at > max(self._wait, limits.PEER_GONE_SECONDS)
        ):
            self._end("exit", "")  # nobody was ever met who could say more

    def alone(self, why: str) -> None:
        """Nobody can be met."""
        if self._spare:
            return self._end("stop", why)
        self.orders.append(("warn", f"the other nodes are not watched: {why}"))
        if self.new:
            self._start(0, "")
        return self._end("exit", "")

    def _give_up(self, why: str, now: float) -> None:
        """Node 0 is lost. ``why``: what to say where nobody waits for it."""
        if not self._wait:
            return self._end("stop", why)
        self._given_up, self._gave_up = now, True
        self._hold(_WAITS, self._wait)

    def _start(self, number: int, say: str, place: str = "") -> None:
        self._log(number, "start", say)
        self._round, self.code, self._running = number, None, True
        self._waiting = self._gave_up = self._spare = False
        self._failure = None
        self.news = True
        self.orders.append(("start", f"{self._used}{place}"))

    def _hold(self, say: str, seconds: float) -> None:
        """Have the launcher end, and wait."""
        if seconds and (0, "wait", say) != self._logged:
            self.orders.append(("pause", f"{seconds:.3f} {say}"))
        self._log(0, "wait", say)
        if not self._waiting:
            self._waiting, self.code, self.news = True, None, True
            self.orders.append(("wait", say))

    def _log(self, number: int, do: str, say: str) -> None:
        if say and (number, do, say) != self._logged:
            self.orders.append(("say", say))
        self._logged = (number, do, say)

    def _end(self, order: str, why: str) -> None:
        self.done = True
        self.orders.append((order, why))
