"""Fixtures of the tests beside this file."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from clusterkit.backends.kubernetes.api_server import (
    KubeTransport,
)


class Answers(ThreadingHTTPServer):
    """Takes every object and keeps what was asked."""

    request_queue_size = 64  # all come at once

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = []
        self.answers = {}
        self.together = self.retry_after = None
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def _answer(self):
        if self.server.together is not None:
            self.server.together.wait(30)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.server.asked.append((self.command, self.path, body, dict(self.headers)))
        status, answer = self.server.answers.get(
            self.path.partition("?")[0], (200, {"metadata": {"name": "n", "uid": "the-uid"}})
        )
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
            status, answer = answer
        if status == 200 and body and "apply-patch" in self.headers["Content-Type"]:
            sent = yaml.safe_load(body)
            answer = sent | {"metadata": sent["metadata"] | {"uid": "the-uid"}}
        data = json.dumps(answer).encode()
        self.send_response(status)
        if status == 429 and self.server.retry_after:
            self.send_header("Retry-After", self.server.retry_after)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PATCH = do_DELETE = do_POST = _answer


@pytest.fixture
def server():
    found = Answers()
    yield found
    found.shutdown()
    found.server_close()


@pytest.fixture
def config(server, tmp_path):
    document = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [
            {"name": "k", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "users": [{"name": "u", "user": {"token": "t0ken"}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
    }  # fmt: skip
    file = tmp_path / "config"
    file.write_text(yaml.safe_dump(document))
    return str(file)


@pytest.fixture
def transport():
    found = KubeTransport()
    yield found
    found.close()
