"""What is said of a run: states, nodes, the failure; one form for every backend."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class State(StrEnum):
    """States of a run and of a node; what a backend reports beyond them is UNKNOWN."""

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
    """A run's state from its nodes' states."""
    for state in (State.UNKNOWN, State.RESTARTING, State.RUNNING, State.FAILED, State.CANCELLED):
        if state in states:
            return state
    if states == {State.SUCCEEDED}:
        return State.SUCCEEDED
    return State.RUNNING if State.SUCCEEDED in states else State.PENDING


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
    """RESTARTING: when the next attempt begins, or until when it is waited for a lost node."""
    remarks: tuple[str, ...] = ()
    """What a person should know of it, however it ended: log lines that were lost, and the like."""
    hang: str | None = None
    """What its ranks stand still for, or on node 0 those of all nodes; null while they go on."""
    slow: str | None = None
    """On node 0: which ranks the others wait for again and again; null while there are none."""
    spare: bool = False
    """Whether it has no ranks: it waits for a place, or would if it had come."""


class RankExit(Struct, frozen=True):
    """How one rank ended, where the backend knows: -N for signal N; Unix time."""

    node: int
    rank: int
    exit_code: int
    at: float
    asked: bool = True
    """Whether its agent may have asked it to end before it did."""


class NodeCause(Struct, frozen=True, kw_only=True):
    """Why a node or its ranks were killed, where a backend knows more than an exit code says."""

    node: int
    words: str
    hint: str | None = None
    exit_code: int = 137


class Failure(Struct, frozen=True, kw_only=True):
    """Who failed first, and why."""

    node: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    cause: str
    hint: str | None = None
    traceback: str | None = None

    @property
    def who(self) -> str:
        """``rank 3 on node 1``, ``node 1``, or ``the run`` where it was none of them."""
        node = "the run" if self.node is None else f"node {self.node}"
        return node if self.rank is None else f"rank {self.rank} on {node}"

    @property
    def blame(self) -> str:
        """``rank 3 on node 1 failed first``, or ``the run failed``."""
        return f"{self.who} failed{'' if self.node is None else ' first'}"

    @property
    def summary(self) -> str:
        """The cause in one line; ``...`` stands for the rest of it."""
        first, _, rest = self.cause.partition("\n")
        return f"{first} ..." if rest else first


class AttemptStatus(Struct, frozen=True, kw_only=True):
    """How an attempt ended after which another was started. Times are Unix seconds."""

    attempt: int
    state: State
    failure: Failure | None
    started_at: float
    finished_at: float
    last_step: int | None = None
    """That it reported."""
    steps_lost: int | None = None
    """From the step that a later attempt resumed from to ``last_step``."""


class Goodput(Struct, frozen=True, kw_only=True):
    """Where a run's seconds went, by what rank 0 reported, until it ended or until now."""

    share: float
    """Of all of them that were ``training``."""
    training: float
    waiting: float
    """From submit to the start of its first node."""
    start: float
    """To the first attempt's first step."""
    restart: float
    """From the last step of an attempt to the first of the next one."""
    again: float
    """Steps that an earlier attempt had done."""
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
    finished_at: float | None = None
    attempts: tuple[AttemptStatus, ...] = ()
    """The attempts before the newest."""
    restarts_left: int | None = None
    """None: nobody counts them, because its supervisor has not begun."""
    goodput: Goodput | None = None
    """None: no step was reported, or nobody has looked."""
    remark: str | None = None
    """What a person should know of this state, in one sentence."""

    def __repr__(self) -> str:
        code = "" if self.exit_code is None else f" ({self.exit_code})"
        cause = "" if self.failure is None else f": {self.failure.cause.partition(chr(10))[0]:.80}"
        return f"<{type(self).__name__} {self.run} {self.state}{code}{cause}>"
