"""The API server: requests by path, what its answers mean, and the objects that it has."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlencode

from clusterkit.backends.kubernetes.connect import Connection, connect, context_of
from clusterkit.backends.kubernetes.exec_stream import ExecStream
from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.lost_pods import JSON, force
from clusterkit.backends.kubernetes.nodes import is_ready
from clusterkit.backends.kubernetes.objects import RUN, Object, as_yaml, path_of
from clusterkit.backends.kubernetes.pod import Pod
from clusterkit.cluster import KubernetesCluster
from clusterkit.errors import ClusterkitError, RunFolderError, SubmitFailed, Unavailable
from clusterkit.plan import KubernetesNative, Plan
from clusterkit.transport import LocalTransport, Stream, Transport

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

ANSWER_SECONDS = 30.0
RENEW_SECONDS = 5.0
"""Least time between two readings of a kubeconfig whose credentials were not accepted."""
PARALLEL_REQUESTS = 8
APPLY_PATCH = "application/apply-patch+yaml"
_BETWEEN = (
    "check the proxy and the login to the cluster: `kubectl get --raw /version` should fail too"
)


class Refusal(Unavailable):
    """The API server answered with an error.

    Attributes:
        reason: the error's ``reason``; those that are handled somewhere have a class each.
        detail: the error's ``message``.
    """

    def __init__(self, detail: str, reason: str = "") -> None:
        self.detail, self.reason = detail, reason or type(self).__name__
        super().__init__(f"Error from server ({self.reason}): {detail}")


class NotFound(Refusal):
    pass


class Conflict(Refusal):
    pass


class Forbidden(Refusal):
    pass


class InternalError(Refusal):
    """Also: an admission webhook does not answer."""


_REFUSALS = {kind.__name__: kind for kind in (NotFound, Conflict, Forbidden, InternalError)}


class Unreachable(Unavailable):
    """The API server does not answer."""


class Unreadable(Unreachable):
    """Something answers for the API server: a proxy, or a login page. It may stop to."""


class Context(NamedTuple):
    """A context of a kubeconfig; None: the current context, the default file."""

    kubeconfig: str | None
    name: str | None


class KubeTransport(LocalTransport):
    """Files of this machine, and API servers."""

    def __init__(self) -> None:
        self._connections: dict[Context, Connection] = {}
        self._renew_at: dict[Context, float] = {}
        self._dates: dict[Context, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def request(
        self, to: Context, method: str, path: str, body: object = None, content: str = JSON
    ) -> str:
        """Send a request and return the body of the answer.

        Raises:
            Refusal: the server answered with an error.
            Unavailable: it does not answer (`Unreachable`), or does not accept the credentials.
        """
        response = self._request(to, method, path, body, content)
        try:
            return response.read().decode(errors="replace")
        except Exception as error:  # urllib3 raises many kinds, all of which mean this
            raise _unreachable(error, self._connection(to).host) from error

    def stream(self, to: Context, path: str, silence: float) -> AnswerStream:
        """Open a watch, or a log that is followed. Raises as `request`.

        Args:
            silence: seconds without anything after which a `read` fails.
        """
        return AnswerStream(self._request(to, "GET", path, silence=silence))

    def execute(self, to: Context, path: str) -> Stream:
        """Open the streams of a command in a pod. Raises as `request`."""
        import websocket

        for again in (True, False):
            connection = self._connection(to)
            try:
                return ExecStream(connection.websocket(path))
            except websocket.WebSocketBadStatusException as error:
                if error.status_code == 401 and again and self._renew(to, connection):
                    continue
                answer = error.resp_body or b""
                raise _refusal(error.status_code, answer, connection.host, web_page=False) from None
            except (websocket.WebSocketException, OSError) as error:
                raise _unreachable(error, connection.host) from error
        raise AssertionError

    def close(self) -> None:
        with self._lock:
            connections, self._connections = self._connections, {}
        for each in connections.values():
            each.close()

    def time(self, to: Context) -> float:
        """Return the Unix time by the server's clock: that of this machine may differ from it, and
        from the times in the server's objects."""
        date, at = self._dates.get(to, (time.time(), time.monotonic()))
        return date + time.monotonic() - at

    def _connection(self, to: Context) -> Connection:
        with self._lock:
            if to not in self._connections:
                self._connections[to] = connect(*to)
            return self._connections[to]

    def _renew(self, to: Context, refused: Connection) -> bool:
        """Read the kubeconfig again, after its credentials were not accepted: tokens and
        certificates are replaced in it, or by its exec plugin. Returns whether there is a new
        connection."""
        with self._lock:
            if self._connections.get(to) is not refused:
                return True  # another thread has done it
            if time.monotonic() < self._renew_at.get(to, 0.0):
                return False
            self._renew_at[to] = time.monotonic() + RENEW_SECONDS
            with contextlib.suppress(ClusterkitError):
                self._connections[to] = connect(*to)
                return True
            return False

    def _request(
        self, to: Context, method: str, path: str, body: object = None, content: str = JSON,
        silence: float = ANSWER_SECONDS,
    ) -> BaseHTTPResponse:  # fmt: skip
        """Send a request and return the response, unread. Raises as `request`."""
        import urllib3

        data = None
        if body is not None:
            data = (as_yaml(body) if content == APPLY_PATCH else json.dumps(body)).encode()
        for again in (True, False):
            connection = self._connection(to)
            try:
                response = connection.send(method, path, data, content, silence)
                if response.status == 401 and again and self._renew(to, connection):
                    response.drain_conn()
                    continue
                with contextlib.suppress(ValueError, TypeError):
                    date = parsedate_to_datetime(response.headers["Date"]).timestamp()
                    self._dates[to] = (date, time.monotonic())
                web_page = response.headers.get("Content-Type", "").startswith("text/html")
                if web_page or response.status >= 300:
                    answer = response.read()
                    raise _refusal(response.status, answer, connection.host, web_page=web_page)
            except (urllib3.exceptions.HTTPError, OSError) as error:
                # A certificate that has expired is refused in the handshake by some.
                tls = isinstance(_cause(error), ssl.SSLError)
                if tls and again and self._renew(to, connection):
                    continue
                raise _unreachable(error, connection.host) from error
            break
        return response


