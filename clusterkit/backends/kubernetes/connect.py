"""Connections to API servers: the official client reads kubeconfigs and renews credentials, urllib3
sends the requests (docs/architecture.md, "Rejected alternatives")."""

from __future__ import annotations

import os
import ssl
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml

from clusterkit.cluster import KubernetesCluster
from clusterkit.errors import BadInput, Unavailable

if TYPE_CHECKING:
    from kubernetes.client import Configuration
    from urllib3 import BaseHTTPResponse, PoolManager
    from websocket import WebSocket

CONNECT_SECONDS = 5.0
EXEC_SECONDS = 30.0
"""For the API server, kubelet and container runtime to start a command in a pod."""
MAX_CONNECTIONS = 1000
OVERLOADED_TRIES, OVERLOADED_SECONDS = 4, 5
"""How often an API server is asked again that answers 429 with Retry-After, and how late at most:
it has not looked at the request. Who calls decides whether all else is tried again."""
_CONNECTING = threading.Lock()


class Connection:
    """Connections to one API server, at the address ``host``; kept for the next requests."""

    def __init__(self, settings: Configuration) -> None:
        self.host = settings.host
        self._settings = settings
        self._tls = _tls(settings)
        self._pool = _pool(settings, self._tls)

    def send(
        self, method: str, path: str, body: bytes | None, content: str, silence: float
    ) -> BaseHTTPResponse:
        """Send a request and return the response, unread. Raises errors of urllib3, and OSError.

        Args:
            silence: how many seconds nothing may come, before the answer and within it.
        """
        import urllib3

        headers = {"Accept": "application/json, */*", "User-Agent": "clusterkit"}
        headers |= {} if body is None else {"Content-Type": content}
        # Reads a token that is about to expire again, or asks its exec plugin.
        if token := self._settings.auth_settings().get("BearerToken", {}).get("value"):
            headers["Authorization"] = token
        retries = urllib3.Retry(
            OVERLOADED_TRIES, connect=False, read=False, other=0, allowed_methods=None,
            raise_on_status=False, retry_after_max=OVERLOADED_SECONDS,
        )  # fmt: skip
        return self._pool.request(
            method, self.host + path, body=body, headers=headers, preload_content=False,
            timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=silence),
            redirect=False, retries=retries,
        )  # fmt: skip

    def websocket(self, path: str) -> WebSocket:
        """Open a WebSocket to the streams of a command in a pod. Raises what websocket-client does.

        That is the official client's own library. Its `kubernetes.stream` reads certificates from
        files, of which there are none here, and drops bytes that are not UTF-8.
        """
        import websocket
        from kubernetes.client.rest import should_bypass_proxies

        headers = ["User-Agent: clusterkit"]
        if token := self._settings.auth_settings().get("BearerToken", {}).get("value"):
            headers.append(f"Authorization: {token}")
        options: dict[str, Any] = {"http_no_proxy": ["*"]}
        proxy = self._settings.proxy
        if proxy and not should_bypass_proxies(self.host, self._settings.no_proxy or ""):
            at = urlsplit(proxy)
            kind = at.scheme if at.scheme.startswith("socks") else "http"
            options = {
                "http_proxy_host": at.hostname, "http_proxy_port": at.port, "proxy_type": kind,
                "http_proxy_auth": (at.username, at.password) if at.username else None,
            }  # fmt: skip
        tls: dict[str, Any] = {"context": self._tls}
        if self._settings.tls_server_name:
            tls["server_hostname"] = self._settings.tls_server_name
        return websocket.create_connection(
            f"ws{self.host.removeprefix('http')}{path}", timeout=EXEC_SECONDS, header=headers,
            subprotocols=["v4.channel.k8s.io"], sslopt=tls, suppress_origin=True, **options,
        )  # fmt: skip

    def close(self) -> None:
        self._pool.clear()


def connect(kubeconfig: str | None, context: str | None) -> Connection:
    """Connect to a context of a kubeconfig; in a pod without one, to the pod's own cluster.

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
            return Connection(settings)
        # The client writes keys to files, which it remembers for all threads in a global table, and
        # writes again if they are gone. Private keys do not stay on the disk while a run lasts.
        with _CONNECTING, tempfile.TemporaryDirectory(prefix="clusterkit-") as folder:
            config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=os.pathsep.join(map(str, existing)),
                context=context,
                client_configuration=settings,
                persist_config=False,
                temp_file_path=folder,
            )
            return Connection(settings)
    except config.ConfigException as error:
        reason = str(error).removeprefix("Invalid kube-config file. ")
        if f" name {context} in " in reason and "/contexts" in reason:
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


def _pool(settings: Configuration, tls: ssl.SSLContext) -> PoolManager:
    """Return connections as settings say."""
    import urllib3
    from kubernetes.client.rest import should_bypass_proxies
    from kubernetes.utils.keepalive import tcp_keepalive_socket_options

    options: dict[str, Any] = {
        "ssl_context": tls,
        # urllib3 warns of each connection beyond these; as many logs may be followed at once.
        "maxsize": MAX_CONNECTIONS,
        # Load balancers drop connections on which nothing is sent for some minutes, and tell
        # neither side.
        "socket_options": tcp_keepalive_socket_options(idle=30, interval=10, count=3),
    }
    if settings.tls_server_name:
        options["server_hostname"] = settings.tls_server_name
    proxy = settings.proxy
    if not proxy or should_bypass_proxies(settings.host, settings.no_proxy or ""):
        return urllib3.PoolManager(**options)
    if proxy.startswith("socks"):
        from urllib3.contrib.socks import SOCKSProxyManager

        return SOCKSProxyManager(proxy, **options)
    return urllib3.ProxyManager(proxy, **options)


def _tls(settings: Configuration) -> ssl.SSLContext:
    """Return what the settings say of certificates and key, which are read now."""
    from urllib3.util import create_urllib3_context

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
    return context
