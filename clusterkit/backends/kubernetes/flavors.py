"""The flavors: kinds of jobs that own a run's pods, their manifests, the choice of one; and the
manifests of the run's watcher. Pure."""

from __future__ import annotations

import posixpath
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from clusterkit.agent import PREEMPTED_EXIT
from clusterkit.backends.kubernetes.objects import (
    ATTEMPT,
    ROLE,
    RUN,
    Object,
    literal,
    new_object,
    plural,
)
from clusterkit.backends.kubernetes.pods import (
    Shape,
    container_security,
    metadata,
    placement,
    pod_security,
    template,
    unreachable_for,
)
from clusterkit.cluster import KubernetesCluster, KubernetesFacts
from clusterkit.errors import BadInput, CapabilityError, Unavailable
from clusterkit.spec import JobSpec

SSH_PORT = 2222
SSH_KEYS = "/etc/clusterkit/ssh"
"""Where sshd and ssh of the image look for keys, whatever HOME is; only root may write there."""


class Flavor(ABC):
    """A kind of job.

    Attributes:
        api: API group and version.
        index: label that holds a pod's node rank; None: there is only node 0.
        host: format of the name by which the other pods reach a node's.
        container: name of a pod's container that runs the node; as the operator wants it.
        operator: the controller that creates its pods; empty: Kubernetes itself.
        extra_kinds: further kinds of its API of which a run has an object.
    """

    kind: ClassVar[str]
    api: ClassVar[str]
    index: ClassVar[str | None]
    host: ClassVar[str]
    container: ClassVar[str]
    operator: ClassVar[str] = ""
    extra_kinds: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def render(self, shape: Shape) -> list[Object]:
        """Return the objects of a run; the job is the last."""

    def node_name(self, shape: Shape, node: int) -> str:
        return self.host.format(name=shape.name, namespace=shape.namespace, node=node)

    @property
    def group(self) -> str:
        return self.api.rpartition("/")[0]

    @property
    def plural(self) -> str:
        return plural(self.kind)

    def served(self, resources: Mapping[str, Any]) -> bool:
        """Whether the kind is in an API group's resource list."""
        return any(each.get("name") == self.plural for each in resources.get("resources") or ())

    def job(self, shape: Shape, spec: Object) -> Object:
        """Return the job with this spec."""
        return new_object(self.api, self.kind, metadata(shape), spec=spec)