class AnswerStream:
    """An answer that is read while the server sends it.

    Attributes:
        broken: whether the connection broke before the server had sent all.
    """

    def __init__(self, response: BaseHTTPResponse) -> None:
        self._response = response
        self.broken = False

    def read(self) -> bytes:
        """Return the next bytes; ``b""`` at the end or if the connection broke.

        Raises:
            SubmitFailed: nothing came for a while.
        """
        import urllib3

        try:
            # Unlike read, read1 returns what is there without waiting for more.
            return self._response.read1(1 << 16)
        except (TimeoutError, urllib3.exceptions.ReadTimeoutError) as error:
            raise SubmitFailed("the API server stopped sending") from error
        # AttributeError: `stop` between two lines of ssl.SSLSocket.read.
        except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError):
            self.broken = True
            return b""

    def stop(self) -> None:
        """Let a `read` of another thread return. Idempotent."""
        # It has ended, maybe just now.
        with contextlib.suppress(OSError, ValueError, RuntimeError, TypeError):
            self._response.shutdown()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()


def _refusal(status: int, answer: bytes, host: str, *, web_page: bool) -> Unavailable:
    if web_page or status < 400:
        return Unreadable(
            f"HTTP {status}: a proxy answers at {host} instead of the API server, with a web "
            "page or a redirect",
            hint=_BETWEEN,
        )
    if status == 401:
        return Unavailable(
            f"Unauthorized: the API server {host} does not accept your credentials",
            hint="they may have expired: log in to the cluster again",
        )
    try:
        document = json.loads(answer)
        reason = str(document.get("reason", status))
        message = str(document.get("message", ""))
    except (ValueError, AttributeError):
        reason, message = str(status), answer.decode(errors="replace").strip()[:300]
    return _REFUSALS.get(reason, Refusal)(message, reason)


def _cause(error: BaseException) -> BaseException:
    """Return the error by which this one was caused in the end."""
    while (deeper := getattr(error, "reason", None) or error.__cause__) is not None:
        if not isinstance(deeper, BaseException):
            break
        error = deeper
    return error


def _unreachable(error: Exception, host: str) -> Unreachable:
    cause = _cause(error)
    reason = str(cause).rpartition(": ")[2] or type(cause).__name__
    return Unreachable(
        f"the API server {host} does not answer: {reason}",
        hint="is the cluster up, and the VPN? `kubectl cluster-info` should say",
    )


# ---------------------------------------------------------------- objects on a server


