"""Following a run's pods: an API server as a small server of HTTP plays it."""

import contextlib
import dataclasses
import errno
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import msgspec
import pytest
import yaml

from clusterkit import backends
from clusterkit.agent import NODE_FILE, STOPPED
from clusterkit.backends.kubernetes import monitor as monitor_module
from clusterkit.backends.kubernetes import pod_log
from clusterkit.backends.kubernetes.api_server import KubeTransport, NotFound, RunObjects
from clusterkit.backends.kubernetes.apply import remove
from clusterkit.backends.kubernetes.monitor import PodMonitor, PodWatch
from clusterkit.backends.kubernetes.observe import (
    Removed,
    known_after,
    observation,
    read_known,
    read_pods,
    removed_pods,
    write_known,
    write_removed,
)
from clusterkit.backends.kubernetes.pod_log import LogWriter
from clusterkit.cluster import KubernetesCluster, KubernetesFacts
from clusterkit.errors import RunFolderError, Unavailable
from clusterkit.run.folder import OWNS_CLUSTER_OBJECTS, RunFolder, RunHandle
from clusterkit.run.status import State
from clusterkit.spec import JobSpec

BACKEND = backends.backend("kubernetes")
LABELS = {
    "clusterkit/role": "node", "clusterkit/attempt": "1", "clusterkit/run": "demo-1",
    "training.kubeflow.org/replica-index": "0",
}  # fmt: skip
LINE = "2026-11-22T04:00:01.000000Z 0 hello"


def pod(code=None):
    ended = {"terminated": {"exitCode": code, "message": json.dumps({"exit_code": code})}}
    state = {"running": {}} if code is None else ended
    phase = "Running" if code is None else "Failed" if code else "Succeeded"
    return {
        "metadata": {"name": "demo-1-worker-0", "uid": "u", "labels": LABELS},
        "spec": {"nodeName": "node-1", "containers": [{"name": "pytorch"}]},
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": "pytorch", "state": state, "restartCount": 0}],
        },
    }


