"""Nodes that are lost and come back: what node 0 decides, and agents that follow it."""

import signal
import time
from pathlib import Path

import pytest

from clusterkit import agent
from clusterkit.agent import limits
from clusterkit.agent.membership import Membership
from tests.agents import RANK, RUN, Nodes

# ---------------------------------------------------------------- node 0's decisions


class Table:
    """A membership of ``nodes``, at a moment that the test chooses."""

    def __init__(self, nodes=2, wait=60.0):
        self.now = 0.0
        self.membership = Membership(nodes, 30.0, wait)
        self.identity = self.membership.identity

    def arrives(self, node, name="", **hello):
        given = {
            "agent": name or f"agent-{node}",
            "coordinator": "",
            "round": 0,
            "running": False,
            "code": None,
        }
        self.membership.arrives(node, {**given, **hello}, self.now)
        return self.orders()

    def all_arrive(self):
        for node in range(self.membership._nodes):
            self.arrives(node)
        return self

    def ended(self, node, code, number=None):
        number = self.membership.round if number is None else number
        self.membership.ended(node, number, code, self.now)
        return self.turn(0)

    def leaves(self, node):
        self.membership.leaves(node, self.now)
        return self.orders()

    def turn(self, seconds, but=()):
        """Time goes by, and all but these say that they live."""
        self.now += seconds
        for node, member in self.membership.members.items():
            if node not in but and member.closed is None and not member.leaving:
                self.membership.hears(node, self.now)
        self.membership.turn(self.now)
        return self.orders()

    def orders(self):
        orders, self.membership.orders = self.membership.orders, []
        connected = {
            node for node, member in self.membership.members.items() if member.closed is None
        }
        return [(node, *next(iter(what.items()))) for node, what in orders if node in connected]


def test_the_first_to_come_start_at_once():
    table = Table()
    assert table.arrives(1) == [(1, "start", 1)]
    assert table.arrives(0) == [(0, "start", 1)]
    assert table.turn(1000) == []


def test_one_that_started_before_it_met_node_0_belongs_to_the_first_round():
    table = Table()
    table.arrives(0)
    assert table.arrives(1, running=True) == []
    table.ended(0, 0)
    assert table.ended(1, 0, number=0) == [(0, "exit", 0), (1, "exit", 0)]


def test_one_that_ended_before_it_met_node_0_is_heard():
    table = Table()
    table.arrives(0)
    assert table.arrives(1, code=127) == []
    assert table.turn(3) == [(0, "stop", "node 1 failed"), (1, "stop", "node 1 failed")]


def test_all_end_when_the_last_has_ended_well():
    table = Table().all_arrive()
    assert table.ended(0, 0) == []
    assert table.ended(1, 0) == [(0, "exit", 0), (1, "exit", 0)]


def test_a_launcher_that_fails_while_no_node_is_lost_ends_the_run():
    table = Table(3).all_arrive()
    assert table.ended(1, 7) == []
    assert table.turn(limits.FAILURE_GRACE) == []
    assert table.turn(0.1) == [(node, "stop", "node 1 failed") for node in range(3)]
    assert table.arrives(2) == [(2, "stop", "node 1 failed")]


def test_a_failure_that_is_the_echo_of_a_lost_node_ends_nothing():
    table = Table().all_arrive()
    table.ended(0, 1)
    assert table.leaves(1) == [(0, "wait", "node 1 was lost")]
    assert table.turn(50) == []
    assert table.arrives(1, "another") == []
    assert table.turn(0) == [(0, "start", 2), (1, "start", 2)]


def test_a_failure_is_judged_once_it_is_known_whether_a_quiet_node_is_lost():
    table = Table().all_arrive()
    table.membership.closed(1, table.now)
    table.ended(0, 1)
    assert table.turn(limits.PEER_GONE_SECONDS - 0.1) == []
    assert table.turn(0.2) == [(0, "wait", "node 1 was lost")]
    table = Table().all_arrive()
    table.turn(limits.PEER_QUIET_SECONDS + 1, but={1})
    table.ended(0, 1)
    assert table.turn(20, but={1}) == []
    assert (0, "wait", "node 1 was lost") in table.turn(20, but={1})


