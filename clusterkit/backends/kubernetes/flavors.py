"""The kinds of jobs that can keep a run's pods: their manifests, and which one is taken; and what
watches over those pods. Pure."""

from __future__ import annotations

import math
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from clusterkit.agent import LEFT
from clusterkit.backends.kubernetes.pods import (
    ATTEMPT,
    ROLE,
    RUN,
    Shape,
    container_security,
    metadata,
    placement,
    pod_security,
    silent_for,
    template,
)
from clusterkit.backends.kubernetes.text import Object, literal, made, plural
from clusterkit.cluster import KubernetesCluster, KubernetesFacts
from clusterkit.errors import BadInput, CapabilityError, Unavailable
from clusterkit.spec import JobSpec

SSH_PORT = 2222
SSH_KEYS = "/etc/clusterkit/ssh"
"""Where sshd and ssh of the image look for keys, whatever HOME is, and only root may put some."""


class Flavor(ABC):
    """A kind of job."""

    kind: ClassVar[str]
    api: ClassVar[str]
    """Its API's group and version."""
    index: ClassVar[str | None]
    """Label that holds a pod's node rank; None: there is only node 0."""
    host: ClassVar[str]
    """The name under which the other pods find a node's, with fields of `Shape` and ``node``."""
    operator: ClassVar[str] = ""
    """Who makes its pods; empty: Kubernetes itself."""
    besides: ClassVar[tuple[str, ...]] = ()
    """Kinds of its API that a run has beside its job."""

    @abstractmethod
    def render(self, shape: Shape) -> list[Object]:
        """Its objects; the job itself is the last."""

    def node_name(self, shape: Shape, node: int) -> str:
        return self.host.format(name=shape.name, namespace=shape.namespace, node=node)

    @property
    def group(self) -> str:
        return self.api.rpartition("/")[0]

    @property
    def plural(self) -> str:
        return plural(self.kind)

    def served(self, resources: Mapping[str, Any]) -> bool:
        """Whether an API group's list of what it serves has this kind."""
        return any(each.get("name") == self.plural for each in resources.get("resources") or ())

    def job(self, shape: Shape, spec: Object) -> Object:
        """The job, of this spec."""
        return made(self.api, self.kind, metadata(shape), spec=spec)


