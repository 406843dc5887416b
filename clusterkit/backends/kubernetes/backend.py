"""Pods of a Kubernetes cluster, one per node, kept by a PyTorchJob, MPIJob, TrainJob or Job."""

from __future__ import annotations

import dataclasses
import getpass
import io
import json
import math
import os
import posixpath
import re
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

import msgspec
import yaml

import clusterkit
from clusterkit.assemble import Peers, Places, assemble, require_packages
from clusterkit.backends.base import (
    Backend,
    Handle,
    Newest,
    Observation,
    Recovered,
    RemoteRun,
    Watcher,
)
from clusterkit.backends.kubernetes.client import KUSTOMIZATION, KubeTransport
from clusterkit.backends.kubernetes.flavors import FLAVORS, choose, served
from clusterkit.backends.kubernetes.guard import PROGRAM, RULES, guard, rules_of, rules_text
from clusterkit.backends.kubernetes.lease import LeasedWatcher, guarded, newest
from clusterkit.backends.kubernetes.nodes import gpus_of, selected, usable
from clusterkit.backends.kubernetes.observe import (
    HOST,
    PodWatcher,
    collect,
    known,
    observation,
    pods_of,
)
from clusterkit.backends.kubernetes.others import PROJECT, RECORD, USER, Record, kept, listing
from clusterkit.backends.kubernetes.patch import check_patch
from clusterkit.backends.kubernetes.pods import ATTEMPT, JOB, MANAGER, RUN, Shape
from clusterkit.backends.kubernetes.remove import remove
from clusterkit.backends.kubernetes.rights import access_review, to_watch
from clusterkit.backends.kubernetes.text import Object, object_name, quantity
from clusterkit.backends.nodes import (
    CPU_IMAGE,
    GPU_IMAGE,
    PACKAGES,
    TOOLS,
    device_of,
    interpreter,
    own_ports,
    threads_of,
)
from clusterkit.cluster import (
    ClusterSpec,
    Facts,
    Gpu,
    HostFacts,
    KubernetesCluster,
    KubernetesFacts,
    Project,
)
from clusterkit.errors import BadInput, ClusterkitError, Unavailable, about, counted
from clusterkit.plan import Note, Plan, PlanFile, Step, Tree
from clusterkit.project import snapshot, words
from clusterkit.rendezvous import Endpoint, Topology, mpirun_interface
from clusterkit.runs import home, resolve, slug
from clusterkit.shell import quote as quoted
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport
from clusterkit.yaml_text import documents

if TYPE_CHECKING:
    from clusterkit.doctor.base import Patient

MANIFESTS = "manifests.yaml"
ARCHIVE = PROJECT
MOST_BYTES = 1_040_000
"""Of a project, compressed; a config map takes 1 MiB."""
REJOIN_SECONDS = 900.0
"""How long a run waits for another pod in the place of one that is lost; a Job takes up to 600 s
before it makes one of which several were lost."""
NAME_SECONDS = 120
"""How long a pod waits for the name of another to resolve."""
_PET = (
    "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_MAX_RESTARTS", "PET_NNODES", "PET_NODE_RANK",
    "PET_NPROC_PER_NODE", "PET_RDZV_BACKEND", "PET_RDZV_CONF", "PET_RDZV_ENDPOINT",
    "PET_RDZV_ID", "PET_STANDALONE",
)  # fmt: skip
"""Variables of the operators that torchrun would take for its own options."""
_UNSEEN = "the image's; not looked at"