class PyTorchJob(Flavor):
    """A job of Kubeflow's training operator 1.9, with Workers only.

    With a Master every Worker would get an init container that pod security "restricted" forbids,
    and the job would count as done when the Master is.
    """

    kind, api, host = "PyTorchJob", "kubeflow.org/v1", "{name}-worker-{node}"
    index = "training.kubeflow.org/replica-index"
    container = "pytorch"
    operator = "Kubeflow's training operator"

    def render(self, shape: Shape) -> list[Object]:
        # With ExitCode a pod that ends with 128 or more is replaced; with Never one that was
        # deleted counts as failed.
        policy = "OnFailure" if shape.topology.elastic else "ExitCode" if shape.rejoin else "Never"
        worker = {
            "replicas": shape.topology.nodes,
            "restartPolicy": policy,
            "template": template(shape, self.container, rank=f"metadata.labels['{self.index}']"),
        }
        spec = {
            # The operator takes a job for done when Worker 0 is, while others may still be at
            # work; when one fails the agents end all.
            "runPolicy": {"cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": {"Worker": worker},
        }
        return [self.job(shape, spec)]


class MPIJob(Flavor):
    """A job of Kubeflow's MPI operator 0.7: workers run sshd as a user, the launcher mpirun."""

    kind, api = "MPIJob", "kubeflow.org/v2beta1"
    host = "{name}-worker-{node}.{name}.{namespace}.svc"
    index = None  # there is one launcher, and it is node 0
    container = "mpi"
    operator = "Kubeflow's MPI operator"

    def render(self, shape: Shape) -> list[Object]:
        probe = {
            # Without it, or without launcherCreationPolicy, mpirun starts before sshd and fails.
            "ports": [{"name": "ssh", "containerPort": SSH_PORT}],
            "readinessProbe": {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 2},
        }
        launcher = template(shape, self.container, rank=None, ranks=False)
        sshd: tuple[str, ...] = ("clusterkit-sshd",)
        if shape.copied:
            sshd = ("sh", "-c", f"{shape.unpack}exec {sshd[0]}")
        worker = template(shape, self.container, rank=None, role="worker", command=sshd, more=probe)
        spec = {
            "slotsPerWorker": shape.topology.nproc_per_node,
            "sshAuthMountPath": SSH_KEYS,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
            "mpiReplicaSpecs": {
                name: {"replicas": number, "restartPolicy": "Never", "template": pod}
                for name, number, pod in (
                    ("Launcher", 1, launcher),
                    ("Worker", shape.topology.nodes, worker),
                )
            },
        }
        return [self.job(shape, spec)]


class PlainJob(Flavor):
    """An Indexed Job and a headless service: no operator, every cluster has it."""

    kind, api, host = "Job", "batch/v1", "{name}-{node}.{name}"
    index = "batch.kubernetes.io/job-completion-index"
    container = "train"

    def render(self, shape: Shape) -> list[Object]:
        network = {
            "clusterIP": "None",
            # Pods wait for each other's names before they are ready.
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": shape.name},
        }
        service = new_object("v1", "Service", metadata(shape, shape.name), spec=network)
        rank = f"metadata.annotations['{self.index}']"
        spec = {
            "completionMode": "Indexed",
            "completions": shape.topology.nodes,
            "parallelism": shape.topology.nodes,
            **_replacement(shape, self.container),
            "template": template(shape, self.container, rank=rank, subdomain=shape.name),
        }
        return [service, self.job(shape, spec)]


def _replacement(shape: Shape, container: str) -> Object:
    """Return the keys of a Job by which only a pod that was removed is replaced.

    A deleted pod gets no condition DisruptionTarget, but its agent exits with PREEMPTED_EXIT.
    """
    found: Object = {"backoffLimit": 0}
    if shape.rejoin:
        deleted = {"containerName": container, "operator": "In", "values": [PREEMPTED_EXIT]}
        # A TrainingRuntime has no default for the status.
        disrupted = {"type": "DisruptionTarget", "status": "True"}
        found["podReplacementPolicy"] = "Failed"
        found["podFailurePolicy"] = {
            "rules": [
                {"action": "Ignore", "onPodConditions": [disrupted]},
                {"action": "Ignore", "onExitCodes": deleted},
            ]
        }
    return found


class JobSet(Flavor):
    """A job of JobSet 0.10: one Job, and the service that JobSet makes for it."""

    kind, api, host = "JobSet", "jobset.x-k8s.io/v1alpha2", "{name}-node-0-{node}.{name}"
    index = PlainJob.index
    container = "node"
    operator = "JobSet"

    def render(self, shape: Shape) -> list[Object]:
        spec = {
            # Pods wait for each other's names before they are ready.
            "network": {"subdomain": shape.name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            # The agents restart ranks, in the same pods.
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                _replicated(
                    shape, completions=shape.topology.nodes, parallelism=shape.topology.nodes
                )
            ],
        }
        return [self.job(shape, spec)]


def _replicated(shape: Shape, **keys: Any) -> Object:
    """Return the one Job of a JobSet, with further keys of its spec."""
    name = JobSet.container
    pod = template(shape, name, rank=f"metadata.annotations['{PlainJob.index}']")
    spec = {**keys, **_replacement(shape, name), "template": pod}
    return {"name": "node", "template": {"spec": spec}}


class TrainJob(JobSet):
    """A job of Kubeflow's trainer 2.1, with a runtime of its own that no admin has to create.

    The trainer makes a JobSet of it.
    """

    kind, api = "TrainJob", "trainer.kubeflow.org/v1alpha1"
    operator = "Kubeflow's trainer"
    extra_kinds = ("TrainingRuntime",)

    def render(self, shape: Shape) -> list[Object]:
        job = _replicated(shape)
        labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        job["template"]["metadata"] = {"labels": labels}
        (kind,), nodes = self.extra_kinds, {"numNodes": shape.topology.nodes}
        policy = {"mlPolicy": nodes, "template": {"spec": {"replicatedJobs": [job]}}}
        runtime = new_object(self.api, kind, metadata(shape, shape.name), spec=policy)
        named = {"apiGroup": self.group, "kind": kind, "name": shape.name}
        return [runtime, self.job(shape, {"runtimeRef": named, "trainer": nodes})]


FLAVORS: Mapping[str, Flavor] = {
    "pytorchjob": PyTorchJob(),
    "mpijob": MPIJob(),
    "trainjob": TrainJob(),
    "jobset": JobSet(),
    "job": PlainJob(),
}
_MPI = ("mpirun", "deepspeed")
"""Launchers that start the ranks of all nodes from one pod, as an MPIJob has it."""


def choose(job: JobSpec, cluster: KubernetesCluster, facts: KubernetesFacts) -> tuple[str, str]:
    """Choose the flavor; returns its name, and why it was chosen.

    Raises:
        BadInput: flavor and launcher do not go together.
        CapabilityError: the flavor cannot run an elastic number of nodes.
        Unavailable: the cluster does not serve that kind of job.
    """
    mpi = job.started_by == "mpirun"
    name: str = cluster.flavor
    origin = "cluster: flavor"
    if name == "auto":
        usable = [
            each
            for each, flavor in FLAVORS.items()
            if flavor.kind in (*facts.kinds, "Job")
            and (each == "mpijob") == mpi
            and (mpi or not job.elastic or each in ("pytorchjob", "job"))
        ]
        if not usable:
            raise Unavailable(
                "launcher: mpirun needs MPIJob, which the cluster does not serve",
                hint="install Kubeflow's MPI operator, or launcher: forkserver",
            )
        name, origin = usable[0], "launcher: mpirun" if mpi else "the cluster serves it"
        if name == "job":
            origin = "the cluster has no training operator"
    flavor = FLAVORS[name]
    if (mpi and name != "mpijob") or (name == "mpijob" and job.started_by not in _MPI):
        raise BadInput(
            f"flavor: {name} cannot run launcher {job.started_by}",
            hint=f"flavor: auto, or --set launcher={'forkserver' if mpi else 'mpirun'}",
            cluster="flavor",
        )
    if job.elastic and name != "pytorchjob":
        raise CapabilityError(
            f"nodes: {job.nodes}: flavor {name} cannot run an elastic number of nodes",
            hint="flavor: pytorchjob",
            job="nodes",
        )
    if name != "job" and flavor.kind not in facts.kinds:
        raise Unavailable(
            f"flavor: the cluster does not serve {flavor.kind}",
            hint=f"install {flavor.operator}, or flavor: job, which needs none",
        )
    return name, origin


# ---------------------------------------------------------------- the watcher

WATCHER_FILE = "lost_pods.py"
"""The watcher's file in the run's config map."""
RBAC = "rbac.authorization.k8s.io"


def watcher(shape: Shape, flavor: Flavor, python: str) -> list[Object]:
    """Return the objects of the run's watcher; ``python`` is the interpreter in the image."""
    name = f"{shape.name}-watch"
    meta = metadata(shape, name)
    del meta["labels"][ATTEMPT]
    # It may delete the run's own pods, whose names are known before, and nothing else.
    names = [flavor.node_name(shape, node) for node in range(shape.topology.nodes)]
    pods = {"apiGroups": [""], "resources": ["pods"]}
    rules = [
        {**pods, "verbs": ["list"]},
        {**pods, "resourceNames": names, "verbs": ["delete"]},
    ]
    account = {"kind": "ServiceAccount", "name": name, "namespace": shape.namespace}
    role = {"apiGroup": RBAC, "kind": "Role", "name": name}
    labels = {**meta["labels"], ROLE: "watcher"}
    pod = {"metadata": {"labels": labels}, "spec": _watcher_pod(shape, name, python)}
    return [
        new_object("v1", "ServiceAccount", meta, automountServiceAccountToken=False),
        new_object(f"{RBAC}/v1", "Role", meta, rules=rules),
        new_object(f"{RBAC}/v1", "RoleBinding", meta, roleRef=role, subjects=[account]),
        new_object(
            "batch/v1", "Job", {**meta, "labels": labels},
            spec={"backoffLimit": 1000, "template": pod},
        ),
    ]  # fmt: skip


def _watcher_pod(shape: Shape, account: str, python: str) -> Object:
    cluster, files = shape.cluster, "/clusterkit"
    selector = f"{RUN}={shape.labels[RUN]},{ROLE}=node"
    command = [python, "-I", "-S", posixpath.join(files, WATCHER_FILE), shape.namespace, selector]
    # By then the ranks of a lost pod, which do not hear of node 0, have ended.
    seconds = f"{cluster.lost_after + cluster.stop_grace:g}"
    container = {
        "name": "watcher",
        "image": shape.image,
        "imagePullPolicy": cluster.image_pull_policy,
        "command": [literal(word) for word in (*command, seconds)],
        "resources": {
            "requests": {"cpu": "10m", "memory": "64Mi"},
            "limits": {"memory": "256Mi"},
        },
        "securityContext": container_security(),
        "volumeMounts": [{"name": "files", "mountPath": files, "readOnly": True}],
    }
    return {
        "restartPolicy": "OnFailure",
        "serviceAccountName": account,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        # It may run on a lost node itself, and must be replaced as early as the run's pods.
        **placement(
            cluster, [*map(dict, cluster.tolerations), *unreachable_for(cluster.lost_after)]
        ),
        "securityContext": pod_security(cluster.user),
        "containers": [container],
        "volumes": [{"name": "files", "configMap": {"name": shape.name}}],
    }
