"""Nodes that are lost and come back: agents that follow what node 0 decides."""

import json
import signal
import time
from pathlib import Path

import pytest

from clusterkit import agent
from clusterkit.agent.protocol import SPARE_NOT_NEEDED
from tests.agents import RANK, RUN, Nodes


@pytest.fixture
def nodes(tmp_path):
    found = Nodes(tmp_path)
    yield found
    found.close()


def test_run_without_lost_nodes_ends_with_ranks(nodes):
    nodes.begin(2)
    nodes.end(1, 0)
    nodes.end(0, 0)
    assert [nodes.agents[node].wait(60) for node in (0, 1)] == [0, 0]
    assert nodes.log_of(0) == nodes.log_of(1) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_failed_rank_ends_run_on_all_nodes(nodes, failing):
    nodes.begin(2)
    nodes.end(failing, 7)
    assert nodes.agents[failing].wait(60) == 7
    assert nodes.agents[1 - failing].wait(60) == 1  # not what stands for a node taken away
    assert nodes.exit_of(failing)["reason"] is None
    other = nodes.exit_of(1 - failing)
    assert (other["exit_code"], other["reason"]) == (143, f"stopped: node {failing} failed")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("lost", [0, 1])
def test_lost_node_that_returns_restarts_all_ranks(nodes, lost, how):
    before = nodes.begin(2)
    nodes.agents[lost].send_signal(how)
    assert nodes.agents[lost].wait(60) == (agent.PREEMPTED_EXIT if how == signal.SIGTERM else -how)
    agent.wait_gone([before[lost]], 60)
    nodes.start(lost)
    after = nodes.running(0, 1)
    assert not set(before.values()) & set(after.values())
    assert [agent.start_ticks(pid) for pid in before.values()] == [None, None]
    deadline = time.monotonic() + 60
    while not all(
        (nodes.log_of(node) or [""])[-1].endswith(agent.STARTING_AGAIN) for node in (0, 1)
    ):
        assert time.monotonic() < deadline  # a run that ends at once does not say so any more
        time.sleep(0.02)
    for node in (0, 1):
        nodes.end(node, 0)
    assert [nodes.agents[node].wait(60) for node in (0, 1)] == [0, 0]
    assert nodes.log_of(1 - lost)[0] == f"node {lost} was lost; waiting for it"


