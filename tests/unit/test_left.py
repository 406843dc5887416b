"""Ranks that neither run nor end although others have ended: who is named, and when."""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from clusterkit.agent import clock, identity, limits, rank_state
from clusterkit.agent.messages import Left
from clusterkit.agent.node_files import NodeFiles
from clusterkit.agent.watch import Watch
from clusterkit.backends import node_status
from clusterkit.backends.node_status import NativeState, judge_node, judge_running
from clusterkit.run.status import IdleRank, NodeStatus, RunStatus, State
from clusterkit.ui.formatting import remark_lines
from clusterkit.ui.top.board import RunBoard
from tests.agents import RUN, Nodes
from tests.unit import test_forkserver

agent = test_forkserver.agent


class Node:
    """The watch of a node of two ranks, at times that the test gives."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int = 1) -> None:
        monkeypatch.setenv("CLUSTERKIT_RUN_DIR", str(tmp_path))
        monkeypatch.setattr(clock, "awake", lambda: self.now)
        monkeypatch.setattr(rank_state, "context_switches", lambda pid: self.switches[pid])
        monkeypatch.setattr(rank_state, "record", self._record)
        options = argparse.Namespace(nproc=2, hang_timeout=None, tagged=False, nodes=nodes)
        self.now, self.switches, self.places_read = 0.0, {1000: b"0", 1001: b"0"}, 0
        self.files = NodeFiles(tmp_path, 1, echo=False)
        self.watch = Watch(options, tmp_path, self.files.log, self._take)
        self.begin(nodes)

    def begin(self, nodes: int = 1) -> None:
        """Begin a round, with new processes."""
        self.watch._receive(0, {"begin": nodes, "past": len(self.files.log.ranks)})
        self.switches = {pid + 10: b"0" for pid in self.switches}
        for rank, pid in enumerate(self.switches):
            self.files.log.ranks.append({**identity(os.getpid()), "pid": pid, "rank": rank})

    def _record(
        self, rank: dict[str, Any], folder: Path, *, place: bool, moves: bool
    ) -> dict[str, Any]:
        self.places_read += place
        return {"rank": rank["rank"], "at": f"leave.py:{8 + rank['rank']}", "waits": []}

    def _take(self, order: object) -> None:
        if isinstance(order, Left):
            self.files.show(order)

    def pass_time(self, seconds: float, runs: tuple[int, ...] = ()) -> None:
        """Look once a second; ``runs``: ranks whose main threads run meanwhile."""
        for _ in range(round(seconds)):
            self.now += 1.0
            for rank, pid in enumerate(self.switches):
                if rank in runs:
                    self.switches[pid] += b"1"
            self.watch._check_ranks()

    def end(self, rank: int) -> None:
        self.switches[[*self.switches][rank]] = b""

    def pid(self, rank: int) -> int:
        return [*self.switches][rank]

    @property
    def logged(self) -> list[str]:
        lines = (self.files.folder / "log").read_text().splitlines()
        return [line.partition(" - ")[2] for line in lines]

    @property
    def status(self) -> NodeStatus:
        return judge_running(0, "h", (self.files.folder / "started.json").read_bytes())


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def run_of(*nodes: NodeStatus) -> RunStatus:
    return RunStatus(run="r", job="j", cluster="c", backend="b", state=State.RUNNING, nodes=nodes)


def test_rank_that_does_not_end_is_logged_once_and_shown_until_it_runs(node: Node) -> None:
    node.pass_time(10, runs=(0, 1))
    node.end(0)
    node.pass_time(59)
    assert (node.logged, remark_lines(run_of(node.status))) == ([], [])
    node.pass_time(30)
    text = (
        r"not ended: the main thread of rank 1 has not run for \d+ s, and rank 0 has ended; "
        r"rank 1 is at leave\.py:9"
    )
    assert all(re.fullmatch(text, x) for x in (*node.logged, *remark_lines(run_of(node.status))))
    assert [each.rank for each in node.status.idle] == [1]
    node.pass_time(1, runs=(1,))
    assert remark_lines(run_of(node.status)) == []
    node.pass_time(100)
    assert len(node.logged) == 1
    assert len(remark_lines(run_of(node.status))) == 1
    node.end(1)
    node.pass_time(61)
    assert (node.status.ended, node.status.idle, len(node.logged)) == ((0, 1), (), 1)


def test_rank_that_computes_after_others_ended_is_not_named(node: Node) -> None:
    """Its main thread may wait for its other threads, or never be switched."""
    node.end(0)
    for _ in range(40):
        node.watch._usage.busy_at[node.pid(1)] = node.now
        node.pass_time(5)
    assert (node.logged, node.status.idle) == ([], ())


def test_ranks_that_wait_while_all_run_are_neither_named_nor_queried_for_it(node: Node) -> None:
    node.pass_time(1000)
    assert (node.logged, node.status.idle, node.places_read) == ([], (), 0)


def test_ranks_of_round_before_count_neither_as_ended_nor_as_left(node: Node) -> None:
    node.end(0)
    node.pass_time(100)
    assert node.status.idle
    before = dict(node.switches)
    node.begin()
    after, node.switches = node.switches, {**before, **node.switches}
    node.files.log.ranks[-1:] = []  # only one of the new ones has started
    node.pass_time(100)
    assert (node.status.ended, node.status.idle, len(node.logged)) == ((), (), 1)
    assert after


def test_idle_rank_on_one_node_is_compared_with_other_nodes_by_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch, nodes=2)
    node.pass_time(70, runs=(1,))
    assert node.logged == []
    idle = node.status
    assert [(each.rank, each.at) for each in idle.idle] == [(0, "leave.py:8")]
    running = NodeStatus(node=1, host="h", state=State.RUNNING)
    assert remark_lines(run_of(idle, running)) == []
    done = NodeStatus(node=1, host="h", state=State.SUCCEEDED, ended_at=time.time() - 90)
    (text,) = remark_lines(run_of(idle, done))
    assert re.fullmatch(
        r"not ended: the main thread of rank 0 on node 0 has not run for (6|7)\d s, and node 1 has "
        r"ended; rank 0 on node 0 is at leave\.py:8",
        text,
    )
    # The record of a node comes a moment later than the end of another one.
    just = NodeStatus(node=1, host="h", state=State.SUCCEEDED, ended_at=time.time() - 1)
    assert remark_lines(run_of(idle, just)) == []


def test_message_names_many_ranks_and_nodes_together() -> None:
    since = time.time() - 3600
    idle = tuple(IdleRank(rank, since, "a.py:1" if rank < 6 else None) for rank in (5, 6))
    nodes = [
        NodeStatus(node=0, host="h", state=State.SUCCEEDED, ended_at=since),
        NodeStatus(node=1, host="h", state=State.RUNNING, ended=(4, 7), idle=idle),
        NodeStatus(node=2, host="h", state=State.RUNNING, ended=(8,)),
    ]
    assert remark_lines(run_of(*nodes)) == [
        "not ended: the main threads of ranks 5-6 on node 1 have not run for 3600 s, and ranks 4 "
        "and 7-8 and node 0 have ended; rank 5 on node 1 is at a.py:1; rank 6 on node 1 is at an "
        "unknown place"
    ]


def test_top_shows_rank_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = (IdleRank(1, time.time() - 65, "leave.py:8"),)
    run = run_of(NodeStatus(node=0, host="h", state=State.RUNNING, ended=(0,), idle=idle))
    board = object.__new__(RunBoard)
    board.live, board._standstill = argparse.Namespace(status=run, stale=False), None
    text = " ".join(piece[0].strip() for line in board._notes(60, 9) for piece in line)
    assert text.startswith("not ended: the main thread of rank 1 has not run for 65 s, and rank 0")


LEAVES = """
import os, torch
if os.environ["RANK"] == "0":
    open("pipe").read()
