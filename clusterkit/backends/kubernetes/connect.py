"""Connections to the API server of a context: kubeconfigs, certificates, sockets."""

from __future__ import annotations

import os
import socket
import ssl
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from clusterkit.cluster import KubernetesCluster
from clusterkit.errors import BadInput, Unavailable

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

MAX_CONNECTIONS = 1000
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
            return _kept_alive(client.ApiClient(settings))
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
                return _kept_alive(_with_keys_in_memory(client.ApiClient(settings)))
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


def _kept_alive(client: ApiClient) -> ApiClient:
    """Let the kernel ask idle connections for a sign of life: load balancers drop those on which
    nothing is sent for some minutes, and tell neither side."""
    from urllib3.connection import HTTPConnection

    options = [*HTTPConnection.default_socket_options, (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # macOS lacks the first
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    client.rest_client.pool_manager.connection_pool_kw["socket_options"] = options
    return client
