"""What happens to a simulated run, by number."""

import random
from dataclasses import dataclass, replace

from clusterkit.agent import limits

LOST_AFTER = 10.0
WAIT = 20.0  # for a lost node, where one may come back
LATE = 1.0  # the longest that a message may take, unless a link is cut
MEET = 60.0  # after which ranks that did not find each other fail

LOSSES = ("crash", "node", "leave", "zombie")
FAILURES = ("rank", "start")
MOMENTS = (*FAILURES, "reset", "port", "late")  # without a length
FAULTS = (*LOSSES, "cut", "to", "from", "freeze", "leap", *MOMENTS)


@dataclass(frozen=True)
class Fault:
    """What happens to a node, at a time or before that many messages have arrived.

    ``crash``: its agent is killed. ``node``: it vanishes. ``leave``: it is asked to end.
    ``zombie``: it lives on and nobody reaches it. In its place comes another one ``seconds`` later.
    Where nobody comes (``back``), one may come ``again``, and waits until it is told to start.
    ``rank``: a rank fails. ``start``: one of the next launcher's does, at once.
    ``cut``, ``to``, ``from``: nothing gets through for ``seconds``, or nothing to or from node 0.
    ``freeze``: its agent stands still. ``leap``: its clock goes on by that much. ``reset``: its
    connection breaks off. ``port``: rank 0's port is taken from now on: nothing can follow a
    launcher that ends on node 0. ``late``: its agent finds the run over its time limit.
    """

    kind: str
    node: int
    at: float = 0.0
    step: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """All that a simulation depends on."""

    seed: int
    nodes: int = 3
    back: bool = True  # whether lost nodes come back
    restarts: int = 2
    work: float = 5.0  # seconds that a round takes undisturbed
    lost: float = 0.0  # share of all messages
    doubled: float = 0.0
    late: float = 0.0
    faults: tuple[Fault, ...] = ()
    least: int = 0  # nodes with which the run may go on; 0: with all alone
    spares: int = 0
    again: float = 0.0  # seconds after which another agent comes in the place of one that ended

    @property
    def text(self) -> str:
        """All but the faults; of what was added later, only what is not as it was before."""
        text = repr(replace(self, faults=())).removesuffix(")")
        for later in ("again=0.0", "spares=0", "least=0"):
            text = text.removesuffix(f", {later}")
        return f"{text})"

    @property
    def kind(self) -> bool:
        """Whether there are nodes and restarts enough for the run to succeed."""
        failures = sum(fault.kind in FAILURES for fault in self.faults)
        if failures > self.restarts or any(f.kind in ("port", "late") for f in self.faults):
            return False
        if self.goes_on:
            lost = {fault.node for fault in self.faults if fault.kind in LOSSES}
            away = sum(fault.seconds for fault in self.faults if fault.kind not in LOSSES)
            enough = self.nodes + self.spares - len(lost) >= (self.least or self.nodes)
            return 0 not in lost and enough and away <= WAIT / 2
        away = sum(fault.seconds for fault in self.faults)
        if self.back:
            return away <= WAIT / 2
        harmless = all(fault.kind not in LOSSES for fault in self.faults)
        return harmless and away <= 1.0 and not self.lost and not self.late

    @property
    def goes_on(self) -> bool:
        """Whether the run may go on without nodes that are lost."""
        return not self.back and bool(self.least or self.spares)

    @property
    def bound(self) -> float:
        """When every node has ended, whatever happened."""
        last = max((fault.at + fault.seconds for fault in self.faults), default=0.0)
        losses = sum(fault.kind not in FAILURES for fault in self.faults)
        again = 2 + self.restarts + losses * (2 if self.again else 1)
        return last + again * (MEET + self.work + LOST_AFTER) + 2 * WAIT + limits.PEER_MEET_SECONDS


def make(seed: int) -> Schedule:
    """The schedule of that number."""
    rng = random.Random(seed)
    nodes, back = rng.choice((1, 2, 2, 3, 3, 4, 6)), rng.random() < 0.6
    short = rng.random() < 0.6
    faults = []
    at, step = rng.choice((0.0, 0.0, rng.uniform(0, 15))), rng.choice((0, 0, rng.randrange(200)))
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        kind = rng.choice(FAULTS)
        longest = (3.0 if back else 0.5) if short else 30.0
        seconds = 0.0 if kind in MOMENTS else round(rng.uniform(0, longest), 3)
        # Troubles never come singly.
        if rng.random() < 0.5:
            step += rng.choice((1, 2, rng.randrange(1, 8 * nodes), rng.randrange(1, 40 * nodes)))
            when = {"step": step}
        else:
            at += rng.choice((rng.uniform(0, 0.01), rng.uniform(0, 1.0), rng.uniform(0, 12.0)))
            when = {"at": round(at, 4)}
        faults.append(Fault(kind, rng.choice((0, *range(nodes))), seconds=seconds, **when))
    unkind = rng.random() < 0.5
    made = Schedule(
        seed, nodes, back, rng.choice((0, 1, 2, 5)),
        round(rng.choice((0.1, 1, 10)) * rng.uniform(0.2, 1), 3),
        lost=rng.choice((0.02, 0.1)) if unkind else 0.0,
        doubled=rng.choice((0.0, 0.1)) if unkind else 0.0,
        late=rng.choice((0.0, 0.05, 0.3)) if unkind else 0.0, faults=tuple(faults),
        least=rng.choice((0, 0, 1, max(1, nodes - 1))),
    )  # fmt: skip
    if back or nodes == 1:
        return made
    spares = rng.choice((0, 0, 1, 2))
    if spares and rng.random() < 0.5:
        others = range(nodes, nodes + spares)
        faults = [replace(one, node=rng.choice((one.node, *others))) for one in faults]
    made = replace(made, faults=tuple(faults), spares=spares)
    comes = made.goes_on and rng.random() < 0.5
    # Sooner than they can be missed, or when the others have gone on.
    if not comes:
        return made
    again, longer = rng.choice((0.1, 1.5 * WAIT, 2 * WAIT)), round(rng.uniform(20, 120), 3)
    lost = Fault(rng.choice(LOSSES), rng.randrange(1, nodes), at=round(rng.uniform(0, 20), 4))
    faults = rng.choice((made.faults, (*made.faults, lost)))
    return replace(made, again=again, work=rng.choice((made.work, longer)), faults=faults)
