"""Nodes that are lost and come back, launchers that fail: what the nodes of a run decide.

`tests/simulation` has them meet each other on a bad day."""

from types import SimpleNamespace

import pytest

from clusterkit.agent import limits
from clusterkit.agent.coordinator import Server
from clusterkit.agent.member import RestartPolicy
from clusterkit.agent.membership import Membership
from clusterkit.agent.messages import (
    AgentState,
    CountRestarts,
    EndLauncher,
    Finish,
    Log,
    Pause,
    Start,
    Warn,
)
from clusterkit.agent.peer import Peer
from clusterkit.agent.retries import Retries

NAMES = {CountRestarts: "follow", Start: "start", EndLauncher: "wait"}


def brief(node, order):
    """The node, what it is ordered to do, and why it ends."""
    if isinstance(order, Finish):
        return node, "stop" if order.stop else "exit", order.reason
    return node, NAMES[type(order)], ""


class Table:
    """Peers around a membership, at a moment that the test chooses; what is said is heard."""

    def __init__(self, nodes=2, wait=60.0, restarts=0, retry_on=(), least=None, spares=0):
        self.retry_on, self.least, self.spares = retry_on, least, spares
        self.now, self.nodes, self.wait, self.restarts = 0.0, nodes, wait, restarts
        self.peers = {}
        self.warned = []
        self.away = set()  # nodes without a connection
        self.new_node_0()

    def new_node_0(self):
        terms = RestartPolicy(
            self.nodes, 30.0, self.wait, self.restarts, self.retry_on, self.least, self.spares
        )
        self.membership = Membership(terms)

    def arrives(self, node, running=False):
        """Another agent does."""
        self.peers[node] = Peer(node, 30.0, self.wait, self.now, node >= self.nodes)
        if running and self.wait:
            self.peers[node].disconnected(self.now, "nobody there")
            self.peers[node].orders.clear()
        return self.returns(node)

    def returns(self, node):
        """Its connection does."""
        self.away.discard(node)
        self.peers[node].connected(self.now)
        return self.talk(node)

    def all_arrive(self):
        for node in range(self.nodes + self.spares):
            self.arrives(node)
        return self

    def ended(self, node, code):
        self.peers[node].launcher_ended(code, self.now)
        return self.talk(node)

    def leaves(self, node):
        self.peers[node].leave()
        return self.talk(node)

    def breaks(self, node):
        self.away.add(node)
        self.peers[node].disconnected(self.now)
        self.membership.disconnected(node, self.now)
        return self.talk()

    def turn(self, seconds, but=()):
        """Time goes by, and all but these say that they live."""
        self.now += seconds
        return self.talk(*(node for node in self.peers if node not in but))

    def talk(self, *nodes):
        """What these say, and all that follows of it: the last order to each node."""
        found, told = [], 0
        waiting = [node for node in nodes if node not in self.away]
        while waiting or told != self.membership.sequence:
            for node in waiting:
                self.membership.receive(node, state_of(self.peers[node]), self.now)
            self.membership.tick(self.now)
            told = self.membership.sequence
            for node, peer in sorted(self.peers.items()):
                if node not in self.away:
                    peer.receive(self.directive(node), self.now)
            waiting = [
                n for n, peer in self.peers.items() if peer.report_due and n not in self.away
            ]
        for node, peer in sorted(self.peers.items()):
            peer.tick(self.now)
            logs = [order for order in peer.orders if isinstance(order, Log)]
            pauses = [order for order in peer.orders if isinstance(order, Pause)]
            warnings = [order for order in peer.orders if isinstance(order, Warn)]
            self.warned += [order.text for order in warnings]
            others = [order for order in peer.orders if order not in logs + pauses + warnings]
            found += [brief(node, order) for order in others[-1:]]
            self.said = [order.text for order in logs]
            self.pauses = pauses
            peer.orders.clear()
        return found

    def directive(self, node):
        return self.membership.directive(node, self.now)


def state_of(peer):
    return AgentState.parse(peer.report())


def to_all(*order, nodes=2):
    return [(node, *order) for node in range(nodes)]


def start(*nodes):
    return [(node, "start", "") for node in nodes]


def wait(*nodes):
    return [(node, "wait", "") for node in nodes]


def test_joining_nodes_start_at_once_in_first_round():
    table = Table()
    assert table.arrives(1) == start(1)
    assert table.arrives(0) == start(0)
    assert table.turn(1000) == []


