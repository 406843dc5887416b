"""The API server: connections by the official client, and requests by path.

The client reads kubeconfigs, renews credentials and pools connections. Requests do not go through
its generated classes: these have no jobs of operators, no server-side apply, and a watch that
waits cannot be ended by another thread. Its dynamic client has to discover every kind first.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import yaml

from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.lost_pods import JSON, force
from clusterkit.backends.kubernetes.nodes import is_ready
from clusterkit.backends.kubernetes.objects import MANAGER, RUN, Object, as_yaml, plural
from clusterkit.backends.kubernetes.pod_status import Pod
from clusterkit.cluster import KubernetesCluster
from clusterkit.errors import BadInput, RunFolderError, SubmitFailed, Unavailable
from clusterkit.plan import KubernetesNative, Plan
from clusterkit.transport import Completed, Environment, LocalTransport, Transport

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
MAX_CONNECTIONS = 1000
PARALLEL_REQUESTS = 8
APPLY_PATCH = "application/apply-patch+yaml"


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


class Context(NamedTuple):
    """A context of a kubeconfig; None: the current context, the default file."""

    kubeconfig: str | None
    name: str | None


class KubeTransport(LocalTransport):
    """Files of this machine, and API servers.

    Attributes:
        handlers: functions that are called instead of commands, by argv, with the command's
            environment. A plan has ``kubectl apply``, but kubectl need not be installed.
    """

    def __init__(self) -> None:
        self.handlers: dict[tuple[str, ...], Callable[[Mapping[str, str]], None]] = {}
        self._clients: dict[Context, ApiClient] = {}
        self._lock = threading.Lock()

    def run(
        self, host: str, argv: Sequence[str], *, env: Environment = None, **more: Any
    ) -> Completed:
        if (handler := self.handlers.get(tuple(argv))) is None:
            return super().run(host, argv, env=env, **more)
        try:
            handler(env or {})
        except Refusal as error:
            # Only its message: no kubectl ran, so there is no exit code to report.
            raise SubmitFailed(error.message) from error
        return Completed(tuple(argv), 0, "", "")

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
            data: bytes = response.read()
        except Exception as error:  # urllib3 raises many kinds, all of which mean this
            raise _unreachable(error, self._client(to)) from error
        return data.decode(errors="replace")

    def stream(self, to: Context, path: str) -> RawStream:
        """Open a watch, or a log that is followed. Raises as `request`."""
        return RawStream(self._request(to, "GET", path))

    def close(self) -> None:
        with self._lock:
            clients, self._clients = self._clients, {}
        for each in clients.values():
            each.rest_client.pool_manager.clear()

    def _client(self, to: Context) -> ApiClient:
        with self._lock:
            if to not in self._clients:
                self._clients[to] = connect(*to)
            return self._clients[to]

    def _request(
        self, to: Context, method: str, path: str, body: object = None, content: str = JSON
    ) -> Any:
        """Send a request and return the response, unread. Raises as `request`."""
        import urllib3

        client = self._client(to)
        headers = {"Accept": "application/json, */*", "User-Agent": "clusterkit"}
        data = None
        if body is not None:
            headers["Content-Type"] = content
            data = (as_yaml(body) if content == APPLY_PATCH else json.dumps(body)).encode()
        # Adds the credentials, which the client renews.
        found = client.param_serialize(
            method, path, header_params=headers, auth_settings=["BearerToken"]
        )
        # For streams as well, whose timeout is set anew by each read: the server begins at once,
        # but for the log of a pod on a node that was just lost it waits two minutes for that node.
        timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=ANSWER_SECONDS)
        try:
            response = client.rest_client.pool_manager.request(
                method, found[1], body=data, headers=found[2], timeout=timeout,
                preload_content=False, retries=False,
            )  # fmt: skip
            if response.status >= 400:
                answer = response.read()
                response.release_conn()
                raise _refusal(response.status, answer, client)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _unreachable(error, client) from error
        return response


class RawStream:
    """An answer that is read while the server sends it."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self._closed = False

    def read(self, timeout: float | None = None) -> bytes:
        """Return the next bytes; ``b""`` at the end or if the connection broke.

        Raises:
            SubmitFailed: nothing came within ``timeout`` seconds.
        """
        import urllib3

        sock = getattr(getattr(self._response, "connection", None), "sock", None)
        if sock is not None:
            sock.settimeout(timeout)
        try:
            # Unlike read, read1 returns what is there without waiting for more.
            data: bytes = self._response.read1(1 << 16)
        except (TimeoutError, urllib3.exceptions.ReadTimeoutError) as error:
            raise SubmitFailed("the API server stopped sending") from error
        except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError):
            return b""
        return data

    def close(self) -> None:
        """Close the connection; a `read` of another thread returns. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
            self._response.shutdown()
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._response.close()

    def __enter__(self) -> RawStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refusal(status: int, answer: bytes, client: ApiClient) -> Unavailable:
    if status == 401:
        return Unavailable(
            f"the API server {client.configuration.host} does not accept your credentials",
            hint="they may have expired: log in to the cluster again",
        )
    try:
        document = json.loads(answer)
        reason = str(document.get("reason", status))
        message = str(document.get("message", ""))
    except (ValueError, AttributeError):
        reason, message = str(status), answer.decode(errors="replace").strip()[:300]
    return _REFUSALS.get(reason, Refusal)(message, reason)


def _unreachable(error: Exception, client: ApiClient) -> Unreachable:
    cause: BaseException = error
    while (deeper := getattr(cause, "reason", None) or cause.__cause__) is not None:
        if not isinstance(deeper, BaseException):
            break
        cause = deeper
    reason = str(cause).rpartition(": ")[2] or type(cause).__name__
    return Unreachable(
        f"the API server {client.configuration.host} does not answer: {reason}",
        hint="is the cluster up, and the VPN? `kubectl cluster-info` should say",
    )


# ---------------------------------------------------------------- connecting

_CONNECTING = threading.Lock()


def connect(kubeconfig: str | None, context: str | None) -> ApiClient:
    """Make a client for a context of a kubeconfig; in a pod without one, for the pod's own cluster.

    Raises:
        BadInput: there is no such file, context or user in it.
        Unavailable: the package is not installed.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        raise not_installed() from None
    named = kubeconfig or os.environ.get("KUBECONFIG")
    files = [Path(part).expanduser() for part in (named or "~/.kube/config").split(":") if part]
    existing = [path for path in files if path.is_file()]
    settings = client.Configuration()
    settings.retries = False
    # urllib3 warns of each connection beyond these; as many logs may be followed at once.
    settings.connection_pool_maxsize = MAX_CONNECTIONS
    in_pod = not named and "KUBERNETES_SERVICE_HOST" in os.environ
    if not existing and not in_pod:
        raise BadInput(
            f"kubeconfig: there is no {files[0]}",
            hint="kubeconfig: PATH in the cluster entry, or export KUBECONFIG=PATH",
            cluster="kubeconfig",
        )
    try:
        if not existing:
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            return client.ApiClient(settings)
        # The client writes keys to files, which it remembers for all threads in a global table.
        with _CONNECTING, tempfile.TemporaryDirectory(prefix="clusterkit-") as folder:
            try:
                config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=os.pathsep.join(map(str, existing)),
                    context=context,
                    client_configuration=settings,
                    persist_config=False,
                    temp_file_path=folder,
                )
                return _with_keys_in_memory(client.ApiClient(settings))
            finally:
                # Else the next client would get files of this folder, which is gone then.
                config.kube_config._cleanup_temp_files()  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        reason = str(error).removeprefix("Invalid kube-config file. ")
        if context is not None and context in reason:
            raise BadInput(
                f"context: {existing[0]} has no context {context!r}",
                hint="`kubectl config get-contexts` lists them",
                cluster="context",
            ) from None
        raise BadInput(
            f"kubeconfig: {existing[0] if existing else files[0]}: {reason}", cluster="kubeconfig"
        ) from None
    except (yaml.YAMLError, OSError, ValueError, TypeError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(
            f"kubeconfig: {existing[0]} cannot be read: {reason}", cluster="kubeconfig"
        ) from None


def context_of(cluster: KubernetesCluster) -> tuple[str, str]:
    """Return the names of the context and of the namespace."""
    try:
        from kubernetes import config
    except ImportError:
        raise not_installed() from None
    try:
        contexts, active = config.list_kube_config_contexts(cluster.kubeconfig)  # type: ignore[no-untyped-call]
        chosen = next((each for each in contexts if each["name"] == cluster.context), active)
        own = chosen["context"].get("namespace")
    except (config.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, KeyError):
        # In a pod there is no kubeconfig; `connect` reports what is wrong with one.
        return cluster.context or "", cluster.namespace or "default"
    return str(chosen["name"]), str(cluster.namespace or own or "default")


def not_installed() -> Unavailable:
    return Unavailable(
        "backend kubernetes needs the package kubernetes",
        hint="python -m pip install 'clusterkit[kubernetes]'",
    )


def _with_keys_in_memory(client: ApiClient) -> ApiClient:
    """Load certificates and key now: private keys do not stay on the disk while a run lasts."""
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


# ---------------------------------------------------------------- objects on a server


class Server:
    """The API server of a context, and a namespace. Methods raise as `KubeTransport.request`."""

    def __init__(self, context: Context, namespace: str, transport: Transport) -> None:
        assert isinstance(transport, KubeTransport)
        self._context, self.namespace, self._transport = context, namespace, transport

    def path(self, api: str, kind: str, name: str = "") -> str:
        """Return the path of an object of the namespace, or of all of its kind."""
        root = f"/apis/{api}" if "/" in api else f"/api/{api}"
        listed = f"{root}/namespaces/{quote(self.namespace)}/{plural(kind)}"
        return f"{listed}/{quote(name)}" if name else listed

    def request(self, method: str, path: str, body: object = None, content: str = JSON) -> str:
        """Send a request and return the body of the answer."""
        return self._transport.request(self._context, method, path, body, content)

    def get(self, path: str) -> Object:
        """Return the object or list at a path."""
        found: Object = json.loads(self.request("GET", path))
        return found

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
        found: Object = json.loads(self.request("POST", path, body))
        return found

    def apply(self, path: str, body: Object) -> Object:
        """Create or change the object at a path (server-side apply), and return it."""
        path += f"?fieldManager={MANAGER}&force=true&fieldValidation=Strict"
        applied: Object = json.loads(self.request("PATCH", path, body, APPLY_PATCH))
        return applied

    def delete(self, path: str) -> None:
        """Delete what is at a path, and in the background what that owns. Idempotent."""
        joined = "&" if "?" in path else "?"
        with contextlib.suppress(NotFound):
            self.request("DELETE", f"{path}{joined}propagationPolicy=Background")

    def stream(self, path: str) -> RawStream:
        """Open a watch, or a log that is followed."""
        return self._transport.stream(self._context, path)


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
        listed = self.get(f"{self.path('v1', 'Event')}?fieldSelector={chosen}")
        found: list[dict[str, Any]] = listed["items"]
        return found

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
