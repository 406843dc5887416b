"""Nodes that are lost and come back, launchers that fail: what the nodes decide."""

import pytest

from clusterkit.agent import limits
from clusterkit.agent.messages import (
    Finish,
    Pause,
)
from clusterkit.agent.peer import Peer
from clusterkit.agent.retries import Retries
from tests.unit.membership.table import Table, start, state_of, stop, to_all, wait


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