class KubernetesBackend(Backend):
    """Nodes are pods; see `clusterkit.agent` for what runs in each of them."""

    name = "kubernetes"
    summary = "pods of a Kubernetes cluster, one node each"
    elsewhere: ClassVar[bool] = True
    managed: ClassVar[bool] = True
    own_network: ClassVar[bool] = True
    start_seconds: ClassVar[float] = math.inf

    @classmethod
    def settled(
        cls, cluster: ClusterSpec, folder: Path, include: str | None, exclude: str | None
    ) -> ClusterSpec:
        super().settled(cluster, folder, include, exclude)
        assert isinstance(cluster, KubernetesCluster)
        for key in ("memory", "shm_size"):
            if (size := getattr(cluster, key)) is not None:
                with about("cluster", key):
                    quantity(key, size)
        with about("cluster", "resources"):
            for name, amount in cluster.resources.items():
                quantity(f"resources: {name}", amount)
        check_patch(cluster.patch)
        paths = [each.path.rstrip("/") for each in cluster.volumes]
        if twice := sorted({path for path in paths if paths.count(path) > 1}):
            raise BadInput(
                f"volumes: two of them on {twice[0]}",
                hint="give each its own path",
                cluster="volumes",
            )
        if cluster.shared and not any(
            cluster.shared.rstrip("/") == path or cluster.shared.startswith(path + "/")
            for path in paths
        ):
            raise BadInput(
                f"shared: {cluster.shared} is in none of the volumes",
                hint="volumes: [{claim: NAME, path: " + cluster.shared + "}]",
                cluster="shared",
            )
        if cluster.kubeconfig is None:
            return cluster
        path = str((folder / Path(cluster.kubeconfig).expanduser()).absolute())
        return msgspec.structs.replace(cluster, kubeconfig=path)

    @classmethod
    def transport(cls, cluster: ClusterSpec) -> Transport:
        return KubeTransport()

    # -- probing --------------------------------------------------------------

    def probe(
        self, cluster: ClusterSpec, transport: Transport, job: JobSpec | None = None
    ) -> Facts:
        assert isinstance(cluster, KubernetesCluster)
        tool = ["kubectl", *_flags(cluster.kubeconfig, cluster.context)]
        version = _get(tool, "/version", transport)
        context, namespace = _context(cluster)
        namespace = cluster.namespace or namespace
        _check_namespace(tool, namespace, transport)
        gpus = _gpus(cluster, job, tool, transport)
        kinds = _kinds(tool, transport)
        kubernetes = KubernetesFacts(
            version=str(version.get("gitVersion", "?")),
            context=context,
            namespace=namespace,
            kubeconfig=cluster.kubeconfig or os.environ.get("KUBECONFIG"),
            kinds=kinds,
            user=_user(),
        )
        if job is not None:
            _check_rights(choose(job, cluster, kubernetes)[0], tool, namespace, transport)
            kubernetes = msgspec.structs.replace(
                kubernetes, may_watch=_may_watch(cluster, tool, namespace, transport)
            )
        return _facts(cluster, kubernetes, gpus, job)

    def places(self, cluster: ClusterSpec, transport: Transport) -> int:
        assert isinstance(cluster, KubernetesCluster)
        tool = ["kubectl", *_flags(cluster.kubeconfig, cluster.context)]
        done = transport.run(HOST, [*tool, "get", "--raw", "/api/v1/nodes"])
        if done.exit_code:
            raise Unavailable(
                f"how many nodes the cluster has is unknown: {done.stderr.strip()}",
                hint="--nodes N",
            )
        nodes = json.loads(done.stdout)["items"]
        return sum(selected(node, cluster) and usable(node, cluster) for node in nodes)

    def subject(self, name: str, cluster: ClusterSpec, job: JobSpec | None = None) -> Patient:
        from clusterkit.doctor.kubernetes.base import KubeSubject

        assert isinstance(cluster, KubernetesCluster)
        asked = job or JobSpec(name="any", command=("true",))

        def manifests(kube: KubernetesFacts, gpus: tuple[Gpu, ...]) -> list[Object]:
            facts = _facts(cluster, kube, gpus, asked)
            plan = self.plan(asked, cluster, facts, "doctor-rehearsal")
            text = next(file.text for file in plan.files if file.path.endswith(MANIFESTS))
            return list(yaml.safe_load_all(text or ""))

        def locate() -> tuple[str, str]:
            context, namespace = _context(cluster)
            return context, cluster.namespace or namespace

        return KubeSubject(
            cluster=name,
            entry=cluster,
            job=asked,
            tool=("kubectl", *_flags(cluster.kubeconfig, cluster.context)),
            locate=locate,
            manifests=manifests,
        )

    # -- planning -------------------------------------------------------------

    def plan(self, job: JobSpec, cluster: ClusterSpec, facts: Facts, run_id: str) -> Plan:
        assert isinstance(cluster, KubernetesCluster)
        kube, host = facts.kubernetes, facts.hosts[0]
        if kube is None:
            raise BadInput("facts: no Kubernetes is named", hint="use those of such a run")
        least, most = job.node_range
        device, device_origin = device_of(job, [host])
        nproc, nproc_origin = _ranks_per_node(job, host, device)
        topology = Topology(least, most, nproc)
        flavor_name, flavor_origin = choose(job, cluster, kube)
        require_packages(job, host)
        threads, threads_origin = _threads(job, cluster, nproc)
        flavor = FLAVORS[flavor_name]
        run_dir = posixpath.join(kube.root, run_id)
        local = posixpath.join(facts.home, "runs", run_id)
        name = object_name(run_id)
        mpi = flavor_name == "mpijob"
        rejoin, rejoin_origin = _rejoin(job, cluster, flavor_name)
        own = _own_program(job) if cluster.code == "baked" else None
        workdir, program = _places(job, cluster, facts, run_dir)
        shape = Shape(
            name=name,
            namespace=kube.namespace,
            cluster=cluster,
            image=_image(cluster, device),
            run_dir=run_dir,
            min_nodes=least,
            nodes=most,
            nproc_per_node=nproc,
            port=facts.port,
            gpus=nproc if device == "cuda" else 0,
            labels={
                "app.kubernetes.io/managed-by": MANAGER,
                RUN: run_id,
                JOB: slug(job.name),
                ATTEMPT: "1",
                **({USER: kube.user} if kube.user else {}),
                **cluster.labels,
            },
            command=("/bin/sh", posixpath.join(run_dir, "files", "pod.sh")),
            copied=cluster.code == "copied",
            rejoin=rejoin,
        )
        names = [flavor.node_name(shape, node) for node in range(most)]
        assembly = assemble(
            program,
            topology=topology,
            endpoint=Endpoint(names[0], facts.port, run_id),
            places=Places(
                run_dir,
                workdir,
                host.python,
                posixpath.join(cluster.shared, run_id) if cluster.shared else None,
                host.python_origin,
            ),
            device=device,
            threads=threads,
            hosts=names,
            cluster_env=cluster.env,
            network_env={
                "GLOO_SOCKET_IFNAME": facts.interface,
                "NCCL_SOCKET_IFNAME": facts.interface,
                **(mpirun_interface(facts.interface) if mpi else {}),
            },
            stop_grace=cluster.stop_grace,
            peers=None
            if mpi
            else Peers(
                names[0],
                facts.watch_port or own_ports(facts.port)[1],
                cluster.lost_after,
                REJOIN_SECONDS if rejoin else None,
            ),
            container=True,
            mpi_interface=facts.interface if mpi and job.launcher == "deepspeed" else None,
        )
        files = [_moved(file, run_dir, local) for file in assembly.files]
        awaited = names if mpi else names[:1] if most > 1 else []
        files.append(
            PlanFile(
                posixpath.join(local, "files", "pod.sh"),
                text=_pod_script(
                    awaited,
                    assembly.command,
                    needed=job.launcher != "python",
                    project=posixpath.join(run_dir, "project") if shape.copied else None,
                ),
                mode=0o755,
            )
        )
        shape = dataclasses.replace(shape, secrets=assembly.secrets)
        objects = flavor.render(shape)
        watched, watched_origin = _watched(cluster, kube)
        if watched:
            rules = rules_of(
                shape,
                flavor,
                objects,
                nodes=1 if mpi else most,
                needed=1 if mpi else least,
                replaces=topology.elastic or rejoin,
                force=cluster.replace_lost,
                restarts=job.restarts,
                time_limit=job.limit_seconds,
                lost_after=cluster.lost_after,
            )
            objects = [*guard(shape, flavor, objects, host.python), *objects]
            at = posixpath.join(local, "files")
            files.append(
                PlanFile(posixpath.join(at, PROGRAM), resource="backends/kubernetes/watcher.py")
            )
            files.append(PlanFile(posixpath.join(at, RULES), text=rules_text(rules)))
        if own is not None:
            name_there = posixpath.join(local, "files", posixpath.basename(own))
            files.append(PlanFile(name_there, resource=own))
        record = PlanFile(
            posixpath.join(local, "files", RECORD), text=Record.of(job, cluster, facts).text()
        )
        files.append(record)
        inside = [posixpath.basename(file.path) for file in files]
        head = f"run {run_id}: {topology}\nby hand: kubectl apply --server-side --kustomize ."
        files += [
            PlanFile(
                posixpath.join(local, "files", MANIFESTS),
                text=documents(objects, head),
            ),
            PlanFile(
                posixpath.join(local, "files", KUSTOMIZATION),
                text=documents([_kustomization(shape, inside)]),
            ),
        ]
        notes = [
            Note("flavor", flavor_name, flavor_origin),
            Note("namespace", kube.namespace, _namespace_origin(cluster)),
            Note("device", device, device_origin),
            Note("nproc_per_node", str(nproc), nproc_origin),
            Note("image", shape.image, "cluster: image" if cluster.image else f"device {device}"),
            Note("workdir", workdir, _code_origin(cluster, facts)),
            Note("master_addr", names[0], "name of the first pod"),
            Note("master_port", str(facts.port), facts.port_origin),
            Note("threads_per_rank", str(threads), threads_origin),
            Note("watcher", "on" if watched else "off", watched_origin),
            *assembly.notes,
        ]
        if not job.elastic:
            words_of = "replaced, and the run goes on" if rejoin else "ends the run"
            notes.append(Note("lost_pod", words_of, rejoin_origin))
        if name != run_id:
            notes.append(
                Note("name", name, f"Kubernetes does not take {run_id} as a service's name")
            )
        if job.checkpoint is not None and not cluster.shared:
            notes.append(
                Note("", "checkpoints go with their pods: `shared` names a volume of all pods", "")
            )
        return Plan(
            run_id=run_id,
            run_dir=run_dir,
            backend=self.name,
            summary=f"{topology} in pods of Kubernetes {kube.version}, kept by a {flavor.KIND}, "
            f"started by {job.launcher}; world size {topology.world_size}",
            notes=tuple(notes),
            trees=_trees(cluster, facts, local),
            files=tuple(files),
            steps=(*_packing(cluster, local), _apply(kube, local, assembly.secrets)),
            hosts=(HOST,) * most,
            nodes=1 if mpi else most,
            world_size=topology.world_size,
            topology={"min_nodes": least, "nodes": most, "nproc_per_node": nproc},
            address=names[0],
            port=facts.port,
            # What takes the working tree apart runs on this machine.
            python="python3" if shape.copied else host.python,
            shared=posixpath.join(cluster.shared, run_id) if cluster.shared else "",
            stop_grace=cluster.stop_grace,
            lost_after=cluster.lost_after,
            rejoin=rejoin,
            replace_lost=rejoin and cluster.replace_lost,
        )

    # -- carrying out ---------------------------------------------------------

    def status(self, handle: Handle, transport: Transport) -> Observation | None:
        if not known(handle.plan, transport):
            return None
        try:
            pods = pods_of(handle, transport)
        except ClusterkitError as error:
            return observation(handle, {}, transport, silent=error.message)
        return observation(handle, pods, transport)

    def watch(self, handle: Handle, transport: Transport) -> Watcher:
        kind = LeasedWatcher if guarded(handle.plan) else PodWatcher
        return kind(handle, transport)

    def newest(self, handle: Handle, transport: Transport) -> Newest:
        return newest(handle, transport)

    def collect(self, handle: Handle, transport: Transport) -> None:
        collect(handle, transport)

    def cancel(self, handle: Handle, transport: Transport, reason: str = "cancelled") -> None:
        remove(handle, transport)

    # -- runs of other machines -----------------------------------------------

    def listing(self, cluster: ClusterSpec, transport: Transport) -> list[RemoteRun]:
        assert isinstance(cluster, KubernetesCluster)
        tool = ["kubectl", *_flags(cluster.kubeconfig, cluster.context)]
        return listing(tool, cluster.namespace or _context(cluster)[1], transport)

    def recover(self, run: str, cluster: ClusterSpec, transport: Transport) -> Recovered:
        assert isinstance(cluster, KubernetesCluster)
        replace = msgspec.structs.replace
        context, namespace = _context(cluster)
        namespace = cluster.namespace or namespace
        tool = ["kubectl", *_flags(cluster.kubeconfig, cluster.context)]
        ids = [each.run for each in listing(tool, namespace, transport)]
        run = resolve(run, ids, f"in namespace {namespace}")
        found = kept(tool, namespace, run, transport)
        kube = found.record.facts.kubernetes
        assert kube is not None
        here = replace(
            kube,
            context=context,
            namespace=namespace,
            kubeconfig=cluster.kubeconfig or os.environ.get("KUBECONFIG"),
        )
        return Recovered(
            run=run,
            job=found.record.job,
            cluster=replace(
                found.record.cluster,
                kubeconfig=cluster.kubeconfig,
                context=cluster.context,
                namespace=cluster.namespace,
            ),
            facts=replace(found.record.facts, home=str(home()), kubernetes=here),
            attempt=found.attempt,
            created_at=found.created_at,
            project=found.project,
        )