def test_node_started_before_meeting_node_0_joins_first_round():
    table = Table()
    table.arrives(0)
    assert table.arrives(1, running=True) == []
    table.ended(0, 0)
    assert table.ended(1, 0) == to_all("exit", "")


def test_failure_before_meeting_node_0_restarts_all_once():
    table = Table()
    table.arrives(0)
    table.peers[1] = Peer(1, 30.0, 60.0, 0.0)
    table.peers[1].disconnected(0.0, "nobody there")
    table.peers[1].launcher_ended(127, 0.0)
    table.peers[1].orders.clear()
    assert table.returns(1) == wait(0, 1)
    assert table.ended(0, 143) == start(0, 1)
    assert table.ended(1, 127) == wait(0, 1)
    assert table.ended(0, 143) == [(0, "stop", "node 1 failed"), (1, "exit", "node 1 failed")]


def test_all_nodes_exit_after_last_launcher_succeeds():
    table = Table().all_arrive()
    assert table.ended(0, 0) == []
    assert table.ended(1, 0) == to_all("exit", "")


def test_launcher_failure_without_lost_node_ends_run():
    table = Table(3).all_arrive()
    assert table.ended(1, 7) == wait(0, 1, 2)
    assert table.ended(0, 143) == []
    words = "node 1 failed"
    assert table.ended(2, 143) == [(0, "stop", words), (1, "exit", words), (2, "stop", words)]
    assert table.arrives(2) == [(2, "stop", words)]


def test_launcher_failure_caused_by_lost_node_does_not_end_run():
    table = Table().all_arrive()
    assert table.ended(0, 1) == wait(0, 1)
    table.leaves(1)
    assert table.turn(50, but={1}) == []
    assert table.arrives(1) == start(0, 1)


def test_failure_while_other_node_is_disconnected_does_not_end_run():
    table = Table().all_arrive()
    table.breaks(1)
    assert table.ended(0, 1) == wait(0)
    assert table.turn(limits.PEER_GONE_SECONDS - 0.1) == []
    assert table.turn(50) == wait(1)  # it has given node 0 up
    assert table.arrives(1) == start(0, 1)
    table.ended(0, 0)
    assert table.ended(1, 0) == to_all("exit", "")


@pytest.mark.parametrize("wait_for", [0.0, 60.0])
def test_launcher_failure_restarts_all_launchers(wait_for):
    table = Table(3, wait_for, restarts=2).all_arrive()
    assert table.ended(1, 7) == wait(0, 1, 2)
    assert table.ended(0, 143) == []
    assert table.ended(2, 0) == start(0, 1, 2)
    assert table.said == ["restart 1 of 2"]
    assert table.ended(0, 1) == wait(0, 1, 2)
    table.ended(1, 143)
    assert table.ended(2, 143) == []  # soon after the first one: after a pause
    assert table.pauses == [Pause("restart 2 of 2 waits 1 s", 1.0)]
    assert table.turn(1.1) == start(0, 1, 2)
    for node in range(3):
        orders = table.ended(node, 0)
    assert orders == to_all("exit", "", nodes=3)


@pytest.mark.parametrize("wait_for", [0.0, 60.0])
def test_failure_after_last_restart_ends_run(wait_for):
    table = Table(2, wait_for, restarts=1).all_arrive()
    for _ in range(2):
        orders = table.ended(0, 7)
        orders += table.ended(1, 143) if orders[-1][1] == "wait" else []
    assert orders[-2:] == [(0, "exit", "node 0 failed"), (1, "stop", "node 0 failed")]


def failure(error="E: bad", code=1, words=""):
    echo = "by peer" in error
    return {"failure": {"code": code, "error": error, "echo": echo, "words": words}}


def rounds(failures, steps=(None,) * 9, **options):
    """What ends a run of two nodes whose ranks fail so, and after how many rounds."""
    table = Table(2, 0.0, restarts=6, **options).all_arrive()
    for number, ((first, other), step) in enumerate(zip(failures, steps, strict=False), 1):
        table.peers[1].launcher_ended(1, table.now, **(first or {}), step=step)
        table.talk(1)
        table.peers[0].launcher_ended(1, table.now, **(other or {}))
        table.talk(0)
        table.turn(limits.SOON_SECONDS)
        if table.membership.decided:
            return number, table.membership.verdict.final
    return None


