"""What a run needs next: tables of cases for the pure decisions, each rule with its own."""

import itertools

import msgspec
import pytest

from clusterkit.backends.base import Observation
from clusterkit.cluster import Facts, HostFacts
from clusterkit.lifecycle import reconcile
from clusterkit.lifecycle.evidence import Terms, Verdict, facts_without, may_live, verdict
from clusterkit.lifecycle.reconcile import (
    AGAIN_SECONDS,
    LIMIT_SLACK,
    LOST_SECONDS,
    PEERS_SECONDS,
    START_TRIES,
    Ended,
    Finish,
    Look,
    Next,
    Reconciler,
    Stage,
    Start,
    Stop,
)
from clusterkit.run.begun import Begun, since
from clusterkit.run.status import AttemptStatus, NodeStatus, RunStatus, State, overall
from clusterkit.spec import JobSpec

UP, OK, BAD, AWAY = State.RUNNING, State.SUCCEEDED, State.FAILED, State.UNKNOWN
STOPPED, WAITS = State.CANCELLED, State.PENDING
LEASE = 45.0
TERMS = Terms(nodes=2, places=2, least=2, replaces_lost=True, lease=LEASE)
CODES = {OK: 0, BAD: 1, STOPPED: 143}


def seen(*states, gone=(), **more):
    """Nodes in these states; ``gone``: those whose agent left no exit record."""
    nodes = tuple(
        NodeStatus(node=number, host=f"h{number}", state=state,
                   exit_code=None if number in gone else CODES.get(state))
        for number, state in enumerate(states)
    )  # fmt: skip
    return Observation(state=overall(set(states)), nodes=nodes, **more)


def running(terms=TERMS, restarts=2, **more):
    made = Reconciler(terms, restarts, **more)
    assert made.decide(None, 0.0, False) == [Start()]
    made.started(0.0)
    assert made.decide(seen(*[UP] * terms.nodes), 1.0, False) == []
    return made


def ended(made, found, now, **more):
    """The actions after an attempt that ended so."""
    assert made.decide(found, now, False) == [Ended()]
    return made.judged(now, cancelled=False, **more)


# ---------------------------------------------------------------- rule 2: only evidence ends a run


@pytest.mark.parametrize("states", [(AWAY,), (AWAY, UP), (UP, AWAY), (AWAY, AWAY)])
@pytest.mark.parametrize("restarts", [0, 2])
def test_unknown_nodes_never_end_run(states, restarts):
    terms = msgspec.structs.replace(TERMS, nodes=len(states), places=len(states), least=1)
    made = running(terms, restarts)
    for hours in range(100):
        assert made.decide(seen(*states), hours * 3600.0, False) == []


def test_missing_observation_never_ends_run():
    made = running()
    assert [made.decide(None, hours * 3600.0, False) for hours in range(9)] == [[]] * 9


def test_run_continues_after_unknown_host_answers_again():
    made = running()
    assert made.decide(seen(UP, AWAY), 100.0, False) == []
    assert made.decide(seen(UP, UP), 200.0, False) == []
    assert ended(made, seen(OK, OK), 300.0) == [Finish(OK)]


# ---------------------------------------------------------------- rule 1: one attempt at a time


def test_agent_without_exit_record_is_stopped_before_next_attempt():
    made = running()
    assert ended(made, seen(BAD, STOPPED, gone=[0]), 10.0) == [Stop(reconcile.OTHER_ENDED)]
    made.stopped(11.0, acknowledged=False)
    assert made.decide(None, 12.0, False) == []
    assert made.decide(None, 12.0 + AGAIN_SECONDS, False) == [Stop(reconcile.OTHER_ENDED)]
    made.stopped(20.0, acknowledged=True)
    assert made.decide(None, 21.0, False) == [Next(2, Verdict.REPLACE)]
    assert made.decide(None, 21.0, False) == [Start()]


