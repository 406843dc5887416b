"""The plan of a job whose nodes are pods. Pure."""

from __future__ import annotations

import dataclasses
import math
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

import clusterkit
from clusterkit.assemble import Assembly, Coordinator, NodePaths, Placement, require_packages
from clusterkit.backends.kubernetes.apply import KUSTOMIZATION, MANIFESTS, creation_steps
from clusterkit.backends.kubernetes.flavors import FLAVORS, WATCHER_FILE, choose, watcher
from clusterkit.backends.kubernetes.objects import (
    ATTEMPT,
    JOB,
    MANAGER,
    RUN,
    USER,
    Object,
    new_object,
    object_name,
)
from clusterkit.backends.kubernetes.pods import PROJECT, Shape, code_of
from clusterkit.backends.kubernetes.remote_runs import RECORD, Record
from clusterkit.backends.placing import (
    CPU_IMAGE,
    GPU_IMAGE,
    device_of,
    interface_env,
    threads_of,
)
from clusterkit.backends.ports import default_ports
from clusterkit.cluster import Facts, HostFacts, KubernetesCluster, KubernetesFacts
from clusterkit.errors import BadInput, pluralize
from clusterkit.jobfile.yaml_text import documents
from clusterkit.plan import KubernetesNative, Note, PlanFile, Step, Tree
from clusterkit.rendezvous import Endpoint, Topology, mpirun_interface
from clusterkit.run.folder import slug
from clusterkit.shell import quote
from clusterkit.spec import JobSpec
from clusterkit.sync import snapshot

HOST = "localhost"
REJOIN_SECONDS = 900.0
"""How long a run waits for the replacement of a lost pod; a Job that has lost several waits up to
600 s before it creates one."""
LATE_SECONDS = 3600.0
"""How long after `time_limit` the kubelet ends a pod: agents count from their own start, the
kubelet from before the image is pulled."""
NAME_SECONDS = 120
"""How long a pod waits for another's name to resolve."""
_PET = (
    "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_MAX_RESTARTS", "PET_NNODES", "PET_NODE_RANK",
    "PET_NPROC_PER_NODE", "PET_RDZV_BACKEND", "PET_RDZV_CONF", "PET_RDZV_ENDPOINT",
    "PET_RDZV_ID", "PET_STANDALONE",
)  # fmt: skip
"""Variables that operators set and torchrun would take for its own options."""


def place(
    job: JobSpec, cluster: KubernetesCluster, facts: Facts, run_id: str
) -> KubernetesPlacement:
    """As `clusterkit.backends.base.Backend.place`."""
    kube, host = facts.kubernetes, facts.hosts[0]
    if kube is None:
        raise BadInput("--facts is not from a Kubernetes cluster", hint="use those of such a run")
    device, device_origin = _device(job, cluster, kube, host)
    nproc, nproc_origin = _ranks_per_node(job, host, device)
    topology = Topology(*job.node_range, nproc)
    flavor_name, flavor_origin = choose(job, cluster, kube)
    require_packages(job, host)
    threads, threads_origin = _threads(job, cluster, kube, nproc)
    flavor = FLAVORS[flavor_name]
    rejoin, rejoin_origin = _rejoin(job, cluster, flavor_name)
    replaces = (rejoin or job.elastic) and cluster.replace_lost
    watched, watched_origin = _watched(cluster, flavor_name, replaces=replaces)
    shape = _shape(job, cluster, kube, run_id, topology, device, rejoin=rejoin)
    own = _own_program(job) if cluster.code == "baked" else None
    workdir, workdir_origin, program = _program(job, cluster, facts, shape.run_dir, own)
    local = posixpath.join(facts.home, "runs", run_id)
    names = tuple(flavor.node_name(shape, node) for node in range(topology.nodes))
    mpi = flavor_name == "mpijob"
    trees: tuple[Tree, ...] = ()
    if shape.copied and (found := facts.project) is not None:
        path = posixpath.join(local, "files", "project")
        trees = (Tree(found.root, path, found.digest, snapshot.summary(found)),)
    return KubernetesPlacement(
        job=program,
        topology=topology,
        endpoint=Endpoint(names[0], facts.port, run_id),
        places=NodePaths(
            shape.run_dir,
            workdir,
            host.python,
            posixpath.join(cluster.shared, run_id) if cluster.shared else None,
            host.python_origin,
        ),
        device=device,
        threads=threads,
        where=f"in pods of {f'Kubernetes {kube.version}'.rstrip()}, kept by a {flavor.kind}",
        hosts=(HOST,) * topology.nodes,
        names=names,
        cluster=cluster,
        network_env={
            **interface_env(facts.interface),
            **(mpirun_interface(facts.interface) if mpi else {}),
        },
        coordinator=Coordinator(
            names[0],
            facts.watch_port or default_ports(facts.port)[1],
            REJOIN_SECONDS if rejoin else 0,
        ),
        container=True,
        mpi_interface=facts.interface if mpi and job.started_by == "deepspeed" else None,
        trees=trees,
        # The working tree is unpacked on this machine.
        tree_python="python3" if shape.copied else None,
        notes=(
            Note("flavor", flavor_name, flavor_origin),
            Note(
                "context",
                kube.context or "none",
                "cluster: context" if cluster.context else "the kubeconfig's own",
            ),
            Note(
                "namespace",
                kube.namespace,
                "cluster: namespace" if cluster.namespace else "the context's own",
            ),
            Note("device", device, device_origin),
            Note("nproc_per_node", str(nproc), nproc_origin),
            Note("image", shape.image, "cluster: image" if cluster.image else f"device {device}"),
            Note("workdir", workdir, workdir_origin),
            Note("master_addr", names[0], "name of the first pod"),
            Note("master_port", str(facts.port), facts.port_origin),
            Note("threads_per_rank", str(threads), threads_origin),
            Note("watcher", "on" if watched else "off", watched_origin),
        ),
        remarks=_remarks(job, kube, run_id, shape, rejoin_origin),
        rejoin=rejoin,
        replace_lost=replaces,
        native=KubernetesNative(
            kubeconfig=kube.kubeconfig,
            context=kube.context,
            namespace=kube.namespace,
            name=shape.name,
            flavor=flavor_name,
            watched=watched,
        ),
        shape=shape,
        record=Record.of(job, cluster, facts),
        local=local,
        own_program=own,
    )