def test_run_survives_repeated_and_simultaneous_node_losses(nodes):
    nodes.begin(3)
    for lost in ((1,), (1,), (1, 2), (0, 1)):
        for node in lost:
            nodes.agents[node].terminate()
            assert nodes.agents[node].wait(60) == agent.PREEMPTED_EXIT
        for node in lost:
            nodes.start(node, 3)
        nodes.running(0, 1, 2)
    nodes.end_all()
    assert [nodes.agents[node].wait(60) for node in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("lost", [0, 1])
def test_node_that_does_not_return_stops_other_node_with_reason(nodes, lost):
    nodes.begin(2, wait=0.5)
    nodes.agents[lost].terminate()
    assert nodes.agents[1 - lost].wait(60) == 1
    why = f"stopped: node {lost} was lost and did not come back within 0.5 s"
    assert nodes.exit_of(1 - lost)["reason"] == why


def test_silent_node_is_lost_and_replaced_by_new_agent(nodes):
    ranks = nodes.begin(2, lost_after=2)
    silent = nodes.agents[1]
    silent.send_signal(signal.SIGSTOP)
    try:
        agent.wait_gone([ranks[0]], 60)
        assert nodes.log_of(0) == ["node 1 was lost; waiting for it"]
        # On another machine it would not be there.
        (Path(nodes.path(1)) / "started.json").unlink()
        nodes.start(1)
        nodes.running(0, 1)
    finally:
        silent.kill()
    # Its rank would read what is meant for the new one.
    silent.wait(60)
    agent.wait_gone([ranks[1]], 60)
    for node in (0, 1):
        nodes.end(node, 0)
    assert nodes.agents[0].wait(60) == 0


def test_launcher_that_cannot_start_ends_run(nodes):
    nodes.start(0)
    nodes.start(1, argv=["/nope"])
    assert nodes.agents[1].wait(60) == 127
    assert nodes.exit_of(1)["reason"] == "No such file or directory: /nope"
    assert nodes.agents[0].wait(60) == 1


def test_agent_with_failed_launcher_exits_as_preempted_on_sigterm(nodes):
    nodes.start(0, argv=("sh", "-c", f"trap '' TERM; {RANK}"))  # it is waited for
    nodes.running(0)
    nodes.start(1, argv=("/nope",))
    deadline = time.monotonic() + 60
    while not (nodes.folder / "met-1").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    nodes.agents[1].terminate()
    assert nodes.agents[1].wait(60) == agent.PREEMPTED_EXIT
    assert nodes.exit_of(1)["reason"] == "stopped on request"


def test_single_node_agent_exits_as_preempted_on_sigterm(nodes):
    nodes.start(0, nodes=1)
    nodes.running(0)
    nodes.agents[0].terminate()
    assert nodes.agents[0].wait(60) == agent.PREEMPTED_EXIT
    assert nodes.exit_of(0)["reason"] == "stopped on request"


JOINING = RUN.replace("limits.RANKS_GRACE", "limits.JOIN_SECONDS = limits.RANKS_GRACE")
WORLD = """echo "$NODE_RANK of $GROUP_WORLD_SIZE"; echo "$NODE_RANK $$" >"$DIR/up"
read code <"$DIR/code-$NODE_RANK"; exit "$code\""""


def test_elastic_run_continues_with_fewer_ranks_in_same_order(nodes):
    nodes.begin(3, wait=1.0, least=2, argv=("sh", "-c", WORLD))
    nodes.all_met(3)
    nodes.agents[1].kill()
    nodes.running(0, 1)  # these are node 0 and node 2
    for node in (0, 1):
        nodes.end(node, 0)
    assert [nodes.agents[node].wait(60) for node in (0, 2)] == [0, 0]
    lost = "node 1 was lost"
    for node, rank in ((0, 0), (2, 1)):
        # The agent's own lines may overtake the ranks'.
        assert set(nodes.log_of(node)) == {
            f"{node} of 3", f"{lost}; waiting for it",
            f"{lost} and did not come back within 1 s; 2 of 3 continue; starting again",
            f"{rank} of 2",
        }  # fmt: skip
        assert nodes.exit_of(node)["exit_code"] == 0


def test_returning_node_joins_after_running_ranks_have_saved(nodes):
    saves = f"trap 'echo saved; exit 0' TERM; {WORLD}"
    nodes.begin(3, wait=1.0, least=2, argv=("sh", "-c", saves), run=JOINING)
    nodes.all_met(3)
    nodes.agents[1].kill()
    nodes.running(0, 1)  # these are node 0 and node 2
    nodes.start(1, 3, wait=1.0, least=2, argv=("sh", "-c", saves), run=JOINING)
    nodes.running(0, 1, 2)
    for node in range(3):
        nodes.end(node, 0)
    assert [nodes.agents[node].wait(60) for node in range(3)] == [0, 0, 0]
    for node, place in ((0, 0), (2, 1)):
        said = nodes.log_of(node)
        came, saved = "node 1 can join; the ranks save their work and end", said.index("saved")
        assert said.index(f"{place} of 2") < said.index(came)
        assert said.index("node 1 can join; 3 nodes continue; starting again") > saved
        assert said.count(f"{node} of 3") == 2
    assert nodes.log_of(1)[-1] == "1 of 3"
    assert "spare: waits until a node is lost" in nodes.log_of(1)
    assert [nodes.exit_of(node)["reason"] for node in range(3)] == [None, None, None]


def test_spare_takes_rank_of_lost_node(nodes):
    for node in range(3):
        nodes.start(node, wait=1.0, spares=1, restarts=1, argv=("sh", "-c", WORLD))
    nodes.running(0, 1)
    nodes.all_met(3)
    assert json.loads((Path(nodes.path(2)) / "started.json").read_bytes())["spare"]
    nodes.agents[1].kill()
    nodes.running(0, 1)
    assert "spare" not in json.loads((Path(nodes.path(2)) / "started.json").read_bytes())
    for node in (0, 1):
        nodes.end(node, 0)
    assert [nodes.agents[node].wait(60) for node in (0, 2)] == [0, 0]
    assert "1 of 2" in nodes.log_of(2)
    assert (
        "node 1 was lost and did not come back within 1 s; node 2 replaces node 1; starting again"
    ) in nodes.log_of(0)
    assert nodes.exit_of(2)["restarts_left"] == 1


def test_spare_follows_restart_and_exits_with_other_nodes(nodes):
    for node in range(3):
        nodes.start(node, wait=60.0, spares=1, restarts=1)
    nodes.running(0, 1)
    nodes.all_met(3)
    nodes.end(1, 7)
    nodes.running(0, 1)
    for node in (0, 1):
        nodes.end(node, 0)
    assert [process.wait(60) for process in nodes.started] == [0, 0, 0]
    before, after = nodes.exit_of(2), nodes.exit_of(2, 2)
    assert (before["next"], before["reason"]) == (2, SPARE_NOT_NEEDED)
    assert (after["exit_code"], after["reason"], after["restarts_left"]) == (0, None, 0)


def test_spare_of_failed_run_is_stopped_with_reason(nodes):
    for node in range(3):
        nodes.start(node, wait=60.0, spares=1)
    nodes.running(0, 1)
    nodes.all_met(3)
    nodes.end(1, 7)
    assert nodes.agents[1].wait(60) == 7
    nodes.agents[2].wait(60)
    assert nodes.exit_of(2)["reason"] == "stopped: node 1 failed"