def test_unacknowledged_stop_delays_next_attempt_then_fails_run():
    made, now, starts = running(), 10.0, 0
    ended(made, seen(BAD, STOPPED, gone=[0]), now)
    while now < 10.0 + LOST_SECONDS:
        for action in made.decide(None, now, False):
            assert action == Stop(reconcile.OTHER_ENDED)
            made.stopped(now, acknowledged=False)
            starts += 1
        now += 1.0
    made.stop_at = now + 1
    assert starts > 100
    assert made.decide(None, now + 1.0, False) in ([Finish(BAD)], [Stop(reconcile.OTHER_ENDED)])
    made.stopped(now + 1.0, acknowledged=False)
    assert made.decide(None, now + 2.0, False) == [Finish(BAD)]


@pytest.mark.parametrize(
    ("states", "least", "lease", "over"),
    [
        ((BAD, AWAY), 2, LEASE, True),
        ((BAD, AWAY), 2, None, False),  # nothing ends the ranks there
        ((OK, AWAY), 2, LEASE, False),  # they may finish without node 0
        ((AWAY, BAD), 2, LEASE, True),
        ((AWAY, OK), 2, LEASE, False),  # node 0 may have succeeded as well
        ((AWAY, BAD), 1, LEASE, False),  # node 0 may continue alone
        ((AWAY, BAD, AWAY), 2, LEASE, False),  # with node 2
        ((AWAY, AWAY), 2, LEASE, False),  # nobody has told of an end
        ((UP, AWAY), 2, LEASE, False),  # they may hear each other
    ],
)
def test_lease_of_unknown_nodes_expires_only_if_ranks_cannot_continue(states, least, lease, over):
    terms = Terms(nodes=len(states), places=len(states), least=least, lease=lease)
    made = running(terms)
    found = seen(*states)
    assert made._lease_over(found, 100.0) is False
    assert made._lease_over(found, 100.0 + LEASE - 0.1) is False
    assert made._lease_over(found, 100.0 + LEASE) is over
    assert made._lease_over(seen(*[UP] * len(states)), 200.0) is False
    assert made._lease_over(found, 201.0) is False  # it counts anew


def test_unknown_node_is_replaced_after_lease_expires():
    terms = msgspec.structs.replace(TERMS, dispensable=1)
    made = running(terms)
    found, actions = seen(BAD, AWAY), []
    for now in range(2, 200):
        for action in made.decide(found if made.stage is Stage.WATCH else None, now, False):
            actions.append((now, action))
            if isinstance(action, Stop):
                made.stopped(now, acknowledged=False)
            elif isinstance(action, Ended):
                actions += [(now, each) for each in made.judged(now, cancelled=False)]
                made.stopped(now, acknowledged=False)
    (now, following) = next(each for each in actions if isinstance(each[1], Next))
    assert following == Next(2, Verdict.REPLACE, (1,))
    assert now >= 2 + LEASE
    assert actions[-1][1] == Start()


def test_exit_record_of_returned_host_decides_verdict():
    made = running()
    made.decide(seen(BAD, AWAY), 10.0, False)
    assert ended(made, seen(BAD, AWAY), 10.0 + LEASE)[0] == Stop(reconcile.OTHER_ENDED)
    made.stopped(60.0, acknowledged=True)
    assert made.stage is Stage.WATCH
    assert ended(made, seen(BAD, BAD), 61.0) == [Next(2, Verdict.RESTART)]


def test_stopped_host_without_exit_record_is_stopped_again_then_replaced():
    made = running()
    made.decide(seen(BAD, AWAY), 10.0, False)
    assert ended(made, seen(BAD, AWAY), 10.0 + LEASE)[0] == Stop(reconcile.OTHER_ENDED)
    made.stopped(60.0, acknowledged=True)
    assert ended(made, seen(BAD, AWAY), 120.0)[0] == Stop(reconcile.OTHER_ENDED)
    made.stopped(121.0, acknowledged=True)
    assert made.decide(None, 122.0, False) == [Next(2, Verdict.REPLACE)]


