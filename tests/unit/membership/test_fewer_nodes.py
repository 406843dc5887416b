"""Runs that go on with fewer nodes, or with spares."""

from types import SimpleNamespace

import pytest

from clusterkit.agent import limits
from clusterkit.agent.coordinator import Server
from clusterkit.agent.messages import (
    Finish,
    Start,
)
from clusterkit.agent.peer import Peer
from tests.unit.membership.table import Table, start, state_of, to_all, wait


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
