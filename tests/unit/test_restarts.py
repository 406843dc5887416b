"""Agents that start all ranks again after one failed, each time as another attempt."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from clusterkit import agent
from clusterkit.agent.node_files import NodeFiles, restarts_left
from clusterkit.backends.node_status import judge_running
from clusterkit.run.status import State
from tests.agents import RUN, Nodes


@pytest.fixture
def nodes(tmp_path):
    found = Nodes(tmp_path)
    yield found
    found.close()


def begin(nodes, count, restarts, wait=0.0):
    """Start them all; their ranks, once each node has met node 0."""
    ranks = nodes.begin(count, wait=wait, restarts=restarts)
    nodes.all_met(count)
    return ranks


@pytest.mark.parametrize("wait", [0.0, 60.0])
@pytest.mark.parametrize("failing", [0, 1])
def test_failed_rank_restarts_ranks_of_all_nodes_under_same_agents(nodes, failing, wait):
    before = begin(nodes, 2, 1, wait)
    nodes.end(failing, 7)
    after = nodes.running(0, 1)
    assert not set(before.values()) & set(after.values())
    for node in (0, 1):
        nodes.end(node, 0)
    assert [nodes.agents[node].wait(60) for node in (0, 1)] == [0, 0]
    first, second = nodes.exit_of(failing), nodes.exit_of(failing, 2)
    assert (first["exit_code"], first["reason"], first["next"]) == (7, None, 2)
    assert (second["exit_code"], second["reason"], second.get("next")) == (0, None, None)
    other = nodes.exit_of(1 - failing)
    assert (other["exit_code"], other["reason"]) == (143, f"stopped: node {failing} failed")
    assert nodes.log_of(failing) == [f"node {failing} failed", "restart 1 of 1"]


def test_single_node_restarts_ranks_until_restarts_are_used(nodes):
    begin(nodes, 1, 2)
    for code in (7, 9):
        nodes.end(0, code)
        nodes.running(0)
    nodes.end(0, 5)
    assert nodes.agents[0].wait(60) == 5
    ends = [nodes.exit_of(0, attempt) for attempt in (1, 2, 3)]
    assert [end["exit_code"] for end in ends] == [7, 9, 5]
    assert [end["restarts_left"] for end in ends] == [1, 0, 0]
    assert (
        restarts_left(2, Path(nodes.path(0))) == 0
    )  # for an agent that somebody starts there anew


def test_failure_on_full_disk_is_recorded_and_not_restarted(tmp_path):
    """It takes no record of another attempt; so there is none."""
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    nodes = Nodes(tmp_path)
    try:
        begin(nodes, 1, 2)
        with contextlib.suppress(OSError), (tmp_path / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        nodes.end(0, 7)
        assert nodes.agents[0].wait(60) == 7
        ended = nodes.exit_of(0)
        assert (ended["exit_code"], ended.get("next")) == (7, None)
        assert "not started again: its disk is full" in ended["remarks"]
    finally:
        nodes.close()
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


FAILS = """echo "$NODE_RANK $$" >"$DIR/up"; echo '@clusterkit {"event": "metrics", "step": 4}'
echo 'Traceback (most recent call last):'; echo '  File "a.py", line 3, in main'; echo 'E: bad'
exit 1"""


def test_same_exception_twice_in_a_row_ends_run(nodes):
    nodes.start(0, 1, wait=0, restarts=5, argv=("sh", "-c", FAILS))
    assert nodes.agents[0].wait(60) == 1
    ended = nodes.exit_of(0, 2)
    assert (ended["final"], ended["remarks"]) == (True, [
        'failed twice with the same error: E: bad (File "a.py", line 3, in main) at step 4; '
        "not restarted again"
    ])  # fmt: skip


# A node whose limit is not over before it has heard of node 0, and which does not end before it has
# told of that.
LATE_ONCE_MET = RUN.replace(
    "sys.exit(",
    "import threading; from clusterkit.agent.node import Node; met = threading.Event(); "
    "Peer.receive = lambda self, *given, do=Peer.receive: (do(self, *given), met.set()); "
    "late = Node._time_limit_reached; "
    "Node._time_limit_reached = lambda self: (met.wait(200), late(self)); "
    "limits.PEER_SECONDS = 200; sys.exit(",
)


@pytest.mark.parametrize("restarts", [0, 3])
def test_time_limit_reached_on_one_node_ends_all_nodes(nodes, restarts):
    nodes.start(0, 2, wait=0, restarts=restarts, limit=600, lost_after=600)
    nodes.start(1, 2, wait=0, restarts=restarts, limit=0, lost_after=600, run=LATE_ONCE_MET)
    assert [nodes.agents[node].wait(240) for node in (1, 0)] == [124, 143]
    ends = [nodes.exit_of(node) for node in (1, 0)]
    assert [end["final"] for end in ends] == [True, True]
    assert ends[0]["reason"] == "it was stopped at its time_limit"
    assert ends[1]["reason"].startswith("stopped: ")


def test_time_limit_counts_seconds_run_in_earlier_attempts(tmp_path):
    """A requeued Slurm job waited between them, and the node may have had another number."""
    now = time.time()
    folders = [tmp_path / each for each in ("1/node-0", "1/node-1", "2/node-1", "3/node-0")]
    for folder in folders:
        folder.mkdir(parents=True)
    for folder, began in zip(folders, (90000, 90000, 9000, 0), strict=True):
        (folder / "started.json").write_text(json.dumps({"at": now - began}))
    for folder, ended in zip(folders[:2], (89990, 89900), strict=True):
        (folder / "exit.json").write_text(json.dumps({"at": now - ended}))
    (folders[2] / "log").touch()  # an agent that was killed
    os.utime(folders[2] / "log", (now, now - 8000))
    files = NodeFiles(folders[3], 3, echo=False)
    assert files.seconds_run() == pytest.approx(100 + 1000, abs=1)
    assert files.deadline(1200) == pytest.approx(time.monotonic() + 100, abs=30)


def test_succeeded_node_restarts_with_failed_node(nodes):
    begin(nodes, 2, 1)
    nodes.end(1, 0)
    nodes.end(0, 7)
    nodes.running(0, 1)
    for node in (0, 1):
        nodes.end(node, 0)
    assert [nodes.agents[node].wait(60) for node in (0, 1)] == [0, 0]
    assert nodes.exit_of(1)["exit_code"] == 0


def test_killed_rank_is_restarted_promptly(nodes):
    taken = []
    ranks = begin(nodes, 1, 3)
    for _ in range(3):
        began = time.monotonic()
        agent.send(ranks.values(), signal.SIGKILL)
        ranks = nodes.running(0)
        taken.append(time.monotonic() - began)
    assert taken[0] < 50  # 0.3 s alone
    nodes.end(0, 0)
    assert nodes.agents[0].wait(60) == 0


def test_agent_echoes_node_files_to_output_but_not_to_log(tmp_path, capfd):
    (tmp_path / "1" / "node-0").mkdir(parents=True)
    files = NodeFiles(tmp_path / "1" / "node-0", 1, echo=True)
    files.set_waiting("restart 1 of 2 waits 1 s", 1.0)
    files.next_attempt(2, {"exit_code": 7, "processes": []})
    first, second = (line.split(" ", 4) for line in capfd.readouterr().out.splitlines())
    assert [first[1:4], second[1:4]] == [
        ["-", agent.NODE_FILE.decode(), f"{name}.json"] for name in ("started", "exit")
    ]
    assert json.loads(first[4])["waits"]["why"] == "restart 1 of 2 waits 1 s"
    assert json.loads(second[4])["next"] == 2
    # To its log that adds nothing.
    assert (tmp_path / "1" / "node-0" / "log").read_text() == ""


@pytest.mark.parametrize("lost", [0, 1])
def test_killed_agent_stops_other_node(nodes, lost):
    begin(nodes, 2, 5)
    nodes.agents[lost].kill()
    assert nodes.agents[1 - lost].wait(60) == 143


def test_pause_before_restart_is_reported_as_restarting(nodes):
    begin(nodes, 1, 3)
    for _ in range(2):
        nodes.end(0, 7)
    nodes.running(0)
    started = Path(nodes.path(0, 2)) / "started.json"
    deadline = time.monotonic() + 60
    while (found := judge_running(0, "here", started.read_bytes())).state is State.RUNNING:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (found.state, found.reason) == (State.RESTARTING, "restart 2 of 3 waits 1 s")
    assert abs(found.until - started.stat().st_mtime - 1) < 0.5
    nodes.running(0)
    after = (Path(nodes.path(0, 3)) / "started.json").read_bytes()
    assert judge_running(0, "here", after).state is State.RUNNING
