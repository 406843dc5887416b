"""The HTTP server of `clusterkit web`: who may ask, and what for.

The standard library's server, a thread per connection: a few browsers of one person ask it, through
the loopback interface, and each keeps one connection open for news. What a framework would add
(workers, routing by decorators, templates) has no use here, and the safe ones of them are not pure
Python.

Everything is refused unless

* the `Host` header is an IP address, `localhost` or the name given to ``--host``: a name that
  somebody else's DNS points here is none of these;
* `Origin` and `Sec-Fetch-Site`, where the browser sends them, say that our own page asks;
* the token comes with it, in the URL or a header; to change something, in a header, which no form
  and no link of another page can set.

No path leads to a file: there are the routes below, and run ids are checked.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import socket
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from clusterkit.errors import ClusterkitError, RunNotFound, Unavailable
from clusterkit.output import prometheus
from clusterkit.web import page
from clusterkit.web.site import MOST_POINTS, News, Site

NEWS_SECONDS = 0.5
"""Between two looks at whether something is new."""
_ALIVE_SECONDS = 15.0
"""Between two signs of life on a connection that has no news."""
_BODY = 1 << 16
_CONNECTIONS = 64
"""At once; more are turned away, so that whoever has no token cannot fill the memory."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"{page.policy()}; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Server(ThreadingHTTPServer):
    """Serves the runs of this machine until `shutdown`.

    Raises:
        Unavailable: the address is not one of this machine's, or the port is taken.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 2 * _CONNECTIONS

    def __init__(self, host: str = "127.0.0.1", port: int = 0, opens: Sequence[str] = ()) -> None:
        self.site, self.host, self._opens = Site(), host, opens
        self.token = secrets.token_urlsafe(32)
        self.stopping = threading.Event()
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        try:
            family, *_, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self.address_family = family
            super().__init__(address, _Handler)  # type: ignore[arg-type]
        except OSError as error:
            raise Unavailable(
                f"--host {host} --port {port}: {error.strerror or error}",
                "--port 0 takes one that is free; --host is an address of this machine",
            ) from error

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the DNS for a name that nobody here needs.
        socketserver.TCPServer.server_bind(self)

    @property
    def url(self) -> str:
        """With the token: whoever has it may look, and cancel runs."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        others = f"/curves/{','.join(self._opens[1:])}" if self._opens[1:] else ""
        place = f"#{self._opens[0]}{others}" if self._opens else ""
        return f"http://{host}:{self.server_address[1]}/?token={self.token}{place}"

    def shutdown(self) -> None:
        self.stopping.set()
        super().shutdown()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a browser that went away is none
            super().handle_error(request, client_address)