class PyTorchJob(Flavor):
    """Of Kubeflow's training operator 1.9: Workers only.

    A Master would bring an init container into every Worker that pod security "restricted" forbids,
    and a job that counts as done when its Master is.
    """

    kind, api, host = "PyTorchJob", "kubeflow.org/v1", "{name}-worker-{node}"
    index = "training.kubeflow.org/replica-index"
    operator = "Kubeflow's training operator"

    def render(self, shape: Shape) -> list[Object]:
        # With ExitCode a pod that ends with 128 or more is made anew; with Never one that was
        # deleted counts as failed.
        policy = "OnFailure" if shape.topology.elastic else "ExitCode" if shape.rejoin else "Never"
        worker = {
            "replicas": shape.topology.nodes,
            "restartPolicy": policy,
            "template": template(shape, "pytorch", rank=f"metadata.labels['{self.index}']"),
        }
        spec = {
            # A job is done for the operator when Worker 0 is; the others may still be at work,
            # and end together by themselves when one of them fails (clusterkit.agent).
            "runPolicy": {"cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": {"Worker": worker},
        }
        return [self.job(shape, spec)]


class MPIJob(Flavor):
    """Of Kubeflow's MPI operator 0.7: workers run sshd as a plain user, the launcher mpirun."""

    kind, api = "MPIJob", "kubeflow.org/v2beta1"
    host = "{name}-worker-{node}.{name}.{namespace}.svc"
    index = None  # there is one launcher, and it is node 0
    operator = "Kubeflow's MPI operator"

    def render(self, shape: Shape) -> list[Object]:
        probe = {
            # Without it, and without launcherCreationPolicy, mpirun comes before sshd and fails.
            "ports": [{"name": "ssh", "containerPort": SSH_PORT}],
            "readinessProbe": {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 2},
        }
        launcher = template(shape, "mpi", rank=None, ranks=False)
        sshd: tuple[str, ...] = ("clusterkit-sshd",)
        if shape.copied:
            sshd = ("sh", "-c", f"{shape.unpack}exec {sshd[0]}")
        worker = template(shape, "mpi", rank=None, role="worker", command=sshd, more=probe)
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

    def render(self, shape: Shape) -> list[Object]:
        network = {
            "clusterIP": "None",
            # Names are there before their pods are ready: they wait for each other.
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": shape.name},
        }
        service = made("v1", "Service", metadata(shape, shape.name), spec=network)
        rank = f"metadata.annotations['{self.index}']"
        spec = {
            "completionMode": "Indexed",
            "completions": shape.topology.nodes,
            "parallelism": shape.topology.nodes,
            # One that fails takes the others with it; whoever watches starts all of them again.
            **_replacing(shape, "train"),
            "template": template(shape, "train", rank=rank, subdomain=shape.name),
        }
        return [service, self.job(shape, spec)]


def _replacing(shape: Shape, container: str) -> Object:
    """The keys of a Job by which a pod that was taken away is made anew, and no other.

    A pod that somebody deletes is not marked as disrupted: its agent's exit code tells.
    """
    found: Object = {"backoffLimit": 0}
    if shape.rejoin:
        taken = {"containerName": container, "operator": "In", "values": [LEFT]}
        # (Written out: in a TrainJob's runtime it has no default.)
        disrupted = {"type": "DisruptionTarget", "status": "True"}
        found["podReplacementPolicy"] = "Failed"
        found["podFailurePolicy"] = {
            "rules": [
                {"action": "Ignore", "onPodConditions": [disrupted]},
                {"action": "Ignore", "onExitCodes": taken},
            ]
        }
    return found


class JobSet(Flavor):
    """Of JobSet 0.10: one Job, in a network that JobSet makes for it."""

    kind, api, host = "JobSet", "jobset.x-k8s.io/v1alpha2", "{name}-node-0-{node}.{name}"
    index = PlainJob.index
    operator = "JobSet"

    def render(self, shape: Shape) -> list[Object]:
        spec = {
            # Names are there before their pods are ready: they wait for each other.
            "network": {"subdomain": shape.name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            # The agents start ranks again, in the pods that are there.
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                _replicated(
                    shape, completions=shape.topology.nodes, parallelism=shape.topology.nodes
                )
            ],
        }
        return [self.job(shape, spec)]


def _replicated(shape: Shape, **keys: Any) -> Object:
    """The one Job of a JobSet, with further keys of its spec."""
    pod = template(shape, "node", rank=f"metadata.annotations['{PlainJob.index}']")
    spec = {**keys, **_replacing(shape, "node"), "template": pod}
    return {"name": "node", "template": {"spec": spec}}


class TrainJob(JobSet):
    """Of Kubeflow's trainer 2.1, with a runtime of the run's own, which no admin has to make.

    The trainer makes a JobSet of it.
    """

    kind, api = "TrainJob", "trainer.kubeflow.org/v1alpha1"
    operator = "Kubeflow's trainer"
    besides = ("TrainingRuntime",)

    def render(self, shape: Shape) -> list[Object]:
        job = _replicated(shape)
        labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        job["template"]["metadata"] = {"labels": labels}
        (kind,), nodes = self.besides, {"numNodes": shape.topology.nodes}
        policy = {"mlPolicy": nodes, "template": {"spec": {"replicatedJobs": [job]}}}
        runtime = made(self.api, kind, metadata(shape, shape.name), spec=policy)
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
"""Launchers that an MPIJob's pod can start the ranks of all others with."""


def choose(job: JobSpec, cluster: KubernetesCluster, facts: KubernetesFacts) -> tuple[str, str]:
    """The flavor, and why this one.

    Raises:
        BadInput: flavor and launcher do not go together.
        CapabilityError: the flavor cannot run an elastic number of nodes.
        Unavailable: the cluster does not serve that kind of job.
    """
    mpi = job.started_by == "mpirun"
    name: str = cluster.flavor
    origin = "cluster: flavor"
    if name == "auto":
        fits = [
            each
            for each, flavor in FLAVORS.items()
            if flavor.kind in (*facts.kinds, "Job")
            and (each == "mpijob") == mpi
            and (mpi or not job.elastic or each in ("pytorchjob", "job"))
        ]
        if not fits:
            raise Unavailable(
                "launcher: mpirun needs MPIJob, which the cluster does not serve",
                hint="install Kubeflow's MPI operator, or launcher: forkserver",
            )
        name, origin = fits[0], "launcher: mpirun" if mpi else "the cluster serves it"
        if name == "job":
            origin = "the cluster serves no kind of its own for training"
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

PROGRAM = "lost_pods.py"
"""Its file in the run's config map."""
RBAC = "rbac.authorization.k8s.io"


def watcher(shape: Shape, flavor: Flavor, python: str) -> list[Object]:
    """Its objects.

    Args:
        python: interpreter in the image.
    """
    name = f"{shape.name}-watch"
    meta = metadata(shape, name)
    del meta["labels"][ATTEMPT]
    # A PyTorchJob's pods have names that are known before; a Job holds its own.
    removes: Object = {"verbs": ["delete", "patch"]}
    if flavor.kind == "PyTorchJob":
        names = [flavor.node_name(shape, node) for node in range(shape.topology.nodes)]
        removes = {"resourceNames": names, "verbs": ["delete"]}
    pods = {"apiGroups": [""], "resources": ["pods"]}
    account = {"kind": "ServiceAccount", "name": name, "namespace": shape.namespace}
    role = {"apiGroup": RBAC, "kind": "Role", "name": name}
    labels = {**meta["labels"], ROLE: "watcher"}
    pod = {"metadata": {"labels": labels}, "spec": _watching_pod(shape, name, python)}
    return [
        made("v1", "ServiceAccount", meta, automountServiceAccountToken=False),
        made(f"{RBAC}/v1", "Role", meta, rules=[{**pods, "verbs": ["list"]}, {**pods, **removes}]),
        made(f"{RBAC}/v1", "RoleBinding", meta, roleRef=role, subjects=[account]),
        made(
            "batch/v1", "Job", {**meta, "labels": labels},
            spec={"backoffLimit": 1000, "template": pod},
        ),
    ]  # fmt: skip


def _watching_pod(shape: Shape, account: str, python: str) -> Object:
    cluster, files = shape.cluster, "/clusterkit"
    kept = math.ceil(cluster.lost_after)
    selector = f"{RUN}={shape.labels[RUN]},{ROLE}=node"
    words = [python, "-I", posixpath.join(files, PROGRAM), shape.namespace, selector]
    container = {
        "name": "watcher",
        "image": shape.image,
        "imagePullPolicy": cluster.image_pull_policy,
        "command": [literal(word) for word in (*words, f"{cluster.lost_after:g}")],
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
        # A node that is gone may have it as well, and must not keep it longer than the run's pods.
        **placement(cluster, [*map(dict, cluster.tolerations), *silent_for(kept)]),
        "securityContext": pod_security(cluster.user),
        "containers": [container],
        "volumes": [{"name": "files", "configMap": {"name": shape.name}}],
    }
