"""API servers, reached through the official client."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from clusterkit.backends.kubernetes.lost_pods import JSON
from clusterkit.backends.kubernetes.text import as_yaml
from clusterkit.errors import BadInput, SubmitFailed, Unavailable
from clusterkit.transport import Completed, Environment, LocalTransport

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
MOST_CONNECTIONS = 1000
APPLY_PATCH = "application/apply-patch+yaml"


class Refusal(Unavailable):
    """The API server understood, and said no.

    Attributes:
        reason: its own word for why; the reasons that anybody acts upon have a class each.
        said: its own words.
    """

    def __init__(self, said: str, reason: str = "") -> None:
        self.said, self.reason = said, reason or type(self).__name__
        super().__init__(f"Error from server ({self.reason}): {said}")


class NotFound(Refusal):
    pass


class Conflict(Refusal):
    pass


class Forbidden(Refusal):
    pass


class InternalError(Refusal):
    """A webhook that does not answer, for one."""


_REFUSALS = {kind.__name__: kind for kind in (NotFound, Conflict, Forbidden, InternalError)}


class Away(Unavailable):
    """The API server does not answer."""


class Context(NamedTuple):
    """Which API server: a context of a kubeconfig; None: its current one, the usual file."""

    kubeconfig: str | None
    name: str | None


class KubeTransport(LocalTransport):
    """This machine's files, and API servers.

    Attributes:
        carried_out: what is done for a plan's command that a person could type, such as ``kubectl
            apply``, by its words; it is given the command's environment. kubectl need not be there.
    """

    def __init__(self) -> None:
        self.carried_out: dict[tuple[str, ...], Callable[[Mapping[str, str]], None]] = {}
        self._clients: dict[Context, ApiClient] = {}
        self._lock = threading.Lock()

    def run(
        self, host: str, argv: Sequence[str], *, env: Environment = None, **more: Any
    ) -> Completed:
        if (ours := self.carried_out.get(tuple(argv))) is None:
            return super().run(host, argv, env=env, **more)
        try:
            ours(env or {})
        except Refusal as error:
            # As it was said: no kubectl ran that could have exited with anything.
            raise SubmitFailed(error.message) from error
        return Completed(tuple(argv), 0, "", "")

    def request(
        self, to: Context, method: str, path: str, body: object = None, content: str = JSON
    ) -> str:
        """What the API server answers.

        Raises:
            Refusal: it says no.
            Unavailable: it does not answer (`Away`), or does not know us.
        """
        response = self._request(to, method, path, body, content, ANSWER_SECONDS)
        try:
            data: bytes = response.read()
        except Exception as error:  # urllib3 has many, and all mean this
            raise _unreachable(error, self._client(to)) from error
        return data.decode(errors="replace")

    def stream(self, to: Context, path: str) -> RawStream:
        """An answer that goes on: a watch, or a log that is followed. Raises as `request`."""
        # The server begins at once, but for the log of a pod on a node that was just lost: it would
        # wait two minutes for that node, and who follows the log with it.
        return RawStream(self._request(to, "GET", path, seconds=ANSWER_SECONDS))

    def close(self) -> None:
        with self._lock:
            clients, self._clients = self._clients, {}
        for each in clients.values():
            each.rest_client.pool_manager.clear()

    # -- requests -------------------------------------------------------------

    def _client(self, to: Context) -> ApiClient:
        with self._lock:
            if to not in self._clients:
                self._clients[to] = connect(*to)
            return self._clients[to]

    def _request(
        self,
        to: Context,
        method: str,
        path: str,
        body: object = None,
        content: str = JSON,
        seconds: float | None = None,
    ) -> Any:
        """An answer that is still to be read. Raises as `request`."""
        import urllib3

        client = self._client(to)
        headers = {"Accept": "application/json, */*", "User-Agent": "clusterkit"}
        if body is not None:
            headers["Content-Type"] = content
        # As the client itself does it; adds the credentials, which may have been renewed.
        found = client.param_serialize(
            method, path, header_params=headers, auth_settings=["BearerToken"]
        )
        timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=seconds)
        data = None
        if body is not None:
            data = (as_yaml(body) if content == APPLY_PATCH else json.dumps(body)).encode()
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

    def __init__(self, response: Any) -> None:
        self._response = response
        self._closed = False

    def read(self, timeout: float | None = None) -> bytes:
        """Some of it; ``b""`` at the end, and where the connection broke."""
        import urllib3

        sock = getattr(getattr(self._response, "connection", None), "sock", None)
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


def _refused(status: int, said: bytes, client: ApiClient) -> Unavailable:
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
    return _REFUSALS.get(reason, Refusal)(message, reason)


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


# ---------------------------------------------------------------- connecting

_CONNECTING = threading.Lock()


def connect(kubeconfig: str | None, context: str | None) -> ApiClient:
    """A client for a context of a kubeconfig; in a pod without one, for the pod's own cluster.

    Raises:
        BadInput: no such file, context or user in it.
        Unavailable: the package is not installed.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        raise not_installed() from None
    named = kubeconfig or os.environ.get("KUBECONFIG")
    files = [Path(part).expanduser() for part in (named or "~/.kube/config").split(":") if part]
    there = [path for path in files if path.is_file()]
    settings = client.Configuration()
    settings.retries = False
    # Kept open; of one more a warning is printed. As many logs may be followed at once.
    settings.connection_pool_maxsize = MOST_CONNECTIONS
    in_pod = not named and "KUBERNETES_SERVICE_HOST" in os.environ
    if not there and not in_pod:
        raise BadInput(
            f"kubeconfig: there is no {files[0]}",
            hint="kubeconfig: PATH in the cluster entry, or export KUBECONFIG=PATH",
            cluster="kubeconfig",
        )
    try:
        if not there:
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            return client.ApiClient(settings)
        # The library remembers the files that it makes of the keys for all threads.
        with _CONNECTING, tempfile.TemporaryDirectory(prefix="clusterkit-") as folder:
            try:
                config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=os.pathsep.join(map(str, there)),
                    context=context,
                    client_configuration=settings,
                    persist_config=False,
                    temp_file_path=folder,
                )
                return _holding(client.ApiClient(settings))
            finally:
                # It would hand out again those that go with this folder.
                config.kube_config._cleanup_temp_files()  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        said = str(error).removeprefix("Invalid kube-config file. ")
        if context is not None and context in said:
            raise BadInput(
                f"context: {there[0]} has no context {context!r}",
                hint="`kubectl config get-contexts` lists them",
                cluster="context",
            ) from None
        raise BadInput(
            f"kubeconfig: {there[0] if there else files[0]}: {said}", cluster="kubeconfig"
        ) from None
    except (yaml.YAMLError, OSError, ValueError, TypeError, KeyError) as error:
        said = str(error).splitlines()[0]
        raise BadInput(
            f"kubeconfig: {there[0]} cannot be read: {said}", cluster="kubeconfig"
        ) from None


def not_installed() -> Unavailable:
    """The official client is not there."""
    return Unavailable(
        "backend kubernetes needs the package kubernetes",
        hint="python -m pip install 'clusterkit[kubernetes]'",
    )


def _holding(client: ApiClient) -> ApiClient:
    """The client with its certificates and key in memory: their files may go."""
    from urllib3.util.ssl_ import create_urllib3_context

    settings, pools = client.configuration, client.rest_client.pool_manager
    context = create_urllib3_context()
    if not settings.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif settings.ssl_ca_cert:
        context.load_verify_locations(settings.ssl_ca_cert)
    else:
        context.load_default_certs()
    if settings.cert_file:
        context.load_cert_chain(settings.cert_file, settings.key_file)
    for name in ("ca_certs", "ca_cert_data", "cert_file", "key_file"):
        pools.connection_pool_kw.pop(name, None)
    pools.connection_pool_kw["ssl_context"] = context
    return client
