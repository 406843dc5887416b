"""What grows with the nodes of a run, counted and not timed: `tests.bench.scale` has the times."""

import json
import threading
from types import SimpleNamespace

import msgspec
import pytest

from clusterkit.agent import clock, coordinator, limits
from clusterkit.backends.local.backend import LocalBackend
from clusterkit.backends.ssh import observe
from clusterkit.backends.ssh.backend import SshBackend
from clusterkit.cluster import Facts
from clusterkit.lifecycle import control
from clusterkit.lifecycle.control import cancel
from clusterkit.output import mirror
from clusterkit.output.mirror import NodeView
from clusterkit.plan import Plan
from clusterkit.run.folder import RunFolder, RunHandle
from clusterkit.run.status import RunStatus, State
from clusterkit.spec import JobSpec
from clusterkit.transport import Completed, LocalTransport

NODES = 200
ALIVE = {"begun": True, "alive": True, "ended": False}


@pytest.fixture
def handle(tmp_path):
    """A run over SSH on many hosts."""
    hosts = tuple(f"h{number}" for number in range(NODES))
    plan = Plan(
        run_id="r", run_dir="/r", backend="ssh", summary="", nodes=NODES, world_size=NODES,
        hosts=hosts, python="python3",
    )  # fmt: skip
    return RunHandle(RunFolder(tmp_path / "r"), plan)


class Watch:
    """Instead of `mirror.Watch`: what the hosts say comes from the test."""

    def __init__(self, views, open_stream, back):
        self.views = views


@pytest.fixture
def monitor(handle, monkeypatch):
    monkeypatch.setattr(observe, "Watch", Watch)
    made = observe.SshMonitor(handle, LocalTransport())
    for view in made._watch.views:
        view.folder = None
        view.take({"file": "started.json"}, b'{"pid": 1}')
        view.take(ALIVE, b"")
    return made


@pytest.fixture
def judged(monkeypatch):
    """The nodes that were judged."""
    found = []

    def count(node, *args, real=observe.judge_node, **more):
        found.append(node)
        return real(node, *args, **more)

    monkeypatch.setattr(observe, "judge_node", count)
    return found


def test_heartbeats_and_log_lines_do_not_judge_nodes_again(monitor, judged):
    first = monitor.status()
    assert [node.state for node in first.nodes] == [State.RUNNING] * NODES
    assert len(judged) == NODES
    for _ in range(20):
        for view in monitor._watch.views:
            view.take({"file": "log"}, b"T 0 a line\n")
            view.take(ALIVE, b"")
        assert monitor.status() is first
    assert len(judged) == NODES


@pytest.mark.parametrize(
    ("frames", "state"),
    [
        ([({"file": "exit.json"}, b'{"exit_code": 3, "at": 1.0}'),
          ({"begun": True, "alive": False, "ended": True}, b"")], State.FAILED),
        ([({"begun": True, "alive": False, "ended": True}, b"")], State.FAILED),
        ([({"file": "started.json"}, b'{"remarks": ["slow"]}')], State.RUNNING),
    ],
)  # fmt: skip
def test_status_changes_only_node_with_new_exit_or_started_file(monitor, frames, state):
    before = monitor.status()
    for header, data in frames:
        monitor._watch.views[7].take(header, data)
    seen = monitor.status()
    assert seen.nodes[7].state is state
    assert seen.nodes[7] != before.nodes[7]
    assert seen.nodes[:7] + seen.nodes[8:] == before.nodes[:7] + before.nodes[8:]


def test_status_reports_silent_node_until_answer_returns(monitor):
    before, view = monitor.status(), monitor._watch.views[7]
    now = [view.clock()]
    view.clock = lambda: now[0]
    view.lost(mirror.SubmitFailed("host h7 no longer answers"))
    for seconds in (5, 6):
        now[0] = view.received_at + seconds
        assert f"no answer for {seconds} s" in monitor.status().nodes[7].reason
    view.take(ALIVE, b"")
    assert monitor.status() == before


def test_status_remarks_on_incomplete_log_copy_until_resolved(monitor):
    view = monitor._watch.views[7]
    before = monitor.status()
    lines = {"rest": [frame({"file": "log"}, b"x"), frame(ALIVE), b""]}

    class Told:
        def read(self, timeout=None):
            return lines["rest"].pop(0)

    def refuse(name, payload):
        raise mirror.SubmitFailed("no space")

    view._append, append = refuse, view._append
    with pytest.raises(mirror.SubmitFailed):
        mirror.pull(view, Told())
    assert "its log here is incomplete" in monitor.status().nodes[7].remarks[0]
    view._append = append
    lines["rest"] = [frame({"file": "log"}, b"x"), frame(ALIVE), b""]
    mirror.pull(view, Told())
    assert monitor.status() == before


def frame(header, data=b""):
    return json.dumps({**header, "bytes": len(data)}).encode() + b"\n" + data


def test_status_checks_silence_of_each_node_once(monitor, monkeypatch):
    for view in monitor._watch.views:
        view.lost(mirror.SubmitFailed("no answer"))
    asked = []
    silent_for = NodeView.silent_for
    monkeypatch.setattr(NodeView, "silent_for", lambda view: asked.append(1) or silent_for(view))
    assert {node.state for node in monitor.status().nodes} == {State.RUNNING}
    assert len(asked) == NODES


