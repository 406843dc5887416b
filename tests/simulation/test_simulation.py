"""A run's decisions on bad days: 2,000 of them, a crash at every step, 1,000 nodes.

More of them: ``make simulation SCHEDULES=100000``.
"""

from dataclasses import replace

import pytest

from clusterkit.agent import limits
from clusterkit.agent.membership import Membership
from clusterkit.agent.peer import Peer
from tests.simulation import agents
from tests.simulation.__main__ import at_scale
from tests.simulation.schedule import LOSSES, WAIT, Fault, Schedule, make
from tests.simulation.world import World, fails, shrink, tried

SCHEDULES, CHUNK = 2000, 100


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_random_schedules_violate_no_invariant(first):
    for seed in range(first, first + CHUNK):
        if fails(make(seed)):
            small = shrink(make(seed))
            pytest.fail(f"seed {seed}: {fails(small)}\n{small!r}")


@pytest.mark.parametrize("kind", LOSSES)
def test_run_tolerates_loss_of_any_node_at_every_step(kind):
    quiet = Schedule(1, 3, restarts=1, work=1.0, faults=(Fault("rank", 1, at=1.5),))
    steps = World(quiet).run().steps
    assert steps > 20
    for step in range(1, steps):
        for node in range(3):
            lost = Fault(kind, node, step=step, seconds=0.5)
            schedule = Schedule(1, 3, restarts=1, work=1.0, faults=(*quiet.faults, lost))
            assert fails(schedule) is None, schedule


@pytest.mark.parametrize("kind", ["crash", "node", "leave"])
def test_shrink_continues_after_permanent_node_loss_at_every_step(kind):
    quiet = Schedule(1, 3, False, restarts=1, work=1.0, faults=(Fault("rank", 1, at=1.5),), least=2)
    steps = World(quiet).run().steps
    assert steps > 20
    for step in range(1, steps):
        for node in (1, 2):
            schedule = replace(quiet, faults=(*quiet.faults, Fault(kind, node, step=step)))
            assert fails(schedule) is None, schedule


@pytest.mark.parametrize("kind", ["crash", "node", "leave"])
def test_spare_replaces_node_lost_at_every_step(kind):
    rank = Fault("rank", 1, at=1.5)
    quiet = Schedule(1, 3, False, restarts=1, work=1.0, faults=(rank,), spares=1)
    steps = World(quiet).run().steps
    assert steps > 20
    for step in range(1, steps):
        for node in (1, 2, 3):  # the last is the spare itself
            schedule = replace(quiet, faults=(rank, Fault(kind, node, step=step)))
            assert schedule.kind
            assert fails(schedule) is None, schedule


@pytest.mark.parametrize("again", [0.1, 50.0])
@pytest.mark.parametrize("kind", ["crash", "node", "leave"])
def test_returned_node_rejoins_after_loss_at_any_step(kind, again):
    rank = Fault("rank", 1, at=1.5)
    quiet = Schedule(1, 4, False, restarts=1, work=100.0, faults=(rank,), least=2, again=again)
    steps = World(replace(quiet, work=1.0)).run().steps
    grown = 0
    for step in range(1, steps, 3):
        for nodes in ((1,), (2, 3)):
            lost = (Fault(kind, node, step=step + node) for node in nodes)
            world, why = tried(replace(quiet, faults=(rank, *lost)))
            assert why is None
            assert [agent.node for agent in world.last] == [0, 1, 2, 3]
            assert world.rulings[0].action == "exit"
            grown += world.grown
    assert (grown > steps // 3) == (again > WAIT + limits.PEER_GONE_SECONDS)


@pytest.mark.parametrize(
    "schedule",
    [
        # Node 0 was lost, and one that never met the new one had ended: it waited for ever.
        Schedule(59, 2, restarts=0, work=8.699,
                 faults=(Fault("crash", 0, step=3, seconds=4.085),
                         Fault("from", 1, step=6, seconds=27.225))),
        # A launcher that met nobody runs on, and the others start again around a new node 0.
        Schedule(9459, 3, restarts=0, work=1.602,
                 faults=(Fault("crash", 0, step=5, seconds=2.397),)),
        # The ranks of a new node 0 have ended with those that had begun around the old one.
        Schedule(12991, 4, restarts=1, work=6.313,
                 faults=(Fault("rank", 1, at=2.207), Fault("zombie", 0, step=41, seconds=2.474))),
        Schedule(1391, 2, restarts=0, work=5.859, lost=0.02, doubled=0.1, late=0.1,
                 faults=(Fault("zombie", 0, step=2, seconds=2.436),)),
        # A node gave up a node 0 that stood still, and what failed of that ended the run.
        Schedule(2014666, 3, restarts=0, work=9.292, lost=0.1,
                 faults=(Fault("freeze", 0, at=0.4223, seconds=9.945),)),
        # What failed of a node 0 that was lost before it was met cost a restart.
        Schedule(2615, 3, restarts=1, work=6.148, lost=0.1, late=0.1,
                 faults=(Fault("rank", 2, at=6.846), Fault("node", 0, step=2, seconds=1.96),
                         Fault("crash", 0, at=2.739, seconds=0.471))),
        # Nobody knew that there was one before the one that came again: others failed of its loss.
        Schedule(2778, 2, False, restarts=0, work=59.084, doubled=0.1, late=0.05, spares=2,
                 again=0.1, faults=(Fault("crash", 1, at=2.2058),)),
        # A node joined whose ranks, which it had started alone, were still ending.
        Schedule(30013461, 6, restarts=0, work=0.053, least=5,
                 faults=(Fault("leap", 4, at=14.7935, seconds=25.134),
                         Fault("leave", 1, step=1, seconds=19.434),
                         Fault("to", 0, at=14.905, seconds=19.819))),
    ],
)  # fmt: skip
def test_schedules_of_fixed_bugs_pass(schedule):
    assert fails(schedule) is None


class NoBarrier(Membership):
    """Begins the next round before all launchers have ended."""

    def tick(self, now):
        for member in self.members.active():
            member.state.running, member.ready = False, True
        super().tick(now)


class Impatient(Membership):
    """Goes on without a lost node before that has given the run up."""

    def tick(self, now):
        self._timeout = 0.0
        super().tick(now)


class Forgetful(Peer):
    """Starts again what has ended already."""

    def receive(self, directive, now):
        if not self.state.running:
            self.state.round, self.state.exit_code = 0, None
        super().receive(directive, now)


class Deaf(Peer):
    """Never takes node 0 for lost."""

    def tick(self, now):
        self.link.received(now)
        super().tick(now)


@pytest.mark.parametrize("broken", [NoBarrier, Impatient, Forgetful, Deaf])
def test_simulation_finds_and_shrinks_deliberate_bugs(broken, monkeypatch):
    monkeypatch.setattr(agents, broken.__mro__[1].__name__, broken)
    schedule = next(make(seed) for seed in range(1000) if fails(make(seed)))
    small = shrink(schedule)
    assert fails(small) == fails(eval(repr(small)))  # it replays exactly
    assert len(small.faults) <= min(2, len(schedule.faults))


def test_messages_per_round_grow_linearly_with_nodes():
    for nodes in (10, 300):
        found = at_scale(nodes)
        assert found.messages_of_a_round <= 10 * nodes
        assert found.seconds_of_a_round < 4.0  # the slowest launcher takes 3 s to end
