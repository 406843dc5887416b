"""The API server, asked through a transport in the words of kubectl; and where it has what belongs
to a run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.pods import RUN
from clusterkit.backends.kubernetes.text import Object
from clusterkit.errors import RunFolderError, Unavailable
from clusterkit.plan import KubernetesNative, Plan
from clusterkit.transport import Stream, Transport

HOST = "localhost"
MERGE = ("--type", "merge", "--patch")
_REFUSED = re.compile(r"Error from server \((\w+)\): (.*)", re.DOTALL)


def flags(kubeconfig: str | None, context: str | None, namespace: str | None = None) -> list[str]:
    """Those of kubectl."""
    words = {"--kubeconfig": kubeconfig, "--context": context, "--namespace": namespace}
    return [word for flag, value in words.items() if value for word in (flag, value)]


class Refusal(Unavailable):
    """The API server will not, or does not answer.

    Attributes:
        reason: ``NotFound``, ``Forbidden``, ``Conflict``; empty where it did not answer.
        said: its own words.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        found = _REFUSED.match(text)
        self.reason, self.said = found.groups() if found else ("", text)


class Server:
    """An API server, as ``kubectl`` with some flags reaches it."""

    def __init__(self, tool: Sequence[str], transport: Transport) -> None:
        self._tool = tuple(tool)
        self._transport = transport

    def call(self, *words: str, stdin: bytes = b"", timeout: float | None = None) -> str:
        """What a command prints.

        Raises:
            Refusal: it failed.
        """
        done = self._transport.run(HOST, [*self._tool, *words], stdin=stdin, timeout=timeout)
        if done.exit_code:
            raise Refusal(done.stderr.strip() or f"exit code {done.exit_code}")
        return done.stdout

    def text(self, path: str) -> str:
        """What is at a path, such as a log. Raises as `call`."""
        return self.call("get", "--raw", path)

    def get(self, path: str) -> Object:
        """The object or list at a path. Raises as `call`."""
        found: Object = json.loads(self.text(path))
        return found

    def find(self, path: str) -> Object | None:
        """`get`, or None where there is nothing."""
        try:
            return self.get(path)
        except Refusal as error:
            if error.reason == "NotFound":
                return None
            raise

    def look(self, path: str) -> Object | None:
        """`get`, or None where there is nothing, or we may not look."""
        try:
            return self.get(path)
        except Refusal:
            return None

    def post(self, path: str, body: Object) -> Object:
        """What the server makes of an object that is sent to a path. Raises as `call`."""
        sent = json.dumps(body).encode()
        found: Object = json.loads(
            self.call("create", "--raw", path, "--filename", "-", stdin=sent)
        )
        return found

    def delete(self, path: str, **query: str) -> None:
        """Remove what is at a path, and in the background what that owns. Idempotent.

        Raises as `call`.
        """
        options = {"propagationPolicy": "Background", **query}
        words = "&".join(f"{key}={value}" for key, value in options.items())
        joined = "&" if "?" in path else "?"
        try:
            self.call("delete", "--raw", f"{path}{joined}{words}")
        except Refusal as error:
            if error.reason != "NotFound":
                raise

    def stream(self, path: str) -> Stream:
        """An answer that goes on: a watch, or a log that is followed."""
        return self._transport.open(HOST, [*self._tool, "get", "--raw", path])


class RunObjects(Server):
    """What belongs to a run, on the server and in the namespace that it was planned for."""

    def __init__(self, plan: Plan, transport: Transport) -> None:
        native = plan.native
        if not isinstance(native, KubernetesNative):
            raise RunFolderError(
                f"run {plan.run_id}: its plan does not say where its objects are",
                hint="it was submitted by an older clusterkit; `kubectl` can follow and delete it",
            )
        words = flags(native.kubeconfig, native.context, native.namespace)
        super().__init__(["kubectl", *words], transport)
        self.namespace = native.namespace
        self.flavor = FLAVORS[native.flavor]
        self.name = native.name
        self._run_id = plan.run_id

    def path(self, api: str, plural: str, name: str) -> str:
        """Where an object of the namespace is."""
        root = f"/apis/{api}" if "/" in api else f"/api/{api}"
        return f"{root}/namespaces/{self.namespace}/{plural}/{name}"

    def pod_path(self, name: str) -> str:
        return self.path("v1", "pods", name)

    @property
    def job_path(self) -> str:
        """Where the job is that keeps the run's pods."""
        return self.path(self.flavor.api, self.flavor.plural, self.name)

    def pods_path(self, **query: str) -> str:
        """Where all pods of the run are listed."""
        selector = quote(f"{RUN}={self._run_id}", safe="")
        more = "".join(f"&{key}={quote(value, safe='')}" for key, value in query.items())
        return f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={selector}{more}"

    def events(self, field: str) -> list[dict[str, Any]]:
        """The namespace's events of which this is true. Raises as `call`."""
        chosen = quote(field, safe="")
        path = f"/api/v1/namespaces/{self.namespace}/events?fieldSelector={chosen}"
        found: list[dict[str, Any]] = self.get(path)["items"]
        return found

    def node_ready(self, host: str) -> bool | None:
        """Whether a node of the cluster answers; None: we may not look, or nobody says."""
        try:
            found = self.find(f"/api/v1/nodes/{host}")
        except Refusal:
            return None
        conditions = ((found or {}).get("status") or {}).get("conditions") or ()
        return {each["type"]: each["status"] for each in conditions}.get("Ready") == "True"
