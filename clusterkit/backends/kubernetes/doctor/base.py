"""The base of checks of a Kubernetes cluster.

There are no hosts to run anything on: a check reads from `ClusterAnswers`, whose requests change
nothing. They read objects, ask for access reviews, and create with ``dryRun=All``.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, wraps
from typing import Any, ClassVar

from msgspec import Struct

from clusterkit import shell
from clusterkit.backends.kubernetes.api_server import PARALLEL_REQUESTS, ClusterServer, Refusal
from clusterkit.backends.kubernetes.flavors import FLAVORS, Flavor, choose
from clusterkit.backends.kubernetes.lost_pods import JSON
from clusterkit.backends.kubernetes.nodes import selected
from clusterkit.backends.kubernetes.objects import (
    ATTEMPT,
    Object,
    new_object,
    parse_amount,
)
from clusterkit.backends.kubernetes.probe import facts_of, survey
from clusterkit.cluster import Facts, KubernetesCluster
from clusterkit.doctor.base import Check, Verdict, shortened
from clusterkit.errors import BadInput, ClusterkitError, Unavailable
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

CLUSTER = "cluster"
"""Host of findings on the cluster as a whole."""
WATCHER = "watcher"
"""Role of the pod of a run's watcher."""


@dataclass(frozen=True)
class KubeSubject:
    """A namespace of a Kubernetes cluster, and a job for it.

    Attributes:
        cluster: name in the cluster file.
        entry: its entry there.
        job: one node that runs anything if nobody named a job.
        manifests: returns the objects of the job's plan for facts.
    """

    kind: ClassVar[str] = "kubernetes"
    port: ClassVar[int | None] = None
    cluster: str
    entry: KubernetesCluster
    job: JobSpec
    manifests: Callable[[Facts], list[Object]]


class Reply(Struct, frozen=True):
    """The answer to a request.

    Attributes:
        reason: why it was refused: ``NotFound``, ``Forbidden``, ``AlreadyExists``; empty if not.
        detail: the message of the refusal.
    """

    document: dict[str, Any] = {}
    reason: str = ""
    detail: str = ""

    @property
    def items(self) -> list[Any]:
        return self.document.get("items") or []

    def unknown(self, objects: str) -> Verdict:
        """Return the verdict on objects that could not be read."""
        if self.reason == "Forbidden":
            return skip(f"unknown: no permission to list {objects}")
        if self.reason == "NotAsked":
            return skip("the API server did not answer")
        cause = f"unknown: {shortened(self.detail or self.reason)}"
        return skip(cause) if self.reason == "NotFound" else warn(cause)


def no_answer(error: ClusterkitError) -> Reply:
    if isinstance(error, Refusal):
        return Reply(reason=error.reason, detail=error.detail)
    return Reply(reason="Unavailable", detail=error.message)


VERSION = "/version"
NAMESPACE = "/api/v1/namespaces/{namespace}"
GROUPS = "/apis"
NODES = "/api/v1/nodes"
UNEXPECTED = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What reading an answer raises that is not in Kubernetes' form."""


def unexpected(error: Exception) -> str:
    return f"the API server sent an unexpected answer: {type(error).__name__} {error}"


class ClusterAnswers(ClusterServer):
    """A cluster and what the job's plan would create there. No request is sent twice; checks use it
    from several threads.

    Attributes:
        now: Unix seconds.
        flavor: kind of job that would be used; None: there is none, or no plan.
        origin: why that one.
        objects: what the job's plan would create.
        problem: why there is no plan.
    """

    def __init__(self, subject: KubeSubject, transport: Transport) -> None:
        super().__init__(subject.entry, transport)
        self._answers: dict[tuple[str, str], str | ClusterkitError] = {}
        self._locks: dict[tuple[str, str], threading.Lock] = {}
        self.subject, self.entry, self.job = subject, subject.entry, subject.job
        self.now = time.time()
        self.flavor: str | None = None
        self.origin = ""
        self.objects: tuple[Object, ...] = ()
        self.problem: ClusterkitError | None = None
        # If it does not answer once, nothing more is asked.
        self._unreachable = False
        self._unreachable = bool(self.reply(VERSION).reason)
        if not self._unreachable:
            self._plan()

    def _plan(self) -> None:
        try:
            entry, job = self.entry, self.job
            kube, gpus = survey(entry, job, self)
            self.flavor, self.origin = choose(job, entry, kube)
            self.objects = tuple(self.subject.manifests(facts_of(entry, kube, gpus, job)))
        except ClusterkitError as error:
            self.problem = error
        except UNEXPECTED as error:
            self.problem = Unavailable(unexpected(error))

    def kubectl(self, *words: str) -> str:
        """Return a kubectl command for people, for this cluster."""
        flags = {"--kubeconfig": self.entry.kubeconfig, "--context": self.entry.context}
        given = [word for flag, value in flags.items() if value for word in (flag, value)]
        return shell.join(("kubectl", *given, *words))

    def request(self, method: str, path: str, body: object = None, content: str = JSON) -> str:
        key = path, json.dumps(body)
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._answers:
                if self._unreachable:
                    raise Refusal("", "NotAsked")
                try:
                    self._answers[key] = super().request(method, path, body, content)
                except ClusterkitError as error:
                    self._answers[key] = error
        if isinstance(answer := self._answers[key], ClusterkitError):
            raise answer
        return answer

    def reply(self, path: str, body: Object | None = None) -> Reply:
        """Get what is at a path, or post ``body`` to it. Replaces ``{namespace}`` in the path."""
        path = path.replace("{namespace}", self.namespace)
        try:
            document = self.get(path) if body is None else self.post(path, body)
        except BadInput:
            raise
        except ClusterkitError as error:
            return no_answer(error)
        return Reply(document=document)

    @cached_property
    def rehearsed(self) -> dict[str, Reply]:
        """Replies to a dry run that creates the job and its pods, by kind and by role."""
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            asked = _rehearsal(self)
            replies = pool.map(lambda each: self.reply(*each), asked.values())
            return dict(zip(asked, replies, strict=True))

    @property
    def kind(self) -> Flavor | None:
        return None if self.flavor is None else FLAVORS[self.flavor]