ECHO = failure("RuntimeError: Connection closed by peer")


@pytest.mark.parametrize(
    ("failures", "steps", "end"),
    [
        ([(failure(), ECHO)] * 2, (3, 3), "E: bad at step 3"),
        # The other node is the first to fail of it.
        ([(failure(), None), (ECHO, failure())], (), "E: bad"),
        # Both fail by themselves, but the second time one is asked to end first.
        ([(failure(), failure("E: worse")), (failure(), None)], (3, 3), "E: bad at step 3"),
    ],
)
def test_same_failure_twice_in_a_row_is_not_restarted_again(failures, steps, end):
    words = f"failed twice with the same error: {end}; not restarted again"
    assert rounds(failures, steps or (None, None)) == (2, words)


@pytest.mark.parametrize(
    ("failures", "steps"),
    [
        ([(failure(), ECHO)] * 2, (3, 4)),
        ([(failure(), None), (failure("E: worse"), None), (failure(), None)], (3, 3, 3)),
        ([(ECHO, None)] * 2, (3, 3)),
        ([(failure("", 137), failure())] * 2, (3, 3)),  # killed: the others may fail of that
        ([(None, None)] * 2, (3, 3)),
    ],
)
def test_failure_that_may_differ_is_restarted(failures, steps):
    assert rounds(failures, steps) is None


USAGE = "usage: train.py [-h] / train.py: error: unrecognized arguments: --r=16"


def test_same_startup_error_twice_is_not_restarted_again():
    wrong = failure("", 2, USAGE)
    words = f"failed twice with the same error: exit code 2: {USAGE}; not restarted again"
    assert rounds([(wrong, wrong), (wrong, None)]) == (2, words)
    for other in (
        [(wrong, None), (failure("", 2, "another"), None)] * 2,
        [(failure("", 2), None)] * 3,  # it printed nothing
    ):
        assert rounds(other) is None
    assert rounds([(wrong, None)] * 2, (3, 3)) is None  # there were steps
    assert rounds([(wrong, None)] * 2, retry_on=(2,)) is None  # who says so wants it again


def test_same_output_after_long_run_is_restarted():
    retries = Retries(5)
    found = [
        retries.reason_not_to_restart([failure("", 3, "preempted")["failure"]], None, 3600.0)
        for _ in "ab"
    ]
    assert found == [None, None]


def test_pause_after_over_1000_restarts_is_longest_pause():
    retries = Retries(2000)
    for _ in range(1100):
        retries.use()
    assert retries.pause(1.0) == limits.LONGEST_PAUSE


def test_repeated_losses_back_off_then_count_as_failures():
    """An agent that is killed again and again, by a memory limit, say."""
    retries = Retries(3)
    pauses = [retries.lost(90.0) for _ in range(limits.FREE_RESTARTS)]
    assert pauses == [0, 0, 1, 2, 4, 8, 16, 30, 30, 30]
    assert retries.lost(90.0) is None
    assert retries.lost(3600.0) == 0.0


def test_repeatedly_lost_node_counts_as_failed_after_free_restarts():
    table = Table(2, 60.0, restarts=1).all_arrive()
    membership, now = table.membership, 0.0
    for _ in range(limits.FREE_RESTARTS):
        assert membership._ending is None
        membership._began, membership._ending = now, None
        membership._lose(1, now + 90)
        assert membership._ending.failed is None
        membership._ending, now = None, now + 90
    membership._began = now
    membership._lose(1, now + 90)
    assert membership._ending.failed == 1


def test_exit_code_not_in_retry_on_is_not_restarted():
    killed, left = failure("", 137), failure("", 3)
    assert rounds([(killed, ECHO), (left, ECHO)], retry_on=(137, 75)) == (
        2, "exit code 3 is not in retry_on; not restarted"
    )  # fmt: skip
    # Who failed first is not known.
    assert rounds([(ECHO, None), (None, None)], retry_on=(137,)) is None


def test_single_node_run_restarts_until_restarts_are_used():
    table = Table(1, 0.0, restarts=1).all_arrive()
    assert table.ended(0, 9) == start(0)
    assert table.ended(0, 9) == [(0, "exit", "node 0 failed")]


