"""A client of the official package for a context of a kubeconfig, with its keys in memory."""

from __future__ import annotations

import os
import ssl
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from clusterkit.errors import BadInput, Unavailable

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

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
