"""An API server, and where it has what belongs to a run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any
from urllib.parse import quote

import yaml

from clusterkit.backends.kubernetes.client import (
    APPLY_PATCH,
    Conflict,
    Context,
    KubeTransport,
    NotFound,
    RawStream,
    Refusal,
)
from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.judge import Pod
from clusterkit.backends.kubernetes.lost_pods import JSON, force
from clusterkit.backends.kubernetes.nodes import is_ready
from clusterkit.backends.kubernetes.pods import MANAGER, RUN
from clusterkit.backends.kubernetes.rights import Right, access_review
from clusterkit.backends.kubernetes.text import Object, plural
from clusterkit.cluster import KubernetesCluster
from clusterkit.errors import RunFolderError
from clusterkit.plan import KubernetesNative, Plan
from clusterkit.transport import Transport

HOST = "localhost"
MANIFESTS = "manifests.yaml"
AT_ONCE = 8
"""Requests that are under way together."""


def flags(kubeconfig: str | None, context: str | None, namespace: str | None = None) -> list[str]:
    """Those of kubectl, in commands for people."""
    words = {"--kubeconfig": kubeconfig, "--context": context, "--namespace": namespace}
    return [word for flag, value in words.items() if value for word in (flag, value)]


def path_to(api: str, namespace: str, kind: str, name: str = "") -> str:
    """Where an object of a namespace is, or all of its kind."""
    root = f"/apis/{api}" if "/" in api else f"/api/{api}"
    return f"{root}/namespaces/{quote(namespace)}/{plural(kind)}{name and f'/{quote(name)}'}"


def objects_of(plan: Plan) -> list[Object]:
    """What a plan makes besides files; the job that keeps the run's pods is the last."""
    text = next(file.text for file in plan.files if file.path.endswith(f"/{MANIFESTS}"))
    return list(yaml.safe_load_all(text or ""))


class Server:
    """The API server of a context. Each method raises as `KubeTransport.request`."""

    def __init__(self, context: Context, transport: Transport) -> None:
        assert isinstance(transport, KubeTransport)
        self._context = context
        self._transport = transport

    @classmethod
    def of(cls, cluster: KubernetesCluster, transport: Transport) -> Server:
        """The one that a cluster entry names."""
        return cls(Context(cluster.kubeconfig, cluster.context), transport)

    def request(self, method: str, path: str, body: object = None, content: str = JSON) -> str:
        return self._transport.request(self._context, method, path, body, content)

    def text(self, path: str) -> str:
        """What is at a path, such as a log."""
        return self.request("GET", path)

    def get(self, path: str) -> Object:
        """The object or list at a path."""
        found: Object = json.loads(self.text(path))
        return found

    def find(
        self, path: str, absent: type[Refusal] | tuple[type[Refusal], ...] = NotFound
    ) -> Object | None:
        """`get`, or None where there is nothing; with `Refusal`, where we may not look as well."""
        try:
            return self.get(path)
        except absent:
            return None

    def post(self, path: str, body: Object) -> Object:
        """What the server makes of an object that is sent to a path."""
        found: Object = json.loads(self.request("POST", path, body))
        return found

    def denied(self, namespace: str, rights: Iterable[Right]) -> list[Right]:
        """Those of the rights that it does not give us."""

        def allowed(right: Right) -> bool:
            review = self.post(
                "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
                access_review(namespace, *right),
            )
            return bool((review.get("status") or {}).get("allowed"))

        asked = list(rights)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [
                right for right, may in zip(asked, pool.map(allowed, asked), strict=True) if not may
            ]

    def apply(self, path: str, body: Object) -> Object:
        """Make the object at a path, or what is there into it; as the server has it then."""
        path += f"?fieldManager={MANAGER}&force=true&fieldValidation=Strict"
        made: Object = json.loads(self.request("PATCH", path, body, APPLY_PATCH))
        return made

    def delete(self, path: str) -> None:
        """Remove what is at a path, and in the background what that owns. Idempotent."""
        joined = "&" if "?" in path else "?"
        with contextlib.suppress(NotFound):
            self.request("DELETE", f"{path}{joined}propagationPolicy=Background")

    def stream(self, path: str) -> RawStream:
        """An answer that goes on: a watch, or a log that is followed."""
        return self._transport.stream(self._context, path)


class RunObjects(Server):
    """What belongs to a run, on the server and in the namespace that it was planned for."""

    def __init__(self, plan: Plan, transport: Transport) -> None:
        native = plan.native
        if not isinstance(native, KubernetesNative):
            raise RunFolderError(
                f"run {plan.run_id}: its plan does not say where its objects are",
                hint="it was submitted by an older clusterkit; `kubectl` can follow and delete it",
            )
        super().__init__(Context(native.kubeconfig, native.context), transport)
        self.namespace = native.namespace
        self.flavor = FLAVORS[native.flavor]
        self.name = native.name
        self._run_id = plan.run_id

    def path(self, api: str, kind: str, name: str = "") -> str:
        """Where an object of the namespace is."""
        return path_to(api, self.namespace, kind, name)

    def pod_path(self, name: str) -> str:
        return self.path("v1", "Pod", name)

    def force(self, pod: Pod) -> None:
        """As `lost_pods.force`; fine where it is gone, or another one, by now."""
        with contextlib.suppress(NotFound, Conflict):
            force(self.request, self.pod_path(pod.name), pod.uid, held=pod.held)

    @property
    def job_path(self) -> str:
        """Where the job is that keeps the run's pods."""
        return self.path(self.flavor.api, self.flavor.kind, self.name)

    def pods_path(self, **query: str) -> str:
        """Where all pods of the run are listed."""
        selector = quote(f"{RUN}={self._run_id}", safe="")
        more = "".join(f"&{key}={quote(value, safe='')}" for key, value in query.items())
        return f"{self.path('v1', 'Pod')}?labelSelector={selector}{more}"

    def events(self, field: str) -> list[dict[str, Any]]:
        """The namespace's events of which this is true."""
        chosen = quote(field, safe="")
        listed = self.get(f"{self.path('v1', 'Event')}?fieldSelector={chosen}")
        found: list[dict[str, Any]] = listed["items"]
        return found

    @cached_property
    def namespace_goes(self) -> bool:
        """Whether it is being deleted; asked for once. False where we may not look."""
        found = self.find(f"/api/v1/namespaces/{self.namespace}", Refusal) or {}
        return "deletionTimestamp" in found.get("metadata", {})

    def node_ready(self, host: str) -> bool | None:
        """Whether a node of the cluster answers; None: we may not look, or nobody says."""
        try:
            found = self.find(f"/api/v1/nodes/{host}")
        except Refusal:
            return None
        return is_ready(found or {})
