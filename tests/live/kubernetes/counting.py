"""The API server behind a proxy that counts what is asked of it, and can answer in its stead."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_DROPPED = {"connection", "transfer-encoding", "content-length", "host", "keep-alive"}


class Counting:
    """What was asked through the proxy since `reset`."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        told = json.loads(kubeconfig.read_text())
        found, user = told["clusters"][0]["cluster"], told["users"][0]["user"]
        self.server = urlsplit(found["server"])
        self.calls: Counter[str] = Counter()
        self.bytes = 0
        self.answer: tuple[bytes, str] | None = None
        """What is said to all, with 200 and this content type, instead of passing it on."""
        self.open: set[http.client.HTTPSConnection] = set()
        self._lock = threading.Lock()
        self.tls = ssl.create_default_context(
            cadata=base64.b64decode(found["certificate-authority-data"]).decode()
        )
        for name in ("certificate", "key"):
            (folder / name).write_bytes(base64.b64decode(user[f"client-{name}-data"]))
        self.tls.load_cert_chain(folder / "certificate", folder / "key")
        outer = self

        class Handler(_Handler):
            counting = outer

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        told["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self._http.server_port}"}
        told["users"][0]["user"] = {"token": "anybody"}
        self.kubeconfig = folder / "counted.conf"
        self.kubeconfig.write_text(json.dumps(told))

    def __enter__(self) -> Counting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def reset(self) -> None:
        with self._lock:
            self.calls, self.bytes = Counter(), 0

    def note(self, call: str, size: int) -> None:
        with self._lock:
            if call:
                self.calls[call] += 1
            self.bytes += size

    @contextlib.contextmanager
    def instead(self, body: bytes, content: str) -> Iterator[None]:
        """Answer everything with this meanwhile; watches and logs that are followed break off."""
        self.answer = body, content
        for upstream in self.open.copy():
            with contextlib.suppress(OSError, AttributeError):
                upstream.sock.shutdown(socket.SHUT_RDWR)
        try:
            yield
        finally:
            self.answer = None

    @property
    def total(self) -> int:
        return sum(self.calls.values())


class _Handler(BaseHTTPRequestHandler):
    counting: Counting
    protocol_version = "HTTP/1.1"

    def _pass(self) -> None:
        counting, server = self.counting, self.counting.server
        counting.note(_words(self.command, self.path), 0)
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size) if size else None
        if counting.answer:
            said, content = counting.answer
            self.send_response(200)
            self.send_header("Content-Type", content)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)
            return
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in _DROPPED and name.lower() != "authorization"
        }
        upstream = http.client.HTTPSConnection(
            server.hostname or "", server.port, context=counting.tls
        )
        counting.open.add(upstream)
        with contextlib.ExitStack() as stack:
            stack.callback(upstream.close)
            stack.callback(counting.open.discard, upstream)
            try:
                upstream.request(self.command, self.path, body, headers)
                answer = upstream.getresponse()
            except OSError:
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _DROPPED:
                    self.send_header(name, value)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with contextlib.suppress(OSError, http.client.HTTPException):
                for piece in _pieces(answer):
                    counting.note("", len(piece))
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                if "follow=true" in self.path:
                    # Logs of fake pods end at once, those of real ones when their container does.
                    self.rfile.read(1)
                    self.close_connection = True
                    return
                self.wfile.write(b"0\r\n\r\n")
                return
            self.close_connection = True

    do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = _pass

    def log_message(self, *_: Any) -> None:
        pass


def _pieces(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    while piece := answer.read1(1 << 16):
        yield piece


def _words(method: str, path: str) -> str:
    """A request in words that are the same for every run: ``GET pods``, ``WATCH pods``."""
    where = urlsplit(path)
    verb = "WATCH" if "watch=" in where.query else method
    parts = where.path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:] if parts[0] == "apis" else parts
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    if len(parts) > 1:
        parts[1] = "NAME"
    return re.sub(r"/NAME$", "/NAME", f"{verb} {'/'.join(parts)}").strip()
