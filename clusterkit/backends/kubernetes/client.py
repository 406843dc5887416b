"""The API server, reached through the official client, in the words of kubectl.

A plan's step is what a person could type: ``kubectl apply --server-side --kustomize DIR``. It is
carried out here, without kubectl: that, and ``get``, ``create`` and ``delete`` with ``--raw``.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from clusterkit.backends.kubernetes.apply import MERGE_PATCH, Away, Refused, apply, encoded
from clusterkit.backends.kubernetes.connect import connect
from clusterkit.errors import ClusterkitError, SubmitFailed, Unavailable
from clusterkit.transport import Completed, LocalTransport, Stream

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
_PATCHED = {
    "pod": "/api/v1/namespaces/{}/pods",
    "lease": "/apis/coordination.k8s.io/v1/namespaces/{}/leases",
}


class _Server(NamedTuple):
    """Which one, and which namespace of it."""

    kubeconfig: str | None
    context: str | None
    namespace: str


def _parsed(argv: Sequence[str]) -> tuple[list[str], _Server]:
    """The words of a command of kubectl, and the server that its flags name."""
    words, flags = list(argv[1:]), {}
    while words and words[0] in ("--kubeconfig", "--context", "--namespace"):
        flags[words[0]] = words[1]
        del words[:2]
    namespace = flags.get("--namespace", "default")
    return words, _Server(flags.get("--kubeconfig"), flags.get("--context"), namespace)


class KubeTransport(LocalTransport):
    """This machine's files, and the API servers that ``kubectl`` would speak with."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str | None, str | None], ApiClient] = {}
        self._lock = threading.Lock()

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: bytes = b"",
    ) -> Completed:
        if argv[0] != "kubectl":
            return super().run(host, argv, env=env, timeout=timeout, stdin=stdin)
        words, server = _parsed(argv)
        seconds = timeout or ANSWER_SECONDS
        try:
            match words:
                case ["get", "--raw", path]:
                    out = self._call(server, "GET", path, seconds=seconds)
                case ["delete", "--raw", path]:
                    out = self._call(server, "DELETE", path, seconds=seconds)
                case ["create", "--raw", path, "--filename", "-"]:
                    out = self._call(server, "POST", path, json.loads(stdin), seconds=seconds)
                case ["patch", kind, name, "--type", "merge", "--patch", text, *_]:
                    path = f"{_PATCHED[kind].format(server.namespace)}/{quote(name)}"
                    body = json.loads(text)
                    out = self._call(server, "PATCH", path, body, MERGE_PATCH, seconds=seconds)
                case ["apply", *_, "--kustomize", folder]:
                    out = apply(
                        lambda *request: self._call(server, *request, seconds=seconds),
                        server.namespace,
                        Path(folder),
                        env or {},
                    )
                case _:
                    raise SubmitFailed(f"not carried out here: {' '.join(argv)}")
        except Refused as error:
            said = f"Error from server ({error.reason}): {error.said}"
            return Completed(tuple(argv), 1, "", said)
        return Completed(tuple(argv), 0, out, "")

    def open(
        self, host: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> Stream:
        if argv[0] != "kubectl":
            return super().open(host, argv, env=env)
        words, server = _parsed(argv)
        match words:
            case ["get", "--raw", path]:
                return RawStream(self._request(server, "GET", path))
        raise SubmitFailed(f"not carried out here: {' '.join(argv)}")

    def close(self) -> None:
        with self._lock:
            clients, self._clients = self._clients, {}
        for each in clients.values():
            each.rest_client.pool_manager.clear()

    # -- requests -------------------------------------------------------------

    def _client(self, server: _Server) -> ApiClient:
        key = (server.kubeconfig, server.context)
        with self._lock:
            if key not in self._clients:
                self._clients[key] = connect(*key)
            return self._clients[key]

    def _call(
        self,
        server: _Server,
        method: str,
        path: str,
        body: object = None,
        content: str = "application/json",
        *,
        seconds: float,
    ) -> str:
        response = self._request(server, method, path, body, content, seconds)
        try:
            data: bytes = response.read()
        except Exception as error:  # urllib3 has many, and all mean this
            raise _unreachable(error, self._client(server)) from error
        return data.decode(errors="replace")

    def _request(
        self,
        server: _Server,
        method: str,
        path: str,
        body: object = None,
        content: str = "application/json",
        seconds: float | None = None,
    ) -> Any:
        """An answer that is still to be read.

        Raises:
            Refused: the server says no.
            Unavailable: it does not answer, or does not know us.
        """
        import urllib3

        client = self._client(server)
        headers = {"Accept": "application/json, */*", "User-Agent": "clusterkit"}
        if body is not None:
            headers["Content-Type"] = content
        # As the client itself does it; adds the credentials, which may have been renewed.
        found = client.param_serialize(
            method, path, header_params=headers, auth_settings=["BearerToken"]
        )
        timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=seconds)
        data = None if body is None else encoded(body, content)
        try:
            response = client.rest_client.pool_manager.request(
                method, found[1], body=data, headers=found[2], timeout=timeout,
                preload_content=False, retries=False,
            )  # fmt: skip
            if response.status >= 400:
                said = response.read()
                response.release_conn()
                raise _refused(response.status, said, client)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _unreachable(error, client) from error
        return response


class RawStream:
    """An answer that goes on."""

    near = True  # nothing is sent

    def __init__(self, response: Any) -> None:
        self._response = response
        self._pieces: Iterator[bytes] = response.stream(1 << 16, decode_content=True)
        self._closed = False

    def write(self, data: bytes) -> None:
        raise AssertionError("nothing listens")

    def close_input(self) -> None:
        pass

    def read(self, timeout: float | None = None) -> bytes:
        """Some of it; ``b""`` at the end, and where the connection broke."""
        import urllib3

        sock = self._socket()
        if sock is not None:
            sock.settimeout(timeout)
        try:
            # read1 gives what is there, and does not wait for more.
            piece: bytes = self._response.read1(1 << 16)
        except (TimeoutError, urllib3.exceptions.ReadTimeoutError) as error:
            raise SubmitFailed("the API server stopped sending") from error
        except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError):
            return b""
        return piece

    def _socket(self) -> socket.socket | None:
        connection = getattr(self._response, "connection", None)
        found: socket.socket | None = getattr(connection, "sock", None)
        return found

    @property
    def stderr(self) -> str:
        return ""

    def exit_code(self, timeout: float | None = None) -> int:
        return 0

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # Another thread may sit in `read`.
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
            self._response.shutdown()
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._response.close()

    def __enter__(self) -> RawStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refused(status: int, said: bytes, client: ApiClient) -> ClusterkitError:
    try:
        answer = json.loads(said)
        reason = str(answer.get("reason", status))
        message = str(answer.get("message", ""))
    except (ValueError, AttributeError):
        reason, message = str(status), said.decode(errors="replace").strip()[:300]
    if status == 401:
        return Unavailable(
            f"the API server {client.configuration.host} does not accept your credentials",
            hint="they may have expired: log in to the cluster again",
        )
    return Refused(status, reason, message)


def _unreachable(error: Exception, client: ApiClient) -> Away:
    cause: BaseException = error
    while (deeper := getattr(cause, "reason", None) or cause.__cause__) is not None:
        if not isinstance(deeper, BaseException):
            break
        cause = deeper
    words = str(cause).rpartition(": ")[2] or type(cause).__name__
    return Away(
        f"the API server {client.configuration.host} does not answer: {words}",
        hint="is the cluster up, and the VPN? `kubectl cluster-info` should say",
    )
