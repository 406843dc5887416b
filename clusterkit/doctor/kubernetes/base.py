"""What a check of a Kubernetes cluster is made of: what it asks the API server, and how the answers
are judged.

There are no hosts to run anything on. Every question is a request that changes nothing: reading an
object, asking what one may do, creating something with ``dryRun=All``. `KubeCheck.judge` is a pure
function of the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace

from clusterkit import shell
from clusterkit.backends.kubernetes.flavors import FLAVORS, Flavor
from clusterkit.backends.kubernetes.nodes import selected
from clusterkit.backends.kubernetes.pods import ATTEMPT
from clusterkit.backends.kubernetes.rights import access_review, to_watch
from clusterkit.backends.kubernetes.text import Object
from clusterkit.cluster import Gpu, KubernetesCluster, KubernetesFacts
from clusterkit.doctor.base import Finding, described
from clusterkit.doctor.words import shortened
from clusterkit.errors import ClusterkitError
from clusterkit.spec import JobSpec

CLUSTER = "cluster"
"""What findings call the cluster as a whole; its nodes have their names."""
WATCHER = "watcher"
"""Role of the pod that watches over a run in the cluster."""
ALONE = ""
"""Key of the answer to a look that asks one question."""


@dataclass(frozen=True)
class KubeSubject:
    """A namespace of a Kubernetes cluster, and what it is to be fit for.

    Attributes:
        cluster: what the cluster file calls it.
        entry: its entry there.
        job: whose needs; one node that runs anything, where nobody named a job.
        tool: ``kubectl`` with its kubeconfig and context.
        locate: reads the kubeconfig; gives the context and the namespace.
        manifests: the objects of the job on a cluster that serves these kinds and has these GPUs
            in a node, as its plan has them.
    """

    way: ClassVar[str] = "kubernetes"
    port: ClassVar[int | None] = None
    cluster: str
    entry: KubernetesCluster
    job: JobSpec
    tool: tuple[str, ...]
    locate: Callable[[], tuple[str, str]]
    manifests: Callable[[KubernetesFacts, tuple[Gpu, ...]], list[Object]]

    def kubectl(self, *words: str) -> str:
        """A command for people, for this cluster."""
        return shell.join((*self.tool, *words))


class Reply(Struct, frozen=True):
    """What the API server answered to one question."""

    document: dict[str, Any] = {}
    reason: str = ""
    """Why it did not: ``NotFound``, ``Forbidden``, ``AlreadyExists``; empty where it did."""
    said: str = ""
    """Its words then."""

    @property
    def items(self) -> list[Any]:
        return self.document.get("items") or []

    def unknown(self, what: str) -> Finding:
        """Nothing can be said, and why."""
        if self.reason == "Forbidden":
            return skip(f"unknown: you may not look at {what}")
        if self.reason == "Unasked":
            return skip("the API server did not answer")
        cause = f"unknown: {shortened(self.said or self.reason)}"
        return skip(cause) if self.reason == "NotFound" else warn(cause)


class Ask(Struct, frozen=True):
    """One question: a path to get, or to post ``body`` to."""

    path: str
    body: dict[str, Any] | None = None


@dataclass(frozen=True)
class Seen:
    """What is known of a cluster so far.

    Attributes:
        namespace: where the run would be.
        context: of the kubeconfig; empty in a pod.
        now: Unix seconds.
        replies: by the look's name and the question's key.
        flavor: kind of job that would be taken; None: there is none, or no plan.
        origin: why that one.
        objects: what the job's plan would make.
        problem: why there is no plan.
    """

    namespace: str
    context: str = ""
    now: float = 0.0
    replies: Mapping[str, Mapping[str, Reply]] = field(default_factory=dict)
    flavor: str | None = None
    origin: str = ""
    objects: tuple[Object, ...] = ()
    problem: ClusterkitError | None = None

    def reply(self, look: Look, key: str = ALONE) -> Reply:
        """The answer to a question; one that was not asked was not answered."""
        return self.replies.get(look.name, {}).get(key, Reply(reason="Unasked"))

    def spec_of(self, role: str, template: Object) -> Object:
        """A pod's spec as the API server would have it, defaults and all; else the template's."""
        answer = self.reply(REHEARSAL, role)
        spec: Object = (template if answer.reason else answer.document)["spec"]
        return spec

    @property
    def kind(self) -> Flavor | None:
        return None if self.flavor is None else FLAVORS[self.flavor]


@dataclass(frozen=True)
class Look:
    """Questions of one sort.

    Attributes:
        name: unlike any other's.
        asks: the questions by a key of their own; is given what the looks before have found.
        late: asked when it is known what the job's objects are.
    """

    name: str
    asks: Callable[[Seen, KubeSubject], Mapping[str, Ask]]
    late: bool = False


@dataclass(frozen=True)
class KubeCheck:
    """One thing that has to be right; `check` makes it.

    Attributes:
        name: as ``--only`` takes it.
        purpose: one line: what has to be right.
        judge: pure.
        looks: what it needs to know.
        quick: whether a submit makes sure of it as well.
    """

    name: str
    purpose: str
    judge: Callable[[Seen, KubeSubject], list[Finding]]
    looks: tuple[Look, ...] = ()
    quick: bool = False


Judge = Callable[[Seen, KubeSubject], Finding | list[Finding]]


UNPLANNED = "the job cannot be planned for this cluster"


def check(
    *looks: Look,
    quick: bool = False,
    of: str | None = None,
    planned: bool = False,
) -> Callable[[Judge], KubeCheck]:
    """Make a check of a function whose findings are those of `ok`, `warn`, `fail` and `skip`. Its
    docstring is the check's purpose.

    Args:
        of: what the first look shows. Where it was not answered, this is what is unknown, and the
            function is not called.
        planned: nothing can be said as long as there is no plan; `plan` says why there is none.
    """

    def made(function: Judge) -> KubeCheck:
        def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
            found: Finding | list[Finding]
            if of is not None and (reply := seen.reply(looks[0])).reason:
                found = reply.unknown(of)
            elif planned and not seen.objects:
                found = skip(UNPLANNED)
            else:
                found = function(seen, subject)
            several = found if isinstance(found, list) else [found]
            return [replace(each, check=name) for each in several]

        name, purpose = described(function)
        return KubeCheck(name, purpose, judge, looks, quick)

    return made


def ok(cause: str, *, host: str = CLUSTER) -> Finding:
    return Finding("", host, "ok", cause)


def skip(cause: str, *, host: str = CLUSTER) -> Finding:
    return Finding("", host, "skip", cause)


def warn(cause: str, remedy: str | None = None, *, host: str = CLUSTER) -> Finding:
    return Finding("", host, "warn", cause, remedy)


def fail(cause: str, remedy: str | None = None, *, host: str = CLUSTER) -> Finding:
    return Finding("", host, "fail", cause, remedy)


# ---------------------------------------------------------------- questions that many have


def one(path: str) -> Callable[[Seen, KubeSubject], Mapping[str, Ask]]:
    """One object or list; ``{namespace}`` in its path is the run's."""
    return lambda seen, subject: {ALONE: Ask(path.format(namespace=seen.namespace))}