def test_pauses_between_quick_failures_grow_to_limit_and_reset():
    table = Table(1, 0.0, restarts=20).all_arrive()
    pauses = []
    for _ in range(9):
        began, orders = table.now, table.ended(0, 9)
        while orders != start(0):
            orders = table.turn(0.5)
        pauses.append(table.now - began)
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    table.turn(limits.SOON_SECONDS + 1)
    assert table.ended(0, 9) == start(0)


def test_new_node_0_keeps_count_of_used_restarts():
    table = Table(2, restarts=1).all_arrive()
    table.ended(1, 7)
    table.ended(0, 143)
    table.breaks(1)
    table.new_node_0()
    table.arrives(0)
    table.returns(1)
    table.ended(0, 143)
    table.ended(1, 143)
    table.ended(0, 7)
    assert table.ended(1, 143)[-1] == (1, "stop", "node 0 failed")


def test_lost_node_that_returns_uses_no_restart():
    table = Table(2, restarts=1).all_arrive()
    for _ in range(3):
        table.ended(0, 1)
        table.leaves(1)
        assert table.arrives(1) == start(0, 1)


def test_without_rejoin_lost_node_ends_run_despite_restarts():
    table = Table(2, 0.0, restarts=1).all_arrive()
    table.breaks(1)
    words = "the launcher of node 1 is gone"
    assert table.turn(limits.PEER_GONE_SECONDS + 0.1, but={1})[0] == (0, "stop", words)


def test_round_does_not_begin_while_node_is_disconnected():
    """It may be the agent that died during the pause: the next round would miss it."""
    table = Table(2, 0.0, restarts=3).all_arrive()
    table.ended(0, 7)
    assert table.ended(1, 143) == start(0, 1)
    table.ended(0, 9)
    assert table.ended(1, 143) == []  # after a pause of 1 s
    table.breaks(1)
    assert table.turn(1.1, but={1}) == []
    assert table.turn(4, but={1})[0] == (0, "stop", "the launcher of node 1 is gone")


def test_launcher_that_does_not_end_in_time_ends_run():
    table = Table(2, 0.0, restarts=1).all_arrive()
    table.ended(0, 7)
    for _ in range(24):
        assert table.turn(limits.END_SECONDS / 25) == []
    assert table.turn(limits.END_SECONDS / 20)[0][1:] == ("stop", "node 1 did not end within 606 s")


def test_short_disconnect_does_not_interrupt_run():
    table = Table().all_arrive()
    table.breaks(1)
    table.turn(limits.PEER_GONE_SECONDS - 1)
    assert table.returns(1) == []
    assert table.turn(100) == []
    # What was said meanwhile is made good.
    table.breaks(1)
    table.peers[1].launcher_ended(5, table.now)
    assert table.returns(1) == wait(0, 1)


def test_order_missed_while_disconnected_is_repeated_on_return():
    table = Table().all_arrive()
    table.breaks(0)
    table.leaves(1)
    assert table.arrives(1) == wait(1)
    assert table.returns(0) == wait(0)
    table.breaks(0)
    table.peers[0].launcher_ended(143, table.now)
    assert table.returns(0) == start(0, 1)


def test_all_launchers_end_before_any_starts_again():
    table = Table(3).all_arrive()
    assert table.leaves(2) == wait(0, 1)
    table.arrives(2)
    assert table.ended(0, 143) == []
    assert table.ended(1, 1) == start(0, 1, 2)


def test_new_agent_for_connected_node_restarts_all_nodes():
    table = Table().all_arrive()
    assert table.arrives(1) == wait(0, 1)
    assert table.ended(0, 1) == start(0, 1)


def test_replaced_agent_is_rejected_and_told_to_stop():
    table = Table().all_arrive()
    old = table.peers[1]
    table.arrives(1)
    assert table.ended(0, 1) == start(0, 1)
    assert not table.membership.receive(1, state_of(old), table.now)
    old.receive(table.membership.rejection(1), table.now)
    assert old.orders[-1] == Finish(stop=True, reason="another agent has replaced it")
    assert table.turn(1) == []


def test_returning_node_already_running_ends_before_restart():
    table = Table().all_arrive()
    table.leaves(1)
    table.ended(0, 1)
    assert table.arrives(1, running=True) == wait(1)
    assert table.ended(1, 143) == start(0, 1)