# ---------------------------------------------------------------- probing


def _facts(
    cluster: KubernetesCluster,
    kube: KubernetesFacts,
    gpus: tuple[Gpu, ...],
    job: JobSpec | None,
) -> Facts:
    """What a plan has to know; reads the job's project where that is copied.

    Raises:
        BadInput: the project is too large.
    """
    port, watch_port = own_ports(cluster.port)
    python, origin = interpreter(job, (cluster.python, "cluster: python"))
    return Facts(
        home=str(home()),
        hosts=(
            HostFacts(
                host="pods",
                address="node-0",
                cpus=max(1, math.floor(cluster.cpus or 1)),
                memory_mib=0,
                gpus=gpus,
                python=python,
                python_origin=origin,
                versions=dict.fromkeys(PACKAGES, _UNSEEN),
                tools=dict.fromkeys(TOOLS, _UNSEEN),
            ),
        ),
        port=port,
        port_origin="every pod has its own" if cluster.port == "auto" else "cluster: port",
        interface=cluster.interface,
        watch_port=watch_port,
        project=_project(job) if cluster.code == "copied" and job is not None else None,
        kubernetes=kube,
    )


def _flags(kubeconfig: str | None, context: str | None, namespace: str | None = None) -> list[str]:
    words = {"--kubeconfig": kubeconfig, "--context": context, "--namespace": namespace}
    return [word for flag, value in words.items() if value for word in (flag, value)]


