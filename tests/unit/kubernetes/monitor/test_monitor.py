"""Following a run's pods."""

import dataclasses
import json
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from clusterkit.agent import STOPPED
from clusterkit.backends.kubernetes import monitor as monitor_module
from clusterkit.backends.kubernetes.api_server import RunObjects
from clusterkit.backends.kubernetes.apply import remove
from clusterkit.backends.kubernetes.monitor import PodMonitor, PodWatch
from clusterkit.errors import Unavailable
from clusterkit.run.status import State
from tests.unit.kubernetes.monitor.playing import BACKEND, HTML, LABELS, LINE, log_of, pod, until


def test_monitor_reports_cancelled_when_namespace_is_deleted(server, transport, handle):
    """Also while its job is still there, which may go after its pods."""
    server.leaving = True
    server.end(143)
    server.pod["metadata"] = server.pod["metadata"] | {"deletionTimestamp": "2026-11-22T04:00:00Z"}
    words = json.dumps({"exit_code": 143, "reason": STOPPED})
    server.pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = words
    monitor = PodMonitor(handle, transport)
    try:
        deadline = time.monotonic() + 30
        while not (seen := monitor.status()).state.final:
            assert time.monotonic() < deadline, seen
            time.sleep(0.05)
    finally:
        monitor.close()
    assert (seen.state, seen.removed) == (State.CANCELLED, "its namespace, ns, is being deleted")
    assert seen.nodes[0].reason == seen.removed


@pytest.mark.parametrize("answer", [HTML, b"<!doctype", {}, {"items": 3}, [], {"items": [3]}, None])
def test_monitor_survives_garbage_answers_of_proxy(answer, server, transport, handle):
    monitor = PodMonitor(handle, transport)
    try:
        until(monitor, lambda seen: seen.state is State.RUNNING)
        if answer is None:  # a watch of which every event is nonsense
            server.pod = None
            server.changed.set()
        else:
            server.answer = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            server.changed.set()
        seen = until(monitor, lambda seen: seen.nodes[0].reason is not None)
        assert seen.state is State.RUNNING
        with pytest.raises(Unavailable, match="could not end run demo-1"):
            remove(handle, transport)
        assert server.deleted == []
        server.answer, server.pod = None, pod(0)
        until(monitor, lambda seen: seen.state is State.SUCCEEDED)
    finally:
        monitor.close()
    assert log_of(handle) == [LINE]


def test_monitor_restarts_watch_that_died_or_failed_to_start(
    server, transport, handle, monkeypatch
):
    run, started = PodWatch._run, []

    def dies(self):
        started.append(self)
        if len(started) > 1:
            run(self)

    def refuses(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(PodWatch, "_run", dies)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        monitor = PodMonitor(handle, transport)
        assert monitor.status().state is State.PENDING
    try:
        until(monitor, lambda seen: seen.state is State.RUNNING)
        assert len(started) == 2
    finally:
        monitor.close()


SILENT = [
    {"type": "Ready", "status": "False", "lastTransitionTime": "2026-11-22T04:00:00Z"},
    {"type": "ContainersReady", "status": "True"},
]


def test_lost_after_ignores_clock_skew_with_api_server(server, transport, handle, monkeypatch):
    server.date = "Sun, 22 Nov 2026 04:00:20 GMT"
    server.pod["status"]["conditions"] = SILENT
    plan = msgspec.structs.replace(handle.plan, lost_after=30.0, replace_lost=True)
    handle = dataclasses.replace(handle, plan=plan)
    assert BACKEND.status(handle, transport).state is State.RUNNING
    assert RunObjects(plan, transport).time() == pytest.approx(1795320020, abs=15)
    clock = [1000.0]
    monkeypatch.setattr(
        monitor_module, "time", SimpleNamespace(monotonic=lambda: clock[0], strftime=time.strftime)
    )
    monitor = PodMonitor(handle, transport)
    try:
        until(monitor, lambda seen: seen.state is State.RUNNING)
        clock[0] += 29
        assert monitor.status().state is State.RUNNING
        clock[0] += 2
        assert monitor.status().state is State.UNKNOWN
        assert server.deleted == []
        # Its ranks have `stop_grace` to end.
        clock[0] += plan.stop_grace
        monitor.status()
        assert server.deleted == ["pods/demo-1-worker-0"]
    finally:
        monitor.close()


def test_silent_node_is_not_lost_while_api_server_is_away(server, transport, handle, monkeypatch):
    server.pod["status"]["conditions"] = SILENT
    clock = [1000.0]
    monkeypatch.setattr(
        monitor_module, "time", SimpleNamespace(monotonic=lambda: clock[0], strftime=time.strftime)
    )
    monitor = PodMonitor(handle, transport)
    try:
        until(monitor, lambda seen: seen.state is State.RUNNING)
        server.answer = HTML
        server.changed.set()
        until(monitor, lambda seen: seen.nodes[0].reason is not None)
        clock[0] += 1000
        server.answer = None
        until(monitor, lambda seen: seen.nodes[0].reason is None)
        assert monitor.status().state is State.RUNNING
    finally:
        monitor.close()


STOPPED_WORDS = json.dumps({"exit_code": 143, "reason": STOPPED})


@pytest.mark.parametrize("restarts", [0, 2])
@pytest.mark.parametrize("how", ["gone", "foreground", "never seen"])
def test_monitor_reports_cancelled_when_job_is_deleted(how, restarts, server, transport, run_of):
    handle = run_of(restarts=restarts)
    if how == "never seen":
        server.deleted.append("pods")
    monitor = PodMonitor(handle, transport)
    try:
        if how != "never seen":
            until(monitor, lambda seen: seen.state is State.RUNNING)
        server.job = {"metadata": {"deletionTimestamp": "x"}} if how == "foreground" else None
        if how != "never seen":
            ends = pod(143)
            ends["metadata"] = ends["metadata"] | {"deletionTimestamp": "2026-11-22T04:00:00Z"}
            ends["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = STOPPED_WORDS
            server.pod = ends
            server.changed.set()
        seen = until(monitor, lambda seen: seen.state.final)
    finally:
        monitor.close()
    assert seen.state is State.CANCELLED
    assert seen.removed == seen.nodes[0].reason
    assert seen.removed.startswith("NotFound: PyTorchJob demo-1 was deleted by a user, or the run")


def test_mpijob_status_names_image_error_of_workers(server, transport, run_of):
    handle = run_of(nodes=2, launcher="mpirun")
    waiting = {"waiting": {"reason": "ErrImageNeverPull"}}
    server.pod["metadata"] = server.pod["metadata"] | {
        "labels": LABELS | {"clusterkit/role": "worker"}
    }
    server.pod["spec"]["containers"][0] |= {"name": "mpi", "image": "a/b:1"}
    server.pod["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"name": "mpi", "state": waiting}],
    }
    (node,) = BACKEND.status(handle, transport).nodes
    assert "image a/b:1 cannot be pulled" in node.reason
    assert node.state is State.FAILED