def test_each_of_several_lost_nodes_has_its_own_wait():
    table = Table(4, wait=100).all_arrive()
    table.leaves(1)
    table.leaves(2)
    for node in (0, 3):
        table.ended(node, 143)
    table.arrives(1)
    assert table.turn(90, but={2}) == []
    table.leaves(1)
    assert table.turn(90, but={1, 2}) == []  # each has its own time
    table.arrives(1)
    assert table.arrives(2) == start(0, 1, 2, 3)


def test_lost_node_that_does_not_return_in_time_ends_run():
    table = Table(3).all_arrive()
    table.leaves(1)
    table.leaves(2)
    table.ended(0, 143)
    table.arrives(1)
    assert table.turn(60, but={2}) == []
    assert table.turn(1, but={2})[0] == (
        0, "stop", "node 2 was lost and did not come back within 60 s",
    )  # fmt: skip


def test_silent_node_is_lost_and_restarts_on_return():
    table = Table().all_arrive()
    assert table.turn(29, but={1}) == []
    assert table.turn(2, but={1}) == wait(0, 1)  # it may still hear
    table.ended(0, 1)
    assert table.ended(1, 137) == start(0, 1)


def test_node_that_gave_up_on_node_0_restarts_without_failure():
    table = Table().all_arrive()
    table.away.add(1)
    assert table.turn(30, but={1}) == []
    assert table.talk() == []
    table.peers[1].tick(table.now + 1)
    table.peers[1].launcher_ended(143, table.now)
    assert table.returns(1) == wait(0, 1)
    assert table.ended(0, 143) == start(0, 1)


def test_new_node_0_restarts_run_with_earlier_nodes():
    table = Table(3).all_arrive()
    for node in (1, 2):
        table.breaks(node)
        table.peers[node].launcher_ended(1, table.now)
    table.new_node_0()
    assert table.arrives(0) == start(0)
    assert table.returns(1) == start(1)
    assert table.said == ["node 0 is back; starting again"] or table.said == []
    assert table.returns(2) == start(2)
    assert table.said == ["node 0 is back; starting again"]
    for node in range(3):
        table.ended(node, 0)
    assert table.membership.verdict.action == "exit"


def test_new_node_0_ends_and_restarts_ranks_still_running():
    table = Table().all_arrive()
    table.breaks(1)
    table.new_node_0()
    table.arrives(0)
    assert table.returns(1) == wait(0, 1)
    assert table.ended(1, 143) == []
    assert table.ended(0, 143) == start(0, 1)


def test_earlier_node_joining_new_node_0_makes_all_nodes_end_ranks():
    table = Table(3).all_arrive()
    table.breaks(1)
    table.peers[1].launcher_ended(1, table.now)
    del table.peers[2]
    table.new_node_0()
    table.arrives(0)
    assert table.arrives(2, running=True) == []
    assert table.returns(1) == wait(0, 1, 2)


def test_node_that_never_joins_new_node_0_ends_run():
    table = Table(3).all_arrive()
    table.breaks(1)
    table.peers[1].launcher_ended(1, table.now)
    del table.peers[2]
    table.new_node_0()
    table.arrives(0)
    table.returns(1)
    words = "node 2 was lost and did not come back within 60 s"
    assert table.turn(61)[0] == (0, "stop", words)


def test_finished_node_0_exits_after_bounded_wait_for_absent_node():
    table = Table()
    table.arrives(0)
    table.ended(0, 0)
    assert table.turn(60) == []
    assert table.turn(1) == [(0, "exit", "")]


FAILURE = {"code": 1, "error": "", "echo": False, "timed_out": False, "words": "oops"}


@pytest.mark.parametrize(
    ("failure", "free"),
    [
        (None, True),
        (FAILURE, True),  # it may have caught what a lost node 0 raised
        ({**FAILURE, "error": "RuntimeError: Connection closed by peer", "echo": True}, True),
        ({**FAILURE, "error": "KeyError: 'lr' (train.py:9)"}, False),
    ],
)
def test_failure_before_meeting_node_0_is_free_once_unless_program_raised(failure, free):
    table = Table(2)
    table.arrives(0)
    table.peers[1] = peer = Peer(1, 30.0, 60.0, 0.0)
    peer.disconnected(0.0, "nobody there")
    peer.orders.clear()
    peer.launcher_ended(1, 0.0, failure=failure)
    assert table.returns(1) == wait(0, 1)
    if free:
        assert table.ended(0, 143) == start(0, 1)
        assert table.warned == 2 * [
            "restarted without using a restart: node 1 failed before it had met node 0"
        ]
        assert table.ended(1, 1) == wait(0, 1)
    assert table.ended(0, 143) == stop(1, nodes=2)


