"""Runs in a cluster that any machine may have submitted: listed, and recovered to attach to."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct

from clusterkit.backends.base import Recovered, RemoteRun
from clusterkit.backends.kubernetes.api_server import NotFound, Refusal, Server
from clusterkit.backends.kubernetes.flavors import FLAVORS, Flavor
from clusterkit.backends.kubernetes.lost_pods import unix
from clusterkit.backends.kubernetes.objects import (
    ATTEMPT,
    JOB,
    RUN,
    USER,
    Object,
    object_name,
)
from clusterkit.backends.kubernetes.pod import attempt_of
from clusterkit.backends.kubernetes.pods import PROJECT
from clusterkit.backends.kubernetes.rbac import ROLE_HINT
from clusterkit.cluster import Facts, KubernetesCluster
from clusterkit.errors import RunFolderError, RunNotFound, Unavailable
from clusterkit.run.status import State
from clusterkit.spec import JobSpec

RECORD = "record.json"
"""The file of a run that holds what its plan was made of."""
STATES: Mapping[str, State] = {
    "Created": State.PENDING,
    "Suspended": State.PENDING,
    "StartupPolicyInProgress": State.PENDING,
    "Running": State.RUNNING,
    "SuccessCriteriaMet": State.RUNNING,
    "FailureTarget": State.RUNNING,
    "Restarting": State.RESTARTING,
    "Succeeded": State.SUCCEEDED,
    "Complete": State.SUCCEEDED,
    "Completed": State.SUCCEEDED,
    "Failed": State.FAILED,
}
"""States by the type of a job's newest true condition; a type means the same in all flavors."""


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a plan was made of, without what is true of the submitter's machine alone."""

    job: JobSpec
    cluster: KubernetesCluster
    facts: Facts

    @classmethod
    def of(cls, job: JobSpec, cluster: KubernetesCluster, facts: Facts) -> Record:
        return for_machine(cls(job=job, cluster=cluster, facts=facts), KubernetesCluster())

    def text(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"


T = TypeVar("T", Record, Recovered)


def for_machine(
    found: T,
    entry: KubernetesCluster,
    *,
    home: str = "",
    context: str = "",
    namespace: str = "",
    kubeconfig: str | None = None,
) -> T:
    """Replace what depends on the machine: its home, and how it reaches the cluster."""
    replace, kube = msgspec.structs.replace, found.facts.kubernetes
    assert kube is not None
    kube = replace(kube, context=context, namespace=namespace, kubeconfig=kubeconfig)
    own = {key: getattr(entry, key) for key in ("kubeconfig", "context", "namespace")}
    facts = replace(found.facts, home=home, kubernetes=kube)
    return replace(found, cluster=replace(found.cluster, **own), facts=facts)


# ---------------------------------------------------------------- listing


def listing(server: Server) -> list[RemoteRun]:
    """Return the runs of a namespace, newest first.

    Raises:
        Unavailable: the API server does not answer, or refuses.
    """
    # A run's watcher is a Job of the run as well, but has no ATTEMPT.
    selector = quote(f"{RUN},{ATTEMPT}", safe="")

    def ask(flavor: Flavor) -> list[RemoteRun]:
        path = server.path(flavor.api, flavor.kind)
        try:
            found = server.items(f"{path}?labelSelector={selector}")
        except NotFound:
            return []  # the cluster does not serve that kind
        except Refusal as error:
            raise Unavailable(
                f"the runs of namespace {server.namespace} cannot be listed: {error.message}",
                hint=ROLE_HINT,
            ) from None
        return [read(each, flavor) for each in found]

    with ThreadPoolExecutor(len(FLAVORS)) as pool:
        found = [run for runs in pool.map(ask, FLAVORS.values()) for run in runs]
    return sorted(found, key=lambda run: run.started_at or 0.0, reverse=True)


def read(job: Mapping[str, Any], flavor: Flavor) -> RemoteRun:
    """Read a run from its job. Pure."""
    meta, labels = job["metadata"], job["metadata"].get("labels") or {}
    status = job.get("status") or {}
    state = state_of(job)
    ended = status.get("completionTime")
    if ended is None and state.final:
        ended = max(
            (str(each.get("lastTransitionTime") or "") for each in _conditions(job)), default=None
        )
    return RemoteRun(
        run=str(labels[RUN]),
        job=str(labels.get(JOB, "?")),
        state=state,
        kind=flavor.kind,
        attempt=attempt_of(job) or 1,
        pods=_node_count(job.get("spec") or {}),
        user=labels.get(USER),
        started_at=unix(meta.get("creationTimestamp")),
        finished_at=unix(ended) if state.final else None,
    )


def state_of(job: Mapping[str, Any]) -> State:
    """Return a job's state by its conditions. Pure."""
    held = [each for each in _conditions(job) if each.get("status") == "True"]
    states = [STATES.get(str(each.get("type")), State.UNKNOWN) for each in held]
    for final in (State.FAILED, State.SUCCEEDED):
        if final in states:
            return final
    status = job.get("status") or {}
    parts = [status]
    for key in ("jobsStatus", "replicatedJobsStatus"):
        parts += status.get(key) or ()
    if not held:
        # A running Job, or what owns one, has no condition, only a number of ready pods.
        if any(isinstance(each, Mapping) and each.get("ready") for each in parts):
            return State.RUNNING
        return State.PENDING
    times = [str(each.get("lastTransitionTime") or "") for each in held]
    return max(zip(times, range(len(held)), states, strict=True))[2]


def _conditions(job: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = (job.get("status") or {}).get("conditions") or ()
    return [each for each in found if isinstance(each, Mapping)]


def _node_count(spec: Mapping[str, Any]) -> int | None:
    for replicas in ("pytorchReplicaSpecs", "mpiReplicaSpecs"):
        if replicas in spec:
            return int(spec[replicas].get("Worker", {}).get("replicas", 1))
    for each in spec.get("replicatedJobs") or ():
        return int(each["template"]["spec"]["parallelism"])
    found = spec.get("parallelism", (spec.get("trainer") or {}).get("numNodes"))
    return None if found is None else int(found)


# ---------------------------------------------------------------- one run


def recover(server: Server, run_id: str) -> Recovered:
    """Return what the cluster holds of a run; see `for_machine`.

    Raises:
        RunNotFound: it holds nothing.
        Unavailable: the API server does not answer, or refuses.
        RunFolderError: it was submitted by another version, or is damaged.
    """
    name = object_name(run_id)
    found = _config_map(server, name)
    if found is None:
        raise RunNotFound(
            f"run {run_id!r} is unknown in namespace {server.namespace}",
            hint="a run that has ended leaves nothing in the cluster",
        )
    text = (found.get("data") or {}).get(RECORD)
    if text is None:
        raise RunFolderError(
            f"run {run_id}: the cluster has no record of its job",
            hint="it was submitted by an older clusterkit; `kubectl` can follow and delete it",
        )
    try:
        record = msgspec.json.decode(text, type=Record)
    except msgspec.MsgspecError as error:
        raise RunFolderError(
            f"run {run_id}: what the cluster holds of it cannot be read ({error})",
            hint="it was submitted by another version of clusterkit: attach with that one",
        ) from None
    code = None
    if record.cluster.code == "copied":
        held = _config_map(server, f"{name}-code") or {}
        packed = (held.get("binaryData") or {}).get(PROJECT)
        if packed is None:
            raise RunFolderError(f"run {run_id}: its config map {name}-code is gone")
        code = base64.b64decode(packed)
    return Recovered(
        run=run_id,
        job=record.job,
        cluster=record.cluster,
        facts=record.facts,
        attempt=attempt_of(found) or 1,
        created_at=unix(found["metadata"].get("creationTimestamp")) or 0.0,
        project=code,
    )


def _config_map(server: Server, name: str) -> Object | None:
    path = server.path("v1", "ConfigMap", name)
    try:
        return server.find(path)
    except Refusal as error:
        raise Unavailable(f"{error.message} ({path})", hint=ROLE_HINT) from None
