"""The kinds of jobs that can keep a run's pods, and which one is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from clusterkit.backends.kubernetes import job, mpijob, pytorchjob, trainjob
from clusterkit.backends.kubernetes.pods import Shape
from clusterkit.backends.kubernetes.text import Object
from clusterkit.cluster import KubernetesCluster, KubernetesFacts
from clusterkit.errors import BadInput, CapabilityError, Unavailable
from clusterkit.spec import JobSpec
from clusterkit.status import State


class Flavor(Protocol):
    """What each of the modules holds."""

    KIND: str
    API: str
    PLURAL: str
    INDEX: str | None
    STATES: Mapping[str, State]

    def node_name(self, shape: Shape, node: int) -> str: ...

    def render(self, shape: Shape) -> list[Object]: ...


FLAVORS: Mapping[str, Flavor] = {
    "pytorchjob": pytorchjob,  # type: ignore[dict-item]
    "mpijob": mpijob,  # type: ignore[dict-item]
    "trainjob": trainjob,  # type: ignore[dict-item]
    "job": job,  # type: ignore[dict-item]
}
OPERATORS = {
    "pytorchjob": "Kubeflow's training operator",
    "mpijob": "Kubeflow's MPI operator",
    "trainjob": "Kubeflow's trainer",
}
_MPI = ("mpirun", "deepspeed")
"""Launchers that an MPIJob's pod can start the ranks of all others with."""
_NOT_ELASTIC = ("mpijob", "trainjob", "job")


def served(group: Mapping[str, Any], flavor: Flavor) -> bool:
    """Whether an API group's list of what it serves has the flavor's kind."""
    return any(each.get("name") == flavor.PLURAL for each in group.get("resources") or ())


def by_kind(kind: str) -> Flavor:
    """The flavor whose objects are of this kind."""
    return next(flavor for flavor in FLAVORS.values() if kind == flavor.KIND)


def choose(job: JobSpec, cluster: KubernetesCluster, facts: KubernetesFacts) -> tuple[str, str]:
    """The flavor, and why this one.

    Raises:
        BadInput: flavor and launcher do not go together.
        CapabilityError: the flavor cannot run an elastic number of nodes.
        Unavailable: the cluster does not serve that kind of job.
    """
    mpi = job.launcher == "mpirun"
    name: str = cluster.flavor
    origin = "cluster: flavor"
    if name == "auto":
        served = [each for each, flavor in FLAVORS.items() if flavor.KIND in (*facts.kinds, "Job")]
        wanted = ("mpijob",) if mpi else ("pytorchjob",) if job.elastic else tuple(OPERATORS)
        fits = [each for each in served if each in (*wanted, "job") and (each == "mpijob") == mpi]
        if not fits:
            raise Unavailable(
                "launcher: mpirun needs MPIJob, which the cluster does not serve",
                hint="install Kubeflow's MPI operator, or launcher: torchrun",
            )
        name, origin = fits[0], "launcher: mpirun" if mpi else "the cluster serves it"
        if name == "job":
            origin = "the cluster serves no kind of its own for training"
    flavor = FLAVORS[name]
    if (mpi and name != "mpijob") or (name == "mpijob" and job.launcher not in _MPI):
        raise BadInput(
            f"flavor: {name} cannot run launcher {job.launcher}",
            hint="flavor: auto, or --set launcher=torchrun" if mpi else "flavor: auto",
            cluster="flavor",
        )
    if job.elastic and name in _NOT_ELASTIC:
        raise CapabilityError(
            f"nodes: {job.nodes}: flavor {name} cannot run an elastic number of nodes",
            hint="flavor: pytorchjob",
            job="nodes",
        )
    if name != "job" and flavor.KIND not in facts.kinds:
        raise Unavailable(
            f"flavor: the cluster does not serve {flavor.KIND}",
            hint=f"install {OPERATORS[name]}, or flavor: job, which needs none",
        )
    return name, origin