def _get(tool: list[str], path: str, transport: Transport) -> dict[str, Any]:
    done = transport.run(HOST, [*tool, "get", "--raw", path])
    if done.exit_code:
        raise Unavailable(f"{done.stderr.strip()} ({path})")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _context(cluster: KubernetesCluster) -> tuple[str, str]:
    """The name of the context, so that it is the same one later, and its namespace."""
    from kubernetes import config

    try:
        found = config.list_kube_config_contexts(cluster.kubeconfig)  # type: ignore[no-untyped-call]
    except config.ConfigException:  # in a pod there is none
        return cluster.context or "", "default"
    contexts, active = found
    chosen = next((each for each in contexts if each["name"] == cluster.context), active)
    return str(chosen["name"]), str(chosen["context"].get("namespace") or "default")


def _user() -> str:
    """Who submits, as a label may say it; empty where nobody knows."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a user id without a name, as in many a container
        return ""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:63].strip("_.-")


def _namespace_origin(cluster: KubernetesCluster) -> str:
    return "cluster: namespace" if cluster.namespace else "the context's own"


def _project(job: JobSpec) -> Project:
    """The working tree, if a config map takes it.

    Raises:
        BadInput: it is too large.
    """
    found = snapshot(Path(job.workdir or "."), job.program)
    packed = io.BytesIO()
    if found.size < 32 * MOST_BYTES:
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
            for entry in found.entries:
                archive.add(found.root / entry.path, entry.path, recursive=False)
    if found.size >= 32 * MOST_BYTES or packed.tell() > MOST_BYTES:
        raise BadInput(
            f"code: {found.root} is too large for a config map ({words(found.facts())})",
            hint="code: baked, with the project in the image or in a volume",
            cluster="code",
        )
    return found.facts()


def _check_namespace(tool: list[str], namespace: str, transport: Transport) -> None:
    done = transport.run(HOST, [*tool, "get", "--raw", f"/api/v1/namespaces/{quote(namespace)}"])
    if done.exit_code and "(NotFound)" in done.stderr:
        raise BadInput(
            f"namespace: the cluster has no {namespace}",
            hint=f"kubectl create namespace {namespace}",
            cluster="namespace",
        )


def _check_rights(flavor: str, tool: list[str], namespace: str, transport: Transport) -> None:
    """Refuse what the API server would not let us do, before anything is made.

    Raises:
        Unavailable: names the right that is missing.
    """
    found = FLAVORS[flavor]
    group = found.API.rpartition("/")[0]
    for right in (
        ("create", group, found.PLURAL),
        ("create", "", "configmaps"),
        ("list", "", "pods"),
    ):
        if not _may(right, tool, namespace, transport):
            raise Unavailable(
                f"you may not {right[0]} {right[2]} in namespace {namespace}",
                hint="k8s/rbac.yaml is the role that a submitter needs: an admin can bind it",
            )


def _may(
    right: tuple[str, str, str], tool: list[str], namespace: str, transport: Transport
) -> bool:
    """Whether the API server would let us; a right is a verb, an API group and a resource."""
    asked = access_review(namespace, *right)
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    command = [*tool, "create", "--raw", path, "--filename", "-"]
    done = transport.run(HOST, command, stdin=json.dumps(asked).encode())
    allowed = not done.exit_code and json.loads(done.stdout).get("status", {}).get("allowed")
    return bool(allowed)


def _may_watch(
    cluster: KubernetesCluster, tool: list[str], namespace: str, transport: Transport
) -> bool:
    """Whether the run can have a watcher in the cluster.

    Raises:
        Unavailable: it is asked for, and may not be made.
    """
    if cluster.watcher is False:
        return False
    wanted = [right for right in to_watch() if right[0] == "create"]
    missing = [right for right in wanted if not _may(right, tool, namespace, transport)]
    if missing and cluster.watcher is True:
        raise Unavailable(
            f"watcher: you may not {missing[0][0]} {missing[0][2]} in namespace {namespace}",
            hint="k8s/rbac.yaml has these rights; or watcher: false",
        )
    return not missing


def _kinds(tool: list[str], transport: Transport) -> tuple[str, ...]:
    """Kinds of jobs that the cluster serves, besides the plain one."""
    found = []
    for flavor in FLAVORS.values():
        if flavor.KIND == "Job":
            continue
        done = transport.run(HOST, [*tool, "get", "--raw", f"/apis/{flavor.API}"])
        if not done.exit_code and served(json.loads(done.stdout), flavor):
            found.append(flavor.KIND)
    return tuple(found)


def _gpus(
    cluster: KubernetesCluster, job: JobSpec | None, tool: list[str], transport: Transport
) -> tuple[Gpu, ...]:
    """Those of the node that has most of them."""
    if cluster.gpus == 0 or (job is not None and job.device == "cpu"):
        return ()
    done = transport.run(HOST, [*tool, "get", "--raw", "/api/v1/nodes"])
    return gpus_of(cluster, None if done.exit_code else json.loads(done.stdout)["items"])


# ---------------------------------------------------------------- planning


def _watched(cluster: KubernetesCluster, kube: KubernetesFacts) -> tuple[bool, str]:
    """Whether the run gets a watcher in the cluster, and why."""
    if cluster.watcher is False:
        return False, "cluster: watcher"
    if not kube.may_watch:
        return False, "you may not create its role: k8s/rbac.yaml has the rights"
    return True, "it goes on with the run while nobody outside watches"


def _ranks_per_node(job: JobSpec, host: HostFacts, device: str) -> tuple[int, str]:
    there = len(host.gpus)
    if job.gpus_per_node != "auto":
        if device == "cuda" and job.gpus_per_node > there:
            raise BadInput(
                f"gpus_per_node: {job.gpus_per_node}, but no node of the cluster has more than "
                f"{counted(there, 'GPU')}",
                hint=f"--gpus {there}, or --set device=cpu to run on CPU threads",
                job="gpus_per_node",
            )
        return job.gpus_per_node, "job: gpus_per_node"
    if device == "cpu":
        return 1, "without GPUs one rank per node"
    return there, f"{counted(there, 'GPU')} of a node"


def _threads(job: JobSpec, cluster: KubernetesCluster, nproc: int) -> tuple[int, str]:
    if cluster.cpus is None and job.threads_per_rank == "auto":
        return 1, "no `cpus` in the cluster entry"
    return threads_of(job, max(1, math.floor(cluster.cpus or 1)), nproc)


def _image(cluster: KubernetesCluster, device: str) -> str:
    return cluster.image or (GPU_IMAGE if device == "cuda" else CPU_IMAGE)


def _places(
    job: JobSpec, cluster: KubernetesCluster, facts: Facts, run_dir: str
) -> tuple[str, JobSpec]:
    """Where the ranks start in a pod, and the job with the path that its program has there."""
    if cluster.code == "baked":
        own = _own_program(job)
        if own is not None:
            path = posixpath.join(run_dir, "files", posixpath.basename(own))
            return cluster.workdir, msgspec.structs.replace(job, program=path)
        return cluster.workdir, _in_image(job, cluster)
    if facts.project is None:
        raise BadInput("facts: no project is named", hint="use those of a run with code: copied")
    inside = posixpath.relpath(job.workdir or facts.project.root, facts.project.root)
    workdir = posixpath.normpath(posixpath.join(run_dir, "project", inside))
    program = job.program
    if program is not None and posixpath.isabs(program):
        program = posixpath.relpath(program, job.workdir or "/")
    return workdir, msgspec.structs.replace(job, program=program)


def _rejoin(job: JobSpec, cluster: KubernetesCluster, flavor: str) -> tuple[bool, str]:
    """Whether another pod may take a lost one's place in a run that goes on, and why."""
    if flavor == "mpijob":
        return False, "mpirun starts all ranks at once"
    if job.elastic:
        return False, "torchrun itself does it"
    if job.checkpoint is None or job.checkpoint.resume == "never":
        if job.restarts:
            return True, "restarts: the job may begin anew"
        return False, "the job would begin anew, and restarts is 0"
    where = posixpath.join(cluster.shared or "/", job.checkpoint.dir)
    if not (cluster.shared or posixpath.isabs(job.checkpoint.dir)) or not any(
        posixpath.commonpath([where, each.path]) == posixpath.normpath(each.path)
        for each in cluster.volumes
    ):
        return False, "its checkpoints go with its pods"
    return True, "checkpoints lie in a volume of all pods"