def test_a_connection_that_breaks_off_for_a_moment_changes_nothing():
    table = Table().all_arrive()
    table.membership.closed(1, table.now)
    table.turn(limits.PEER_GONE_SECONDS - 1)
    assert table.arrives(1, running=True, round=1, coordinator=table.identity) == []
    assert table.turn(100) == []
    # What was said meanwhile is made good.
    table.membership.closed(1, table.now)
    assert table.arrives(1, running=False, round=1, code=5, coordinator=table.identity) == []
    assert table.turn(3) == [(0, "stop", "node 1 failed"), (1, "stop", "node 1 failed")]


def test_a_start_that_was_not_heard_is_said_again():
    table = Table().all_arrive()
    table.leaves(1)
    table.ended(0, 143)
    table.arrives(1, "another")
    assert table.turn(0) == [(0, "start", 2), (1, "start", 2)]
    table.membership.closed(0, table.now)
    again = table.arrives(0, round=1, code=143, coordinator=table.identity)
    assert again == [(0, "start", 2)]
    assert table.turn(10) == []


def test_the_others_end_before_all_start_again():
    table = Table(3).all_arrive()
    assert table.leaves(2) == [(0, "wait", "node 2 was lost"), (1, "wait", "node 2 was lost")]
    table.arrives(2, "another")
    assert table.ended(0, 143) == []
    assert table.ended(1, 1) == [(0, "start", 2), (1, "start", 2), (2, "start", 2)]


def test_an_agent_in_another_s_place_says_that_the_node_was_lost():
    table = Table().all_arrive()
    assert table.arrives(1, "another") == [(0, "wait", "node 1 was lost")]
    assert table.ended(0, 1) == [(0, "start", 2), (1, "start", 2)]


def test_one_that_started_too_early_ends_first():
    table = Table().all_arrive()
    table.leaves(1)
    table.ended(0, 1)
    assert table.arrives(1, "another", running=True) == [(1, "wait", "node 1 was lost")]
    assert table.ended(1, 143, number=0) == [(0, "start", 2), (1, "start", 2)]


@pytest.mark.parametrize("times", [2, 5])
def test_the_same_node_may_be_lost_again_and_again(times):
    table = Table().all_arrive()
    for number in range(times):
        assert table.leaves(1) == [(0, "wait", "node 1 was lost")]
        table.ended(0, 143)
        table.arrives(1, f"number {number}")
        assert table.turn(1) == [(0, "start", number + 2), (1, "start", number + 2)]


def test_two_may_be_lost_at_once_and_one_while_it_is_waited_for():
    table = Table(4, wait=100).all_arrive()
    table.leaves(1)
    table.leaves(2)
    for node in (0, 3):
        table.ended(node, 143)
    table.arrives(1, "b")
    assert table.turn(90) == []
    assert table.leaves(1) == [(0, "wait", "node 1 was lost"), (3, "wait", "node 1 was lost")]
    assert table.turn(90) == []  # each has its own time
    table.arrives(1, "c")
    table.arrives(2, "b")
    assert table.turn(0) == [(node, "start", 2) for node in range(4)]


def test_one_that_stays_away_ends_the_run():
    table = Table(3).all_arrive()
    table.leaves(1)
    table.leaves(2)
    table.ended(0, 143)
    table.arrives(1, "another")
    assert table.turn(60) == []
    assert table.turn(1)[0] == (
        0, "stop", "node 2 was lost and did not come back within 60 s",
    )  # fmt: skip


def test_one_that_fell_silent_is_lost_and_may_come_back_itself():
    table = Table().all_arrive()
    assert table.turn(29, but={1}) == []
    # It may still hear.
    assert table.turn(2, but={1}) == [(node, "wait", "node 1 was lost") for node in (0, 1)]
    table.ended(0, 1)
    hello = {
        "running": False,
        "round": 1,
        "code": 137,
        "coordinator": table.identity,
        "lost": True,
    }
    table.arrives(1, **hello)
    assert table.turn(0) == [(0, "start", 2), (1, "start", 2)]


def test_one_that_had_given_node_0_up_is_no_failure():
    table = Table().all_arrive()
    hello = {
        "running": False,
        "round": 1,
        "code": 143,
        "coordinator": table.identity,
        "lost": True,
    }
    assert table.arrives(1, **hello) == [(0, "wait", "node 1 was lost")]
    assert table.ended(0, 143) == [(0, "start", 2), (1, "start", 2)]