def _rehearsal(seen: ClusterAnswers) -> dict[str, tuple[str, Object]]:
    """Return the path and the body that create the job and each kind of pod."""
    query = "dryRun=All&fieldValidation=Strict"
    asked = {}
    for role, _, template in templates(seen.objects):
        name = f"{seen.objects[-1]['metadata']['name']}-{role}"
        spec = {**template["spec"], "restartPolicy": template["spec"].get("restartPolicy", "Never")}
        if role == WATCHER:  # its account is created with the run
            del spec["serviceAccountName"]
        meta = {**template.get("metadata", {}), "name": name, "namespace": seen.namespace}
        pod = new_object("v1", "Pod", meta, spec=spec)
        asked[role] = (f"{seen.path('v1', 'Pod')}?{query}", pod)
    if seen.objects and (kind := seen.kind) is not None and kind.kind != "TrainJob":
        # The trainer admits a TrainJob only if its runtime exists.
        path = f"{seen.path(kind.api, kind.kind)}?{query}"
        asked[kind.kind] = (path, seen.objects[-1])
    return asked


# ---------------------------------------------------------------- checks


Judge = Callable[[ClusterAnswers], Verdict | list[Verdict]]
UNPLANNED = "the job cannot be planned for this cluster"


def check(
    path: str = "", *, of: str = "", quick: bool = False, planned: bool = False
) -> Callable[[Judge], Check]:
    """Make a check of a function that returns verdicts.

    Args:
        path: what it reads. If that is refused the function is not called, and the verdict is that
            ``of`` is unknown.
        planned: skip the function if there is no plan; check `plan` reports why.
    """

    def decorate(function: Judge) -> Check:
        @wraps(function)
        def judge(seen: ClusterAnswers) -> list[Verdict]:
            found: Verdict | list[Verdict]
            try:
                if path and (reply := seen.reply(path)).reason:
                    found = reply.unknown(of)
                elif planned and not seen.objects:
                    found = skip(UNPLANNED)
                else:
                    found = function(seen)
            except UNEXPECTED as error:
                found = warn(shortened(unexpected(error)))
            return found if isinstance(found, list) else [found]

        return Check(judge, quick)

    return decorate


def ok(cause: str, *, host: str = CLUSTER) -> Verdict:
    return Verdict(host, "ok", cause)


def skip(cause: str, *, host: str = CLUSTER) -> Verdict:
    return Verdict(host, "skip", cause)


def warn(cause: str, remedy: str | None = None, *, host: str = CLUSTER) -> Verdict:
    return Verdict(host, "warn", cause, remedy)


def fail(cause: str, remedy: str | None = None, *, host: str = CLUSTER) -> Verdict:
    return Verdict(host, "fail", cause, remedy)


# ---------------------------------------------------------------- requests of pods


def templates(objects: Iterable[Object]) -> list[tuple[str, int, Object]]:
    """Return role, number and template of the pods that objects create."""
    found = []
    for each in objects:
        spec = each.get("spec") or {}
        if each["kind"] in ("PyTorchJob", "MPIJob"):
            replicas = spec.get("pytorchReplicaSpecs") or spec.get("mpiReplicaSpecs") or {}
            found += [
                (role.lower(), int(one.get("replicas", 1)), one["template"])
                for role, one in replicas.items()
            ]
        elif each["kind"] == "TrainingRuntime":
            (job,) = spec["template"]["spec"]["replicatedJobs"]
            found.append(
                ("node", int(spec["mlPolicy"]["numNodes"]), job["template"]["spec"]["template"])
            )
        elif each["kind"] == "JobSet":
            (job,) = (one["template"]["spec"] for one in spec["replicatedJobs"])
            found.append(("node", int(job["parallelism"]), job["template"]))
        elif each["kind"] == "Job":
            role = "node" if ATTEMPT in each["metadata"]["labels"] else WATCHER
            found.append((role, int(spec.get("parallelism", 1)), spec["template"]))
    return found


def limits(spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return the sum of the limits of a pod's containers."""
    total: dict[str, Decimal] = {}
    for each in spec.get("containers") or ():
        for name, text in ((each.get("resources") or {}).get("limits") or {}).items():
            total[name] = total.get(name, Decimal(0)) + parse_amount(text)
    return total


def nodes_of(seen: ClusterAnswers) -> list[Object]:
    """Return the nodes with the entry's labels; none if we may not look."""
    return [node for node in seen.reply(NODES).items if selected(node, seen.entry)]