VERSION = Look("version", one("/version"))
NAMESPACE = Look("namespace", one("/api/v1/namespaces/{namespace}"))
GROUPS = Look("groups", one("/apis"))
KINDS = Look(
    "kinds",
    lambda seen, subject: {
        name: Ask(f"/apis/{flavor.api}") for name, flavor in FLAVORS.items() if name != "job"
    },
)
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def asking(rights: Iterable[tuple[str, str, str]], namespace: str) -> dict[str, Ask]:
    """Whether we have each of these rights."""
    return {
        f"{verb} {resource}": Ask(REVIEWS, access_review(namespace, verb, group, resource))
        for verb, group, resource in rights
    }


def allowed(reply: Reply) -> bool:
    return bool((reply.document.get("status") or {}).get("allowed"))


WATCHING = Look("watching", lambda seen, subject: asking(to_watch(), seen.namespace))
"""Whether the run may have a watcher in the cluster."""
NODES = Look("nodes", one("/api/v1/nodes"))
PODS = Look(
    "pods", one("/api/v1/pods?fieldSelector=status.phase%21%3DSucceeded,status.phase%21%3DFailed")
)
FIRST = (VERSION, NAMESPACE, GROUPS, KINDS, NODES, WATCHING)
"""What every examination begins with: the plan is made of it."""