class Server(ThreadingHTTPServer):
    """Has one pod, which ends when it is told to, and forgets what is deleted."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.pod = pod()
        self.job = {"metadata": {}, "spec": {}}
        self.answer = None  # what a proxy answers to everything but logs
        self.hangs = None  # a part of a log, after which nothing comes
        self.date = None
        self.leaving = False  # whether its namespace is being deleted
        self.events = []
        self.log = [LINE]
        self.deleted = []
        self.changed = threading.Event()
        self.mute = self.logs_asked = 0  # as many requests for logs are never answered
        self.over = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def end(self, code):
        self.pod = pod(code)
        self.changed.set()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def date_time_string(self, timestamp=None):
        return self.server.date or super().date_time_string(timestamp)

    def _send(self, document, status=200):
        if self.server.answer is not None:
            document, status = self.server.answer, 200
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        if data.startswith(b"<html"):
            self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.endswith("/log"):
            if self.server.logs_asked < self.server.mute:
                self.server.logs_asked += 1
                self.server.over.wait(60)
                return
            if (part := self.server.hangs) is not None and "follow" in self.path:
                self.protocol_version = "HTTP/1.1"
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                self.server.over.wait(60)
                self.close_connection = True
                return
            self._send("".join(f"{line[:26]}500Z {line}\n" for line in self.server.log).encode())
        elif "watch=1" in self.path:
            # The header at once, as of a real one: an answer that has not begun cannot be stopped.
            self.send_response(200)
            self.end_headers()
            self.server.changed.wait(10)
            event = json.dumps({"type": "MODIFIED", "object": self.server.pod}).encode() + b"\n"
            with contextlib.suppress(ConnectionError):
                self.wfile.write(event if self.server.answer is None else self.server.answer)
            self.server.changed.clear()
        elif path.endswith("/pods"):
            items = [] if self.server.deleted else [self.server.pod]
            self._send({"metadata": {"resourceVersion": "1"}, "items": items})
        elif path.endswith("/demo-1-worker-0"):
            self._send(self.server.pod)
        elif path.endswith("/demo-1") and self.server.job is not None:
            self._send(self.server.job)
        elif path.endswith("/events"):
            self._send({"items": self.server.events})
        elif path.endswith("/namespaces/ns"):
            at = {"deletionTimestamp": "2026-11-22T04:00:00Z"} if self.server.leaving else {}
            self._send({"metadata": at})
        else:
            name = path.rpartition("/")[2]
            self._send({"reason": "NotFound", "message": f'things "{name}" not found'}, 404)

    def do_DELETE(self):
        self.server.deleted.append(self.path.partition("?")[0].rpartition("namespaces/ns/")[2])
        self._send({})


@pytest.fixture
def server():
    found = Server()
    yield found
    found.changed.set()
    found.over.set()
    found.shutdown()
    found.server_close()


@pytest.fixture
def transport():
    found = KubeTransport()
    yield found
    found.close()


@pytest.fixture
def run_of(server, make_facts, tmp_path):
    """A run of a job on that server."""
    return lambda **job: _handle(server, make_facts(), tmp_path, JobSpec(**{
        "name": "demo", "command": ("true",), "launcher": "forkserver", **job
    }))  # fmt: skip


@pytest.fixture
def handle(run_of):
    return run_of()


def _handle(server, facts, tmp_path, job):
    config = tmp_path / "config"
    config.write_text(yaml.safe_dump({
        "clusters": [
            {"name": "k", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
    }))  # fmt: skip
    kube = KubernetesFacts(
        version="v1.34.4", context="c", namespace="ns", kubeconfig=str(config),
        kinds=("PyTorchJob", "MPIJob"),
    )  # fmt: skip
    facts = msgspec.structs.replace(facts, kubernetes=kube, home=str(tmp_path))
    plan = BACKEND.plan(job, KubernetesCluster(), facts, "demo-1")
    folder = RunFolder(tmp_path / "runs" / "demo-1")
    folder.path.mkdir(parents=True)
    folder.write("run.json", "{}")
    folder.write(OWNS_CLUSTER_OBJECTS, "")
    return RunHandle(folder, plan)


def log_of(handle):
    return (handle.folder.node_dir(handle.attempt, 0) / "log").read_text().splitlines()


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


def test_status_keeps_silent_node_running_within_lost_after(server, transport, handle):
    server.pod["status"]["conditions"] = [
        {"type": "Ready", "status": "False", "lastTransitionTime": "2026-11-22T04:00:00Z"},
        {"type": "ContainersReady", "status": "True"},
    ]
    for seconds, expected in ((1e9, State.RUNNING), (30.0, State.UNKNOWN)):
        plan = msgspec.structs.replace(handle.plan, lost_after=seconds)
        seen = BACKEND.status(dataclasses.replace(handle, plan=plan), transport)
        assert seen.nodes[0].state is expected


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


HTML = b"<html><title>Sign in</title></html>"


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


def test_remove_reads_remaining_logs_of_deleted_pods(server, transport, handle):
    server.end(0)
    remove(handle, transport)
    assert log_of(handle) == [LINE]
    assert "pods" in server.deleted


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


def test_sync_collects_log_lines_only_once(server, transport, handle):
    server.end(0)
    for _ in range(2):
        BACKEND.sync(handle, transport)
    assert log_of(handle) == [LINE]


def next_attempt(number, code=7, **more):
    """What an agent prints when it begins another attempt."""
    ended = {"exit_code": code, "reason": None, "at": 1.0, "processes": [], "next": number, **more}
    return f"2026-11-22T04:00:01.000000Z - {NODE_FILE.decode()} exit.json {json.dumps(ended)}"


def texts(handle, attempt):
    log = handle.folder.node_dir(attempt, 0) / "log"
    return [line.rpartition(" ")[2] for line in log.read_text().splitlines()]


@pytest.fixture
def again(run_of, server):
    """A run whose pod has gone on with its second attempt."""
    server.log += [next_attempt(2), LINE.replace("hello", "again")]
    return run_of(restarts=2)


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


def until(monitor, right):
    deadline = time.monotonic() + 30
    while not right(seen := monitor.status()):
        assert time.monotonic() < deadline, seen
        time.sleep(0.05)
    return seen


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
