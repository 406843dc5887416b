"""Nodes that are lost, and the attempts after them."""

import time

import msgspec
import pytest

from clusterkit.errors import Unavailable
from clusterkit.lifecycle import reconcile as machine
from clusterkit.lifecycle.reconcile import (
    EARLY_LOSSES,
    LOST_SECONDS,
)
from clusterkit.run.status import RunStatus, State
from tests.unit.supervise.supervising import BAD, OK, Scripted, observed


def vanished(*states):
    """A node whose agent ended without an exit record, beside others."""
    found = observed(State.FAILED, *states)
    first = msgspec.structs.replace(found.nodes[0], exit_code=None)
    return msgspec.structs.replace(found, nodes=(first, *found.nodes[1:]))


LOSES = "launcher: forkserver\nrestarts: 1\n"


def test_lost_node_uses_no_restart(supervise_with, monkeypatch):
    monkeypatch.setattr(machine, "EARLY_SECONDS", 0.0)
    backend, status, events = supervise_with(
        [vanished()] * 3 + [observed(BAD), observed(OK)], LOSES
    )
    assert [attempt for attempt, _ in backend.submitted] == [1, 2, 3, 4, 5]
    assert (status.state, status.attempt) == (State.SUCCEEDED, 5)
    assert events[0].text.startswith("attempt 1 has lost nodes: ")
    assert events[0].text.endswith("starting again, which uses no restart")


def test_leftovers_of_killed_agent_are_stopped_before_next_attempt(supervise_with):
    """Its rank ignored SIGTERM: two attempts wrote at once."""
    order = []

    class Ordered(Scripted):
        def submit(self, plan, transport, *, attempt=1, secrets=None, record=None):
            order.append(f"start {attempt}")

        def cancel(self, handle, transport, reason="cancelled"):
            order.append(f"stop {handle.attempt}")
            if len(order) < 4:
                raise Unavailable("no answer")

    _, status, _ = supervise_with([vanished(), observed(OK)], LOSES, kind=Ordered)
    assert order == ["start 1", "stop 1", "stop 1", "stop 1", "start 2"]
    assert status.state is State.SUCCEEDED


def test_unreachable_node_is_followed_until_answer_without_restart(supervise_with):
    """A run that had finished while its submitter was offline ran a second time."""
    away = observed(State.UNKNOWN)
    backend, status, events = supervise_with([[away] * 5 + [observed(OK)]], LOSES)
    assert (len(backend.submitted), backend.cancelled, events) == (1, 0, [])
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)


def test_node_lost_early_repeatedly_fails_run(supervise_with):
    backend, status, _ = supervise_with([vanished()] * 6, LOSES)
    assert len(backend.submitted) == EARLY_LOSSES + 2  # and the restart that there is
    assert status.state is State.FAILED


@pytest.mark.parametrize("job", [f"{LOSES}on_node_loss: fail\n", "launcher: forkserver\n"])
def test_lost_node_fails_run_when_job_allows_no_replacement(supervise_with, job):
    backend, status, _ = supervise_with([vanished()] * 3, job)
    assert (len(backend.submitted), status.state) == (1, State.FAILED)


def test_status_shows_wait_for_unreachable_host_of_lost_node(supervise_with):
    said = []

    class Silent(Scripted):
        def cancel(self, handle, transport, reason="cancelled"):
            said.append(handle.folder.read_json("state.json", RunStatus))
            if len(said) < 3:
                raise Unavailable("h does not answer")

    _, status, events = supervise_with([vanished(), observed(OK)], LOSES, kind=Silent)
    assert status.state is State.SUCCEEDED
    waiting = said[-1]
    assert (waiting.state, waiting.nodes[0].reason) == (State.RESTARTING, "waiting for node 0 (h)")
    assert abs(waiting.nodes[0].until - time.time() - LOST_SECONDS) < 60
    assert "attempt 1: waiting for node 0 (h)" in [event.text for event in events]
