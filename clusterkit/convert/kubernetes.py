"""PyTorchJob, MPIJob, TrainJob and Job of Kubernetes: the job, and an entry with the pod's keys.

Sources: the API of Kubeflow's training operator 1.9, MPI operator 0.7 and trainer 2.1, Kubernetes'
core/v1 and batch/v1. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from clusterkit.convert import lines
from clusterkit.convert.draft import OURS, Draft, Tree
from clusterkit.convert.options import assigned, job_name
from clusterkit.convert.script import Script, left
from clusterkit.jobfile.command import read as read_line
from clusterkit.jobfile.launcher_options import TORCHRUN
from clusterkit.yaml_file import parse_yaml

_QUEUE = "kueue.x-k8s.io/queue-name"
_CONTAINERS = {"pytorchjob": "pytorch", "mpijob": "mpi", "trainjob": "node", "job": "train"}
"""Name of the container in the pods of each kind."""
_BESIDE = ("PersistentVolumeClaim", "PersistentVolume", "ConfigMap", "Secret", "Namespace", "Queue",
           "LocalQueue", "ServiceAccount", "Role", "RoleBinding")  # fmt: skip
_ELASTIC_OURS = ("rdzvBackend", "rdzvHost", "rdzvPort", "rdzvId", "rdzvConf", "standalone")
_POD = {
    "nodeSelector": "node_selector", "tolerations": "tolerations",
    "priorityClassName": "priority_class", "serviceAccountName": "service_account",
    "serviceAccount": "service_account", "terminationGracePeriodSeconds": "stop_grace",
}  # fmt: skip
_CONTAINER = {"image": "image", "imagePullPolicy": "image_pull_policy", "workingDir": "workdir"}

_PARTS = {
    "": dict, ".metadata": dict, ".spec": dict, ".spec.containers": list,
    ".spec.containers.*": dict, ".spec.volumes": list, ".spec.volumes.*": dict,
    ".spec.volumes.*.name": str, ".spec.volumes.*.persistentVolumeClaim": dict,
    ".spec.volumes.*.emptyDir": dict, ".spec.imagePullSecrets": list,
    ".spec.imagePullSecrets.*": dict,
}  # fmt: skip
_CONTAINER_PARTS = {
    "": dict, ".command": list, ".args": list, ".env": list, ".env.*": dict, ".volumeMounts": list,
    ".volumeMounts.*": dict, ".volumeMounts.*.name": str, ".resources": dict,
}  # fmt: skip
_REPLICAS = ("spec.pytorchReplicaSpecs", "spec.mpiReplicaSpecs")
_TEMPLATES = ("spec.template", *(f"{each}.*.template" for each in _REPLICAS))
_TYPES: dict[str, type] = {
    "kind": str, "metadata": dict, "spec": dict, "spec.runPolicy": dict, "spec.elasticPolicy": dict,
    **{each + end: dict for each in _REPLICAS for end in ("", ".*")},
    **{each + end: of for each in _TEMPLATES for end, of in _PARTS.items()},
    **{place + end: of
       for place in ("spec.trainer", *(f"{each}.spec.containers.*" for each in _TEMPLATES))
       for end, of in _CONTAINER_PARTS.items()},
}  # fmt: skip
"""Types of the keys that are read, by path."""


def manifest(draft: Draft, text: str, words: Sequence[str]) -> None:
    """Convert a manifest with one job and the objects that it needs."""
    found = None
    for tree in _documents(draft, text):
        kind = tree.peek("kind")
        if kind in _KINDS:
            if found is not None:
                draft.at = tree.document.where(("kind",))
                draft.refuse(f"kind: {kind}", f"a job file is one job, and {found} is another")
                continue
            found = kind
            draft.cluster["backend"] = draft.cluster_name = "kubernetes"
            _job(draft, tree, str(kind))
        else:
            tree.get("kind")
            if kind in _BESIDE:
                draft.todo(f"kind: {kind}", "apply it yourself: kubectl apply -f")
            else:
                draft.refuse(f"kind: {kind}", f"not one of {', '.join(_KINDS)}")
    draft.at = ""
    if found is None and not draft.refused:
        draft.refuse(draft.name, f"it holds none of {', '.join(_KINDS)}")


def _documents(draft: Draft, text: str) -> list[Tree]:
    """Parse the documents of a file; lines are counted from its beginning."""
    found, first = [], 0
    for part in re.split(r"(?m)^---[ \t]*(?:#.*)?$", text):
        if re.sub(r"(?m)#.*$", "", part).strip():
            document = parse_yaml("\n" * first + part.lstrip("\n") if not part.startswith("\n")
                                  else "\n" * first + part, draft.name)  # fmt: skip
            found.append(Tree(draft, document))
            found[-1].expect(_TYPES)
        first += part.count("\n")
    return found


def _job(draft: Draft, tree: Tree, kind: str) -> None:
    tree.get("apiVersion")
    tree.get("kind")
    draft.entry(f"kind: {kind}", "flavor", kind.lower())
    name = tree.get("metadata", "name") or tree.get("metadata", "generateName")
    if name:
        draft.key(f"metadata.name: {name}", "name", job_name(str(name)))
    if namespace := tree.get("metadata", "namespace"):
        draft.entry(f"metadata.namespace: {namespace}", "namespace", namespace)
    _labels(draft, tree, "metadata")
    _KINDS[kind](draft, tree)
    tree.rest()


def _labels(draft: Draft, tree: Tree, *place: str | int) -> None:
    for field in ("labels", "annotations"):
        for key, value in tree.each(*place, field):
            origin = f"{field}.{key}"
            if key == _QUEUE:
                draft.entry(origin, "queue", value)
            else:
                draft.cluster.setdefault(field, {})[key] = str(value)
                draft.note(origin, f"cluster entry, {field}: {value}", "cluster")


# ---------------------------------------------------------------- kinds


def _pytorch(draft: Draft, tree: Tree) -> None:
    _run_policy(draft, tree)
    replicas = tree.peek("spec", "pytorchReplicaSpecs") or {}
    nodes = 0
    bodies: dict[str, Any] = {}
    for role in replicas:
        place = ("spec", "pytorchReplicaSpecs", role)
        count = tree.get(*place, "replicas")
        origin = f"{role}.replicas: {count}"
        nodes += 1 if count is None else draft.integer(origin, count, least=0) or 0
        _restart_policy(draft, tree, *place)
        body = tree.peek(*place, "template")
        if bodies and body not in bodies.values():
            tree.get(*place)
            other = next(iter(bodies))
            draft.refuse(f"{role}.template", f"all nodes are alike, and it differs from {other}'s")
        elif bodies:
            tree.get(*place, "template")
            draft.note(f"{role}.template", f"as {next(iter(bodies))}'s", "cluster")
        bodies[role] = body
    elastic = tree.peek("spec", "elasticPolicy") is not None
    if not elastic and nodes:
        tree.get("spec", "pytorchReplicaSpecs", next(iter(replicas)), "replicas")
        draft.key("replicas", "nodes", nodes)
    for key, value in tree.each("spec", "elasticPolicy"):
        origin = f"elasticPolicy.{key}: {value}"
        if key in ("minReplicas", "maxReplicas"):
            low, high = (tree.peek("spec", "elasticPolicy", each) or nodes
                         for each in ("minReplicas", "maxReplicas"))  # fmt: skip
            draft.key(origin, "nodes", f"{low}:{high}" if low != high else high)
        elif key == "maxRestarts":
            draft.number(origin, "restarts", value, least=0)
        elif key == "nProcPerNode":
            draft.number(origin, "gpus_per_node", value)
        elif key in _ELASTIC_OURS:
            draft.drop(origin)
        else:
            draft.refuse(origin, "clusterkit does not scale a run by a metric")
    _per_node(draft, tree, "spec", "nprocPerNode")
    if not bodies:
        draft.refuse("spec.pytorchReplicaSpecs", "neither Master nor Worker")
        return
    _pod(draft, tree, "pytorchjob", "spec", "pytorchReplicaSpecs", next(iter(bodies)), "template")


def _mpi(draft: Draft, tree: Tree) -> None:
    _run_policy(draft, tree)
    for key in ("sshAuthMountPath", "launcherCreationPolicy", "mpiImplementation"):
        if (value := tree.get("spec", key)) is not None:
            if key == "mpiImplementation" and value != "OpenMPI":
                draft.refuse(f"{key}: {value}", "only Open MPI's mpirun is used")
            else:
                draft.drop(f"{key}: {value}", OURS)
    launcher = ("spec", "mpiReplicaSpecs", "Launcher")
    worker = ("spec", "mpiReplicaSpecs", "Worker")
    slots = tree.get("spec", "slotsPerWorker")
    draft.number(f"slotsPerWorker: {slots or 1}", "gpus_per_node", slots or 1)
    count = tree.get(*worker, "replicas")
    draft.number(f"Worker.replicas: {count or 1}", "nodes", count or 1)
    tree.get(*launcher, "replicas")
    for role in (launcher, worker):
        _restart_policy(draft, tree, *role)
    one = ("template", "spec", "containers", 0)
    command = _command(tree, *launcher, *one)
    for key in ("image", "name", "env", "resources", "securityContext", "imagePullPolicy"):
        value = tree.get(*launcher, *one, key)
        if key == "env":
            _environment(draft, tree, {}, *launcher, *one, key)
        elif key == "image" and value != tree.peek(*worker, *one, key):
            draft.refuse(f"Launcher.image: {value}", "all nodes have one image")
        elif value is not None and key != "name":
            draft.drop(f"Launcher.{key}", "clusterkit defines the launcher's pod")
    _pod(draft, tree, "mpijob", *worker, "template", command=command)


def _train(draft: Draft, tree: Tree) -> None:
    for key, value in tree.each("spec", "runtimeRef"):
        draft.drop(f"runtimeRef.{key}: {value}", "clusterkit creates the runtime of a run")
    _labels(draft, tree, "spec")
    if (suspend := tree.get("spec", "suspend")) is not None:
        _suspended(draft, suspend)
    trainer = ("spec", "trainer")
    nodes = tree.get(*trainer, "numNodes")
    draft.number(f"numNodes: {nodes or 1}", "nodes", nodes or 1)
    _per_node(draft, tree, *trainer, "numProcPerNode")
    if image := tree.get(*trainer, "image"):
        draft.entry(f"image: {image}", "image", image)
    _resources(draft, tree, *trainer, "resourcesPerNode")
    _environment(draft, tree, {}, *trainer, "env")
    _run(draft, _command(tree, *trainer))


def _plain(draft: Draft, tree: Tree) -> None:
    counts = {key: tree.get("spec", key) for key in ("parallelism", "completions")}
    nodes = counts["parallelism"] or 1
    if (counts["completions"] or nodes) != nodes:
        draft.refuse(f"completions: {counts['completions']}", f"all {nodes} nodes run at once")
    draft.number(f"parallelism: {nodes}", "nodes", nodes)
    if mode := tree.get("spec", "completionMode"):
        draft.drop(f"completionMode: {mode}", OURS)
    _policy(draft, tree, "spec")
    _pod(draft, tree, "job", "spec", "template")


_KINDS = {"PyTorchJob": _pytorch, "MPIJob": _mpi, "TrainJob": _train, "Job": _plain}


def _per_node(draft: Draft, tree: Tree, *place: str) -> None:
    if (count := tree.get(*place)) in ("auto", "gpu"):
        draft.drop(f"{place[-1]}: {count}", "all GPUs of the node is the default")
    elif count is not None:
        draft.number(f"{place[-1]}: {count}", "gpus_per_node", count)


def _run_policy(draft: Draft, tree: Tree) -> None:
    _policy(draft, tree, "spec", "runPolicy")
    for key, value in tree.each("spec", "runPolicy", "schedulingPolicy"):
        origin = f"schedulingPolicy.{key}: {value}"
        if key == "priorityClass":
            draft.entry(origin, "priority_class", value)
        elif key == "queue":
            draft.entry(origin, "queue", value)
        else:
            draft.drop(origin, "the pods of a run are gang-scheduled by its queue")


def _policy(draft: Draft, tree: Tree, *place: str) -> None:
    """Convert the keys that Job and `runPolicy` share."""
    for key in ("cleanPodPolicy", "ttlSecondsAfterFinished", "managedBy"):
        if (value := tree.get(*place, key)) is not None:
            draft.drop(f"{key}: {value}", "`clusterkit rm` removes what remains of a run")
    if (value := tree.get(*place, "activeDeadlineSeconds")) is not None:
        draft.key(f"activeDeadlineSeconds: {value}", "time_limit", value)
    if (value := tree.get(*place, "backoffLimit")) is not None:
        draft.number(f"backoffLimit: {value}", "restarts", value, least=0)
    if (value := tree.get(*place, "suspend")) is not None:
        _suspended(draft, value)


def _suspended(draft: Draft, value: Any) -> None:
    if value:
        draft.refuse("suspend: true", "a run starts when it is submitted")
    else:
        draft.drop("suspend: false", "as without it")


def _restart_policy(draft: Draft, tree: Tree, *place: str) -> None:
    policy = tree.get(*place, "restartPolicy")
    if policy is None:
        return
    origin = f"{place[-1]}.restartPolicy: {policy}"
    if policy == "Never" or "restarts" in draft.job:
        draft.drop(origin, "`restarts` is the limit")
    elif tree.peek("spec", "elasticPolicy", "maxRestarts") is not None:
        draft.drop(origin, "maxRestarts is the limit")
    else:
        draft.key(origin, "restarts", 3, "restarts: 3; it has no limit, and a job needs one")


# ---------------------------------------------------------------- pods


def _pod(
    draft: Draft, tree: Tree, flavor: str, *place: str | int, command: list[str] | None = None
) -> None:
    """Convert the pod template of the nodes."""
    _labels(draft, tree, *place, "metadata")
    spec = (*place, "spec")
    patch: dict[str, Any] = {}
    containers = tree.peek(*spec, "containers") or []
    if len(containers) != 1:
        tree.get(*spec, "containers")
        draft.refuse("containers", f"a pod has one, here are {len(containers)}")
        return
    claims = {str(each.get("name")): each for each in tree.peek(*spec, "volumes") or ()}
    body: dict[str, Any] = {}
    one = (*spec, "containers", 0)
    mounts = tree.peek(*one, "volumeMounts") or []
    for number, mount in enumerate(mounts):
        tree.get(*one, "volumeMounts", number)
        _mount(draft, mount, claims, body)
    for key, value in list(tree.peek(*spec).items()):
        if key in ("containers", "volumes"):
            continue
        tree.get(*spec, key)
        _pod_key(draft, key, value, patch)
    used = {each.get("name") for each in body.get("volumeMounts", ())}
    for number, volume in enumerate(tree.peek(*spec, "volumes") or ()):
        tree.get(*spec, "volumes", number)
        if volume.get("name") in used:
            patch.setdefault("volumes", []).append(volume)
            draft.note(f"volumes.{volume.get('name')}", "cluster entry, patch", "cluster")
        elif volume.get("name") not in {mount.get("name") for mount in mounts}:
            draft.drop(f"volumes.{volume.get('name')}", "nothing mounts it")
    _resources(draft, tree, *one, "resources")
    for key, value in list(containers[0].items()):
        if key in ("volumeMounts", "resources", "command", "args"):
            continue
        tree.get(*one, key)
        if key == "name":
            draft.drop(f"container {value}", f"it is called {_CONTAINERS[flavor]}")
        elif key in _CONTAINER:
            draft.entry(f"{key}: {value}", _CONTAINER[key], value)
        elif key == "env":
            _environment(draft, tree, body, *one, key)
        elif key == "ports":
            draft.drop("ports", "the pods of a run reach each other on every port")
        else:
            body[key] = value
            draft.note(key, "cluster entry, patch", "cluster")
    if body:
        patch["containers"] = [{"name": _CONTAINERS[flavor], **body}]
    if patch:
        draft.cluster["patch"] = patch
    _run(draft, command if command is not None else _command(tree, *one))


def _pod_key(draft: Draft, key: str, value: Any, patch: dict[str, Any]) -> None:
    if key in _POD:
        draft.entry(key, _POD[key], value)
    elif key == "imagePullSecrets":
        draft.entry(key, "image_pull_secrets", [each.get("name") for each in value or ()])
    elif key == "restartPolicy":
        draft.drop(f"{key}: {value}", "`restarts` is the limit")
    elif key == "activeDeadlineSeconds":
        draft.key(f"{key}: {value}", "time_limit", value)
    else:
        patch[key] = value
        draft.note(key, "cluster entry, patch", "cluster")


def _mount(
    draft: Draft, mount: Mapping[str, Any], volumes: Mapping[str, Any], body: dict[str, Any]
) -> None:
    """Convert a volume mount: a claim, memory for /dev/shm, or another volume."""
    name, path = str(mount.get("name")), str(mount.get("mountPath"))
    volume = volumes.get(name, {})
    origin = f"volumeMounts.{name}: {path}"
    claim = volume.get("persistentVolumeClaim")
    if claim is not None and not set(mount) - {"name", "mountPath", "readOnly"}:
        entry = {"claim": claim.get("claimName"), "path": path}
        if mount.get("readOnly") or claim.get("readOnly"):
            entry["read_only"] = True
        draft.append(origin, "volumes", entry)
    elif path == "/dev/shm" and "emptyDir" in volume:
        size = (volume["emptyDir"] or {}).get("sizeLimit")
        if size:
            draft.entry(origin, "shm_size", str(size))
        else:
            draft.drop(origin, "8Gi, unless the entry's `shm_size` says another")
    else:
        body.setdefault("volumeMounts", []).append(dict(mount))
        draft.note(origin, "cluster entry, patch", "cluster")


def _environment(draft: Draft, tree: Tree, body: dict[str, Any], *place: str | int) -> None:
    for number, each in enumerate(tree.peek(*place) or ()):
        tree.get(*place, number)
        name = str(each.get("name"))
        if "valueFrom" in each:
            body.setdefault("env", []).append(dict(each))
            draft.note(f"env.{name}", "cluster entry, patch", "cluster")
        elif "$(" in str(each.get("value", "")):
            draft.refuse(f"env.{name}", "$(NAME) has no value here: write its value instead")
        else:
            assigned(draft, f"env.{name}", name, str(each.get("value", "")))


def _resources(draft: Draft, tree: Tree, *place: str | int) -> None:
    """Convert resource requests and limits; a limit overrides a request."""
    asked: dict[str, tuple[str, Any]] = {}
    places: dict[str, str] = {}
    for field in ("requests", "limits"):
        for key, value in tree.each(*place, field):
            if key in asked and str(asked[key][1]) != str(value):
                draft.drop(f"{asked[key][0]}: {asked[key][1]}", f"the limit is used, {value}")
            elif key in asked:
                draft.drop(f"{asked[key][0]}: {value}", "same as the limit")
            asked[key], places[key] = (f"{field}.{key}", value), draft.at
    for key, (origin, value) in asked.items():
        shown_as, draft.at = f"{origin}: {value}", places[key]
        if key.endswith("/gpu"):
            if (count := draft.integer(shown_as, value, least=0)) is not None:
                draft.entry(shown_as, "gpus", count)
            if key != "nvidia.com/gpu":
                draft.entry(shown_as, "gpu_resource", key)
        elif key == "cpu":
            match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(m?)", str(value))
            if match is None:
                draft.refuse(shown_as, "not a number of cores: 8, 0.5 or 500m")
                continue
            cores = float(match[1]) / (1000 if match[2] else 1)
            draft.entry(shown_as, "cpus", int(cores) if cores == int(cores) else cores)
        elif key == "memory":
            draft.entry(shown_as, "memory", str(value))
        else:
            draft.cluster.setdefault("resources", {})[key] = str(value)
            draft.note(shown_as, f"cluster entry, resources: {value}", "cluster")


# ---------------------------------------------------------------- the command


def _command(tree: Tree, *place: str | int) -> list[str]:
    tree.get(*place, "args")
    found = tree.get(*place, "command") or []
    return [str(word) for word in (*found, *(tree.peek(*place, "args") or []))]


def _run(draft: Draft, words: list[str]) -> None:
    """Convert the container's command: a launcher, a Python, or a script that starts one."""
    if not words:
        draft.refuse("command", "the image's default command is not known: write the command")
        return
    if filled := next((word for word in words if re.search(r"\$\([A-Z_]\w*\)", word)), None):
        draft.refuse(filled, "$(NAME) has no value here: write its value instead")
    run_in_image(draft, words)


def run_in_image(draft: Draft, words: list[str], key: str = "workdir") -> None:
    """Convert a command whose program is in the image; ``cd`` sets `workdir` of the entry."""
    other = left("put it into the image: only the ranks run in a pod", venv=False)
    folder = lambda origin, path: draft.entry(origin, key, path)  # noqa: E731
    Script(draft, {}, _ranks, other, folder).start(words)


def _ranks(draft: Draft, words: Sequence[str]) -> None:
    options = [used.name for used in read_line(words).options] if words else []
    by_env = words and read_line(words).tool is TORCHRUN and "--nproc-per-node" not in options
    if by_env and "gpus_per_node" not in draft.job:
        draft.key("no --nproc-per-node of torchrun", "gpus_per_node", "auto")
    lines.convert(draft, words, inside=True, ranks=None if "gpus_per_node" in draft.job else 1)
