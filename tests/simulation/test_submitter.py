"""The submitter's side on bad days: 2,000 of them; each rule is broken on purpose, and found.

More of them: ``python -m tests.simulation submitter 100000``.
"""

import pytest

from clusterkit.lifecycle import evidence, reconcile
from clusterkit.lifecycle.evidence import Verdict
from clusterkit.lifecycle.reconcile import Reconciler, Stage
from clusterkit.run.status import State
from tests.simulation import submitter
from tests.simulation.submitter import Fault, Schedule, fails, make, shrink, tried

SCHEDULES, CHUNK = 2000, 250


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_random_submitter_schedules_break_no_invariant(first):
    for seed in range(first, first + CHUNK):
        if fails(make(seed)):
            small = shrink(make(seed))
            pytest.fail(f"seed {seed}: {fails(small)}\n{small!r}")


@pytest.mark.parametrize("at", range(3, 40, 4))
@pytest.mark.parametrize("kind", submitter.WATCHERS)
def test_submitter_fault_leaves_run_succeeded_without_restart(kind, at):
    schedule = Schedule(1, 2, work=30, faults=(Fault(kind, at=at, seconds=60),))
    world, why = tried(schedule)
    assert why is None
    assert (world.end, len(world.groups)) == (State.SUCCEEDED, 1)


@pytest.mark.parametrize("at", range(0, 45, 3))
@pytest.mark.parametrize("kind", ["agent", "crash", "island", "rank"])
def test_run_ends_when_supervisor_dies_around_restart(kind, at):
    faults = (Fault(kind, 0, 10, 20), Fault("die", 0, at, 15))
    world, why = tried(Schedule(1, 2, work=5, restarts=2, faults=faults))
    assert why is None
    assert world.end is not None


def silence_ends(monkeypatch):
    """Rule 2: a node that does not answer counts as lost."""
    monkeypatch.setattr(evidence, "ACTIVE", frozenset({State.RUNNING, State.RESTARTING}))
    monkeypatch.setattr(reconcile, "lost", lambda seen: [])


def no_evidence_needed(monkeypatch):
    """Rule 1: what an agent that was killed has left is not stopped."""
    monkeypatch.setattr(reconcile, "may_live", lambda seen, started=True: False)


def all_hosts_obey(monkeypatch):
    """Rule 1: a stop counts as acknowledged though a host did not answer."""
    real = Reconciler.stopped
    monkeypatch.setattr(
        Reconciler, "stopped", lambda self, now, acknowledged: real(self, now, True)
    )


def no_lease(monkeypatch):
    """Rule 1: ranks that are cut off count as gone at once."""
    monkeypatch.setattr(submitter, "LEASE", 1.0)


def node_0_gives_up(monkeypatch):
    """Rule 1: node 0 is out of sight, and may go on with fewer nodes."""

    def over(self, seen, now, real=Reconciler._lease_over):
        terms, self.terms = self.terms, submitter.replace_status(self.terms, least=99)
        try:
            return real(self, seen, now)
        finally:
            self.terms = terms

    monkeypatch.setattr(Reconciler, "_lease_over", over)


def half_a_start_is_forgotten(monkeypatch):
    """Rule 1: the next supervisor starts all nodes beside those that its predecessor started."""

    def adopt(terms, saved, begun, restarts):
        made = Reconciler(terms, restarts, saved.attempt + 1, fresh=False)
        made.stage = Stage.START
        return made

    monkeypatch.setattr(Reconciler, "adopt", adopt)


def success_is_restarted(monkeypatch):
    """Rule 2: what has succeeded runs again."""

    def judge(terms, seen, **given):
        found = evidence.verdict(terms, seen, **given)
        return Verdict.RESTART if found is Verdict.SUCCEEDED and given["restarts_left"] else found

    monkeypatch.setattr(reconcile, "verdict", judge)


def failure_is_success(monkeypatch):
    """The recorded end is true."""
    monkeypatch.setitem(reconcile._ENDS, Verdict.FAILED, State.SUCCEEDED)