def _rehearse(seen: Seen, subject: KubeSubject) -> Mapping[str, Ask]:
    """Creating the job and its pods, without doing it."""
    query = "dryRun=All&fieldValidation=Strict"
    asked = {}
    root = f"/api/v1/namespaces/{seen.namespace}/pods?{query}"
    for role, _, template in templates(seen.objects):
        name = f"{seen.objects[-1]['metadata']['name']}-{role}"
        spec = {**template["spec"], "restartPolicy": template["spec"].get("restartPolicy", "Never")}
        if role == WATCHER:  # its account is made with the run
            del spec["serviceAccountName"]
        meta = {**template.get("metadata", {}), "name": name, "namespace": seen.namespace}
        asked[role] = Ask(root, {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    if seen.objects and (kind := seen.kind) is not None and kind.kind != "TrainJob":
        # The trainer admits a TrainJob only once its runtime is there.
        path = f"/apis/{kind.api}/namespaces/{seen.namespace}/{kind.plural}?{query}"
        asked[kind.kind] = Ask(path, seen.objects[-1])
    return asked


REHEARSAL = Look("rehearsal", _rehearse, late=True)
Outcome = Literal["taken", "unasked", "not allowed", "pod security", "quota", "refused"]
_OUTCOMES: tuple[tuple[str, Outcome], ...] = (
    ("violates PodSecurity", "pod security"), ("cannot create resource", "not allowed"),
    ("failed quota", "quota"), ("exceeded quota", "quota"),
)  # fmt: skip
"""Words of a refusal, and what they mean; the first counts."""


def rehearsed(seen: Seen) -> dict[str, tuple[Outcome, str]]:
    """What came of each thing that was created without doing it, in a word and in the API
    server's words; of the pods' roles, and of the job by its kind."""
    found: dict[str, tuple[Outcome, str]] = {}
    asked = seen.replies.get(REHEARSAL.name, {})
    for what in [*(role for role, _, _ in templates(seen.objects)), *asked]:
        reply = seen.reply(REHEARSAL, what)
        outcome: Outcome = "refused" if reply.reason else "taken"
        if reply.reason == "Unasked":
            outcome = "unasked"
        known = (meaning for words, meaning in _OUTCOMES if words in reply.said)
        found[what] = next(known, outcome), reply.said
    return found


# ---------------------------------------------------------------- what the objects ask for


def templates(objects: Iterable[Object]) -> list[tuple[str, int, Object]]:
    """Role, number and template of the pods that the objects make."""
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


def requests(spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """What a pod asks for: of each resource, its containers together, or one that runs before."""
    # What is limited and not asked for is asked for as well.
    total = _sum(spec.get("containers") or (), "limits", "requests")
    for each in spec.get("initContainers") or ():
        for name, amount in _sum([each], "limits", "requests").items():
            total[name] = max(total.get(name, Decimal(0)), amount)
    return total


def limits(spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """What a pod may use at most, of what is limited."""
    return _sum(spec.get("containers") or (), "limits")


def _sum(containers: Iterable[Mapping[str, Any]], *keys: str) -> dict[str, Decimal]:
    """Of the containers together, what each has under the last of the keys that says anything."""
    total: dict[str, Decimal] = {}
    for each in containers:
        resources = each.get("resources") or {}
        amounts = {name: text for key in keys for name, text in (resources.get(key) or {}).items()}
        for name, text in amounts.items():
            total[name] = total.get(name, Decimal(0)) + quantity(text)
    return total


def quantity(amount: object) -> Decimal:
    """A quantity of Kubernetes as a number; 0 of what is none."""
    from kubernetes.utils.quantity import parse_quantity

    try:
        return Decimal(parse_quantity(str(amount)))  # type: ignore[no-untyped-call]
    except ValueError:
        return Decimal(0)


_SCALES = (("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10))


def amount(name: str, value: Decimal) -> str:
    """A number in the words of Kubernetes: ``16Gi``, ``500m``, ``3``."""
    if "memory" in name or "storage" in name:
        for unit, scale in _SCALES:
            if value >= scale:
                return f"{(value / scale).quantize(Decimal('0.1')).normalize():f}{unit}"
    if value != value.to_integral_value() and value < 1000:
        return f"{(value * 1000).to_integral_value():f}m"
    return f"{value.to_integral_value():f}"


# ---------------------------------------------------------------- helpers of judges


def nodes_of(seen: Seen, subject: KubeSubject) -> list[Object]:
    """The nodes that the entry's selector leaves; none where we may not look."""
    return [node for node in seen.reply(NODES).items if selected(node, subject.entry)]


def names_of(nodes: Iterable[Object]) -> list[str]:
    return [node["metadata"]["name"] for node in nodes]


def is_ready(node: Object) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
