"""States of a run's pods, seen once."""

import dataclasses
import errno
import time

import msgspec
import pytest

from clusterkit.backends.kubernetes.api_server import NotFound, RunObjects
from clusterkit.backends.kubernetes.apply import remove
from clusterkit.backends.kubernetes.monitor import PodMonitor
from clusterkit.backends.kubernetes.observe import (
    Removed,
    known_after,
    observation,
    read_pods,
    removed_pods,
    write_known,
    write_removed,
)
from clusterkit.backends.kubernetes.pod_log import LogWriter
from clusterkit.cluster import KubernetesCluster
from clusterkit.errors import RunFolderError, Unavailable
from clusterkit.run.folder import OWNS_CLUSTER_OBJECTS, RunFolder
from clusterkit.run.status import State
from tests.unit.kubernetes.monitor.playing import BACKEND, HTML, next_attempt, pod


def test_status_keeps_silent_node_running_within_lost_after(server, transport, handle):
    server.pod["status"]["conditions"] = [
        {"type": "Ready", "status": "False", "lastTransitionTime": "2026-11-22T04:00:00Z"},
        {"type": "ContainersReady", "status": "True"},
    ]
    for seconds, expected in ((1e9, State.RUNNING), (30.0, State.UNKNOWN)):
        plan = msgspec.structs.replace(handle.plan, lost_after=seconds)
        seen = BACKEND.status(dataclasses.replace(handle, plan=plan), transport)
        assert seen.nodes[0].state is expected


def test_observation_keeps_image_error_while_pod_is_deleted(server, transport, handle):
    """Its image could not be had; a kubelet says 137 of a container that it never made."""
    objects = RunObjects(handle.plan, transport)
    waits, leaves = pod(), pod()
    waits["spec"]["containers"][0]["image"] = "a/b:1"
    waiting = {"waiting": {"reason": "ErrImageNeverPull"}}
    waits["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"name": "pytorch", "state": waiting}],
    }
    leaves["metadata"] = leaves["metadata"] | {"deletionTimestamp": "2026-11-22T04:01:00Z"}
    unknown = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
    leaves["status"] = {
        "phase": "Failed",
        "containerStatuses": [{"name": "pytorch", "state": unknown}],
    }
    known = {}
    for items in ([waits], [leaves], []):  # as it is removed, and gone
        pods = read_pods(handle, objects, items)
        known = known_after(known, pods, handle.plan)
        (node,) = observation(handle, known, transport).nodes
        assert (node.state, node.exit_code) == (State.FAILED, None)
        assert node.reason == (
            "ErrImageNeverPull: image a/b:1 cannot be pulled: it is not on the node and "
            "image_pull_policy is Never"
        )
        write_removed(handle, Removed(frozenset({"demo-1-worker-0"}), complete=True))


def test_status_of_vanished_pod_depends_on_job_and_recorded_removal(server, transport, handle):
    """Somebody may have taken it up elsewhere, where it succeeded."""
    write_known(handle, read_pods(handle, RunObjects(handle.plan, transport), [server.pod]))
    server.deleted.append("pods")
    assert BACKEND.status(handle, transport).state is State.FAILED
    server.job = None
    (node,) = BACKEND.status(handle, transport).nodes
    assert (node.state, node.host) == (State.UNKNOWN, "node-1")
    assert "attached elsewhere" in node.reason
    write_removed(handle, Removed(frozenset({"demo-1-worker-0"}), complete=True))
    assert BACKEND.status(handle, transport).state is State.CANCELLED


def test_observation_names_lost_node_or_stop_grace_for_removed_pod(server, transport, handle):
    pods = read_pods(handle, RunObjects(handle.plan, transport), [server.pod])
    gone, name = known_after(pods, {}, handle.plan), frozenset(pods)
    for lost, reason in ((name, "NotReady: node node-1 of the cluster does not answer"),
                         (frozenset(), "SIGKILL: it did not stop within stop_grace")):  # fmt: skip
        write_removed(handle, Removed(ended=name, lost=lost, complete=True))
        (node,) = observation(handle, gone, transport).nodes
        assert node.reason == reason
        assert node.state is (State.FAILED if lost else State.CANCELLED)


def test_listing_raises_unavailable_on_proxy_answer(server, transport, handle):
    server.answer = b"{}"
    kube = handle.plan.native
    cluster = KubernetesCluster(kubeconfig=kube.kubeconfig, context="c", namespace="ns")
    with pytest.raises(Unavailable, match="is not a list of objects"):
        BACKEND.listing(cluster, transport)