class Server:
    """The API server of a context, and a namespace. Methods raise as `KubeTransport.request`."""

    def __init__(self, context: Context, namespace: str, transport: Transport) -> None:
        assert isinstance(transport, KubeTransport)
        self._context, self.namespace, self._transport = context, namespace, transport

    def path(self, api: str, kind: str, name: str = "") -> str:
        """Return the path of an object of the namespace, or of all of its kind."""
        return path_of(self.namespace, api, kind, name)

    def request(self, method: str, path: str, body: object = None, content: str = JSON) -> str:
        """Send a request and return the body of the answer."""
        return self._transport.request(self._context, method, path, body, content)

    def time(self) -> float:
        """Return the Unix time by the server's clock."""
        return self._transport.time(self._context)

    def get(self, path: str) -> Object:
        """Return the object or list at a path."""
        return _decoded(self.request("GET", path), path)

    def items(self, path: str) -> list[Object]:
        """Return the objects that are listed at a path."""
        return self.listed(path)[0]

    def listed(self, path: str) -> tuple[list[Object], str]:
        """Return the objects that are listed at a path, and the version at which to begin a watch.

        Raises:
            Unreadable: what answers is no list.
        """
        found = self.get(path)
        items = (found["items"] or []) if "items" in found else None
        if not isinstance(items, list) or not all(
            isinstance(each, dict) and isinstance(each.get("metadata"), dict) for each in items
        ):
            raise _unreadable(path, "a list of objects")
        return items, str((found.get("metadata") or {}).get("resourceVersion", ""))

    def find(
        self, path: str, absent: type[Refusal] | tuple[type[Refusal], ...] = NotFound
    ) -> Object | None:
        """Return the object at a path, or None if the server refuses with one of ``absent``."""
        try:
            return self.get(path)
        except absent:
            return None

    def post(self, path: str, body: Object) -> Object:
        """Create an object and return it as the server has it."""
        return _decoded(self.request("POST", path, body), path)

    def patch(self, path: str, body: Object, content: str) -> Object:
        """Change the object at a path, or with server-side apply create it, and return it."""
        return _decoded(self.request("PATCH", path, body, content), path)

    def delete(self, path: str) -> None:
        """Delete what is at a path, and in the background what that owns. Idempotent."""
        joined = "&" if "?" in path else "?"
        with contextlib.suppress(NotFound):
            _decoded(self.request("DELETE", f"{path}{joined}propagationPolicy=Background"), path)

    def stream(self, path: str, silence: float) -> AnswerStream:
        """Open a watch, or a log that is followed."""
        return self._transport.stream(self._context, path, silence)


def _decoded(text: str, path: str) -> Object:
    """Return the object that the server sent.

    Raises:
        Unreadable: it is none: a proxy in between may answer anything with 200.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _unreadable(path, "a JSON object")
    return found


def _unreadable(path: str, expected: str) -> Unreadable:
    """Return the error that what was expected is not what was sent for a path."""
    return Unreadable(
        f"the answer to {path.partition('?')[0]} is not {expected}: a proxy may answer instead of "
        "the API server",
        hint=_BETWEEN,
    )


class ClusterServer(Server):
    """The server and the namespace that a cluster entry names.

    Attributes:
        context_name: name of the context, which may not be the current one later.
    """

    def __init__(self, cluster: KubernetesCluster, transport: Transport) -> None:
        self.context_name, namespace = context_of(cluster)
        super().__init__(Context(cluster.kubeconfig, cluster.context), namespace, transport)


class RunObjects(Server):
    """The objects of a run, on the server and in the namespace that its plan names."""

    def __init__(self, plan: Plan, transport: Transport) -> None:
        native = plan.native
        if not isinstance(native, KubernetesNative):
            raise RunFolderError(
                f"run {plan.run_id}: its plan does not say where its objects are",
                hint="it was submitted by an older clusterkit; `kubectl` can follow and delete it",
            )
        context = Context(native.kubeconfig, native.context)
        super().__init__(context, native.namespace, transport)
        self.flavor = FLAVORS[native.flavor]
        self.name = native.name
        self._run_id = plan.run_id

    def pod_path(self, name: str) -> str:
        return self.path("v1", "Pod", name)

    def execute(self, pod: Pod, argv: Sequence[str]) -> Stream:
        """Start a command in a pod's container; its input and output are a stream.

        Raises:
            Refusal: the API server answered with an error.
            Unavailable: it does not answer.
        """
        query = [("container", pod.container), *(("command", word) for word in argv)]
        query += [(name, "true") for name in ("stdin", "stdout", "stderr")]
        path = f"{self.pod_path(pod.name)}/exec?{urlencode(query)}"
        return self._transport.execute(self._context, path)

    def force(self, pod: Pod) -> None:
        """Remove a pod as `lost_pods.force`; nothing if it is gone or another one by now."""
        with contextlib.suppress(NotFound, Conflict):
            force(self.request, self.pod_path(pod.name), pod.uid, held=pod.has_finalizers)

    @property
    def job_path(self) -> str:
        """Path of the job that owns the run's pods."""
        return self.path(self.flavor.api, self.flavor.kind, self.name)

    def pods_path(self, **query: str) -> str:
        """Return the path that lists the run's pods."""
        selector = quote(f"{RUN}={self._run_id}", safe="")
        more = "".join(f"&{key}={quote(value, safe='')}" for key, value in query.items())
        return f"{self.path('v1', 'Pod')}?labelSelector={selector}{more}"

    def events(self, field_selector: str) -> list[dict[str, Any]]:
        """Return the namespace's events that a field selector chooses."""
        chosen = quote(field_selector, safe="")
        return self.items(f"{self.path('v1', 'Event')}?fieldSelector={chosen}")

    @cached_property
    def namespace_deleted(self) -> bool:
        """Whether the namespace is being deleted; False if we may not look."""
        found = self.find(f"/api/v1/namespaces/{self.namespace}", Refusal) or {}
        return "deletionTimestamp" in found.get("metadata", {})

    def node_ready(self, host: str) -> bool | None:
        """Whether a node of the cluster is ready; None: we may not look."""
        try:
            found = self.find(f"/api/v1/nodes/{host}")
        except Refusal:
            return None
        return is_ready(found or {})