else:
    open("pipe", "w").close()
    import time
    time.sleep(600)
"""


def test_rank_that_sleeps_after_the_other_ended_is_named_with_its_line(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = "limits.LEFT_SECONDS = 1.0; limits.ANSWER_SECONDS = 30.0; sys.exit"
    monkeypatch.setattr(test_forkserver, "RUN", test_forkserver.RUN.replace("sys.exit", soon))
    os.mkfifo(agent.folder / "pipe")
    begun = agent(LEAVES, nproc=2)
    begun.until_said("not ended: ")
    (text,) = [
        line.text for line in begun.lines() if line.rank is None and "not ended" in line.text
    ]
    assert re.fullmatch(
        r"not ended: the main thread of rank 1 has not run for \d+ s, and rank 0 has ended; "
        r"rank 1 is at program\.py:8",
        text,
    )


RANK = (
    'echo "@clusterkit-rank $NODE_RANK $$" >"$CLUSTERKIT_PIPE-0"; '
    'echo "$NODE_RANK $$" >"$DIR/up"; read code <"$DIR/code-$NODE_RANK"; exit "$code"'
)


def test_rank_alone_on_its_node_is_named_after_the_other_node_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEFT_SECONDS", 1.0)
    soon, argv = RUN.replace("sys.exit", "limits.LEFT_SECONDS = 1.0; sys.exit"), ("sh", "-c", RANK)
    nodes = Nodes(tmp_path)
    try:
        for each in (0, 1):
            nodes.start(each, wait=0, run=soon, argv=argv)
            nodes.running(each)
        nodes.end(0, 0)
        assert nodes.agents[0].wait(60) == 0
        deadline, text = time.monotonic() + 60, [""]
        while not (text := remark_lines(run_of(*(_status(nodes, each) for each in (0, 1))))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert re.fullmatch(
            r"not ended: the main thread of rank 1 on node 1 has not run for \d+ s, and node 0 has "
            r"ended; rank 1 on node 1 is at an unknown place",
            text[0],
        )
        assert nodes.log_of(1) == []
        nodes.end(1, 0)
        assert nodes.agents[1].wait(60) == 0
        assert remark_lines(run_of(*(_status(nodes, each) for each in (0, 1)))) == []
    finally:
        nodes.close()


def _status(nodes: Nodes, node: int) -> NodeStatus:
    files = node_status.NodeFiles.read(Path(nodes.path(node)))
    return judge_node(node, "h", files, NativeState.of_process(files))
