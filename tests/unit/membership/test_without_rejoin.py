"""Runs whose lost nodes do not come back."""

import pytest

from clusterkit.agent import limits
from clusterkit.agent.peer import Peer
from tests.unit.membership.table import Table, stop, to_all


def alone(nodes=3):
    """All run, and have started before they met node 0."""
    table = Table(nodes, wait=0.0)
    for node in range(nodes):
        assert table.arrives(node) == []
    return table


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
