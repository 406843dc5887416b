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
def test_how_a_node_ended_is_what_its_agent_recorded(state):
    native = {"reason": "the engine does not answer", "exit_code": 255}
    assert judged(ended(0), state, **native) == (State.SUCCEEDED, 0, None)
    assert judged(ended(7, "a rank"), state, **native) == (State.FAILED, 7, "a rank")


def test_unless_the_platform_runs_it_still_or_replaces_it():
    assert judged(ended(0), State.RUNNING) == (State.RUNNING, None, None)
    found = judged(ended(143, STOPPED), State.PENDING, reason="evicted; another one comes")
    assert found == (State.PENDING, None, "evicted; another one comes")


def test_unless_it_was_ended_from_outside():
    native = {"ended_by": "evicted: its node is being drained"}
    found = judged(ended(143, STOPPED), State.FAILED, **native)
    assert found == (State.FAILED, 143, native["ended_by"])
    assert judged(ended(143, STOPPED), State.FAILED)[0] is State.CANCELLED


@pytest.mark.parametrize("state", list(State))
def test_an_agent_that_goes_on_with_the_next_attempt_has_ended_this_one(state):
    found = judged(ended(1, "a rank", next=2), state, reason="x", ended_by="y")
    assert found == (State.FAILED, 1, "a rank")


def test_a_node_that_runs_is_seen_through_its_agent_s_record():
    waits = NodeFiles(begun=True, started=b'{"waits": {"why": "for node 1", "until": 9.0}}')
    assert judged(waits, State.RUNNING) == (State.RESTARTING, None, "for node 1")
    assert judged(BEGUN, State.RUNNING, reason="no answer for 3 s") == (
        State.RUNNING, None, "no answer for 3 s"
    )  # fmt: skip
    assert judged(NodeFiles(), State.RUNNING) == (State.PENDING, None, None)


def test_silence_and_what_is_not_understood_are_unknown_and_end_nothing():
    for files in (BEGUN, NodeFiles()):
        assert judged(files, State.UNKNOWN, reason="no answer") == (
            State.UNKNOWN,
            None,
            "no answer",
        )


def test_a_node_that_ended_without_a_record_has_the_platform_s_reason_or_its_last_line():
    assert judged(BEGUN, State.FAILED, reason="OOMKilled", exit_code=137) == (
        State.FAILED, 137, "OOMKilled"
    )  # fmt: skip
    assert judged(BEGUN, State.FAILED, exit_code=3) == (State.FAILED, 3, None)
    last = NodeFiles(begun=True, log=b"a\nMemoryError\n")
    words = "its agent ended without reporting an exit code: MemoryError"
    assert judged(last, State.FAILED) == (State.FAILED, None, words)
    assert judge_node(0, "h", BEGUN, NativeState(state=State.FAILED)).remarks == ("slow disk",)
