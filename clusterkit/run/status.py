"""The status of a run, its nodes and attempts, and its failure; the same for every backend."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace


class State(StrEnum):
    """State of a run or a node; UNKNOWN for any state of a backend's that has no equivalent."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    RESTARTING = "RESTARTING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"

    @property
    def final(self) -> bool:
        return self in FINAL


FINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})


def overall(states: set[State]) -> State:
    """Return a run's state from its nodes' states."""
    for state in (State.UNKNOWN, State.RESTARTING, State.RUNNING, State.FAILED, State.CANCELLED):
        if state in states:
            return state
    if states == {State.SUCCEEDED}:
        return State.SUCCEEDED
    return State.RUNNING if State.SUCCEEDED in states else State.PENDING


class IdleRank(Struct, frozen=True):
    """A rank whose main thread has not run for a minute or longer, by its agent."""

    rank: int
    since: float
    at: str | None = None
    """The line of code that it executes."""
    state: str = ""
    """``stopped``, ``ended`` (its process was not waited for), or empty."""


class NodeStatus(Struct, frozen=True, kw_only=True):
    """One node of the newest attempt."""

    node: int
    host: str
    state: State
    exit_code: int | None = None
    reason: str | None = None
    """Why it ended, where an exit code does not say."""
    ended_at: float | None = None
    until: float | None = None
    """RESTARTING: when the next attempt begins, or how long a lost node is waited for."""
    remarks: tuple[str, ...] = ()
    """Messages for people that do not depend on how it ended, such as lost log lines."""
    hang: str | None = None
    """Why its ranks hang, or on node 0 those of all nodes; null while they make progress."""
    slow: str | None = None
    """On node 0: which ranks the others wait for repeatedly; null if none."""
    ended: tuple[int, ...] = ()
    """Ranks that ended a minute ago or earlier, while its agent runs on."""
    idle: tuple[IdleRank, ...] = ()
    """Recorded where other ranks have ended, or may have on other nodes."""
    spare: bool = False
    """Whether it has no ranks, but replaces a node that is lost."""


class RankExit(Struct, frozen=True):
    """How one rank ended, if the backend knows: exit code, -N for signal N, and Unix time."""

    node: int
    rank: int
    exit_code: int
    at: float
    asked: bool = True
    """Whether its agent may have stopped it."""


class NodeCause(Struct, frozen=True, kw_only=True):
    """Why a node or its ranks were killed, where a backend knows more than the exit code."""

    node: int
    words: str
    hint: str | None = None
    exit_code: int = 137


class Failure(Struct, frozen=True, kw_only=True):
    """The first failure of a run: the rank or node, and the cause."""

    node: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    cause: str
    hint: str | None = None
    traceback: str | None = None

    @property
    def origin(self) -> str:
        """``rank 3 on node 1``, ``node 1``, or ``the run`` where it was neither."""
        node = "the run" if self.node is None else f"node {self.node}"
        return node if self.rank is None else f"rank {self.rank} on {node}"

    @property
    def headline(self) -> str:
        """``rank 3 on node 1 failed first``, or ``the run failed``."""
        return f"{self.origin} failed{'' if self.node is None else ' first'}"

    @property
    def summary(self) -> str:
        """The first line of the cause, with ``...`` if there are more."""
        first, _, rest = self.cause.partition("\n")
        return f"{first} ..." if rest else first

    @property
    def line(self) -> str:
        """``rank 3 on node 1: `` and the summary."""
        return f"{self.origin}: {self.summary}"


class AttemptStatus(Struct, frozen=True, kw_only=True):
    """An attempt that ended and was followed by another. Times are Unix seconds."""

    attempt: int
    state: State
    failure: Failure | None
    started_at: float
    finished_at: float
    last_step: int | None = None
    """The last step that it reported."""
    steps_lost: int | None = None
    """Steps between the one from which a later attempt resumed and ``last_step``."""


class Goodput(Struct, frozen=True, kw_only=True):
    """How a run spent its time in seconds, by what rank 0 reported, until it ended or until now."""

    share: float
    """``training`` as a fraction of the total."""
    training: float
    waiting: float
    """From submit to the start of its first node."""
    start: float
    """From there to the first step of the first attempt."""
    restart: float
    """From the last step of an attempt to the first of the next one."""
    again: float
    """Repeating steps of an earlier attempt."""
    end: float
    """Since the last step."""


class RunStatus(Struct, frozen=True, kw_only=True):
    """The document that ``status --json`` prints. Times are Unix seconds."""

    run: str
    job: str
    cluster: str
    backend: str
    state: State
    exit_code: int | None = None
    attempt: int = 1
    nodes: tuple[NodeStatus, ...] = ()
    failure: Failure | None = None
    started_at: float | None = None
    running_since: float | None = None
    """When all nodes of the newest attempt were first seen to run."""
    ran_seconds: float = 0.0
    """How long the earlier attempts have run, without what they waited for in between."""
    finished_at: float | None = None
    attempts: tuple[AttemptStatus, ...] = ()
    """The attempts before the newest."""
    restarts_left: int | None = None
    """None: its supervisor has not started."""
    goodput: Goodput | None = None
    """None: no step was reported, or the logs were not read."""
    remark: str | None = None
    """A sentence for people about this state."""

    @classmethod
    def unknown(cls, run: str, state: State = State.UNKNOWN) -> RunStatus:
        """Return the status of a run of which only the id is known."""
        return cls(run=run, job="?", cluster="?", backend="?", state=state)

    def after_failure(self, failure: Failure, now: float) -> RunStatus:
        """Return this status after its newest attempt has failed, before another one starts."""
        began = self.attempts[-1].finished_at if self.attempts else self.started_at or 0.0
        finished = max((node.ended_at or 0.0 for node in self.nodes), default=0.0) or now
        ended = AttemptStatus(
            attempt=self.attempt,
            state=State.FAILED,
            failure=failure,
            started_at=began,
            finished_at=finished,
        )
        attempts = (*self.attempts, ended)
        return replace(self, state=State.RESTARTING, failure=failure, attempts=attempts)

    def __repr__(self) -> str:
        code = "" if self.exit_code is None else f" ({self.exit_code})"
        cause = "" if self.failure is None else f": {self.failure.cause.partition(chr(10))[0]:.80}"
        return f"<{type(self).__name__} {self.run} {self.state}{code}{cause}>"