def nothing_has_a_bound(monkeypatch):
    """Rule 4: the next attempt waits for ever for a host that does not come back."""
    monkeypatch.setattr(submitter, "BOUND", 900)
    monkeypatch.setattr(Reconciler, "_settle", without_bound(Reconciler._settle))


def without_bound(real):
    def settle(self, now, cancelled):
        self.settled_at = now
        return real(self, now, cancelled)

    return settle


def trouble_cancels(monkeypatch):
    """Rule 3: whatever goes wrong in the supervisor ends the run."""
    real = submitter.Supervisor.tick

    def tick(self):
        if self.world.error:
            self.world.cancelled, self.world.error = True, False
        real(self)

    monkeypatch.setattr(submitter.Supervisor, "tick", tick)


HARD = (
    # The submitter and the other host stop hearing of node 1 one after the other; node 0 fails.
    Schedule(1, 2, spare_hosts=1, work=90, faults=(
        Fault("cut", 1, 5, 150), Fault("partition", 1, 14, 150), Fault("rank", 0, 15))),
    # Node 0 is out of sight of all others, and goes on alone.
    Schedule(1, 2, least=1, spare_hosts=1, work=90, faults=(Fault("island", 0, 5, 200),)),
    # A host never comes back, and ranks without an agent live on the other one.
    Schedule(1, 2, work=90, orphans=True, faults=(
        Fault("agent", 0, 10), Fault("crash", 1, 12, 100_000))),
)  # fmt: skip


FOUND = (
    # Nothing can be recorded: an attempt begins all the same, and its supervisor dies ...
    Schedule(1050747, 2, restarts=3, work=90, orphans=True, faults=(
        Fault("partition", 1, 5, 148), Fault("die", 1, 18, 4), Fault("disk", 0, 4, 92))),
    # ... once half of it is started ...
    Schedule(2, 2, restarts=3, work=90, orphans=True, faults=(
        Fault("disk", 0, 4, 92), Fault("partition", 1, 5, 148), Fault("die", 1, 18, 4))),
    # ... or the disk is read-only.
    Schedule(1050747, 2, restarts=3, work=90, orphans=True, faults=(
        Fault("partition", 1, 5, 148), Fault("die", 1, 18, 4), Fault("disk", 1, 4, 92))),
    # Half of an elastic run is started. Its submitter stands still until that has succeeded ...
    Schedule(1109272, 2, least=1, restarts=3, work=3, faults=(
        Fault("pause", 0, 1, 112), Fault("cut", 1, 0, 6))),
    # ... or dies, and the next one sees no host for longer than it would wait.
    Schedule(1232101, 2, least=1, restarts=3, work=3, orphans=True, faults=(
        Fault("die", 1, 0, 15), Fault("offline", 0, 1, 132))),
)  # fmt: skip


@pytest.mark.parametrize("schedule", FOUND, ids=lambda schedule: str(schedule.seed))
def test_schedules_found_by_long_simulations_pass(schedule):
    assert fails(schedule) is None


@pytest.mark.parametrize(
    "broken",
    [
        silence_ends, no_evidence_needed, all_hosts_obey, no_lease, node_0_gives_up,
        half_a_start_is_forgotten, success_is_restarted, failure_is_success, nothing_has_a_bound,
        trouble_cancels,
    ],
    ids=lambda broken: broken.__name__,
)  # fmt: skip
def test_simulation_finds_rule_broken_on_purpose(broken, monkeypatch):
    assert [fails(each) for each in HARD] == [None] * len(HARD)
    broken(monkeypatch)
    schedules = (*HARD, *map(make, range(4000)))
    schedule = next((each for each in schedules if fails(each)), None)
    assert schedule is not None
    small = shrink(schedule)
    assert fails(small) == fails(eval(repr(small)))  # it replays exactly
    assert len(small.faults) <= min(3, len(schedule.faults))