# ---------------------------------------------------------------- nobody comes back


def alone(nodes=3):
    """All run, and have started before they met node 0."""
    table = Table(nodes, wait=0.0)
    for node in range(nodes):
        assert table.arrives(node) == []
    return table


def stop(failed, nodes=3):
    """What all are told then: the one that failed ends by itself."""
    words = f"node {failed} failed"
    return [(node, "exit" if node == failed else "stop", words) for node in range(nodes)]


@pytest.mark.parametrize("node", [0, 1, 2])
def test_without_rejoin_failure_ends_run_at_once(node):
    table = alone()
    assert table.ended(node, 7) == stop(node)
    assert table.turn(1000) == []


def test_without_rejoin_failure_before_meeting_node_0_ends_run():
    table = Table(2, wait=0.0)
    table.arrives(0)
    table.peers[1] = Peer(1, 30.0, 0.0, 0.0)
    table.peers[1].launcher_ended(127, 0.0)
    assert table.returns(1) == stop(1, nodes=2)


def test_without_rejoin_disconnect_of_succeeded_node_is_no_loss():
    table = alone()
    assert table.ended(1, 0) == []
    table.breaks(1)
    del table.peers[1]
    assert table.turn(1000) == []
    assert table.ended(0, 0) == [(0, "exit", ""), (2, "exit", "")]  # and nobody watches node 2


def test_without_rejoin_disconnected_node_ends_run_after_limit():
    table = alone()
    table.breaks(1)
    del table.peers[1]
    assert table.turn(limits.PEER_GONE_SECONDS) == []
    words = "the launcher of node 1 is gone"
    assert table.turn(0.1) == [(0, "stop", words), (2, "stop", words)]


def test_without_rejoin_short_disconnect_does_not_interrupt_run():
    table = alone()
    table.breaks(1)
    table.turn(limits.PEER_GONE_SECONDS - 1)
    assert table.returns(1) == []
    assert table.turn(1000) == []


def test_without_rejoin_silent_node_ends_run():
    table = alone()
    assert table.turn(30, but={2}) == []
    assert table.turn(0.1, but={2}) == to_all(
        "stop", "node 2 has not answered node 0 for 30 s", nodes=3
    )


def test_without_rejoin_new_agent_for_connected_node_ends_run():
    table = alone()
    assert table.arrives(1) == to_all("stop", "the launcher of node 1 is gone", nodes=3)


# ---------------------------------------------------------------- fewer nodes


def without(table, *lost):
    """These nodes vanish, the ranks of the others end; what follows when the wait is over."""
    for node in lost:
        table.breaks(node)
        del table.peers[node]
    table.turn(limits.PEER_GONE_SECONDS + 1, but=lost)
    for node in sorted(table.membership.members.ranks.keys() - set(lost)):
        table.ended(node, 1)
    assert table.turn(table.wait - 1, but=lost) == []
    return table.turn(2, but=lost)


def test_elastic_run_continues_without_lost_node():
    table = Table(4, least=2).all_arrive()
    assert without(table, 1) == start(0, 2, 3)
    assert table.said[-1] == (
        "node 1 was lost and did not come back within 60 s; 3 of 4 continue; starting again"
    )
    assert table.membership.members.ranks == {0: 0, 2: 1, 3: 2}
    for node in (0, 2):
        assert table.ended(node, 0) == []
    assert table.ended(3, 0) == [(node, "exit", "") for node in (0, 2, 3)]


def test_start_order_names_new_rank_and_number_of_nodes():
    peer = Peer(3, 30.0, 60.0, 0.0)
    table = Table(4, least=2).all_arrive()
    without(table, 1)
    peer.receive(table.directive(3), table.now)
    assert peer.orders[-1] == Start(0, rank=2, nodes=3)


def test_agent_returning_after_run_continued_is_told_to_stop():
    table = Table(3, least=2).all_arrive()
    peer = table.peers[2]
    without(table, 2)
    table.peers[2] = peer
    assert table.returns(2) == [(2, "stop", "the run continues without it")]
    assert not table.membership.receive(2, state_of(peer), table.now)
    assert table.turn(1) == []


