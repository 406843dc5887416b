"""How a supervisor judges what it sees of an attempt."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from clusterkit import agent, backends
from clusterkit.backends.base import Observation
from clusterkit.backends.local.backend import LocalBackend
from clusterkit.backends.node_status import observed as from_files
from clusterkit.lifecycle import reconcile as machine
from clusterkit.lifecycle.evidence import Terms
from clusterkit.lifecycle.reconcile import (
    Reconciler,
)
from clusterkit.lifecycle.supervisor import Supervisor
from clusterkit.output import mirror
from clusterkit.run.folder import RunFolder
from clusterkit.run.status import NodeStatus, RunStatus, State
from tests.unit.supervise.supervising import BAD, OK, UP, Kept, Scripted, observed, saved


def went_on(attempt, *states, left=None):
    """An attempt that has ended so, and whose agents have begun that one."""
    return msgspec.structs.replace(observed(*states), next_attempt=attempt, restarts_left=left)


def test_backend_cleanup_runs_after_each_attempt(supervise_with):
    job = "launcher: forkserver\nrestarts: 1\n"
    backend, status, _ = supervise_with([observed(BAD), observed(OK)], job, kind=Kept)
    assert backend.cancelled == 2
    assert (status.state, status.remark) == (State.SUCCEEDED, None)


def test_failed_cleanup_is_remarked_until_cleanup_succeeds(supervise_with, monkeypatch):
    monkeypatch.setattr(Kept, "silent", 1)
    _, status, events = supervise_with([observed(OK)], kind=Kept)
    assert [event.text for event in events] == [
        "not all nodes could be stopped: the engine does not answer"
    ]
    assert "the engine does not answer; `clusterkit cancel" in status.remark
    _, status, _ = supervise_with(
        [observed(BAD), observed(OK)], "launcher: forkserver\nrestarts: 1\n", kind=Kept
    )
    assert status.remark is None


@pytest.mark.parametrize(
    ("restarts", "attempts", "adopt", "started", "end"),
    [
        pytest.param(3, [observed(OK)], None, [1], (State.SUCCEEDED, 0, 1, 3, 0), id="success"),
        pytest.param(
            2, [observed(BAD), observed(BAD), observed(OK)], None,
            [1, 2, 3], (State.SUCCEEDED, 0, 3, 0, 2), id="as often as the job says"),
        pytest.param(
            0, [observed(BAD, code=7)], None, [1], (State.FAILED, 7, 1, 0, 0), id="no restarts"),
        pytest.param(
            2, [went_on(2, BAD, left=1), observed(BAD), observed(OK)], None,
            [1, 3], (State.SUCCEEDED, 0, 3, 0, 2), id="the agents restart once"),
        pytest.param(
            2, [went_on(2, BAD, left=1), went_on(3, BAD, left=0), observed(BAD, code=9)], None,
            [1], (State.FAILED, 9, 3, 0, 2), id="the agents use all restarts"),
        pytest.param(
            1, [went_on(2, State.UNKNOWN), observed(BAD), observed(OK)], None,
            [1, 3], (State.SUCCEEDED, 0, 3, 0, 2), id="a platform's restart is free"),
        pytest.param(
            2, [msgspec.structs.replace(observed(BAD, code=9), final=True)], None,
            [1], (State.FAILED, 9, 1, 2, 0), id="the agents have decided"),
        pytest.param(
            1, [observed(BAD), observed(OK)], saved(State.RUNNING),
            [2], (State.SUCCEEDED, 0, 2, 0, 1), id="failed without a supervisor"),
        pytest.param(
            1, [observed(BAD)] * 3 + [observed(OK)],
            saved(State.RUNNING, attempt=3, restarts_left=1),
            [4], (State.SUCCEEDED, 0, 4, 0, 1), id="attached after a free restart"),
        pytest.param(
            2, [went_on(2, BAD), went_on(3, BAD), observed(OK)], saved(State.RUNNING),
            [], (State.SUCCEEDED, 0, 3, 2, 2), id="attached while agents restart"),
    ],
)  # fmt: skip
def test_supervisor_starts_attempts_within_restart_budget(
    supervise_with, restarts, attempts, adopt, started, end
):
    job = f"launcher: forkserver\nrestarts: {restarts}\n"
    backend, status, _ = supervise_with(attempts, job, adopt)
    assert [attempt for attempt, _ in backend.submitted] == started
    earlier = len(status.attempts)
    assert (status.state, status.exit_code, status.attempt, status.restarts_left, earlier) == end
    assert status.finished_at is not None


def test_run_finished_at_is_end_of_last_node(supervise_with):
    """Its supervisor may have stood still since then."""
    seen = observed(OK, OK)
    nodes = (
        msgspec.structs.replace(seen.nodes[0], ended_at=1000.5),
        msgspec.structs.replace(seen.nodes[1], ended_at=999.0),
    )
    _, status, _ = supervise_with([msgspec.structs.replace(seen, nodes=nodes)])
    assert (status.state, status.finished_at) == (State.SUCCEEDED, 1000.5)


def test_events_name_each_failure_and_restarts_left(supervise_with):
    attempts = [observed(BAD), observed(BAD), observed(OK)]
    _, _, events = supervise_with(attempts, "launcher: forkserver\nrestarts: 2\n")
    assert events[0].text.startswith("attempt 1 failed: node 0: exit code 1 of the launcher;")
    assert [event.text.split("; ")[-1] for event in events] == [
        "starting again, 1 restart left",
        "starting again, 0 restarts left",
    ]
    _, _, events = supervise_with([observed(OK)], "launcher: forkserver\nrestarts: 3\n")
    assert events == []


def test_run_over_time_limit_fails_with_124_and_no_restart(supervise_with):
    late = observed(BAD, code=124, reason=agent.OVER_TIME_LIMIT)
    job = "launcher: forkserver\nrestarts: 3\ntime_limit: 90m\n"
    _, status, _ = supervise_with([went_on(2, BAD), late], job)
    assert (status.state, status.exit_code, status.attempt) == (State.FAILED, 124, 2)
    assert status.failure.cause == "time_limit of 90m: the run was stopped"


def test_pause_of_supervisor_does_not_fail_pending_node(supervise_with, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(mirror, "awake", mirror.PauseAwareClock(lambda: now[0]))
    status = Scripted.status

    def paused(self, handle, transport):
        now[0] += 3600
        return status(self, handle, transport)

    monkeypatch.setattr(Scripted, "status", paused)
    waiting = observed(State.PENDING)
    _, ended, _ = supervise_with([[waiting, waiting, observed(OK)]])
    assert ended.state is State.SUCCEEDED


def test_rank_exits_include_stopped_node_only_when_rank_failed_first():
    def document(at, code, **more):
        end = {"pid": 1, "rank": 1, "exit_code": code, "at": at}
        return json.dumps({"exit_code": 1, "processes": [end], **more}).encode()

    stopped = observed(BAD, State.CANCELLED).nodes
    for first, code, expected in ((1.0, 137, [0, 1]), (3.0, 137, [0]), (1.0, 143, [0])):
        ended = {0: document(2.0, 1), 1: document(first, code, reason="stopped: node 0 failed")}
        assert [end.node for end in from_files(stopped, ended).rank_exits] == expected


def test_supervisor_follows_attempts_begun_by_agents(supervise_with):
    job = "launcher: forkserver\nnodes: 2\nrestarts: 2\n"
    backend, status, events = supervise_with(
        [[observed(UP, UP), went_on(2, BAD, UP, left=1), went_on(2, BAD, OK, left=1)],
         went_on(3, BAD, BAD, left=0),
         [observed(State.PENDING, UP), observed(UP, UP), observed(OK, OK)]], job, kind=Kept,
    )  # fmt: skip
    assert [attempt for attempt, _ in backend.submitted] == [1]
    assert backend.cancelled == 1  # at the end
    assert (status.state, status.attempt) == (State.SUCCEEDED, 3)
    assert [each.failure.origin for each in status.attempts] == ["node 0", "node 0"]
    assert [event.text.split("; ")[-1] for event in events] == [
        "starting again, 1 restart left",
        "starting again, 0 restarts left",
    ]


def test_supervisor_and_agents_share_restart_budget(supervise_with):
    job = "launcher: forkserver\nrestarts: 3\n"
    backend, status, _ = supervise_with(
        [observed(BAD), went_on(3, BAD, left=1), observed(BAD), observed(BAD, code=9)], job
    )
    assert [attempt for attempt, _ in backend.submitted] == [1, 2, 4]
    assert backend.given == [3, 2, 0]
    assert (status.state, status.exit_code, status.restarts_left) == (State.FAILED, 9, 0)


def test_supervisor_does_not_wait_for_node_that_missed_agent_restart(supervise_with):
    job = "launcher: forkserver\nnodes: 2\nrestarts: 1\n"
    backend, status, _ = supervise_with(
        [went_on(2, BAD, BAD, left=0), observed(BAD, State.PENDING)], job
    )
    assert backend.cancelled >= 1
    assert (status.state, status.attempt, status.failure.node) == (State.FAILED, 2, 0)


def test_cancel_ends_attempt_begun_by_agents(supervise_with):
    def cancelled(supervisor):
        saved(State.RUNNING)(supervisor)
        supervisor.folder.file("cancelled").touch()

    job = "launcher: forkserver\nrestarts: 3\n"
    script = [went_on(2, BAD), [observed(UP), observed(UP), observed(State.CANCELLED)]]
    backend, status, _ = supervise_with(script, job, adopt=cancelled)
    assert backend.cancelled >= 1
    assert status.state is State.CANCELLED


def test_failed_node_cancels_other_nodes(supervise_with):
    script = [[observed(UP, UP), observed(BAD, UP), observed(BAD, UP), observed(BAD, BAD)]]
    backend, status, _ = supervise_with(script, "launcher: forkserver\nnodes: 2\n")
    assert backend.cancelled >= 1
    assert status.state is State.FAILED


def test_elastic_run_succeeds_without_failed_node(supervise_with):
    script = [[observed(UP, UP), observed(BAD, UP), observed(BAD, UP), observed(BAD, OK)]]
    backend, status, events = supervise_with(script, 'nodes: "1:2"\n')
    assert backend.cancelled == 0
    assert status.state is State.SUCCEEDED
    assert [event.text for event in events] == ["1 of 2 elastic nodes failed"]


class Awake:
    """A clock that goes on by 5 s at each look."""

    now = 0.0

    def __call__(self):
        assert self.now < 10_000, "it waits"
        self.now += 5.0
        return self.now


def test_single_launcher_success_counts_for_all_nodes(supervise_with):
    def adopt(supervisor):  # as mpirun's plans are
        shape = {"min_nodes": 2, "nodes": 2, "nproc_per_node": 1}
        supervisor.plan = msgspec.structs.replace(supervisor.plan, nodes=1, topology=shape)

    _, status, events = supervise_with([observed(OK)], adopt=adopt)
    assert status.state is State.SUCCEEDED
    assert events == []


@pytest.mark.parametrize(
    "job", ["nodes: 2\nspares: 1\n", "nodes: '1:2'\nspares: 1\non_node_loss: shrink\n"]
)
def test_supervisor_follows_restarted_nodes_with_spare_pending(supervise_with, monkeypatch, job):
    monkeypatch.setattr(mirror, "awake", Awake())
    first = went_on(2, BAD, State.UNKNOWN, State.PENDING, left=0)
    script = [[observed(UP, State.UNKNOWN, State.PENDING), first], observed(OK, OK, State.PENDING)]
    job = f"launcher: forkserver\nrestarts: 1\n{job}"
    _, status, _ = supervise_with(script, job)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)


def test_shrunk_run_succeeds_without_dropped_node(supervise_with):
    job = "launcher: forkserver\nnodes: '1:2'\non_node_loss: shrink\nrestarts: 1\n"
    first = went_on(2, BAD, State.UNKNOWN, left=0)
    _, status, events = supervise_with([first, observed(OK, State.PENDING)], job)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    assert events[-1].text == "1 of 2 elastic nodes failed"


def test_dropped_node_is_started_again_to_rejoin_shrunk_run(supervise_with, monkeypatch):
    job = "launcher: forkserver\nnodes: '1:3'\non_node_loss: shrink\n"
    given = []

    class Joined(Scripted):
        def submit(self, plan, transport, *, attempt=1, secrets=None, record=None):
            nodes = [step.node for step in plan.steps]
            given.append((nodes, attempt, secrets[agent.PEER_TOKEN].reveal()))
            for step in plan.steps:
                record(step, "started")

    monkeypatch.setattr(mirror, "awake", Awake())
    lost = observed(UP, State.UNKNOWN, UP)
    here = observed(UP, State.CANCELLED, UP)
    script = [[lost] * 10 + [here] * 9 + [observed(UP, UP, UP), observed(OK, OK, OK)]]
    _, status, events = supervise_with(script, job, kind=Joined)
    assert status.state is State.SUCCEEDED
    assert [(nodes, attempt) for nodes, attempt, _ in given] == [([0, 1, 2], 1), ([1], 1)]
    assert given[0][2] == given[1][2]  # they know each other by it
    assert events[-1].text == "node 1 was started again, to join the others"


def test_node_restarted_during_cancel_is_stopped(supervise_with, monkeypatch):
    job = "launcher: forkserver\nnodes: '1:2'\non_node_loss: shrink\n"
    clock, over = Awake(), observed(State.CANCELLED, State.CANCELLED)

    class Slow(Scripted):
        def submit(self, plan, transport, *, attempt=1, secrets=None, record=None):
            for step in plan.steps:
                record(step, "started")
            if len(plan.steps) < self.all:
                clock.now += 60.0
                self.attempts[0] = [over, over, observed(State.CANCELLED, UP), over]
                RunFolder(Path(plan.run_dir)).mark_cancelled()
            else:
                self.all = len(plan.steps)

        all = 0

    monkeypatch.setattr(mirror, "awake", clock)
    monkeypatch.setattr(machine, "AGAIN_SECONDS", 0.0)
    script = [[observed(UP, State.CANCELLED)]]
    backend, status, _ = supervise_with(script, job, kind=Slow)
    assert status.state is State.CANCELLED
    assert backend.cancelled >= 1


def test_adopting_supervisor_does_not_wait_for_node_lost_before(supervise_with, monkeypatch):
    job = "launcher: forkserver\nnodes: '1:2'\non_node_loss: shrink\nrestarts: 1\n"
    monkeypatch.setattr(Scripted, "start_seconds", 0.0)
    script = [observed(BAD, BAD), [observed(UP, State.PENDING)] * 3 + [observed(OK, State.PENDING)]]
    backend, status, _ = supervise_with(script, job, adopt=saved(State.RUNNING, attempt=2))
    assert (status.state, status.attempt, backend.cancelled) == (State.SUCCEEDED, 2, 0)


@pytest.fixture
def beside_a_spare(unstarted_run, by_hand, monkeypatch):
    """A run whose two nodes with ranks have ended so, and whose third node stands so; gives it, and
    for what it was ended since."""

    def make(code, spare, job="nodes: 2\nspares: 1\n"):
        run = unstarted_run(f"launcher: forkserver\n{job}")
        hand, ended = by_hand(run), []
        for node in (0, 1):
            hand.node(node, started=hand.dead(), exit_code=code)
        if spare is not None:
            hand.node(2, started=hand.alive() | {"spare": True} | spare)

        def cancel(self, handle, transport, reason="cancelled"):
            ended.append(reason)
            hand.node(2, started=hand.dead(), exit_code=0, reason=f"stopped: {reason}")

        monkeypatch.setattr(LocalBackend, "cancel", cancel)
        return run, hand, ended

    return make


@pytest.mark.parametrize(("code", "state"), [(0, State.SUCCEEDED), (7, State.FAILED)])
@pytest.mark.parametrize(
    "spare",
    [{}, {"waits": {"why": "node 0 was lost; waiting for it", "until": 1e10}}, None],
    ids=["seeks node 0", "waits for it", "has not come"],
)
@pytest.mark.parametrize("job", ["nodes: 2\nspares: 1\n", "nodes: '1:2'\nspares: 1\n"])
def test_nodes_with_ranks_decide_run_end_beside_spare(
    beside_a_spare, monkeypatch, code, state, spare, job
):
    if "1:2" in job:
        job += "on_node_loss: shrink\n"
    run, hand, ended = beside_a_spare(code, spare, job)

    monkeypatch.setattr(mirror, "awake", Awake())
    monkeypatch.setattr("clusterkit.lifecycle.supervisor.POLL_SECONDS", 0.0)
    Supervisor(hand.folder).supervise()
    status = hand.folder.read_json("state.json", RunStatus)
    assert (status.state, status.exit_code) == (state, code)
    assert ended == ["another node has ended"]
    assert run.events() == []


@pytest.mark.parametrize(("code", "state"), [(0, State.SUCCEEDED), (7, State.FAILED)])
@pytest.mark.parametrize("spare", [{}, None])
def test_spare_does_not_change_end_of_unwatched_run(beside_a_spare, code, state, spare):
    run, hand, _ = beside_a_spare(code, spare)
    hand.unwatched()
    assert (run.status().state, run.status().exit_code) == (state, code)
    why = "stopped: node 0 cannot be reached: Connection refused"
    hand.node(2, started=hand.dead(), exit_code=0, reason=why)
    assert (run.status().state, run.status().exit_code) == (state, code)


@pytest.mark.parametrize("attempt", [1, 2])
def test_unwatched_shrunk_run_counts_as_succeeded(unstarted_run, by_hand, attempt):
    run = unstarted_run("launcher: forkserver\nnodes: '1:2'\non_node_loss: shrink\n")
    hand = by_hand(run)
    hand.node(1, started=hand.dead())
    if attempt > 1:
        hand.node(0, started=hand.dead(), exit_code=1, next=2)
    hand.node(0, attempt, started=hand.dead(), exit_code=0)
    hand.unwatched()
    assert (run.status().state, run.status().attempt) == (State.SUCCEEDED, attempt)


def test_reconciler_restarts_lost_nodes_with_backoff():
    terms = Terms(nodes=3, places=3, least=1, rejoins=True, stop_grace=5.0)
    rejoin = Reconciler(terms, 0)

    def due(seen, now, followed):
        rejoin.started_by_agents = followed
        return rejoin.joining(seen, now)

    wait = 5.0 + machine.REJOIN_SECONDS
    gone, away = observed(UP, BAD, UP), observed(UP, State.UNKNOWN, UP)
    assert due(gone, 0.0, False) == []
    assert due(gone, wait - 1, False) == []
    assert due(gone, wait, False) == [1]
    assert due(gone, wait + 1, False) == []
    assert due(gone, 2 * wait + 1, False) == []
    assert due(gone, 3 * wait + 1, False) == [1]  # the next time it is given longer
    # Not while its host is away, while the others wait for it, or when all is decided.
    for other in (away, observed(State.RESTARTING, BAD, State.RESTARTING),
                  msgspec.structs.replace(gone, final=True)):  # fmt: skip
        assert due(other, 100 * wait, False) == due(gone, 101 * wait, False) == []
    assert due(observed(BAD, UP, UP), 300 * wait, False) == []
    assert due(observed(BAD, UP, UP), 400 * wait, False) == []  # node 0 cannot
    absent = observed(UP, State.PENDING, UP)
    assert due(absent, 500 * wait, False) == due(absent, 600 * wait, False) == []
    assert due(absent, 700 * wait, True) == []
    assert due(absent, 800 * wait, True) == [1]


def test_elastic_run_below_minimum_nodes_fails(supervise_with):
    script = [[observed(BAD, BAD, UP), observed(BAD, BAD, BAD)]]
    backend, status, _ = supervise_with(script, 'nodes: "2:3"\n')
    assert backend.cancelled >= 1
    assert status.state is State.FAILED


def test_run_cancelled_before_supervision_ends_without_start(unstarted_run, monkeypatch):
    run = unstarted_run()
    backend = Scripted([])
    monkeypatch.setattr(backends, "backend", lambda name: backend)
    folder = RunFolder(run.path)
    folder.mark_cancelled()
    Supervisor(folder).supervise()
    assert (backend.submitted, backend.cancelled) == ([], 1)
    status = folder.read_json("state.json", RunStatus)
    assert (status.state, status.exit_code) == (State.CANCELLED, 130)


def test_process_identity_survives_json_round_trip(folder):
    folder.write_json("supervisor.json", agent.identity(os.getpid()))
    assert msgspec.json.decode(folder.read("supervisor.json")) == agent.identity(os.getpid())


def test_cancel_after_success_does_not_rewrite_status(unstarted_run, monkeypatch):
    run = unstarted_run()
    folder = RunFolder(run.path)
    supervisor = Supervisor(folder)
    ended = NodeStatus(node=0, host="localhost", state=State.SUCCEEDED, exit_code=0)

    def status(handle, transport):
        folder.mark_cancelled()
        return Observation(state=State.SUCCEEDED, nodes=(ended,))

    monkeypatch.setattr(supervisor.backend, "submit", lambda *_, **__: None)
    monkeypatch.setattr(supervisor.backend, "status", status)
    supervisor.supervise()
    assert run.status().state is State.SUCCEEDED