def _shape(
    job: JobSpec,
    cluster: KubernetesCluster,
    kube: KubernetesFacts,
    run_id: str,
    topology: Topology,
    device: str,
    *,
    rejoin: bool,
) -> Shape:
    run_dir, limit = posixpath.join(kube.root, run_id), job.limit_seconds
    return Shape(
        name=object_name(run_id),
        namespace=kube.namespace,
        cluster=cluster,
        image=cluster.image or (GPU_IMAGE if device == "cuda" else CPU_IMAGE),
        run_dir=run_dir,
        topology=topology,
        gpus=topology.nproc_per_node if device == "cuda" else 0,
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
        deadline=None if limit is None else math.ceil(limit + cluster.stop_grace + LATE_SECONDS),
    )


def _remarks(
    job: JobSpec, kube: KubernetesFacts, run_id: str, shape: Shape, rejoin_origin: str
) -> tuple[Note, ...]:
    cluster, remarks = shape.cluster, []
    if not job.elastic:
        lost = "replaced, and the run continues" if shape.rejoin else "ends the run"
        remarks.append(Note("lost_pod", lost, rejoin_origin))
    if shape.name != run_id:
        reason = f"{run_id} is not a valid name of a Service"
        remarks.append(Note("name", shape.name, reason))
    if kube.most_gpus is not None and shape.gpus > kube.most_gpus:
        text = (
            f"no node has more than {kube.most_gpus} {cluster.gpu_resource} now: pods wait until "
            f"one has {shape.gpus}, as intended if its node pool scales from zero"
        )
        remarks.append(Note("", text, ""))
    if job.checkpoint is not None and not cluster.shared:
        text = "checkpoints go with their pods: `shared` names a volume of all pods"
        remarks.append(Note("", text, ""))
    return tuple(remarks)


def _watched(cluster: KubernetesCluster, flavor: str, *, replaces: bool) -> tuple[bool, str]:
    """Return whether the run gets a watcher in the cluster, and why.

    Args:
        replaces: whether a lost pod is removed, so that another takes its place.

    Raises:
        BadInput: the watcher would need rights on other pods than the run's.
    """
    if cluster.watcher is not True:
        return False, "the cluster entry has no `watcher: true`"
    if not replaces:
        return False, "no lost pod is replaced"
    if flavor != "pytorchjob":
        raise BadInput(
            f"watcher: flavor {flavor} cannot have one: its pods have random names and a finalizer "
            "that only the right to change every pod of the namespace can remove",
            hint="flavor: pytorchjob; or watcher: false: `submit` and `attach` do the same",
            cluster="watcher",
        )
    return True, "cluster: watcher; it removes pods from nodes of the cluster that do not answer"


def _device(
    job: JobSpec, cluster: KubernetesCluster, kube: KubernetesFacts, host: HostFacts
) -> tuple[str, str]:
    """As `device_of`; without GPUs the origin has what was seen, and how to ask for some."""
    if host.gpus or job.device == "cpu" or cluster.gpus == 0:
        return device_of(job, [host])
    seen = f"no node has {cluster.gpu_resource} now"
    if kube.most_gpus is None:
        seen = "the nodes' GPUs were not seen"
    if job.device == "cuda":
        hint = "`gpus: N` in the cluster entry, if such nodes are started on demand; or device: cpu"
        raise BadInput(f"device: cuda, but {seen}", hint=hint, job="device")
    return "cpu", f"{seen}; cluster: `gpus: N` asks for some"