def test_new_agent_after_run_continued_waits_for_place():
    table = Table(3, least=2).all_arrive()
    without(table, 2)
    assert table.arrives(2, running=True) == wait(2)


@pytest.mark.parametrize(("least", "lost"), [(2, (1, 2)), (None, (1,)), (3, (2,))])
def test_run_with_fewer_nodes_than_minimum_ends(least, lost):
    table = Table(3, least=least).all_arrive()
    what = {order[1] for order in without(table, *lost)}
    assert what == {"stop"}


def test_elastic_run_survives_loss_of_several_nodes_in_turn():
    table = Table(3, least=1).all_arrive()
    assert without(table, 1) == start(0, 2)
    table.breaks(2)
    del table.peers[2]
    table.turn(limits.PEER_GONE_SECONDS + 1)
    table.ended(0, 1)
    assert table.turn(61) == start(0)
    assert table.ended(0, 0) == [(0, "exit", "")]


def test_elastic_run_with_fewer_nodes_still_restarts():
    table = Table(3, restarts=1, least=2).all_arrive()
    without(table, 1)
    assert table.ended(2, 7) == wait(0, 2)
    assert table.ended(0, 143) == start(0, 2)
    assert table.membership._retries.used == 1


def test_spare_replaces_lost_node_and_takes_its_rank():
    table = Table(3, spares=2).all_arrive()
    assert table.said == ["spare: waits until a node is lost"]
    assert without(table, 1) == start(0, 2, 3)
    assert table.directive(0).text == (
        "node 1 was lost and did not come back within 60 s; node 3 replaces node 1; starting again"
    )
    assert table.membership.members.ranks == {0: 0, 3: 1, 2: 2}
    assert without(table, 3) == start(0, 2, 4)
    assert table.membership.members.ranks == {0: 0, 4: 1, 2: 2}
    assert table.membership._retries.used == 0
    for node in (0, 2):
        table.ended(node, 0)
    assert table.ended(4, 0) == [(node, "exit", "") for node in (0, 2, 4)]


def test_unused_spare_exits_with_other_nodes():
    table = Table(2, spares=1).all_arrive()
    table.ended(1, 0)
    assert table.ended(0, 0) == [(node, "exit", "") for node in (0, 1, 2)]


def test_lost_spare_is_ignored_and_not_chosen():
    table = Table(3, spares=2).all_arrive()
    table.breaks(3)
    assert table.turn(limits.PEER_GONE_SECONDS + 1, but=(3,)) == []
    del table.peers[3]
    assert without(table, 2) == start(0, 1, 4)
    assert table.membership.members.ranks == {0: 0, 1: 1, 4: 2}


def test_run_without_spares_left_shrinks_or_ends():
    table = Table(4, least=2, spares=1).all_arrive()
    assert without(table, 1, 2) == start(0, 3, 4)
    assert table.membership.members.ranks == {0: 0, 4: 1, 3: 2}
    assert table.said[-1] == (
        "nodes 1, 2 were lost and did not come back within 60 s; "
        "node 4 replaces node 1, 3 of 4 continue; starting again"
    )
    table = Table(3, spares=1).all_arrive()
    ended = without(table, 1, 2)
    assert {order[1] for order in ended} == {"stop"}
    assert [order[0] for order in ended] == [0, 3]


def test_spare_follows_restart_count_of_other_nodes():
    table = Table(2, spares=1, restarts=1).all_arrive()
    table.ended(1, 7)
    assert (2, "follow", "") in table.ended(0, 143)


def test_spare_that_cannot_reach_node_0_stops():
    peer = Peer(3, 30.0, 60.0, 0.0, spare=True)
    peer.disconnected(1.0, "nobody there")
    peer.tick(limits.PEER_MEET_SECONDS + 1)
    assert peer.orders == [Finish(stop=True, reason="node 0 cannot be reached: nobody there")]


@pytest.mark.parametrize("more", [{"spares": 1}, {"least": 2}])
def test_node_that_never_joined_is_replaced_or_dropped(more):
    table = Table(3, **more)
    for node in (0, 1, 3)[: 2 + table.spares]:
        table.arrives(node)
    assert table.turn(limits.PEER_MEET_SECONDS - 1) == []
    assert table.turn(2) == wait(0, 1)
    assert table.directive(0).text == "node 2 was lost; waiting for it"
    for node in (0, 1):
        table.ended(node, 143)
    assert table.turn(61) == start(*(0, 1, 3)[: 2 + table.spares])


