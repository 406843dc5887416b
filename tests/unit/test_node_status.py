"""`judge_node`: what an agent recorded against what the platform says."""

import json

import pytest

from clusterkit.agent import STOPPED
from clusterkit.backends.node_status import NativeState, NodeFiles, judge_node
from clusterkit.run.status import State

BEGUN = NodeFiles(begun=True, started=b'{"host": "h", "remarks": ["slow disk"]}')


def ended(code, reason=None, **more):
    record = {"exit_code": code, "reason": reason, "at": 5.0, "processes": [], **more}
    return NodeFiles(begun=True, exit=json.dumps(record).encode())


def judged(files, state, **native):
    found = judge_node(3, "h", files, NativeState(state=state, **native))
    return found.state, found.exit_code, found.reason


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED, State.SUCCEEDED, State.UNKNOWN])
def test_agent_exit_record_decides_state_of_ended_node(state):
    native = {"reason": "the engine does not answer", "exit_code": 255}
    assert judged(ended(0), state, **native) == (State.SUCCEEDED, 0, None)
    assert judged(ended(7, "a rank"), state, **native) == (State.FAILED, 7, "a rank")


def test_running_or_pending_on_platform_overrides_exit_record():
    assert judged(ended(0), State.RUNNING) == (State.RUNNING, None, None)
    found = judged(ended(143, STOPPED), State.PENDING, reason="evicted; another one comes")
    assert found == (State.PENDING, None, "evicted; another one comes")


def test_node_ended_by_platform_is_failed_with_platform_reason():
    native = {"ended_by": "evicted: its node is being drained"}
    found = judged(ended(143, STOPPED), State.FAILED, **native)
    assert found == (State.FAILED, 143, native["ended_by"])
    assert judged(ended(143, STOPPED), State.FAILED)[0] is State.CANCELLED


@pytest.mark.parametrize("state", list(State))
def test_exit_record_naming_next_attempt_overrides_platform_state(state):
    found = judged(ended(1, "a rank", next=2), state, reason="x", ended_by="y")
    assert found == (State.FAILED, 1, "a rank")


def test_running_node_state_follows_started_file():
    waits = NodeFiles(begun=True, started=b'{"waits": {"why": "for node 1", "until": 9.0}}')
    assert judged(waits, State.RUNNING) == (State.RESTARTING, None, "for node 1")
    assert judged(BEGUN, State.RUNNING, reason="no answer for 3 s") == (
        State.RUNNING, None, "no answer for 3 s"
    )  # fmt: skip
    assert judged(NodeFiles(), State.RUNNING) == (State.PENDING, None, None)


def test_unknown_platform_state_makes_node_unknown():
    for files in (BEGUN, NodeFiles()):
        assert judged(files, State.UNKNOWN, reason="no answer") == (
            State.UNKNOWN,
            None,
            "no answer",
        )


def test_node_without_exit_record_takes_platform_reason_or_last_log_line():
    assert judged(BEGUN, State.FAILED, reason="OOMKilled", exit_code=137) == (
        State.FAILED, 137, "OOMKilled"
    )  # fmt: skip
    assert judged(BEGUN, State.FAILED, exit_code=3) == (State.FAILED, 3, None)
    last = NodeFiles(begun=True, log=b"a\nMemoryError\n")
    words = "its agent ended without reporting an exit code: MemoryError"
    assert judged(last, State.FAILED) == (State.FAILED, None, words)
    assert judge_node(0, "h", BEGUN, NativeState(state=State.FAILED)).remarks == ("slow disk",)