def test_delete_raises_unavailable_on_proxy_answer(server, transport, handle):
    for answer in (HTML, b"ok"):
        server.answer = answer
        with pytest.raises(Unavailable):
            RunObjects(handle.plan, transport).delete("/x")


def test_status_stays_pending_while_job_kind_is_not_served(server, transport, run_of):
    handle = run_of(restarts=1)
    server.pod["metadata"] = server.pod["metadata"] | {"deletionTimestamp": "2026-11-22T04:00:00Z"}
    server.job = {"reason": "x"}

    def not_served(self, path):
        if "pytorchjobs" in path:
            raise NotFound("the server could not find the requested resource")
        return get(self, path)

    get = RunObjects.get
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunObjects, "get", not_served)
        seen = BACKEND.status(handle, transport)
    assert (seen.state, seen.removed) == (State.PENDING, None)


def test_remove_deletes_cluster_objects_despite_full_disk(server, transport, handle, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LogWriter, "_open", full)
    monkeypatch.setattr(RunFolder, "write", raising_full)
    remove(handle, transport)
    assert {"pytorchjobs/demo-1", "pods", "configmaps/demo-1", "secrets/demo-1"} <= set(
        server.deleted
    )


def raising_full(*_):
    raise RunFolderError("No space left on device")


def event(message, at, kind="PyTorchJob", name="demo-1", reason="FailedCreatePod"):
    return {
        "metadata": {}, "reason": reason, "involvedObject": {"kind": kind, "name": name},
        "message": message, "lastTimestamp": f"2026-11-22T04:00:{at:02}Z",
    }  # fmt: skip


def test_status_names_event_that_keeps_pod_from_creation(server, transport, run_of):
    server.job = {"spec": {}, "status": {"active": 1}}
    server.events = [
        event("exceeded quota: two", 2), event("exceeded quota: one", 1),
        event("probe failed", 3, "Pod", "demo-1-worker-0"), event("other", 4, name="demo-12"),
        # What the training operator warns of with each pod.
        event("restart policy will be overwritten", 3, reason="SetPodTemplateRestartPolicy"),
    ]  # fmt: skip
    handle = run_of(nodes=2)
    seen = BACKEND.status(handle, transport)
    assert [node.reason for node in seen.nodes] == [None, "exceeded quota: two"]
    server.events = server.events[-1:]  # which keeps nothing from being created
    assert BACKEND.status(handle, transport).nodes[1].reason is None


def test_status_includes_cause_reported_by_agent(transport, server, run_of):
    server.log += [next_attempt(2, causes=["hang: no progress for 6 s"])]
    (cause,) = BACKEND.status(run_of(restarts=2), transport).causes
    assert (cause.node, cause.words) == (0, "hang: no progress for 6 s")


def test_status_names_next_attempt_of_running_pods(transport, again):
    seen = BACKEND.status(again, transport)
    assert seen.next_attempt == 2
    assert (seen.nodes[0].state, seen.nodes[0].exit_code) == (State.FAILED, 7)
    seen = BACKEND.status(dataclasses.replace(again, attempt=2), transport)
    assert (seen.next_attempt, seen.nodes[0].state) == (None, State.RUNNING)


def test_remove_deletes_run_objects_and_records_ended_pods(server, transport, handle):
    for _ in range(2):
        remove(handle, transport)
    assert {"pytorchjobs/demo-1", "pods", "configmaps/demo-1"} <= set(server.deleted)
    found = removed_pods(handle)
    assert (found.ended, found.complete) == (frozenset({"demo-1-worker-0"}), True)


def test_remove_spares_objects_that_run_did_not_create(server, transport, handle):
    handle.folder.file(OWNS_CLUSTER_OBJECTS).unlink()
    remove(handle, transport)
    assert server.deleted == []
    assert removed_pods(handle) is None


def test_remove_and_monitor_name_unreachable_api_server(server, transport, handle):
    server.shutdown()
    server.server_close()
    with pytest.raises(Unavailable, match="could not end run demo-1: the API server"):
        remove(handle, transport)
    monitor = PodMonitor(handle, transport)
    try:
        deadline = time.monotonic() + 20
        while (reason := monitor.status().nodes[0].reason) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        monitor.close()
    assert "does not answer" in reason
