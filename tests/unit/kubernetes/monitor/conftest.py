"""Fixtures of the tests beside this file."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
import yaml

from clusterkit.backends.kubernetes.api_server import KubeTransport
from clusterkit.cluster import KubernetesCluster, KubernetesFacts
from clusterkit.run.folder import OWNS_CLUSTER_OBJECTS, RunFolder, RunHandle
from clusterkit.spec import JobSpec
from tests.unit.kubernetes.monitor.playing import BACKEND, LINE, next_attempt, pod


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


@pytest.fixture
def again(run_of, server):
    """A run whose pod has gone on with its second attempt."""
    server.log += [next_attempt(2), LINE.replace("hello", "again")]
    return run_of(restarts=2)
