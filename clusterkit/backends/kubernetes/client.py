"""The API server, reached through the official client, in the words of kubectl.

A plan's step is what a person could type: ``kubectl apply --server-side --kustomize DIR``. It is
carried out here, without kubectl: that, and ``get``, ``create`` and ``delete`` with ``--raw``.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import yaml

from clusterkit.backends.kubernetes.pods import MANAGER, ROLE
from clusterkit.backends.kubernetes.text import Object
from clusterkit.backends.kubernetes.watcher import reference, renumber
from clusterkit.errors import BadInput, ClusterkitError, SubmitFailed, Unavailable
from clusterkit.transport import Completed, LocalTransport, Stream, Transport

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
AWAY_SECONDS = 40.0
"""How long the API server may be away while a run is being made."""
RUNTIME_SECONDS = 10.0
"""How long an operator may take to be ready for a job."""
_SOON = ("must be created before", "failed calling webhook")
"""Parts of refusals that are none a moment later."""
APPLIED_AT_ONCE = 8
"""Requests that are under way together while a run is made."""
KUSTOMIZATION = "kustomization.yaml"
_LEASES = "/apis/coordination.k8s.io/v1"
_PLURALS = {
    "ConfigMap": "configmaps", "Secret": "secrets", "Service": "services", "Job": "jobs",
    "PyTorchJob": "pytorchjobs", "MPIJob": "mpijobs", "TrainJob": "trainjobs",
    "TrainingRuntime": "trainingruntimes", "ServiceAccount": "serviceaccounts", "Role": "roles",
    "RoleBinding": "rolebindings", "Lease": "leases",
}  # fmt: skip
_OWNERS = ("PyTorchJob", "MPIJob", "TrainJob", "Job")


class Refused(ClusterkitError):
    """The API server understood, and said no."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"the API server says: {message}")
        self.status = status
        self.reason = reason
        self.said = message


class Away(Unavailable):
    """The API server does not answer."""


