"""Following the logs of a run's pods."""

import dataclasses
import json
import time

from clusterkit.backends.kubernetes import pod_log
from clusterkit.backends.kubernetes.apply import remove
from clusterkit.backends.kubernetes.monitor import PodMonitor
from clusterkit.backends.kubernetes.observe import (
    read_known,
)
from clusterkit.run.status import State
from tests.unit.kubernetes.monitor.playing import BACKEND, LINE, log_of, next_attempt, until


def test_monitor_reports_failed_pod_with_complete_log(server, transport, handle):
    monitor = PodMonitor(handle, transport)
    try:
        deadline = time.monotonic() + 30
        while (seen := monitor.status()).state is not State.RUNNING:
            assert time.monotonic() < deadline, seen
            time.sleep(0.05)
        server.end(3)
        while not (seen := monitor.status()).state.final:
            assert time.monotonic() < deadline, seen
            time.sleep(0.05)
    finally:
        monitor.close()
    assert (seen.state, seen.nodes[0].exit_code, seen.nodes[0].host) == (State.FAILED, 3, "node-1")
    assert log_of(handle) == [LINE]
    assert read_known(handle)["demo-1-worker-0"].exit_code == 3


def test_monitor_reopens_frozen_log_stream(server, transport, handle, monkeypatch):
    monkeypatch.setattr(pod_log, "QUIET_SECONDS", 0.3)
    later = LINE.replace("hello", "later")
    server.hangs = f"{LINE[:26]}500Z {LINE}\n".encode()
    monitor = PodMonitor(handle, transport)
    try:
        until(monitor, lambda _: heard(handle))
        server.hangs = None
        server.log.append(later)
        until(monitor, lambda _: log_of(handle) == [LINE, later])
    finally:
        monitor.close()


def test_monitor_reads_log_end_despite_frozen_stream(server, transport, handle, monkeypatch):
    """Behind a load balancer that has dropped the connection, and told neither side."""
    monkeypatch.setattr(pod_log, "LAST_SECONDS", 0.3)
    later = LINE.replace("hello", "later")
    server.hangs = f"{LINE[:26]}500Z {LINE}\n".encode()
    monitor = PodMonitor(handle, transport)
    try:
        until(monitor, lambda _: heard(handle))
        server.log.append(later)
        server.end(0)
        until(monitor, lambda seen: seen.state is State.SUCCEEDED)
    finally:
        monitor.close()
    assert log_of(handle) == [LINE, later]
    assert read_known(handle)["demo-1-worker-0"].logged


def test_remove_reads_remaining_logs_of_deleted_pods(server, transport, handle):
    server.end(0)
    remove(handle, transport)
    assert log_of(handle) == [LINE]
    assert "pods" in server.deleted


def test_sync_collects_log_lines_only_once(server, transport, handle):
    server.end(0)
    for _ in range(2):
        BACKEND.sync(handle, transport)
    assert log_of(handle) == [LINE]


def texts(handle, attempt):
    log = handle.folder.node_dir(attempt, 0) / "log"
    return [line.rpartition(" ")[2] for line in log.read_text().splitlines()]


def test_sync_separates_logs_and_exits_by_attempt(server, transport, again):
    for _ in range(2):  # the second time from where it was
        BACKEND.sync(again, transport)
    assert (texts(again, 1), texts(again, 2)) == (["hello"], ["again"])
    assert json.loads((again.folder.node_dir(1, 0) / "exit.json").read_bytes())["next"] == 2
    # All within one second: that tells nothing apart.
    server.log += [LINE, next_attempt(3), LINE]
    for _ in range(2):
        BACKEND.sync(again, transport)
    assert [texts(again, number) for number in (1, 2, 3)] == [
        ["hello"], ["again", "hello"], ["hello"],
    ]  # fmt: skip


def test_sync_assigns_replacement_pod_log_to_current_attempt(transport, again, server):
    BACKEND.sync(again, transport)
    server.pod["metadata"] = server.pod["metadata"] | {"uid": "new"}
    later = "2026-11-22T04:00:09.000000Z"
    server.log = [f"{later} - waiting", f"{later}{next_attempt(2)[27:]}", f"{later} 0 back"]
    BACKEND.sync(again, transport)
    assert (texts(again, 1), texts(again, 2)) == (["hello"], ["again", "waiting", "back"])


def test_monitor_requests_log_again_when_first_request_hangs(
    server, transport, handle, monkeypatch
):
    """The API server itself waits two minutes for a node that was just lost; until then no pod in
    its place would be heard."""
    monkeypatch.setattr(pod_log, "QUIET_SECONDS", 0.5)
    server.mute = 1
    monitor = PodMonitor(handle, transport)
    try:
        until(monitor, lambda _: server.logs_asked == 1 and heard(handle))
    finally:
        monitor.close()
    assert log_of(handle) == [LINE]


def heard(handle):
    log = handle.folder.node_dir(handle.attempt, 0) / "log"
    return log.exists() and log.stat().st_size > 0


def test_monitor_follows_same_pod_into_next_attempt(server, transport, run_of):
    handle = run_of(restarts=1)
    monitor = PodMonitor(handle, transport)
    try:
        until(monitor, lambda seen: seen.state is State.RUNNING)
        server.log += [next_attempt(2)]
        seen = until(monitor, lambda seen: seen.next_attempt == 2)
    finally:
        monitor.close()
    assert seen.nodes[0].exit_code == 7
    monitor = PodMonitor(second := dataclasses.replace(handle, attempt=2), transport)
    try:
        # It is the same pod, and known.
        assert monitor.status().state is State.RUNNING
        assert read_known(second) == read_known(handle)
        server.end(0)
        seen = until(monitor, lambda seen: seen.state.final)
    finally:
        monitor.close()
    assert (seen.state, seen.next_attempt) == (State.SUCCEEDED, None)