# ---------------------------------------------------------------- what follows


@pytest.mark.parametrize(
    ("found", "restarts", "more", "expected"),
    [
        (seen(OK, OK), 0, {}, Verdict.SUCCEEDED),
        (seen(OK, OK), 2, {"cancelled": True}, Verdict.SUCCEEDED),
        (seen(BAD, STOPPED), 2, {"cancelled": True}, Verdict.CANCELLED),
        (seen(BAD, STOPPED), 0, {}, Verdict.FAILED),
        (seen(BAD, STOPPED), 1, {}, Verdict.RESTART),
        (seen(BAD, STOPPED, final=True), 1, {}, Verdict.FAILED),
        (seen(BAD, STOPPED, gone=[0]), 0, {}, Verdict.REPLACE),
        (seen(BAD, STOPPED, gone=[0]), 1, {"losses_allowed": False}, Verdict.RESTART),
        (seen(BAD, STOPPED, gone=[0]), 0, {"losses_allowed": False}, Verdict.FAILED),
        (seen(BAD, STOPPED), 0, {"port_taken": True}, Verdict.MOVE),
    ],
)
def test_verdict_follows_from_node_states_and_restarts_left(found, restarts, more, expected):
    given = {"restarts_left": restarts, "cancelled": False, **more}
    assert verdict(TERMS, found, **given) is expected


def test_restarts_after_lost_nodes_are_limited_with_growing_pauses():
    """An agent that was killed every 90 s went on for ever."""
    made, now, pauses = Reconciler(TERMS, 0), 0.0, []
    for _ in range(100):
        began = now
        while made.decide(None, now, False) != [Start()]:
            now += 0.5
        pauses.append(now - began)
        made.started(now)
        made.decide(seen(UP, UP), now, False)
        now += 90.0
        actions = ended(made, seen(BAD, STOPPED, gone=[0]), now)
        made.stopped(now, acknowledged=True)
        actions = made.decide(None, now, False)
        if actions == [Finish(BAD)]:
            break
    assert len(pauses) == reconcile.LOSSES + 1
    assert pauses[:4] == [0.0, 0.0, 0.0, 0.0]
    assert pauses[4:8] == [1.0, 2.0, 4.0, 8.0]
    assert max(pauses) == reconcile.LONGEST_PAUSE


def test_failed_start_of_attempt_is_retried_without_using_restart():
    made, now = running(restarts=1), 10.0
    ended(made, seen(BAD, BAD), now)
    assert made.restarts_left == 0
    for attempt in itertools.count(2):
        while made.decide(None, now, False) != [Start()]:
            now += 0.5
        made.not_started(now, "refused")
        assert made.decide(None, now, False) == [Stop(reconcile.OTHER_ENDED)]
        made.stopped(now, acknowledged=True)
        assert made.decide(None, now, False) == [Look()]
        made.looked_at(seen(STOPPED, WAITS))
        actions = made.decide(None, now, False)
        if actions == [Finish(BAD)]:
            break
        assert actions == [Next(attempt + 1, Verdict.REPLACE)]
    assert attempt == 2 + START_TRIES
    assert now > 30


def test_first_attempt_that_cannot_start_fails_run_at_once():
    made = Reconciler(TERMS, 5)
    assert made.decide(None, 0.0, False) == [Start()]
    made.not_started(1.0, "refused")
    assert made.decide(None, 1.0, False) == [Stop(reconcile.OTHER_ENDED)]
    made.stopped(2.0, acknowledged=False)
    assert made.decide(None, 2.0, False) == [Look()]
    made.looked_at(None)
    assert made.decide(None, 2.0, False) == [Finish(BAD)]


def test_node_that_does_not_report_in_time_stops_attempt():
    made = running()
    ended(made, seen(BAD, BAD), 10.0)
    made.decide(None, 10.0, False)
    made.started(10.0)
    assert made.decide(seen(UP, WAITS), 70.0, False) == []
    assert made.decide(seen(UP, WAITS), 71.0, False) == []
    assert made.problem == "node 1 did not report within 60 s"
    assert made.decide(None, 71.0, False) == [Stop(reconcile.OTHER_ENDED)]


