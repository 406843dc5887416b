"""The backend that runs nodes as pods, owned by a job of one of several kinds (`flavors`)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from clusterkit.agent import PEER_TOKEN
from clusterkit.backends.base import (
    IMAGE_NOTE,
    Backend,
    Inside,
    Monitor,
    Observation,
    Recovered,
    RemoteRun,
    SupportsCleanup,
    SupportsFile,
    SupportsPreflight,
    SupportsRemoteRuns,
    SupportsSync,
)
from clusterkit.backends.kubernetes.api_server import ClusterServer, KubeTransport, RunObjects
from clusterkit.backends.kubernetes.apply import Creation, all_objects, objects_of, remove
from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.monitor import PodMonitor, status_now
from clusterkit.backends.kubernetes.objects import Object
from clusterkit.backends.kubernetes.observe import list_pods
from clusterkit.backends.kubernetes.pod_log import fetch_logs
from clusterkit.backends.kubernetes.probe import count_nodes, facts_of
from clusterkit.backends.kubernetes.remote_runs import for_machine, listing, recover
from clusterkit.backends.kubernetes.validation import check_entry
from clusterkit.backends.probing import assumed_gpus
from clusterkit.cluster import Facts, KubernetesCluster, KubernetesFacts
from clusterkit.errors import BadInput, RunFolderError
from clusterkit.jobfile.yaml_text import documents
from clusterkit.plan import KubernetesNative, Plan
from clusterkit.run.find import resolve_id
from clusterkit.run.folder import RunHandle, home
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

if TYPE_CHECKING:
    from clusterkit.assemble import Placement
    from clusterkit.doctor.base import Subject


class KubernetesBackend(
    Backend[KubernetesCluster],
    SupportsCleanup,
    SupportsFile[KubernetesCluster],
    SupportsPreflight[KubernetesCluster],
    SupportsRemoteRuns[KubernetesCluster],
    SupportsSync,
):
    """Nodes are pods; see `clusterkit.agent` for what runs in each of them."""

    name = "kubernetes"
    summary = "pods of a Kubernetes cluster, one node each"
    command = "kubectl"
    init_entry: ClassVar[dict[str, Any]] = {"code": "copied"}
    init_note = IMAGE_NOTE.format("pods'")
    unsupported: ClassVar[dict[str, str]] = {
        "on_node_loss=shrink": "a pod that is lost is replaced, or ends the run",
        "spares": "a pod that is lost is replaced by another one",
    }
    start_seconds: ClassVar[float] = math.inf

    def probe(
        self, cluster: KubernetesCluster, transport: Transport, job: JobSpec | None = None
    ) -> Facts:
        from clusterkit.backends.kubernetes.probe import probe

        return probe(cluster, transport, job)

    def place(
        self, job: JobSpec, cluster: KubernetesCluster, facts: Facts, run_id: str
    ) -> Placement:
        from clusterkit.backends.kubernetes.place import place

        return place(job, cluster, facts, run_id)

    @classmethod
    def resolved(
        cls, cluster: KubernetesCluster, folder: Path, include: str | None, exclude: str | None
    ) -> KubernetesCluster:
        super().resolved(cluster, folder, include, exclude)
        check_entry(cluster)
        if cluster.kubeconfig is None:
            return cluster
        path = str((folder / Path(cluster.kubeconfig).expanduser()).absolute())
        return msgspec.structs.replace(cluster, kubeconfig=path)

    @classmethod
    def transport(cls, cluster: KubernetesCluster) -> Transport:
        return KubeTransport()

    # -- probing --------------------------------------------------------------

    def capacity(self, cluster: KubernetesCluster, transport: Transport) -> int:
        return count_nodes(cluster, transport)

    def subject(self, name: str, cluster: KubernetesCluster, job: JobSpec | None = None) -> Subject:
        from clusterkit.backends.kubernetes.doctor.base import KubeSubject

        asked = job or JobSpec(name="any", command=("true",))

        def manifests(facts: Facts) -> list[Object]:
            return objects_of(self.plan(asked, cluster, facts, "doctor-rehearsal"))

        return KubeSubject(cluster=name, entry=cluster, job=asked, manifests=manifests)

    # -- as one file ------------------------------------------------------------

    def assumed_facts(self, cluster: KubernetesCluster, job: JobSpec) -> Facts:
        kinds = tuple(flavor.kind for flavor in FLAVORS.values())
        kube = KubernetesFacts(
            version="", context="", namespace=cluster.namespace or "default", kinds=kinds
        )
        return facts_of(cluster, kube, assumed_gpus(cluster.gpus, job), job)

    def one_file(self, plan: Plan, cluster: KubernetesCluster, head: list[str]) -> str:
        if plan.trees:
            raise BadInput(
                "code: copied: the project does not fit into one file",
                "code: baked",
                cluster="code",
            )
        assert isinstance(plan.native, KubernetesNative)
        # Each time it is applied another one: it tells the pods of an earlier time from these.
        values = {PEER_TOKEN: "$(openssl rand -hex 16)"}
        names = [name for step in plan.steps for name in step.secrets]
        secrets = "".join(f" --from-literal={name}={values.get(name, '...')}" for name in names)
        if secrets:
            create = f"kubectl --namespace {plan.native.namespace} create secret generic"
            head = [*head, f"First: {create} {plan.native.name}{secrets}"]
        objects = all_objects(plan)
        for each in objects:
            each["metadata"]["namespace"] = plan.native.namespace
        return documents(objects, "\n".join(head))

    # -- carrying out ---------------------------------------------------------

    def submit(self, plan: Plan, transport: Transport, **more: Any) -> None:
        from clusterkit import execute

        if plan.steps[-1].kind != "request":
            raise RunFolderError(
                f"run {plan.run_id}: its plan was made by an older clusterkit",
                hint=f"submit the job again; `clusterkit cancel {plan.run_id}` ends what runs",
            )
        execute.write_files(plan, transport)
        creation = Creation(plan, transport)
        execute.run_steps(plan, transport, carry_out_one=creation, **more)

    def status(self, handle: RunHandle, transport: Transport) -> Observation | None:
        return status_now(handle, transport)

    def watch(self, handle: RunHandle, transport: Transport) -> Monitor:
        return PodMonitor(handle, transport)

    def sync(self, handle: RunHandle, transport: Transport) -> None:
        fetch_logs(handle, transport, list_pods(handle, transport).values())

    def inside(
        self, handle: RunHandle, transport: Transport, nodes: Sequence[int]
    ) -> dict[int, Inside]:
        objects = RunObjects(handle.plan, transport)
        return {
            pod.node: Inside(pod.name, partial(objects.execute, pod))
            for pod in list_pods(handle, transport).values()
            if pod.node is not None and pod.node in nodes and pod.running and pod.started
        }

    def cancel(self, handle: RunHandle, transport: Transport, reason: str = "cancelled") -> None:
        remove(handle, transport)

    def clean_up(self, handle: RunHandle, transport: Transport) -> None:
        remove(handle, transport)

    # -- runs of other machines -----------------------------------------------

    def listing(self, cluster: KubernetesCluster, transport: Transport) -> list[RemoteRun]:
        return listing(ClusterServer(cluster, transport))

    def recover(self, run: str, cluster: KubernetesCluster, transport: Transport) -> Recovered:
        server = ClusterServer(cluster, transport)
        ids = [each.run for each in listing(server)]
        found = recover(server, resolve_id(run, ids, f"in namespace {server.namespace}"))
        return for_machine(
            found, cluster,
            home=str(home()), context=server.context_name, namespace=server.namespace,
            kubeconfig=cluster.kubeconfig or os.environ.get("KUBECONFIG"),
        )  # fmt: skip