class _Refused(Exception):
    """What is answered instead: a status and a sentence."""

    def __init__(self, status: int, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.hint = status, message, hint


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "clusterkit", ""
    timeout = 30
    disable_nagle_algorithm = True  # an answer is two writes: the second would wait for the first

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self._begun = False
        try:
            self._read_body()
            url = urlsplit(self.path)
            self._query = parse_qs(url.query)
            self._check()
            if not self.path.startswith("/"):
                raise _Refused(404, "this is no proxy")
            self._route(url.path)
        except _Refused as refused:
            self._error(refused.status, refused.message, refused.hint)
        except ClusterkitError as error:
            self._error(404 if isinstance(error, RunNotFound) else 500, error.message, error.hint)
        except OSError:
            raise
        except Exception:
            traceback.print_exc()
            self._error(500, "clusterkit failed here; its terminal says how")

    def _read_body(self) -> None:
        """Nothing is in it for us, but the next request begins after it."""
        length = self.headers.get("Content-Length") or "0"
        if "Transfer-Encoding" in self.headers or not length.isdecimal() or int(length) > _BODY:
            self.close_connection = True
            raise _Refused(400, "no request here has such a body")
        self.rfile.read(int(length))

    # -- who may ask -------------------------------------------------------

    def _check(self) -> None:
        host = self.headers.get("Host") or ""
        if len(self.headers.get_all("Host", [])) != 1 or not self._known(host):
            raise _Refused(403, f"this server is not {host[:80] or 'nameless'}",
                           "ask for it by its IP address, as localhost, or by the name of --host"
                           )  # fmt: skip
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{host}":
            raise _Refused(403, "another page asks")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise _Refused(403, "another page asks")
        scheme, _, given = (self.headers.get("Authorization") or "").partition(" ")
        if scheme.lower() != "bearer":
            given = self._query.get("token", [""])[-1] if self.command == "GET" else ""
        # As bytes: text with other letters than ASCII would be an error.
        if not hmac.compare_digest(given.encode(errors="replace"), self.server.token.encode()):
            raise _Refused(401, "the token is missing or wrong",
                           "open the whole address that `clusterkit web` printed")  # fmt: skip

    def _known(self, host: str) -> bool:
        """Whether it is us whom the browser means; by any port, which a tunnel may change."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in ("localhost", self.server.host.lower()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    # -- what there is -----------------------------------------------------

    def _route(self, path: str) -> None:
        for method, pattern, answer in _ROUTES:
            if match := pattern.fullmatch(path):
                if method != self.command:
                    raise _Refused(405, f"{path}: only {method}")
                answer(self, *match.groups())
                return
        raise _Refused(404, "there is nothing of this name here")

    def _page(self) -> None:
        self._send(page.whole(), "text/html; charset=utf-8")

    def _report(self) -> None:
        ids = self._query.get("run", [])
        document = page.whole(self.server.site.report(ids), time.time())
        name = ids[0] if len(ids) == 1 and re.fullmatch(r"[\w-]+", ids[0]) else "runs"
        self._send(document, "text/html; charset=utf-8", f"{name}.html")

    def _prometheus(self) -> None:
        ids = self._query.get("run", [])
        samples = prometheus.text(self.server.site.reported(ids))
        self._send(samples.encode(), prometheus.CONTENT_TYPE)

    def _series(self, run: str) -> None:
        low, high = self._number("from", float), self._number("to", float)
        names, most = self._query.get("name", []), self._number("points", int) or MOST_POINTS
        self._json(self.server.site.series(run, names, most, low, high))

    def _log(self, run: str) -> None:
        attempt, node = self._number("attempt", int), self._number("node", int) or 0
        which: dict[str, Any] = {key: self._number(key, int) for key in ("rank", "before", "after")}
        which["search"] = self._query.get("search", [""])[-1]
        self._json(self.server.site.log(run, attempt, node, **which))

    def _line(self, run: str) -> None:
        attempt, node = self._number("attempt", int), self._number("node", int) or 0
        self._json(self.server.site.line(run, attempt, node, self._number("at", int) or 0))

    def _news(self) -> None:
        """Server-sent events: which runs have something new, until the browser goes away."""
        # First: whoever has the beginning of this answer and asks then has missed nothing.
        news = News(self.server.site, self._query.get("run", []))
        self.close_connection = True
        self._head(200, "text/event-stream")
        quiet = 0.0
        while True:
            events = news.look()
            quiet = 0.0 if events else quiet + NEWS_SECONDS
            for event in events:
                self.wfile.write(b"data: " + _json(event) + b"\n\n")
            if quiet >= _ALIVE_SECONDS:
                quiet = 0.0
                self.wfile.write(b":\n\n")
            if self.server.stopping.wait(0.01 if news.behind else NEWS_SECONDS):
                return

    def _number(self, name: str, kind: Callable[[str], Any]) -> Any:
        text = self._query.get(name, [""])[-1]
        try:
            return kind(text) if text else None
        except ValueError:
            raise _Refused(400, f"{name}={text[:40]}: not a number") from None

    # -- how it is said ----------------------------------------------------

    def _json(self, document: object) -> None:
        self._send(_json(document), "application/json")

    def _send(self, body: bytes, kind: str, name: str | None = None, status: int = 200) -> None:
        self._head(status, kind, {
            "Content-Length": str(len(body)),
            **({"Content-Disposition": f'attachment; filename="{name}"'} if name else {}),
        })  # fmt: skip
        self.wfile.write(body)

    def _head(self, status: int, kind: str, more: dict[str, str] | None = None) -> None:
        self._begun = True
        self.send_response(status)
        for key, value in {"Content-Type": kind, **_HEADERS, **(more or {})}.items():
            self.send_header(key, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _error(self, status: int, message: str, hint: str | None = None) -> None:
        if self._begun:  # half an answer was given: no other one can follow
            self.close_connection = True
            return
        self._send(_json({"error": message, "hint": hint}), "application/json", status=status)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Of the base class, for what is no HTTP, or a method that is none of ours."""
        self.close_connection = True
        self._begun = False
        self._error(code, message or "no such request")

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal shows the address and nothing else; and a URL holds the token."""


def _json(document: object) -> bytes:
    return msgspec.json.encode(document)


def _as_json(question: Callable[..., object]) -> Callable[..., None]:
    """A route to what a function of the site gives, which the path says all about."""
    return lambda handler, *given: handler._json(question(handler.server.site, *given))


_RUN = r"/api/runs/([a-z0-9][a-z0-9-]{0,62})"
_ROUTES: list[tuple[str, re.Pattern[str], Callable[..., None]]] = [
    (method, re.compile(pattern), answer)
    for method, pattern, answer in (
        ("GET", "/", _Handler._page),
        ("GET", "/report.html", _Handler._report),
        ("GET", "/metrics", _Handler._prometheus),
        ("GET", "/api/news", _Handler._news),
        ("GET", "/api/runs", _as_json(Site.runs)),
        ("GET", _RUN, _as_json(Site.run)),
        ("GET", f"{_RUN}/plan", _as_json(Site.plan)),
        ("GET", f"{_RUN}/series", _Handler._series),
        ("GET", f"{_RUN}/log", _Handler._log),
        ("GET", f"{_RUN}/line", _Handler._line),
        ("POST", f"{_RUN}/cancel", _as_json(Site.cancel)),
    )
]