def test_failure_while_node_is_missing_uses_no_restart():
    table = Table(3, least=2)
    table.arrives(0)
    table.arrives(1)
    table.turn(20)
    assert table.ended(1, 1) == wait(0, 1)
    table.ended(0, 143)
    assert table.turn(61) == start(0, 1)
    assert table.membership._retries.used == 0


def test_node_that_never_joined_is_logged_and_may_still_join():
    table = Table(3)
    table.arrives(0)
    table.arrives(1)
    assert table.turn(limits.PEER_MEET_SECONDS + 1) == []
    assert table.said == ["node 2 did not join within 120 s"]
    assert table.turn(100) == []
    assert table.arrives(2) == start(2)


def test_server_maps_report_of_node_to_its_rank_in_round():
    table, heard = Table(3, spares=1).all_arrive(), []
    without(table, 1)
    server = Server(None, table.membership, lambda node, message: heard.append(node), print)
    for node in (2, 3):
        server._receive(SimpleNamespace(node=node), {"records": []})
    assert heard == [2, 1]


def test_server_announces_nodes_of_round_in_rank_order():
    table, heard = Table(3, spares=1).all_arrive(), []
    without(table, 1)

    class Listener:
        def receive(self, seconds, hear):
            table.membership.verdict = table.directive(0)
            return True

        def close(self):
            pass

    Server(Listener(), table.membership, lambda node, message: heard.append(message), print).run()
    assert heard == [{"places": [0, 3, 2]}]


def gone_on():
    """Three nodes of four, which went on without node 2."""
    table = Table(nodes=4, restarts=1, least=2).all_arrive()
    table.breaks(2)
    table.turn(limits.PEER_GONE_SECONDS + 1, but=(2,))
    for node in (0, 1, 3):
        table.ended(node, 143)
    table.turn(61, but=(2,))
    assert table.membership.members.ranks == {0: 0, 1: 1, 3: 2}
    return table


def comes_again(table, node):
    table.peers[node] = Peer(node, 30.0, table.wait, table.now, spare=True)
    return table.returns(node)


def test_returning_node_joins_after_ranks_end_without_using_restart():
    table = gone_on()
    assert comes_again(table, 2) == []  # not at once: starts cost time
    assert table.turn(limits.JOIN_SECONDS + 1) == wait(0, 1, 3)
    assert table.pauses[0].reason.endswith("node 2 can join; the ranks save their work and end")
    assert table.ended(0, 143) == table.ended(1, 0) == []
    # Whatever they end with: they were asked to, and no restart is used.
    assert table.ended(3, 1) == start(0, 1, 2, 3)
    assert table.said == ["node 2 can join; 4 nodes continue; starting again"]
    assert table.membership.members.ranks == {0: 0, 1: 1, 2: 2, 3: 3}
    assert table.directive(0).restarts_used == 0


def test_returning_node_joins_restart_after_failure():
    table = gone_on()
    comes_again(table, 2)
    assert table.ended(1, 7) == wait(0, 1, 3)
    table.ended(0, 143)
    assert table.ended(3, 143) == start(0, 1, 2, 3)
    assert table.directive(0).restarts_used == 1


def test_returning_node_replaces_another_lost_node():
    table = gone_on()
    comes_again(table, 2)
    table.breaks(3)
    table.turn(limits.PEER_GONE_SECONDS + 1, but=(3,))
    for node in (0, 1):
        table.ended(node, 143)
    table.turn(61, but=(3,))
    assert table.membership.members.ranks == {0: 0, 1: 1, 2: 2}


def test_returning_node_does_not_join_once_launcher_has_succeeded():
    table = gone_on()
    comes_again(table, 2)
    table.ended(3, 0)
    assert table.turn(limits.JOIN_SECONDS + 1) == []
    table.ended(0, 0)
    assert table.ended(1, 0) == to_all("exit", "", nodes=4)


def test_returning_node_becomes_spare_if_all_places_are_taken():
    table = Table(nodes=2, restarts=1, spares=1).all_arrive()
    table.breaks(1)
    table.turn(limits.PEER_GONE_SECONDS + 1, but=(1,))
    table.ended(0, 143)
    assert table.turn(61, but=(1,))[-1:] == start(2)
    assert comes_again(table, 1) == []
    assert table.turn(1000) == []
    assert table.membership.members.spares == [1]