def test_a_new_node_0_goes_on_with_those_who_were_there_before():
    table = Table(3)
    assert table.arrives(0) == [(0, "start", 1)]
    said = table.arrives(1, coordinator="the old one", round=4, code=143)
    assert said == [
        (0, "say", "this node takes the place of one that was lost; starting again"),
        (1, "start", 1),
    ]
    assert table.arrives(2, coordinator="the old one", round=4, code=1) == [(2, "start", 1)]
    for node in range(3):
        table.ended(node, 0)
    assert table.membership.verdict == {"exit": 0}


def test_a_new_node_0_may_be_the_last_to_hear_of_it():
    table = Table()
    assert table.arrives(1, coordinator="the old one", round=1, code=143) == [(1, "start", 1)]
    table.arrives(0)
    assert table.membership.members[0].running


def test_ranks_that_still_run_may_not_reach_those_of_a_new_node_0():
    table = Table()
    table.arrives(0)
    told = table.arrives(1, coordinator="the old one", round=1, running=True)
    assert told[1:] == [(0, "wait", "node 0 was lost"), (1, "wait", "node 0 was lost")]
    assert table.ended(1, 143, number=1) == []
    assert table.ended(0, 143) == [(0, "start", 2), (1, "start", 2)]


def test_those_who_never_come_to_a_new_node_0_end_the_run():
    table = Table(3)
    table.arrives(0)
    table.arrives(1, coordinator="the old one", round=1, code=1)
    assert table.turn(61)[0] == (0, "stop", "node 2 was lost and did not come back within 60 s")


# ---------------------------------------------------------------- nobody comes back


def alone(nodes=3):
    """All run, and have started before they met node 0."""
    table = Table(nodes, wait=0.0)
    for node in range(nodes):
        assert table.arrives(node, running=True) == []
    return table


def to_all(*order, nodes=3):
    return [(node, *order) for node in range(nodes)]


@pytest.mark.parametrize("node", [0, 1, 2])
def test_without_a_return_a_failure_ends_the_run_in_the_same_moment(node):
    table = alone()
    table.membership.ended(node, 0, 7, table.now)
    assert table.orders() == to_all("stop", f"node {node} failed")
    assert table.turn(1000) == []


def test_without_a_return_a_node_that_failed_before_it_met_node_0_ends_the_run():
    table = Table(2, wait=0.0)
    table.arrives(0, running=True)
    assert table.arrives(1, code=127) == to_all("stop", "node 1 failed", nodes=2)


def test_without_a_return_a_node_that_ended_well_is_not_lost():
    table = alone()
    assert table.ended(1, 0) == []
    table.membership.closed(1, table.now)
    assert table.turn(1000, but={1}) == []
    assert table.ended(0, 0) == [(0, "exit", 0), (2, "exit", 0)]  # and nobody watches node 2


def test_without_a_return_a_node_that_is_gone_ends_the_run():
    table = alone()
    table.membership.closed(1, table.now)
    assert table.turn(limits.PEER_GONE_SECONDS, but={1}) == []
    words = "the launcher of node 1 is gone"
    assert table.turn(0.1, but={1}) == [(0, "stop", words), (2, "stop", words)]


def test_without_a_return_a_node_may_connect_again():
    table = alone()
    table.membership.closed(1, table.now)
    table.turn(limits.PEER_GONE_SECONDS - 1, but={1})
    assert table.arrives(1, running=True, coordinator=table.identity) == []
    assert table.turn(1000) == []


def test_without_a_return_a_silent_node_ends_the_run():
    table = alone()
    assert table.turn(30, but={2}) == []
    assert table.turn(0.1, but={2}) == to_all("stop", "node 2 does not answer node 0 for 30 s")


def test_without_a_return_another_agent_in_a_node_s_place_ends_the_run():
    table = alone()
    assert table.arrives(1, "another") == to_all("stop", "the launcher of node 1 is gone")


def test_a_node_that_started_by_itself_and_ended_while_it_was_cut_off_is_heard():
    table = Table()
    table.arrives(0)
    table.arrives(1, running=True)
    table.membership.closed(1, table.now)
    assert table.arrives(1, code=5, coordinator=table.identity) == []
    assert table.turn(3) == to_all("stop", "node 1 failed", nodes=2)