# ---------------------------------------------------------------- cancel, limits, peers


def test_cancel_is_repeated_until_all_nodes_have_ended():
    made = running()
    assert made.decide(seen(UP, UP), 2.0, True) == [Stop(reconcile.CANCELLED)]
    made.stopped(2.0, acknowledged=True)
    assert made.decide(seen(UP, UP), 3.0, True) == []
    assert made.decide(seen(UP, UP), 2.0 + AGAIN_SECONDS, True) == [Stop(reconcile.CANCELLED)]
    made.stopped(8.0, acknowledged=True)
    assert made.decide(seen(STOPPED, STOPPED), 9.0, True) == [Ended()]
    assert made.judged(9.0, cancelled=True) == [Finish(STOPPED)]


@pytest.mark.parametrize("states", [(STOPPED, STOPPED), (BAD, STOPPED)])
def test_removed_platform_job_cancels_run(states):
    """As `kubectl delete` of its job, or a cancel on another machine."""
    made = running(restarts=2)
    assert ended(made, seen(*states, removed="Job r is gone"), 2.0) == [Finish(STOPPED)]


def test_cancel_finishes_despite_unknown_host():
    made = running()
    for now in (2.0, 8.0):
        assert made.decide(seen(STOPPED, AWAY), now, True) == [Stop(reconcile.CANCELLED)]
        made.stopped(now, acknowledged=False)
    assert made.decide(seen(STOPPED, AWAY), 9.0, True) == [Ended()]
    assert made.judged(9.0, cancelled=True) == [Stop(reconcile.CANCELLED)]
    made.stopped(9.0, acknowledged=False)
    assert made.decide(None, 10.0, True) == [Finish(STOPPED)]


def test_time_limit_counts_running_time_over_all_attempts():
    terms = msgspec.structs.replace(TERMS, time_limit=100.0, stop_grace=5.0)
    made = running(terms)  # from 1 s
    ended(made, seen(BAD, BAD), 61.0)
    made.decide(None, 1000.0, False)  # it waited in a queue
    made.started(1000.0)
    assert made.decide(seen(UP, UP), 1000.0, False) == []
    over = 1000.0 + 40.0 + 5.0 + LIMIT_SLACK  # the agents end it themselves, if they can
    assert made.decide(seen(UP, UP), over, False) == []
    assert made.decide(seen(UP, UP), over + 1, False) == [Stop(reconcile.LIMIT)]
    made.stopped(over + 1, acknowledged=True)
    assert ended(made, seen(STOPPED, STOPPED), over + 2) == [Finish(BAD)]
    assert made.over_time_limit


def test_other_nodes_get_time_to_end_before_stop():
    made = running()
    assert made.decide(seen(BAD, UP), 10.0, False) == []
    assert made.decide(seen(BAD, UP), 10.0 + PEERS_SECONDS, False) == [Stop(reconcile.OTHER_ENDED)]


# ---------------------------------------------------------------- another supervisor


def saved(state=UP, **fields):
    return RunStatus(run="r", job="j", cluster="c", backend="b", state=state, **fields)


EARLIER = AttemptStatus(attempt=1, state=BAD, failure=None, started_at=1.0, finished_at=2.0)