def test_ssh_cancel_reaches_all_hosts_in_parallel(handle):
    """One that takes its whole grace must not hold back the next."""
    together = threading.Barrier(NODES, timeout=60)

    class Hosts(LocalTransport):
        def run(self, host, argv, *, env=None, timeout=None, stdin=b""):
            together.wait()
            return Completed(tuple(argv), 0, "", "")

    SshBackend().cancel(handle, Hosts())


def test_cancel_carried_out_by_supervisor_contacts_no_host(unstarted_run, monkeypatch):
    folder = RunFolder(unstarted_run().path)
    running = RunStatus(
        run=folder.run_id, job="d", cluster="l", backend="local", state=State.RUNNING
    )
    folder.write_json("state.json", running)

    class Supervisor:
        """It ends the run when it is next looked at."""

        monotonic = staticmethod(lambda: 0.0)

        @staticmethod
        def sleep(seconds):
            ended = {"state": State.CANCELLED, "exit_code": 130}
            folder.write_json("state.json", control._replace(running, **ended))

    monkeypatch.setattr(control, "time", Supervisor)
    monkeypatch.setattr(control, "_access", lambda *_: (None, folder.handle(), None))
    assert cancel(folder).state is State.CANCELLED


def test_logs_of_one_rank_read_only_its_node(unstarted_run, by_hand, monkeypatch):
    run = unstarted_run(nodes=3, gpus=2)
    for node in range(3):
        lines = [f"2026-11-21T20:11:5{node}.123456Z {2 * node + slot} of it\n" for slot in (0, 1)]
        by_hand(run).node(node, log="".join(lines), exit_code=0)
    opened = []
    node_dir = RunFolder.node_dir
    monkeypatch.setattr(
        RunFolder, "node_dir", lambda *args: opened.append(args[2]) or node_dir(*args)
    )
    assert [(line.node, line.rank) for line in run.logs(rank=3)] == [(1, 3)]
    assert set(opened) == {1}


def test_rank_logs_include_spare_node_of_earlier_attempt(unstarted_run, by_hand):
    run = unstarted_run("launcher: forkserver\nnodes: 2\nspares: 1\nrestarts: 1\n")
    hand, folder = by_hand(run), RunFolder(run.path)
    stamp = "2026-11-21T20:11:5"
    hand.node(1, log=f"{stamp}1.123456Z 1 of node 1\n", exit_code=1)
    hand.node(2, log=f"{stamp}2.123456Z 1 of node 2\n", exit_code=1)
    hand.node(1, 2, log=f"{stamp}3.123456Z 1 again\n", exit_code=0)
    left = msgspec.structs.replace(folder.read_json("job.json", JobSpec), spares=0)
    facts = folder.read_json("facts.json", Facts)
    plan = LocalBackend().plan(left, folder.cluster(), facts, run.id)  # as the supervisor does
    folder.save_plan(facts, plan)
    said = {"run": run.id, "job": "demo", "cluster": "local", "backend": "local"}
    folder.write_json("state.json", RunStatus(**said, state=State.SUCCEEDED, attempt=2))
    for which in ({}, {"rank": 1}):
        assert [(line.node, line.text) for line in run.logs(**which)] == [
            (1, "of node 1"), (2, "of node 2"), (1, "again")
        ]  # fmt: skip
    assert [line.text for line in run.logs(node=2)] == ["of node 2"]


@pytest.mark.parametrize(
    ("topology", "nodes", "expected"),
    [
        ({"min_nodes": 2, "nodes": 2, "nproc_per_node": 4}, 2, 1),
        ({"min_nodes": 1, "nodes": 2, "nproc_per_node": 4}, 2, None),  # elastic
        ({"min_nodes": 2, "nodes": 2, "nproc_per_node": 4}, 1, None),  # one launcher for all
        ({}, 1, None),
    ],
)
def test_plan_node_of_rank_is_none_if_elastic_or_single_launcher(topology, nodes, expected):
    plan = Plan(
        run_id="r", run_dir="/r", backend="b", summary="", nodes=nodes, world_size=8,
        topology=topology,
    )  # fmt: skip
    assert plan.node_of(5) == expected


def test_coordinator_ticks_once_for_many_messages(monkeypatch):
    now, ticks, waits = [100.0], [], []
    monkeypatch.setattr(clock, "awake", lambda: now[0])

    class Listener:
        """Has a message of some node at once, each time, without an end."""

        def receive(self, seconds, on_message):
            waits.append(seconds)
            now[0] += limits.TURN_SECONDS / 100
            return True

        def close(self):
            pass

    class Membership:
        members = SimpleNamespace(by_node={}, ranks={})
        sequence, changed, decided = 0, True, False

        def tick(self, moment):
            ticks.append(moment)
            self.decided = len(ticks) == 10

        advance = tick

    coordinator.Server(Listener(), Membership(), lambda node, message: None, print).run()
    assert len(ticks) == 10
    assert 90 * 9 < len(waits) <= 101 * 10
    assert waits.count(limits.PEER_AGAIN_SECONDS) == 10  # nothing had changed then