# ---------------------------------------------------------------- agents


@pytest.fixture
def nodes(tmp_path):
    found = Nodes(tmp_path)
    yield found
    found.close()


def test_a_run_without_losses_ends_with_its_ranks(nodes):
    nodes.begin(2)
    nodes.end(1, 0)
    nodes.end(0, 0)
    assert [nodes.agents[node].wait(60) for node in (0, 1)] == [0, 0]
    assert nodes.log_of(0) == nodes.log_of(1) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_ends_the_run_and_nothing_is_started_again(nodes, failing):
    nodes.begin(2)
    nodes.end(failing, 7)
    assert nodes.agents[failing].wait(60) == 7
    assert nodes.agents[1 - failing].wait(60) == 1  # not what stands for a node taken away
    assert nodes.exit_of(failing)["reason"] is None
    other = nodes.exit_of(1 - failing)
    assert (other["exit_code"], other["reason"]) == (143, f"stopped: node {failing} failed")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_comes_back_and_all_start_again(nodes, lost, how):
    before = nodes.begin(2)
    nodes.agents[lost].send_signal(how)
    assert nodes.agents[lost].wait(60) == (agent.LEFT if how == signal.SIGTERM else -how)
    agent.wait_gone([before[lost]], 60)
    nodes.start(lost)
    after = nodes.running(0, 1)
    assert not set(before.values()) & set(after.values())
    assert [agent.start_ticks(pid) for pid in before.values()] == [None, None]
    for node in (0, 1):
        nodes.end(node, 0)
    assert [nodes.agents[node].wait(60) for node in (0, 1)] == [0, 0]
    assert nodes.log_of(1 - lost)[0] == f"node {lost} was lost; waiting for it"
    assert nodes.log_of(1 - lost)[-1].endswith(agent.AGAIN)
    assert nodes.log_of(lost)[-1].endswith(agent.AGAIN)


def test_the_same_node_is_lost_twice_and_two_at_once(nodes):
    nodes.begin(3)
    for lost in ((1,), (1,), (1, 2), (0, 1)):
        for node in lost:
            nodes.agents[node].terminate()
            assert nodes.agents[node].wait(60) == agent.LEFT
        for node in lost:
            nodes.start(node, 3)
        nodes.running(0, 1, 2)
    for node in range(3):
        nodes.end(node, 0)
    assert [nodes.agents[node].wait(60) for node in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_stays_away_ends_the_others_by_name(nodes, lost):
    nodes.begin(2, wait=0.5)
    nodes.agents[lost].terminate()
    assert nodes.agents[1 - lost].wait(60) == 1
    why = f"stopped: node {lost} was lost and did not come back within 0.5 s"
    assert nodes.exit_of(1 - lost)["reason"] == why


def test_one_that_falls_silent_is_lost(nodes):
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


def test_a_launcher_that_cannot_start_ends_the_run(nodes):
    nodes.start(0)
    nodes.start(1, argv=["/nope"])
    assert nodes.agents[1].wait(60) == 127
    assert nodes.exit_of(1)["reason"] == "No such file or directory: /nope"
    assert nodes.agents[0].wait(60) == 1


def test_a_node_whose_launcher_could_not_start_may_be_taken_away(nodes):
    patient = RUN.replace("sys.exit", "limits.FAILURE_GRACE = 100; sys.exit")
    for node, argv in ((0, ("sh", "-c", RANK)), (1, ("/nope",))):
        nodes.start(node, argv=argv, run=patient)
    deadline = time.monotonic() + 60
    while not (nodes.folder / "met-1").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    nodes.agents[1].terminate()
    assert nodes.agents[1].wait(60) == agent.LEFT
    assert nodes.exit_of(1)["reason"] == "stopped on request"


def test_a_single_node_that_is_taken_away_says_so_by_its_exit_code(nodes):
    nodes.start(0, nodes=1)
    nodes.running(0)
    nodes.agents[0].terminate()
    assert nodes.agents[0].wait(60) == agent.LEFT
    assert nodes.exit_of(0)["reason"] == "stopped on request"
