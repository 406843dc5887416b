"""Agents that watch each other where no lost node comes back: all end with the first that fails."""

import contextlib
import json
import signal
import socket
import time
from pathlib import Path

import pytest

from clusterkit import agent
from tests.agents import RUN, Nodes

# None of these may be waited for before a node starts, or tells of its failure.
PATIENT = RUN.replace("sys.exit", "limits.RANKS_GRACE = limits.FIRST_SECONDS = 100; sys.exit")


@pytest.fixture
def nodes(tmp_path):
    found = Nodes(tmp_path)
    yield found
    found.close()


def begin(nodes, count=2, **options):
    """Start them all, wait until they run and have met node 0, and give their ranks."""
    ranks = {}
    for node in range(count):
        nodes.start(node, count, wait=0, **options)
        ranks |= nodes.running(node)
    for node in range(count):
        met(nodes, node)
    return ranks


def met(nodes, node):
    """Return when this node has heard of node 0, which knows of it then."""
    deadline = time.monotonic() + 60
    while not (nodes.folder / f"met-{node}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_node_starts_before_node_0_exists(nodes):
    nodes.start(1, wait=0, run=PATIENT)
    nodes.running(1)
    nodes.end(1, 0)
    assert nodes.agents[1].wait(60) == 0


def test_node_starts_when_node_0_does_not_answer(nodes):
    with socket.create_server(("127.0.0.1", nodes.port)):
        nodes.start(1, wait=0, run=PATIENT)
        nodes.running(1)
        nodes.end(1, 0)
        assert nodes.agents[1].wait(60) == 0


def test_failure_before_node_0_start_is_reported_to_node_0(nodes):
    # Node 0 has as long as it takes to come up.
    run = RUN.replace("PEER_GONE_SECONDS = 0.3", "PEER_GONE_SECONDS = limits.PEER_SECONDS = 60")
    nodes.start(1, wait=0, run=run.replace("PEER_SECONDS = 0.2", "PEER_AGAIN_SECONDS = 0.05"))
    rank = nodes.running(1)[1]
    nodes.end(1, 7)
    agent.wait_gone([rank], 60)
    nodes.start(0, wait=0)
    assert nodes.agents[0].wait(60) == 143
    assert nodes.exit_of(0)["reason"] == "stopped: node 1 failed"
    assert nodes.agents[1].wait(60) == 7


@pytest.mark.parametrize("failing", [0, 1])
def test_failed_node_stops_other_nodes_at_once(nodes, failing):
    begin(nodes, 3, run=PATIENT)
    began = time.monotonic()
    nodes.end(failing, 7)
    assert nodes.agents[failing].wait(60) == 7
    assert nodes.exit_of(failing)["reason"] is None
    for other in {0, 1, 2} - {failing}:
        assert nodes.agents[other].wait(60) == 143
        ended = nodes.exit_of(other)
        assert (ended["exit_code"], ended["reason"]) == (143, f"stopped: node {failing} failed")
        assert (ended["stopped_by"], ended["remarks"]) == (None, [])
    assert time.monotonic() - began < 50  # nor for a pause of 100 s; alone it takes 0.1 s


def test_succeeded_node_does_not_stop_other_nodes(nodes):
    begin(nodes, 3)
    nodes.end(1, 0)
    assert nodes.agents[1].wait(60) == 0
    time.sleep(1)  # PEER_GONE_SECONDS is 0.3
    assert [nodes.agents[node].poll() for node in (0, 2)] == [None, None]
    nodes.end(0, 0)
    assert nodes.agents[0].wait(60) == 0
    time.sleep(1)
    assert nodes.agents[2].poll() is None
    nodes.end(2, 5)
    assert nodes.agents[2].wait(60) == 5


@pytest.mark.parametrize("lost", [0, 1])
def test_killed_agent_stops_other_nodes(nodes, lost):
    begin(nodes, 3)
    nodes.agents[lost].kill()
    for other in {0, 1, 2} - {lost}:
        assert nodes.agents[other].wait(60) == 143
        why = f"stopped: the launcher of node {lost} is gone"
        assert nodes.exit_of(other)["reason"] == why
        assert nodes.log_of(other) == []


@pytest.mark.parametrize("silent", [0, 1])
def test_silent_node_stops_other_node_after_lost_after(nodes, silent):
    begin(nodes, lost_after=2)
    nodes.agents[silent].send_signal(signal.SIGSTOP)
    other = nodes.agents[1 - silent]
    assert other.wait(60) == 143
    why = ("node 0 has not answered for 2 s", "node 1 has not answered node 0 for 2 s")[silent]
    assert nodes.exit_of(1 - silent)["reason"] == f"stopped: {why}"
    nodes.agents[silent].kill()


def test_terminated_agent_stops_other_node(nodes):
    begin(nodes)
    nodes.agents[1].terminate()
    assert [nodes.agents[node].wait(60) for node in (1, 0)] == [143, 143]
    assert nodes.exit_of(1)["reason"] == "stopped on request"
    assert nodes.exit_of(0)["reason"] == "stopped: node 1 failed"


def test_rank_that_exits_0_when_stopped_counts_as_success(nodes):
    ready = 'trap \'exit 0\' TERM; echo "$NODE_RANK $$" >"$DIR/up"; while :; do sleep 0.1; done'
    nodes.start(0, wait=0)
    nodes.running(0)
    nodes.start(1, wait=0, argv=["sh", "-c", ready])
    nodes.running(1)
    met(nodes, 0)
    met(nodes, 1)
    nodes.end(0, 7)
    assert [nodes.agents[node].wait(60) for node in (0, 1)] == [7, 0]
    assert nodes.exit_of(1)["reason"] == "stopped: node 0 failed"


def test_missing_node_0_is_remarked_and_node_goes_on(nodes):
    soon = RUN.replace("sys.exit", "limits.PEER_MEET_SECONDS = 0.5; sys.exit")
    nodes.start(1, wait=0, run=soon)
    nodes.running(1)
    started = Path(nodes.path(1), "started.json")
    deadline = time.monotonic() + 60
    while not json.loads(started.read_bytes()).get("remarks"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    nodes.end(1, 0)
    assert nodes.agents[1].wait(60) == 0
    words = (
        "the other nodes are not watched: node 0 cannot be reached: [Errno 111] Connection refused"
    )
    assert nodes.exit_of(1)["remarks"] == [words]
    assert nodes.log_of(1) == [words]


def test_launcher_that_cannot_start_ends_node_with_127(nodes):
    nodes.start(1, wait=0, argv=["/nope"])
    assert nodes.agents[1].wait(60) == 127
    assert nodes.exit_of(1)["reason"] == "No such file or directory: /nope"


def test_taken_watch_port_is_remarked_and_node_runs(nodes):
    with contextlib.closing(socket.create_server(("", nodes.port))):
        nodes.start(0, wait=0)
        nodes.running(0)
        nodes.end(0, 3)
        assert nodes.agents[0].wait(60) == 3
    words = f"the other nodes are not watched: port {nodes.port}: Address already in use"
    assert nodes.exit_of(0)["remarks"] == [words]


@pytest.mark.parametrize("stopped", [0, 1])
def test_ranks_that_succeed_while_agent_is_stopped_count_as_success(nodes, stopped):
    """Although the other node has taken that one for lost by then: the work is done."""
    ranks = begin(nodes, lost_after=2, restarts=1)
    nodes.agents[stopped].send_signal(signal.SIGSTOP)
    for node in (0, 1):
        nodes.end(node, 0)
    agent.wait_gone([ranks[stopped]], 60)
    assert nodes.agents[1 - stopped].wait(60) == 0
    nodes.agents[stopped].send_signal(signal.SIGCONT)
    assert nodes.agents[stopped].wait(60) == 0
    assert [nodes.exit_of(node)["reason"] for node in (0, 1)] == [None, None]
