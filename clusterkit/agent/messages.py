"""What agents report to node 0, what node 0 directs, and orders for an agent's main loop.

Both sides send their whole state, again and again, and never changes: a message that is lost,
late or doubled does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterkit.agent.protocol import Document


@dataclass
class AgentState:
    """The state of one node's agent; each report to node 0 has all of it."""

    agent: str
    """A random name: another agent on the same node has another one."""
    sequence: int = 0  # of this report; late ones are ignored
    coordinator: str = ""  # `Membership.identity` of the node 0 it met last; empty: none yet
    round: int = 0  # the newest that it knows of; it starts no older one
    restarts_used: int = 0
    running: bool = False  # whether its launcher runs
    exit_code: int | None = None  # of the launcher, where that ended by itself in this round
    waiting: bool = False  # whether it may start its launcher only when node 0 directs it to
    gave_up: bool = False  # whether it ended its launcher because node 0 was lost
    leaving: bool = False  # whether it was asked to end, by nobody of the run
    timed_out: bool = False  # whether it found the run over its time limit
    cannot_restart: bool = False  # whether no launcher can be started on this node any more
    failure: Document | None = None  # how its ranks failed by themselves (`RankOutput.failure`)
    step: int | None = None  # the last that its ranks reported

    @classmethod
    def parse(cls, message: Document) -> AgentState:
        """Return the state that a message holds.

        Raises:
            KeyError, TypeError, ValueError: it holds none.
        """
        found = {name: message[name] for name in cls.__dataclass_fields__}
        for name in ("sequence", "round", "restarts_used"):
            found[name] = int(found[name])
        code = found["exit_code"]
        found.update(
            agent=str(found["agent"]), coordinator=str(found["coordinator"]),
            exit_code=None if code is None else int(code),
        )  # fmt: skip
        return cls(**found)


@dataclass(frozen=True)
class Directive:
    """What node 0 directs a node to do, sent again and again; nodes ignore one they know."""

    coordinator: str  # `Membership.identity`
    sequence: int  # of the decision behind it
    round: int
    restarts_used: int
    action: str  # start, wait (end the launcher first), stop, or exit (as the launcher has ended)
    text: str = ""  # for the node's log; of stop and exit: the reason
    seconds: float = 0.0  # wait: how long that may take; 0: not known
    rank: int = 0  # start: the node's rank in this round
    nodes: int = 0  # start: how many nodes this round has
    free: str = ""  # start: why no restart was used, although a launcher failed
    failed: int | None = None  # stop: the node whose launcher failed; None: none did
    final: str | None = None
    """Not None: nobody may start the run again, for this reason if it is not empty."""


# -- orders for the main loop (`node`), from `peer` and `watch`


@dataclass(frozen=True)
class Log:
    """Write a line to the node's log."""

    text: str


@dataclass(frozen=True)
class Warn:
    """Write a line to the node's log, and show it in ``clusterkit status``."""

    text: str


@dataclass(frozen=True)
class CountRestarts:
    """The other nodes have used so many restarts; this one runs nothing yet."""

    restarts_used: int


@dataclass(frozen=True)
class Start:
    """Start the launcher."""

    restarts_used: int
    rank: int | None = None
    """The node's rank in this round; None, as for ``nodes``: the one that it has."""
    nodes: int | None = None


@dataclass(frozen=True)
class EndLauncher:
    """End the launcher and wait for the next `Start`."""

    reason: str


@dataclass(frozen=True)
class Pause:
    """Show that the next `Start` may take so many seconds to come."""

    reason: str
    seconds: float


@dataclass(frozen=True)
class Finish:
    """The run is over: end the launcher (``stop``), or end as it has ended."""

    stop: bool
    reason: str = ""
    final: str | None = None
    """As of `Directive`."""


@dataclass(frozen=True)
class Note:
    """Show that ranks ``hang`` or are ``slow`` (``subject``); no text: no more."""

    subject: str
    text: str = ""


@dataclass(frozen=True)
class Left:
    """Record which ranks of this node have ended, and which neither run nor end (`left`)."""

    ended: list[int]
    idle: list[Document]


@dataclass(frozen=True)
class EndHang:
    """End the launcher of the node with the first rank that others wait for: they hang."""

    node: int  # its rank in this round
    reason: str


Order = Log | Warn | CountRestarts | Start | EndLauncher | Pause | Finish | Note | Left | EndHang


# -- decisions of `hangs` and `stragglers` on node 0, for `watch`


@dataclass(frozen=True)
class QueryRecords:
    """Have all nodes send the records of their ranks (`rank_state.record`)."""

    number: int  # of this query; its answers have the same


@dataclass(frozen=True)
class QueryArrivals:
    """Have all nodes send when their ranks entered collectives (`rank_state.arrivals`)."""

    number: int  # as of `QueryRecords`, counted separately


@dataclass(frozen=True)
class ExamineHosts:
    """Have the hosts of these ranks report, with the next arrivals, what has slowed them since."""

    ranks: tuple[int, ...]


Decision = QueryRecords | QueryArrivals | ExamineHosts | Note | EndHang