def _own_program(job: JobSpec) -> str | None:
    """Where in clusterkit's own package the program lies (that of `bench` does): it comes with the
    run, as the image need not have it."""
    root = posixpath.dirname(clusterkit.__file__) + "/"
    if job.program is None or not job.program.startswith(root):
        return None
    return job.program.removeprefix(root)


def _code_origin(cluster: KubernetesCluster, facts: Facts) -> str:
    if cluster.code == "baked" or facts.project is None:
        return "the image's own (cluster: code, workdir)"
    return f"{facts.project.root}, {words(facts.project)}, in a config map (cluster: code)"


def _trees(cluster: KubernetesCluster, facts: Facts, local: str) -> tuple[Tree, ...]:
    if cluster.code == "baked" or facts.project is None:
        return ()
    found = facts.project
    path = posixpath.join(local, "files", "project")
    return (Tree(found.root, path, found.digest, words(found)),)


def _packing(cluster: KubernetesCluster, local: str) -> tuple[Step, ...]:
    """Makes one file of the working tree's copy."""
    if cluster.code == "baked":
        return ()
    files = posixpath.join(local, "files")
    argv = (
        "tar", "--create", "--gzip", "--file", posixpath.join(files, ARCHIVE),
        "--directory", posixpath.join(files, "project"), ".",
    )  # fmt: skip
    return (Step(kind="run", host=HOST, argv=argv),)