class Target:
    """Which server and namespace, from the words of a command."""

    def __init__(self, argv: Sequence[str]) -> None:
        words = list(argv[1:])
        flags: dict[str, str] = {}
        while words and words[0] in ("--kubeconfig", "--context", "--namespace"):
            flags[words[0]] = words[1]
            del words[:2]
        self.kubeconfig = flags.get("--kubeconfig")
        self.context = flags.get("--context")
        self.namespace = flags.get("--namespace", "default")
        self.words = words


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
        target = Target(argv)
        seconds = timeout or ANSWER_SECONDS
        try:
            match target.words:
                case ["get", "--raw", path]:
                    out = self._call(target, "GET", path, seconds=seconds)
                case ["create", "--raw", path, "--filename", "-"]:
                    asked = json.loads(stdin)
                    out = self._call(
                        target, "POST", path, asked, "application/json", seconds=seconds
                    )
                case [
                    "patch",
                    "lease",
                    name,
                    "--type",
                    "merge",
                    "--patch",
                    text,
                    "--output",
                    "json",
                ]:
                    path = f"{_LEASES}/namespaces/{target.namespace}/leases/{quote(name)}"
                    out = self._call(
                        target, "PATCH", path, json.loads(text), "application/merge-patch+json",
                        seconds=seconds,
                    )  # fmt: skip
                case ["delete", "--raw", path]:
                    out = self._call(target, "DELETE", path, seconds=seconds)
                case ["patch", "pod", name, "--type", "merge", "--patch", change]:
                    path = f"/api/v1/namespaces/{target.namespace}/pods/{name}"
                    content = "application/merge-patch+json"
                    out = self._call(
                        target, "PATCH", path, json.loads(change), content, seconds=seconds
                    )
                case ["apply", *_, "--kustomize", folder]:
                    out = self._apply(target, Path(folder), env or {}, seconds)
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
        target = Target(argv)
        match target.words:
            case ["get", "--raw", path]:
                return RawStream(self._request(target, "GET", path, None, None))
        raise SubmitFailed(f"not carried out here: {' '.join(argv)}")

    def close(self) -> None:
        with self._lock:
            clients, self._clients = self._clients, {}
        for each in clients.values():
            each.rest_client.pool_manager.clear()

    # -- requests -------------------------------------------------------------

    def _client(self, target: Target) -> ApiClient:
        key = (target.kubeconfig, target.context)
        with self._lock:
            if key not in self._clients:
                self._clients[key] = connect(*key)
            return self._clients[key]

    def _call(
        self,
        target: Target,
        method: str,
        path: str,
        body: object = None,
        content: str | None = None,
        *,
        seconds: float = ANSWER_SECONDS,
    ) -> str:
        response = self._request(target, method, path, body, content, seconds)
        try:
            data: bytes = response.read()
        except Exception as error:  # urllib3 has many, and all mean this
            raise _unreachable(error, self._client(target)) from error
        return data.decode(errors="replace")

    def _request(
        self,
        target: Target,
        method: str,
        path: str,
        body: object,
        content: str | None,
        seconds: float | None = None,
    ) -> Any:
        """An answer that is still to be read.

        Raises:
            Refused: the server says no.
            Unavailable: it does not answer, or does not know us.
        """
        import urllib3

        client = self._client(target)
        headers = {"Accept": "application/json, */*", "User-Agent": "clusterkit"}
        if content is not None:
            headers["Content-Type"] = content
        # As the client itself does it; adds the credentials, which may have been renewed.
        found = client.param_serialize(
            method, path, header_params=headers, auth_settings=["BearerToken"]
        )
        timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=seconds)
        data = None if body is None else _encoded(body, content)
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

    # -- apply ----------------------------------------------------------------

    def _apply(self, target: Target, folder: Path, env: Mapping[str, str], seconds: float) -> str:
        """What `kubectl apply` would do with a kustomization, as far as plans have any.

        Whatever is in ``env`` besides the attempt's number becomes the run's Secret; no word and
        no file holds it.
        """
        attempt = env.get("CLUSTERKIT_ATTEMPT", "1")
        secrets = {name: value for name, value in env.items() if name != "CLUSTERKIT_ATTEMPT"}
        objects = kustomized(folder)
        if secrets:
            objects.insert(0, secret_of(objects[0], secrets))
        if attempt != "1":
            renumber(objects, attempt)
        # The job last: with it the run begins. The watcher's, where there is one, owns all of it.
        job = next(each for each in objects if each["kind"] in _OWNERS and not _watches(each))
        root = next((each for each in objects if _watches(each)), job)
        rest = [each for each in objects if each is not job and each is not root]
        with ThreadPoolExecutor(APPLIED_AT_ONCE) as pool:

            def apply(each: Object) -> Object:
                return self._made(target, each, seconds)

            # Whether we may bind a role is looked up in the role.
            late = [each for each in rest if each["kind"] == "RoleBinding"]
            made = list(pool.map(apply, (each for each in rest if each not in late)))
            made += pool.map(apply, late)
            owner = reference(apply(root))
            if root is not job:
                own(job, owner)
                apply(job)
            # With it goes all that belongs to it, whoever deletes it.
            body = {"metadata": {"ownerReferences": [owner]}}

            def adopt(each: Object) -> None:
                path = f"{collection(each, target.namespace)}/{each['metadata']['name']}"
                content = "application/merge-patch+json"
                self._call(target, "PATCH", path, body, content, seconds=seconds)

            list(pool.map(adopt, made))
        return "".join(
            f"{each['kind'].lower()}/{each['metadata']['name']} applied\n" for each in objects
        )

    def _made(self, target: Target, each: Object, seconds: float) -> Object:
        """The object as the server has it now."""
        query = f"fieldManager={MANAGER}&force=true&fieldValidation=Strict"
        path = f"{collection(each, target.namespace)}/{each['metadata']['name']}?{query}"
        start = time.monotonic()
        while True:
            try:
                content = "application/apply-patch+yaml"
                made: Object = json.loads(
                    self._call(target, "PATCH", path, each, content, seconds=seconds)
                )
                return made
            except Away:
                # What is applied twice is applied once.
                if time.monotonic() > start + AWAY_SECONDS:
                    raise
                time.sleep(1)
            except Refused as error:
                # The trainer hears of a runtime a moment after it was made; an operator whose pod
                # is being replaced is not there to be asked.
                late = time.monotonic() > start + RUNTIME_SECONDS
                if late or not any(words in error.said for words in _SOON):
                    raise
                time.sleep(RUNTIME_SECONDS / 50)