def _ranks_per_node(job: JobSpec, host: HostFacts, device: str) -> tuple[int, str]:
    gpus = len(host.gpus)
    if job.gpus_per_node != "auto":
        if device == "cuda" and job.gpus_per_node > gpus:
            raise BadInput(
                f"gpus_per_node: {job.gpus_per_node}, but a pod gets {gpus} (cluster: gpus)",
                hint=f"--gpus {gpus}, or --set device=cpu to run on CPU threads",
                job="gpus_per_node",
            )
        return job.gpus_per_node, "job: gpus_per_node"
    if device == "cpu":
        return 1, "without GPUs one rank per node"
    return gpus, f"{pluralize(gpus, 'GPU')} of a node"


def _threads(
    job: JobSpec, cluster: KubernetesCluster, kube: KubernetesFacts, nproc: int
) -> tuple[int, str]:
    if cluster.cpus is not None or job.threads_per_rank != "auto":
        return threads_of(job, max(1, math.floor(cluster.cpus or 1)), nproc)
    if not kube.gpu_cores:
        return 1, "no `cpus` in the cluster entry"
    threads, origin = threads_of(job, kube.gpu_cores, nproc)
    return threads, f"{origin}; no `cpus`: the share of the pod's GPUs in a node's cores"


def _rejoin(job: JobSpec, cluster: KubernetesCluster, flavor: str) -> tuple[bool, str]:
    """Return whether a lost pod is replaced while the run goes on, and why."""
    if flavor == "mpijob":
        return False, "mpirun starts all ranks at once"
    if job.elastic:
        return False, "torchrun itself does it"
    if job.checkpoint is None or job.checkpoint.resume == "never":
        if job.restarts:
            return True, "restarts: the job may begin anew"
        return False, "the job would begin anew, and restarts is 0"
    if "://" in job.checkpoint.dir:
        return True, "checkpoints lie in a bucket"
    folder = posixpath.join(cluster.shared or "/", job.checkpoint.dir)
    if not (cluster.shared or posixpath.isabs(job.checkpoint.dir)) or not any(
        posixpath.commonpath([folder, each.path]) == posixpath.normpath(each.path)
        for each in cluster.volumes
    ):
        return False, "its checkpoints go with its pods"
    return True, "checkpoints lie in a volume of all pods"


def _own_program(job: JobSpec) -> str | None:
    """Return the program's path in clusterkit's own package if it is there, as that of `bench` is:
    the run brings it along, as the image may lack it."""
    root = posixpath.dirname(clusterkit.__file__) + "/"
    if job.program is None or not job.program.startswith(root):
        return None
    return job.program.removeprefix(root)


def _program(
    job: JobSpec, cluster: KubernetesCluster, facts: Facts, run_dir: str, own: str | None
) -> tuple[str, str, JobSpec]:
    """Return the ranks' folder in a pod, its origin, and the job with its program's path there."""
    replace = msgspec.structs.replace
    if cluster.code == "baked":
        origin = "the image's own (cluster: code, workdir)"
        if own is not None:
            path = posixpath.join(run_dir, "files", posixpath.basename(own))
            return cluster.workdir, origin, replace(job, program=path)
        return cluster.workdir, origin, _in_image(job, cluster)
    found = facts.project
    if found is None:
        raise BadInput("--facts has no project", hint="use those of a run with code: copied")
    inside = posixpath.relpath(job.workdir or found.root, found.root)
    workdir = posixpath.normpath(posixpath.join(run_dir, "project", inside))
    program = job.program
    if program is not None and posixpath.isabs(program):
        program = posixpath.relpath(program, job.workdir or "/")
    origin = f"{found.root}, {snapshot.summary(found)}, in a config map (cluster: code)"
    return workdir, origin, replace(job, program=program)


def _in_image(job: JobSpec, cluster: KubernetesCluster) -> JobSpec:
    if job.program is None or not posixpath.isabs(job.program):
        return job
    root = (job.workdir or "/").rstrip("/") + "/"
    if job.program.startswith(root):
        return msgspec.structs.replace(job, program=job.program.removeprefix(root))
    if job.program.startswith(cluster.workdir.rstrip("/") + "/"):
        return job
    raise BadInput(
        f"program: {job.program} lies outside of the project, which the image holds in "
        f"{cluster.workdir}",
        hint="a path relative to the project's folder",
        job="program",
    )


# ---------------------------------------------------------------- files and steps