def _in_image(job: JobSpec, cluster: KubernetesCluster) -> JobSpec:
    """The job with the path that its program has in the image."""
    replace = msgspec.structs.replace
    if job.program is None or not posixpath.isabs(job.program):
        return job
    root = (job.workdir or "/").rstrip("/") + "/"
    if job.program.startswith(root):
        return replace(job, program=job.program.removeprefix(root))
    if job.program.startswith(cluster.workdir.rstrip("/") + "/"):
        return job
    raise BadInput(
        f"program: {job.program} lies outside of the project, which the image holds in "
        f"{cluster.workdir}",
        hint="a path relative to the project's folder",
        job="program",
    )


def _moved(file: PlanFile, run_dir: str, local: str) -> PlanFile:
    """A pod's file, where it is kept here."""
    path = posixpath.join(local, posixpath.relpath(file.path, run_dir))
    return msgspec.structs.replace(file, path=path)


def _pod_script(
    names: list[str], command: tuple[str, ...], *, needed: bool, project: str | None
) -> str:
    """What a pod starts with.

    Args:
        names: of other pods, to wait for.
        needed: a launcher cannot do without; a program may, and the other pod may have ended.
        project: folder that the project is to be unpacked into.
    """
    unpack = ""
    if project is not None:
        archive = posixpath.join(posixpath.dirname(project), "code", ARCHIVE)
        unpack = (
            f"mkdir -p {quoted(project)}\n"
            f"tar -xzf {quoted(archive)} -C {quoted(project)} --no-same-owner || exit 73\n"
        )
    seconds = NAME_SECONDS if needed else NAME_SECONDS // 10
    message = f"the name $1 did not resolve within {seconds} s"
    if needed:
        give_up = f'            echo "{message}" | tee /dev/termination-log\n            exit 69\n'
    else:
        give_up = f'            echo "{message}; going on without it"\n            return\n'
    waits = "".join(f"await {quoted(name)}\n" for name in names)
    function = (
        "await() {\n"
        "    tries=0\n"
        '    until getent hosts "$1" >/dev/null; do\n'
        "        tries=$((tries + 1))\n"
        '        if [ "$tries" = 25 ]; then echo "waiting for the name $1 to resolve"; fi\n'
        f'        if [ "$tries" = {seconds * 5} ]; then\n{give_up}        fi\n'
        "        sleep 0.2\n"
        "    done\n"
        "}\n"
    )
    return (
        "#!/bin/sh\n"
        "# what a pod runs: forgets what the operator tells torchrun, waits until the others can\n"
        "# be found by name, becomes the node\n"
        "trap 'exit 143' TERM\n"
        f"unset {' '.join(_PET)}\n"
        f"{unpack}{function + waits if names else ''}"
        f"exec {' '.join(quoted(word) for word in command)}\n"
    )


def _kustomization(shape: Shape, files: list[str]) -> Object:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": shape.namespace,
        "resources": [MANIFESTS],
        "configMapGenerator": [
            {"name": shape.name, "files": files},
            *([{"name": shape.code, "files": [ARCHIVE]}] if shape.copied else []),
        ],
        "generatorOptions": {"disableNameSuffixHash": True, "labels": dict(shape.labels)},
    }


def _apply(kube: KubernetesFacts, local: str, secrets: tuple[str, ...]) -> Step:
    return Step(
        kind="run",
        host=HOST,
        argv=(
            "kubectl", *_flags(kube.kubeconfig, kube.context, kube.namespace), "apply",
            "--server-side", "--field-manager", MANAGER,
            "--kustomize", posixpath.join(local, "files"),
        ),
        secrets=secrets,
    )  # fmt: skip