class RawStream:
    """An answer that goes on."""

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


def _refused(status: int, said: bytes, client: ApiClient) -> ClusterkitError:
    try:
        told = json.loads(said)
        reason, message = str(told.get("reason", status)), str(told.get("message", ""))
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


def document(tool: Sequence[str], path: str, transport: Transport) -> Object | None:
    """What the API server has at a path; None: nothing.

    Raises:
        Unavailable: it does not answer, or will not.
    """
    done = transport.run("localhost", [*tool, "get", "--raw", path])
    if done.exit_code == 0:
        found: Object = json.loads(done.stdout)
        return found
    if "(NotFound)" in done.stderr:
        return None
    raise Unavailable(done.stderr.strip() or f"exit code {done.exit_code}")


# ---------------------------------------------------------------- objects


def collection(each: Mapping[str, Any], namespace: str) -> str:
    """The path of all objects of its kind."""
    version = each["apiVersion"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{root}/namespaces/{namespace}/{_PLURALS[each['kind']]}"


def kustomized(folder: Path) -> list[Object]:
    """The objects of a kustomization: config maps of files, then the resources.

    Raises:
        SubmitFailed: a file of it is gone.
    """
    try:
        main = yaml.safe_load((folder / KUSTOMIZATION).read_bytes())
        labels = main.get("generatorOptions", {}).get("labels", {})
        objects: list[Object] = [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": each["name"], "labels": dict(labels)},
                **_data({name: (folder / name).read_bytes() for name in each["files"]}),
            }
            for each in main.get("configMapGenerator", ())
        ]
        for name in main.get("resources", ()):
            objects += yaml.safe_load_all((folder / name).read_bytes())
    except OSError as error:
        raise SubmitFailed(
            f"{error.filename}: {(error.strerror or 'unreadable').lower()}"
        ) from None
    return objects


def as_yaml(body: object) -> str:
    """JSON that is YAML as well: the server reads what is to be applied as that, and refuses the
    pairs by which JSON escapes characters beyond U+FFFF."""

    def escape(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        high, low = int(match[1], 16), int(match[2], 16)
        return f"\\U{0x10000 + ((high - 0xD800) << 10) + low - 0xDC00:08x}"

    # An escaped backslash is passed over together with what it escapes.
    pairs = r"\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|\\."
    return re.sub(pairs, escape, json.dumps(body))


def _encoded(body: object, content: str | None) -> bytes:
    yaml_wanted = content is not None and content.endswith("+yaml")
    return (as_yaml(body) if yaml_wanted else json.dumps(body)).encode()


def _data(files: Mapping[str, bytes]) -> Object:
    """Files as a config map holds them: text, and what is none."""
    text, binary = {}, {}
    for name, content in files.items():
        try:
            text[name] = content.decode()
        except UnicodeDecodeError:
            binary[name] = base64.b64encode(content).decode()
    return {"data": text} | ({"binaryData": binary} if binary else {})


def secret_of(config_map: Mapping[str, Any], values: Mapping[str, str]) -> Object:
    """The run's Secret, named and labelled as its config map."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": json.loads(json.dumps(config_map["metadata"])),
        "stringData": dict(values),
    }


def _watches(each: Mapping[str, Any]) -> bool:
    """Whether it is the job of a run's watcher."""
    labels = each["metadata"].get("labels") or {}
    return bool(each["kind"] == "Job" and labels.get(ROLE) == "watcher")


def own(each: Object, owner: Object) -> None:
    """Have it go when its owner goes."""
    each["metadata"]["ownerReferences"] = [owner]
