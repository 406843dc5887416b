"""The HTTP server of `clusterkit web`: authorization and routes.

It is the standard library's server with a thread per connection, as it serves a few browsers of
one person over the loopback interface. A web framework would add only what is not needed here:
workers, templates, dependencies. The page asks for news once a second: a stream of events would
hold, for each tab, one of the six connections that a browser opens to a host.

A request is refused unless

* its `Host` header is an IP address, `localhost` or the name given to ``--host``: this stops DNS
  rebinding, another site's name that resolves to this machine;
* `Origin` and `Sec-Fetch-Site`, if the browser sends them, are those of our own page;
* it has the token, in the URL or a header; for a change in a header, which no form and no link of
  another page can set. The page itself holds no data and needs none: it keeps the token for its
  tab, so that it can be reloaded by an address without it.

A connection that has not shown the token is closed after _UNKNOWN_SECONDS, and the oldest one when
there are too many.

No path names a file: there are only the routes below, and run ids are checked.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import math
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
from clusterkit.web import page, prometheus
from clusterkit.web.site import MOST_POINTS, Site

_BODY_BYTES = 1 << 16
"""Longest body that is skipped."""
_CONNECTIONS = 64
"""Most connections at once; more are closed, so that clients without a token cannot fill memory."""

_UNKNOWN_SECONDS = 5.0
"""Time in which a connection must send a request with the token."""
_LARGEST = 1 << 53
"""The largest number in a URL: the largest that JavaScript counts to."""

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
    """Serves the runs of this machine until `shutdown`; ``runs`` are those that ``url`` opens.

    Raises:
        Unavailable: the address is not this machine's, or the port is in use.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 2 * _CONNECTIONS

    def __init__(self, host: str = "127.0.0.1", port: int = 0, runs: Sequence[str] = ()) -> None:
        self.site, self.host, self._runs = Site(), host, runs
        self.token = secrets.token_urlsafe(32)
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        self._unknown: dict[socket.socket, float] = {}
        """When each connection that has not shown the token was opened, the oldest first."""
        self._lock = threading.Lock()  # of `_unknown`
        try:
            family, *_, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self.address_family = family
            super().__init__(address, _Handler)  # type: ignore[arg-type]
        except socket.gaierror as error:
            raise Unavailable(
                f"--host {host}: {error.strerror}", "an address of this machine, such as 127.0.0.1"
            ) from None
        except OSError as error:
            raise Unavailable(
                f"--host {host} --port {port}: {error.strerror or error}",
                "--port 0 takes any free one; --host must be an address of this machine",
            ) from error

    def server_bind(self) -> None:
        # Not HTTPServer's, which also asks the DNS for a name that is not used.
        socketserver.TCPServer.server_bind(self)

    @property
    def url(self) -> str:
        """The page's address, with the token that allows to read and to cancel runs."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        others = f"/curves/{','.join(self._runs[1:])}" if self._runs[1:] else ""
        place = f"#{self._runs[0]}{others}" if self._runs else ""
        return f"http://{host}:{self.server_address[1]}/?token={self.token}{place}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self._drop_unknown(time.monotonic(), most=1)
            if not self._free.acquire(timeout=1.0):  # for that one's thread to end
                return self.shutdown_request(request)
        with self._lock:
            self._unknown[request] = time.monotonic()
        return super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.known(request)
            self._free.release()

    def known(self, connection: socket.socket) -> None:
        """Keep a connection that has shown the token; also forget one that has ended."""
        with self._lock:
            self._unknown.pop(connection, None)

    def service_actions(self) -> None:
        """Called twice a second by `serve_forever`."""
        self._drop_unknown(time.monotonic() - _UNKNOWN_SECONDS, most=_CONNECTIONS)

    def _drop_unknown(self, before: float, most: int) -> None:
        """Close the oldest connections without token; the thread of each ends by that."""
        with self._lock:
            for connection in [
                connection for connection, opened in self._unknown.items() if opened <= before
            ][:most]:
                del self._unknown[connection]
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # the browser closed the connection
            super().handle_error(request, client_address)


class _Refused(Exception):
    """An error answer: its HTTP status, message and hint."""

    def __init__(self, status: int, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.hint = status, message, hint


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "clusterkit", ""
    timeout = 30
    disable_nagle_algorithm = True  # an answer is two writes; the second would be delayed

    def do_GET(self) -> None:
        self._headers_sent = False
        try:
            self._read_body()
            if not self.path.startswith("/"):
                raise _Refused(404, "this is not a proxy")
            path, _, query = self.path.partition("?")
            self._query = parse_qs(query)
            self._authorize(path)
            self._route(path)
        except _Refused as refused:
            self._error(refused.status, refused.message, refused.hint)
        except ClusterkitError as error:
            self._error(404 if isinstance(error, RunNotFound) else 500, error.message, error.hint)
        except OSError:
            raise
        except Exception:
            traceback.print_exc()
            self._error(500, "clusterkit web failed; see the traceback in its terminal")

    do_POST = do_GET

    def _read_body(self) -> None:
        """Skip the body, which no request needs: the connection's next request begins after it."""
        length = self.headers.get("Content-Length") or "0"
        if (
            "Transfer-Encoding" in self.headers
            or not length.isdecimal()
            or int(length) > _BODY_BYTES
        ):
            self.close_connection = True
            raise _Refused(400, "request body not accepted")
        self.rfile.read(int(length))

    # -- authorization -----------------------------------------------------

    def _authorize(self, path: str) -> None:
        host = self.headers.get("Host") or ""
        if len(self.headers.get_all("Host", [])) != 1 or not self._is_our_name(host):
            raise _Refused(403, f"the Host header {host[:80] or '(empty)'} is not allowed",
                           "ask for it by its IP address, as localhost, or by the name of --host"
                           )  # fmt: skip
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{host}":
            raise _Refused(403, "cross-origin request refused")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise _Refused(403, "cross-origin request refused")
        if path == "/":
            return
        scheme, _, given = (self.headers.get("Authorization") or "").partition(" ")
        if scheme.lower() != "bearer":
            given = self._query.get("token", [""])[-1] if self.command == "GET" else ""
        # compare_digest raises for text that is not ASCII.
        if not hmac.compare_digest(given.encode(errors="replace"), self.server.token.encode()):
            raise _Refused(401, "the token is missing or wrong",
                           "open the whole address that `clusterkit web` printed")  # fmt: skip
        self.server.known(self.connection)

    def _is_our_name(self, host: str) -> bool:
        """Tell whether a `Host` header names this server, with any port: a tunnel may change it."""
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

    # -- routes ------------------------------------------------------------

    def _route(self, path: str) -> None:
        for method, pattern, answer in _ROUTES:
            if match := pattern.fullmatch(path):
                if method != self.command:
                    raise _Refused(405, f"{path}: only {method}")
                answer(self, *match.groups())
                return
        raise _Refused(404, "there is no such page")

    def _page(self) -> None:
        self._send(page.render(), "text/html; charset=utf-8")

    def _report(self) -> None:
        ids = self._query.get("run", [])
        document = page.render(self.server.site.report(ids), time.time())
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
        numbers = {key: self._number(key, int) for key in ("rank", "before", "after")}
        search = self._query.get("search", [""])[-1]
        self._json(self.server.site.log(run, attempt, node, search=search, **numbers))

    def _line(self, run: str) -> None:
        attempt, node = self._number("attempt", int), self._number("node", int) or 0
        self._json(self.server.site.line(run, attempt, node, self._number("at", int) or 0))

    def _news(self) -> None:
        self._json(self.server.site.news(self._query.get("run", [])))

    def _number(self, name: str, kind: Callable[[str], Any]) -> Any:
        text = self._query.get(name, [""])[-1]
        try:
            value = kind(text) if text else None
        except ValueError:
            value = math.nan
        if value is not None and not -_LARGEST <= value <= _LARGEST:
            raise _Refused(400, f"{name}={text[:40]}: not a number, or too large")
        return value

    # -- answers -----------------------------------------------------------

    def _json(self, document: object) -> None:
        self._send(_json(document), "application/json")

    def _send(self, body: bytes, kind: str, name: str | None = None, status: int = 200) -> None:
        self._head(status, kind, {
            "Content-Length": str(len(body)),
            **({"Content-Disposition": f'attachment; filename="{name}"'} if name else {}),
        })  # fmt: skip
        self.wfile.write(body)

    def _head(self, status: int, kind: str, more: dict[str, str] | None = None) -> None:
        self._headers_sent = True
        self.send_response(status)
        for key, value in {"Content-Type": kind, **_HEADERS, **(more or {})}.items():
            self.send_header(key, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _error(self, status: int, message: str, hint: str | None = None) -> None:
        if self._headers_sent:  # too late for another answer
            self.close_connection = True
            return
        self._send(_json({"error": message, "hint": hint}), "application/json", status=status)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is not HTTP, or another method; called by the base class."""
        self.close_connection = True
        self._headers_sent = False
        self._error(code, message or "no such request")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal shows only the address, and a URL would reveal the token."""


def _json(document: object) -> bytes:
    return msgspec.json.encode(document)


def _as_json(method: Callable[..., object]) -> Callable[..., None]:
    """Make a route of a method of `Site` whose arguments are all in the path."""
    return lambda handler, *arguments: handler._json(method(handler.server.site, *arguments))


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