@dataclass(frozen=True, kw_only=True)
class KubernetesPlacement(Placement):
    """Nodes that are the pods of one job.

    Attributes:
        shape: what the manifests are made of, but for the secrets.
        record: for `clusterkit attach` from another machine.
        local: the run's folder on this machine.
        own_program: see `_own_program`.
    """

    shape: Shape
    native: KubernetesNative
    record: Record
    local: str
    own_program: str | None

    def files(self, assembly: Assembly) -> tuple[PlanFile, ...]:
        shape, native = self.shape, self.native
        mpi = self.starter == "mpirun"
        waits = self.topology.nodes > 1 and self.forked is None
        files = [self._file(posixpath.basename(each.path), each) for each in assembly.files]
        script = _pod_script(
            self.names if mpi else self.names[:1] if waits else (),
            assembly.command,
            needed=self.job.started_by != "forkserver",
            unpack=shape.unpack,
        )
        files.append(self._file("pod.sh", PlanFile("", text=script, mode=0o755)))
        if native.watched:
            program = PlanFile("", resource=f"backends/kubernetes/{WATCHER_FILE}")
            files.append(self._file(WATCHER_FILE, program))
        if (own := self.own_program) is not None:
            files.append(self._file(posixpath.basename(own), PlanFile("", resource=own)))
        files.append(self._file(RECORD, PlanFile("", text=self.record.text())))
        head = f"run {self.endpoint.run_id}: {self.topology}\n"
        head += "by hand: kubectl apply --server-side --kustomize ."
        names = [posixpath.basename(file.path) for file in files]
        return (
            *files,
            self._file(MANIFESTS, PlanFile("", text=documents(self._objects(assembly), head))),
            self._file(KUSTOMIZATION, PlanFile("", text=documents([_kustomization(shape, names)]))),
        )

    def _file(self, name: str, file: PlanFile) -> PlanFile:
        return msgspec.structs.replace(file, path=posixpath.join(self.local, "files", name))

    def _objects(self, assembly: Assembly) -> list[Object]:
        """Return the objects other than config maps of files, the job as the last."""
        shape = dataclasses.replace(self.shape, secrets=assembly.secrets)
        flavor = FLAVORS[self.native.flavor]
        watches = watcher(shape, flavor, self.places.python) if self.native.watched else []
        return [*watches, *flavor.render(shape)]

    def steps(self, assembly: Assembly) -> tuple[Step, ...]:
        files, shape = posixpath.join(self.local, "files"), self.shape
        pack = (
            "tar", "--create", "--gzip", "--file", posixpath.join(files, PROJECT),
            "--directory", posixpath.join(files, "project"), ".",
        )  # fmt: skip
        packing = [Step(kind="run", host=HOST, argv=pack)] if shape.copied else []
        maps = [shape.name, code_of(shape.name)] if shape.copied else [shape.name]
        objects = [*(new_object("v1", "ConfigMap", {"name": name}) for name in maps),
                   *self._objects(assembly)]  # fmt: skip
        return (*packing, *creation_steps(objects, shape.namespace, assembly.secrets))


def _pod_script(names: Sequence[str], command: Sequence[str], *, needed: bool, unpack: str) -> str:
    """Return the shell script that a pod runs.

    Args:
        names: names that must resolve first; the fork server waits by itself, after its imports.
        needed: whether the pod fails without them. A launcher cannot start; a program may not need
            the other pod, which may have ended.
        unpack: shell lines that unpack the project.
    """
    seconds = NAME_SECONDS if needed else NAME_SECONDS // 10
    message = f"the name $1 did not resolve within {seconds} s"
    if needed:
        give_up = f'            echo "{message}" | tee /dev/termination-log\n            exit 69\n'
    else:
        give_up = f'            echo "{message}; going on without it"\n            return\n'
    waits = "".join(f"await {quote(name)}\n" for name in names)
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
    waiting = ", waits until the others can\n# be found by name" if names else ""
    return (
        "#!/bin/sh\n"
        f"# what a pod runs: forgets what the operator tells torchrun{waiting}, becomes the node\n"
        "trap 'exit 143' TERM\n"
        f"unset {' '.join(_PET)}\n"
        f"{unpack}{function + waits if names else ''}"
        f"exec {' '.join(quote(word) for word in command)}\n"
    )


def _kustomization(shape: Shape, files: list[str]) -> Object:
    maps = [{"name": shape.name, "files": files}]
    if shape.copied:
        maps.append({"name": code_of(shape.name), "files": [PROJECT]})
    return new_object(
        "kustomize.config.k8s.io/v1beta1", "Kustomization",
        namespace=shape.namespace, resources=[MANIFESTS], configMapGenerator=maps,
        generatorOptions={"disableNameSuffixHash": True, "labels": dict(shape.labels)},
    )  # fmt: skip