@pytest.mark.parametrize(
    ("status", "begun", "stage", "followed"),
    [
        (saved(), Begun(1, True), Stage.WATCH, False),
        (saved(attempt=2), Begun(1, True), Stage.WATCH, True),
        (saved(attempt=2), None, Stage.WATCH, True),  # begun by another machine
        (saved(WAITS), Begun(1, True), Stage.WATCH, False),
        (saved(WAITS), Begun(1, False), Stage.SETTLE, False),
        (saved(State.RESTARTING, attempts=(EARLIER,)), Begun(1, True), Stage.SETTLE, False),
        # The disk was full: the record is older than what has begun.
        (saved(), Begun(2, True), Stage.WATCH, False),
        (saved(), Begun(2, False), Stage.SETTLE, False),
        (saved(State.RESTARTING, attempts=(EARLIER,)), Begun(2, True), Stage.WATCH, False),
    ],
)
def test_adopted_run_resumes_in_stage_given_by_records(status, begun, stage, followed):
    made = Reconciler.adopt(TERMS, since(status, begun), begun, 3)
    assert (made.stage, made.started_by_agents, made.restarts_left) == (stage, followed, 3)
    assert made.attempt == max(status.attempt, begun.attempt if begun else 1)
    if stage is Stage.SETTLE:
        if begun is not None and not begun.whole:
            assert made.decide(None, 5.0, False) == [Look()]
            made.looked_at(None)
        assert made.decide(None, 5.0, False) == [Stop(reconcile.OTHER_ENDED)]


@pytest.mark.parametrize(
    ("found", "stage"),
    [
        (seen(UP, UP), Stage.WATCH),
        (seen(UP, State.RESTARTING), Stage.WATCH),
        (seen(OK, OK), Stage.JUDGE),
        (seen(UP, WAITS), Stage.SETTLE),
        (seen(UP, AWAY), Stage.SETTLE),
        (seen(UP, BAD), Stage.SETTLE),
    ],
)
def test_adopted_run_with_incomplete_start_resumes_by_node_states(found, stage):
    made = Reconciler.adopt(TERMS, saved(WAITS), Begun(1, False), 3)
    assert made.decide(None, 5.0, False) == [Look()]
    made.looked_at(found)
    assert made.stage is stage
    if stage is Stage.WATCH:
        assert made.decide(found, 6.0, False) == []
        assert (made.attempt, made.restarts_left, made.verdict) == (1, 3, None)
    if stage is Stage.SETTLE:
        assert made.decide(None, 6.0, False) == [Stop(reconcile.OTHER_ENDED)]
    made = Reconciler.adopt(TERMS, saved(WAITS), Begun(1, False), 3)
    assert Look() not in made.decide(None, 5.0, True)  # cancelled


@pytest.mark.parametrize(
    ("found", "started", "living"),
    [
        (seen(OK, OK), True, False),
        (seen(BAD, STOPPED), True, False),
        (seen(BAD, STOPPED, gone=[0]), True, True),
        (seen(BAD, AWAY), True, True),
        (seen(BAD, WAITS), True, True),  # it may begin yet
        (seen(BAD, WAITS), False, False),
    ],
)
def test_may_live_is_true_for_started_nodes_without_exit_record(found, started, living):
    assert may_live(found, started=started) is living


@pytest.mark.parametrize(
    ("fields", "gone", "left"),
    [
        ({"nodes": 2, "spares": 2}, ["h0"], (["h1", "h2", "h3"], 1)),
        ({"nodes": 2, "spares": 2}, ["h0", "h3"], (["h1", "h2"], 0)),
        ({"nodes": 3, "spares": 1}, ["h0", "h3"], None),
        ({"nodes": 4}, ["h0"], None),
        ({"nodes": "2:4", "on_node_loss": "shrink"}, ["h0", "h1"], (["h2", "h3"], 0)),
        ({"nodes": "2:4", "launcher": "torchrun"}, ["h0"], None),
    ],
)
def test_facts_without_lost_hosts_use_spares_or_shrink(fields, gone, left):
    hosts = tuple(
        HostFacts(host=f"h{n}", address="", cpus=1, memory_mib=1, python="") for n in range(4)
    )
    facts = Facts(home="/", hosts=hosts, port=1, port_origin="", interface="")
    job = JobSpec(name="a", program="a.py", **fields)
    found = facts_without(gone, job, facts)
    assert left == (found and ([host.host for host in found[0].hosts], found[1]))
