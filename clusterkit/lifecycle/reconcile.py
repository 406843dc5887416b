"""Decides what a run needs next: from what is recorded and observed of it, and the time.

Pure: no clock, socket, file or thread. The supervisor carries the decisions out; `status` without a
supervisor, and `attach`, come to the same `evidence.verdict`.

1. One attempt at a time. Nothing of a new attempt starts while a rank of an older one may live.
   Evidence that none does: the exit record of every node; a stop that all hosts have acknowledged,
   after the recorded processes were killed; or the lease (`evidence.Terms.lease`).
2. Only evidence ends a run. A node in an unknown state is neither lost nor ended.
3. What goes wrong in the caller is no event here: it calls again.
4. Attempts that cost no restart are counted, and begin ever later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import msgspec
from msgspec import Struct

from clusterkit.backends.base import Observation
from clusterkit.lifecycle.evidence import Phase, Terms, Verdict, lost, may_live, phase, verdict
from clusterkit.run.begun import Begun
from clusterkit.run.status import RunStatus, State

PEERS_SECONDS = 2.0
"""How long the other nodes have to end by themselves, so that the first failure is recorded."""
AGAIN_SECONDS = 5.0
"""Pause before nodes that did not end are stopped again."""
LOST_SECONDS = 600.0
"""How long the next attempt waits for evidence that the last one has ended everywhere."""
LIMIT_SLACK = 60.0
"""How long after ``time_limit`` and ``stop_grace`` the agents are still waited for, which end the
run by themselves."""
REJOIN_SECONDS = 10.0
"""How long a node is missing from a run that continues without it, beyond ``stop_grace``, before
it is started again. Doubles with each try."""
PORT_TRIES = 3
START_TRIES = 6
"""How often in a row an attempt that could not be started is tried again."""
EARLY_SECONDS, EARLY_LOSSES = 60.0, 3
STEADY_SECONDS, LOSSES = 3600.0, 20
"""How often in a row nodes may be lost within EARLY_SECONDS of the start, or within STEADY_SECONDS,
before the loss costs a restart."""
LONGEST_PAUSE = 300.0


# ---------------------------------------------------------------- what is to be done


class Start(Struct, frozen=True):
    """Start an attempt; answer with `Reconciler.started` or `not_started`."""


class Join(Struct, frozen=True):
    """Start one node, which joins the running attempt."""

    node: int


class Stop(Struct, frozen=True):
    """End what the attempt may still run; answer with `Reconciler.stopped`."""

    why: str


class Look(Struct, frozen=True):
    """Ask the hosts about an attempt that was not started wholly, as far as is known: whether all
    nodes run, or how they have ended. Answer with `Reconciler.looked_at`."""


class Ended(Struct, frozen=True):
    """The attempt has ended. Find out why, and answer with `Reconciler.judged`."""


class Next(Struct, frozen=True):
    """Record the attempt as failed, and another one as the newest."""

    attempt: int
    verdict: Verdict | None
    """Why; None: the agents have begun it."""
    without: tuple[int, ...] = ()
    """Nodes without which it is planned, as nothing lives there and their hosts do not answer."""


class Finish(Struct, frozen=True):
    """Record the end of the run."""

    state: State


Action = Start | Join | Stop | Look | Ended | Next | Finish
CANCELLED, OTHER_ENDED, LIMIT = "cancelled", "another node has ended", "the run's time_limit"


_ENDS = {
    Verdict.SUCCEEDED: State.SUCCEEDED,
    Verdict.CANCELLED: State.CANCELLED,
    Verdict.FAILED: State.FAILED,
}


class Stage(Enum):
    START = 1
    """The attempt is to be started."""
    WATCH = 2
    """It has been started, by us or the agents."""
    JUDGE = 3
    """It has ended."""
    SETTLE = 4
    """What follows is known, and waits for evidence that nothing lives."""


@dataclass
class Reconciler:
    """The decisions about one run. All times are seconds of a monotonic clock that stands still
    while its process does."""

    terms: Terms
    restarts_left: int
    attempt: int = 1
    stage: Stage = Stage.START
    started_by_agents: bool = False
    """Whether the agents of the previous attempt have started this one."""
    running_since: float | None = None
    ran_seconds: float = 0.0
    """How long the earlier attempts have run."""
    over_time_limit: bool = False
    """Whether it was stopped at its time limit from here."""
    port_tries: int = PORT_TRIES
    missing: dict[int, float] = field(default_factory=dict)
    """Since when a node has been missing from an attempt that continues without it."""
    joins: dict[int, int] = field(default_factory=dict)
    reported_at: float = 0.0
    """When the node that was started last has reported its state."""
    begun_at: float | None = None
    start_at: float = 0.0
    fresh: bool = True
    """Whether no attempt has begun before: its submitter waits, and is told of an error at once."""
    losses: int = 0  # in a row, without a steady attempt between them
    early_losses: int = 0
    half_started: bool = False
    """Whether its supervisor was killed while it started the nodes: which ones run is not known."""
    not_starting: int = 0
    quiet_since: float | None = None
    stop_at: float | None = None
    stops: int = 0
    living: bool = True
    """Whether ranks of the attempt may live."""
    acknowledged: bool = False
    looked: bool = False
    """Whether the attempt was looked at after all hosts had acknowledged the stop."""
    ending_since: float | None = None
    settled_at: float | None = None
    problem: str = ""
    """Why the attempt could not be started."""
    verdict: Verdict | None = None
    seen: Observation | None = None

    @classmethod
    def adopt(
        cls, terms: Terms, saved: RunStatus, begun: Begun | None, restarts: int
    ) -> Reconciler:
        """Return the state of a run whose previous supervisor is gone.

        Args:
            saved: as of `begun.since`.
            begun: None: a supervisor on another machine has begun it.
        """
        left = restarts if saved.restarts_left is None else saved.restarts_left
        made = cls(terms, left, saved.attempt, ran_seconds=saved.ran_seconds, fresh=False)
        # An attempt that has ended on record means that the next one was not started.
        ended = any(each.attempt == saved.attempt for each in saved.attempts)
        newest = begun if begun is not None and begun.attempt == saved.attempt else None
        if ended or (newest is not None and not newest.whole):
            made.stage, made.seen, made.verdict = Stage.SETTLE, None, Verdict.REPLACE
            made.half_started = not ended
        else:
            made.stage, made.started_by_agents = Stage.WATCH, newest is None
        return made

    # -- the next actions -------------------------------------------------

    def decide(self, seen: Observation | None, now: float, cancelled: bool) -> list[Action]:
        """Return what to do now; nothing: call again later.

        Args:
            seen: the newest attempt, without spares; None: nothing of it can be found, or it was
                not looked at.
            cancelled: whether somebody has asked to end the run.
        """
        match self.stage:
            case Stage.START:
                if cancelled:
                    return self._settle(now, cancelled)
                return [Start()] if now >= self.start_at else []
            case Stage.WATCH:
                return [] if seen is None and not cancelled else self._watch(seen, now, cancelled)
            case Stage.JUDGE:
                return [Ended()]
            case Stage.SETTLE:
                return self._settle(now, cancelled)

    def _watch(self, seen: Observation | None, now: float, cancelled: bool) -> list[Action]:
        tried = cancelled and self.stops > 1
        if seen is None:
            if tried:
                return self._settle(now, cancelled)
            return self._end_nodes(CANCELLED, now, 0.0)
        if self.begun_at is None:
            self.begun_at = now
        begun = sum(node.state is not State.PENDING for node in seen.nodes)
        if self.running_since is None and begun >= self.terms.least:
            self.running_since, self.not_starting = now, 0
        stopping = self.stops > 0
        pending = self.pending(seen, stopping=stopping)
        unreported = not (stopping or seen.next_attempt) and self._unreported(seen, now)
        certain = self.ending_since is not None and now - self.ending_since > LOST_SECONDS
        succeeded = seen.state is State.SUCCEEDED and stopping
        over = self._lease_over(seen, now) or tried or certain or succeeded
        reached = phase(
            self.terms, seen, pending=bool(pending), unreported=unreported, lease_over=over
        )
        if reached is Phase.ENDED:
            self.seen, self.stage = seen, Stage.JUDGE
            self.restarts_left = seen.remaining_restarts(self.restarts_left)
            return [Ended()]
        if cancelled:
            return self._end_nodes(CANCELLED, now, 0.0)
        if self._over_limit(now):
            self.over_time_limit = True
            return self._end_nodes(LIMIT, now, 0.0)
        if reached is Phase.ENDING:
            self.ending_since = now if self.ending_since is None else self.ending_since
            return self._end_nodes(OTHER_ENDED, now, PEERS_SECONDS)
        if pending and now > self.begun_at + self.terms.start_seconds:
            limit = f"{self.terms.start_seconds:g} s"
            self.not_started(now, f"node {pending[0]} did not report within {limit}")
            return []
        self.ending_since = None
        if self.stops == 0:
            self.stop_at = None
        return [Join(node) for node in self.joining(seen, now)]

    def _end_nodes(self, why: str, now: float, grace: float) -> list[Action]:
        if self.stop_at is None:
            self.stop_at = now + grace
        if now < self.stop_at:
            return []
        return [Stop(why)]

    def _over_limit(self, now: float) -> bool:
        limit = self.terms.time_limit
        if limit is None or self.running_since is None:
            return False
        ran = self.ran_seconds + now - self.running_since
        return ran > limit + self.terms.stop_grace + LIMIT_SLACK

    def pending(self, seen: Observation, *, stopping: bool) -> list[int]:
        """Return the nodes with ranks that have yet to start; none of an attempt that needs none.

        A node that is missing from an attempt that agents started may run nowhere: it is waited for
        only while the others are too few.
        """
        pending = [n.node for n in seen.nodes if n.state is State.PENDING and not n.spare]
        enough = len(seen.nodes) - len(pending) >= self.terms.least
        if seen.state is State.SUCCEEDED or (self.started_by_agents and (stopping or enough)):
            return []
        return pending

    def _unreported(self, seen: Observation, now: float) -> bool:
        """Return whether an agent may run that has not reported yet: it follows the others once it
        has connected to node 0, and over SSH its files arrive late."""
        pending = [node for node in seen.nodes if node.state is State.PENDING]
        started = any(
            node.spare or node.node in self.joins or not self.started_by_agents for node in pending
        )
        return started or now < self.reported_at

    def joining(self, seen: Observation, now: float) -> list[int]:
        """Return the nodes to start again now, so that they join the others."""
        running = seen.nodes[0].state is State.RUNNING and not (seen.final or seen.over_time_limit)
        states = {
            State.FAILED,
            State.CANCELLED,
            *([State.PENDING] if self.started_by_agents else []),
        }
        missing = [node.node for node in seen.nodes[1:] if node.state in states]
        if not (self.terms.rejoins and running):
            missing = []
        self.missing = {node: self.missing.get(node, now) for node in missing}
        due = []
        for node, since in list(self.missing.items()):
            tries = self.joins.get(node, 0)
            # By then the lost node's own ranks have ended.
            if now - since >= (self.terms.stop_grace + REJOIN_SECONDS) * 2**tries:
                due.append(node)
                self.joins[node] = tries + 1
                del self.missing[node]
        return due

    def _lease_over(self, seen: Observation, now: float) -> bool:
        """Return whether the ranks of all nodes in an unknown state have ended by themselves, as
        they have not heard of node 0 for long enough."""
        unknown = [node.node for node in seen.nodes if node.state is State.UNKNOWN]
        others = [node for node in seen.nodes if node.state is not State.UNKNOWN]
        quiet = unknown and others and all(node.spare or node.state.final for node in others)
        if not quiet or seen.queued or self.terms.lease is None:
            self.quiet_since = None
            return False
        if 0 in unknown:
            # The nodes that are left could continue around node 0, where they are enough; and where
            # another one has succeeded, they may have, too.
            succeeded = any(node.state is State.SUCCEEDED for node in others)
            holds = len(unknown) < self.terms.least and not succeeded
        else:
            # Where node 0 succeeds, the others may finish without it.
            holds = seen.nodes[0].state is not State.SUCCEEDED
        if self.quiet_since is None:
            self.quiet_since = now
        return holds and now - self.quiet_since >= self.terms.lease

    # -- after an attempt -------------------------------------------------

    def judged(
        self, now: float, *, cancelled: bool, cleaned: bool = True, port_taken: bool = False
    ) -> list[Action]:
        """Return what to do after an attempt that has ended.

        Args:
            cleaned: whether the platform has removed what it kept of the attempt.
            port_taken: whether it failed because its port was taken.
        """
        seen = self.seen
        assert seen is not None
        if self.running_since is not None:
            ran, self.running_since = now - self.running_since, None
            self.ran_seconds += ran
        else:
            ran = 0.0
        if seen.next_attempt is not None:
            following = seen.next_attempt
            self._begin(following, Stage.WATCH, now)
            self.started_by_agents = True
            return [Next(following, None)]
        if lost(seen) and seen.state is not State.SUCCEEDED:
            self.losses = self.losses + 1 if ran < STEADY_SECONDS else 1
            self.early_losses = self.early_losses + 1 if ran < EARLY_SECONDS else 0
        self.verdict = verdict(
            self.terms,
            msgspec.structs.replace(seen, final=seen.final or self.over_time_limit),
            restarts_left=self.restarts_left,
            cancelled=cancelled,
            losses_allowed=self.early_losses <= EARLY_LOSSES and self.losses <= LOSSES,
            port_taken=port_taken and self.port_tries > 0,
        )
        self.stage = Stage.SETTLE
        self.settled_at = now if self.ending_since is None else self.ending_since
        self.stops, self.stop_at = 0, None
        self.living = may_live(seen, started=not self.started_by_agents)
        self.acknowledged = cleaned and not self.living
        return self._settle(now, cancelled)

    def _settle(self, now: float, cancelled: bool) -> list[Action]:
        """End the run, or begin the next attempt once nothing of the last one can live."""
        self.stage = Stage.SETTLE
        if self.half_started and not cancelled:
            return [Look()]
        if self.settled_at is None:
            self.settled_at = now
        if self.verdict is None or (cancelled and self.verdict is not Verdict.SUCCEEDED):
            self.verdict = Verdict.CANCELLED
        end = _ENDS.get(self.verdict)
        failed = self.verdict is Verdict.FAILED and self.stops > 0
        stopped = failed if end is not None else self.acknowledged
        if self.seen is None and stopped and not self.looked:
            return [Look()]
        if end is not None:
            # What could not be stopped is on record, and the end is known.
            done = self.stops > 0 or not self.living
            return [Finish(end)] if done else [Stop(CANCELLED if cancelled else OTHER_ENDED)]
        without: tuple[int, ...] = ()
        if not self.acknowledged:
            if self.stop_at is None or now >= self.stop_at:
                return [Stop(OTHER_ENDED)]
            if self.seen is not None and self._lease_over(self.seen, now):
                known = tuple(n for n in self.seen.nodes if n.state is not State.UNKNOWN)
                if not may_live(msgspec.structs.replace(self.seen, nodes=known)):
                    without = tuple(n.node for n in self.seen.nodes if n not in known)
            if not 0 < len(without) <= self.terms.dispensable:
                # Of an attempt that nobody has seen it is not known that it failed.
                given_up = self.seen is not None and now - self.settled_at > LOST_SECONDS
                return [Finish(State.FAILED)] if given_up else []
        following, found = self.attempt + 1, self.verdict
        if found is Verdict.RESTART:
            self.restarts_left -= 1
        elif found is Verdict.MOVE:
            self.port_tries -= 1
        pause = max(_pause(self.losses - EARLY_LOSSES), _pause(self.not_starting))
        self._begin(following, Stage.START, now)
        self.start_at = now + (pause if found is Verdict.REPLACE else 0.0)
        return [Next(following, found, without)]

    def _begin(self, attempt: int, stage: Stage, now: float) -> None:
        self.attempt, self.stage, self.started_by_agents = attempt, stage, False
        self.fresh = self.looked = False
        self.seen = self.verdict = None
        self.stops, self.stop_at, self.acknowledged, self.living = 0, None, False, True
        self.begun_at = now if stage is Stage.WATCH else None
        self.running_since = self.quiet_since = self.ending_since = self.settled_at = None

    # -- what came of an action -------------------------------------------

    def started(self, now: float) -> None:
        """The attempt's nodes were started."""
        self.stage, self.begun_at = Stage.WATCH, now

    def not_started(self, now: float, problem: str) -> None:
        """The attempt's nodes could not be started, or some: it is stopped and followed by another
        one, which uses no restart, at most START_TRIES times in a row."""
        self.not_starting += 1
        self.problem = problem
        given_up = self.fresh or self.not_starting > START_TRIES
        self.verdict = Verdict.FAILED if given_up else Verdict.REPLACE
        self.stage, self.settled_at, self.seen = Stage.SETTLE, now, None
        self.stops, self.stop_at, self.acknowledged, self.living = 0, None, False, True

    def joined(self, now: float, seconds: float) -> None:
        """A node was started again, and has reported in ``seconds``."""
        self.reported_at = now + seconds

    def stopped(self, now: float, acknowledged: bool) -> None:
        """All hosts were asked to end what runs there; whether all have acknowledged it."""
        self.stops += 1
        self.acknowledged = acknowledged and self.stage is Stage.SETTLE
        self.stop_at = now + AGAIN_SECONDS
        unknown = self.seen and any(n.state is State.UNKNOWN for n in self.seen.nodes)
        if self.acknowledged and unknown and self.starts_again and not self.looked:
            # All hosts answer: how the nodes ended can be known now.
            self.stage, self.looked = Stage.WATCH, True

    def looked_at(self, seen: Observation | None) -> None:
        """The hosts were asked: nodes that were started may have succeeded without the others.

        All may run although their supervisor was killed before it had recorded that.

        Args:
            seen: as of `decide`.
        """
        first, self.half_started = self.half_started, False
        self.looked = not first
        if seen is not None and seen.state is State.SUCCEEDED:
            self.seen, self.stage = seen, Stage.JUDGE
        elif seen is not None and first:
            states = {node.state for node in seen.nodes if not node.spare}
            if states <= {State.RUNNING, State.RESTARTING}:
                self.stage, self.verdict = Stage.WATCH, None

    @property
    def starts_again(self) -> bool:
        """Whether another attempt is to follow."""
        return self.verdict is not None and self.verdict not in _ENDS


def _pause(times: int) -> float:
    """Return the pause before what has been done that often already."""
    return min(2.0 ** (times - 1), LONGEST_PAUSE) if times > 0 else 0.0
