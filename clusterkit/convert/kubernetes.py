"""PyTorchJob, MPIJob, TrainJob and Job of Kubernetes: the job, and an entry with the pod's keys.

Sources: the API of Kubeflow's training operator 1.9, MPI operator 0.7 and trainer 2.1, Kubernetes'
core/v1 and batch/v1. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from clusterkit.convert import lines
from clusterkit.convert.options import assigned, job_name
from clusterkit.convert.script import Script, left
from clusterkit.convert.sheet import OURS, Sheet, Tree
from clusterkit.jobfile.command import read as read_line
from clusterkit.jobfile.launcher_options import TORCHRUN
from clusterkit.yaml_file import parse_yaml

_QUEUE = "kueue.x-k8s.io/queue-name"
_CONTAINERS = {"pytorchjob": "pytorch", "mpijob": "mpi", "trainjob": "node", "job": "train"}
"""What clusterkit calls a pod's container in a job of that kind."""
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
"""What stands where in the keys that are read here."""


def manifest(sheet: Sheet, text: str, words: Sequence[str]) -> None:
    """A file with one job, and objects that it needs beside it."""
    found = None
    for tree in _documents(sheet, text):
        kind = tree.peek("kind")
        if kind in _KINDS:
            if found is not None:
                sheet.at = tree.document.where(("kind",))
                sheet.refuse(f"kind: {kind}", f"a job file is one job, and {found} is another")
                continue
            found = kind
            sheet.cluster["backend"] = sheet.cluster_name = "kubernetes"
            _job(sheet, tree, str(kind))
        else:
            tree.get("kind")
            if kind in _BESIDE:
                sheet.yours(f"kind: {kind}", "apply it yourself: kubectl apply -f")
            else:
                sheet.refuse(f"kind: {kind}", f"not one of {', '.join(_KINDS)}")
    sheet.at = ""
    if found is None and not sheet.refused:
        sheet.refuse(sheet.name, f"it holds none of {', '.join(_KINDS)}")


def _documents(sheet: Sheet, text: str) -> list[Tree]:
    """The documents of a file; lines are counted from its beginning."""
    found, first = [], 0
    for part in re.split(r"(?m)^---[ \t]*(?:#.*)?$", text):
        if re.sub(r"(?m)#.*$", "", part).strip():
            document = parse_yaml("\n" * first + part.lstrip("\n") if not part.startswith("\n")
                                  else "\n" * first + part, sheet.name)  # fmt: skip
            found.append(Tree(sheet, document))
            found[-1].expect(_TYPES)
        first += part.count("\n")
    return found


def _job(sheet: Sheet, tree: Tree, kind: str) -> None:
    tree.get("apiVersion")
    tree.get("kind")
    sheet.entry(f"kind: {kind}", "flavor", kind.lower())
    name = tree.get("metadata", "name") or tree.get("metadata", "generateName")
    if name:
        sheet.key(f"metadata.name: {name}", "name", job_name(str(name)))
    if namespace := tree.get("metadata", "namespace"):
        sheet.entry(f"metadata.namespace: {namespace}", "namespace", namespace)
    _labels(sheet, tree, "metadata")
    _KINDS[kind](sheet, tree)
    tree.rest()


def _labels(sheet: Sheet, tree: Tree, *place: str | int) -> None:
    for field in ("labels", "annotations"):
        for key, value in tree.each(*place, field):
            what = f"{field}.{key}"
            if key == _QUEUE:
                sheet.entry(what, "queue", value)
            else:
                sheet.cluster.setdefault(field, {})[key] = str(value)
                sheet.note(what, f"cluster entry, {field}: {value}", "cluster")


# ---------------------------------------------------------------- kinds


def _pytorch(sheet: Sheet, tree: Tree) -> None:
    _run_policy(sheet, tree)
    replicas = tree.peek("spec", "pytorchReplicaSpecs") or {}
    nodes = 0
    bodies: dict[str, Any] = {}
    for role in replicas:
        place = ("spec", "pytorchReplicaSpecs", role)
        count = tree.get(*place, "replicas")
        what = f"{role}.replicas: {count}"
        nodes += 1 if count is None else sheet.whole(what, count, least=0) or 0
        _restart_policy(sheet, tree, *place)
        body = tree.peek(*place, "template")
        if bodies and body not in bodies.values():
            tree.get(*place)
            other = next(iter(bodies))
            sheet.refuse(f"{role}.template", f"all nodes are alike, and it differs from {other}'s")
        elif bodies:
            tree.get(*place, "template")
            sheet.note(f"{role}.template", f"as {next(iter(bodies))}'s", "cluster")
        bodies[role] = body
    elastic = tree.peek("spec", "elasticPolicy") is not None
    if not elastic and nodes:
        tree.get("spec", "pytorchReplicaSpecs", next(iter(replicas)), "replicas")
        sheet.key("replicas", "nodes", nodes)
    for key, value in tree.each("spec", "elasticPolicy"):
        what = f"elasticPolicy.{key}: {value}"
        if key in ("minReplicas", "maxReplicas"):
            low, high = (tree.peek("spec", "elasticPolicy", each) or nodes
                         for each in ("minReplicas", "maxReplicas"))  # fmt: skip
            sheet.key(what, "nodes", f"{low}:{high}" if low != high else high)
        elif key == "maxRestarts":
            sheet.number(what, "restarts", value, least=0)
        elif key == "nProcPerNode":
            sheet.number(what, "gpus_per_node", value)
        elif key in _ELASTIC_OURS:
            sheet.drop(what)
        else:
            sheet.refuse(what, "pods do not come and go with a measured value")
    _per_node(sheet, tree, "spec", "nprocPerNode")
    if not bodies:
        sheet.refuse("spec.pytorchReplicaSpecs", "neither Master nor Worker")
        return
    _pod(sheet, tree, "pytorchjob", "spec", "pytorchReplicaSpecs", next(iter(bodies)), "template")


def _mpi(sheet: Sheet, tree: Tree) -> None:
    _run_policy(sheet, tree)
    for key in ("sshAuthMountPath", "launcherCreationPolicy", "mpiImplementation"):
        if (value := tree.get("spec", key)) is not None:
            if key == "mpiImplementation" and value != "OpenMPI":
                sheet.refuse(f"{key}: {value}", "only Open MPI's mpirun is used")
            else:
                sheet.drop(f"{key}: {value}", OURS)
    launcher = ("spec", "mpiReplicaSpecs", "Launcher")
    worker = ("spec", "mpiReplicaSpecs", "Worker")
    slots = tree.get("spec", "slotsPerWorker")
    sheet.number(f"slotsPerWorker: {slots or 1}", "gpus_per_node", slots or 1)
    count = tree.get(*worker, "replicas")
    sheet.number(f"Worker.replicas: {count or 1}", "nodes", count or 1)
    tree.get(*launcher, "replicas")
    for role in (launcher, worker):
        _restart_policy(sheet, tree, *role)
    one = ("template", "spec", "containers", 0)
    command = _command(tree, *launcher, *one)
    for key in ("image", "name", "env", "resources", "securityContext", "imagePullPolicy"):
        value = tree.get(*launcher, *one, key)
        if key == "env":
            _environment(sheet, tree, {}, *launcher, *one, key)
        elif key == "image" and value != tree.peek(*worker, *one, key):
            sheet.refuse(f"Launcher.image: {value}", "all nodes have one image")
        elif value is not None and key != "name":
            sheet.drop(f"Launcher.{key}", "the launcher's pod is clusterkit's own")
    _pod(sheet, tree, "mpijob", *worker, "template", command=command)


def _train(sheet: Sheet, tree: Tree) -> None:
    for key, value in tree.each("spec", "runtimeRef"):
        sheet.drop(f"runtimeRef.{key}: {value}", "a run brings a runtime of its own")
    _labels(sheet, tree, "spec")
    if (suspend := tree.get("spec", "suspend")) is not None:
        _suspended(sheet, suspend)
    trainer = ("spec", "trainer")
    nodes = tree.get(*trainer, "numNodes")
    sheet.number(f"numNodes: {nodes or 1}", "nodes", nodes or 1)
    _per_node(sheet, tree, *trainer, "numProcPerNode")
    if image := tree.get(*trainer, "image"):
        sheet.entry(f"image: {image}", "image", image)
    _resources(sheet, tree, *trainer, "resourcesPerNode")
    _environment(sheet, tree, {}, *trainer, "env")
    _run(sheet, _command(tree, *trainer))


def _plain(sheet: Sheet, tree: Tree) -> None:
    counts = {key: tree.get("spec", key) for key in ("parallelism", "completions")}
    nodes = counts["parallelism"] or 1
    if (counts["completions"] or nodes) != nodes:
        sheet.refuse(f"completions: {counts['completions']}", f"all {nodes} nodes run at once")
    sheet.number(f"parallelism: {nodes}", "nodes", nodes)
    if mode := tree.get("spec", "completionMode"):
        sheet.drop(f"completionMode: {mode}", OURS)
    _policy(sheet, tree, "spec")
    _pod(sheet, tree, "job", "spec", "template")


_KINDS = {"PyTorchJob": _pytorch, "MPIJob": _mpi, "TrainJob": _train, "Job": _plain}


def _per_node(sheet: Sheet, tree: Tree, *place: str) -> None:
    if (count := tree.get(*place)) in ("auto", "gpu"):
        sheet.drop(f"{place[-1]}: {count}", "every GPU of the node, as without it")
    elif count is not None:
        sheet.number(f"{place[-1]}: {count}", "gpus_per_node", count)


def _run_policy(sheet: Sheet, tree: Tree) -> None:
    _policy(sheet, tree, "spec", "runPolicy")
    for key, value in tree.each("spec", "runPolicy", "schedulingPolicy"):
        what = f"schedulingPolicy.{key}: {value}"
        if key == "priorityClass":
            sheet.entry(what, "priority_class", value)
        elif key == "queue":
            sheet.entry(what, "queue", value)
        else:
            sheet.drop(what, "all pods of a run are asked for together")


def _policy(sheet: Sheet, tree: Tree, *place: str) -> None:
    """What a job and a `runPolicy` have in common."""
    for key in ("cleanPodPolicy", "ttlSecondsAfterFinished", "managedBy"):
        if (value := tree.get(*place, key)) is not None:
            sheet.drop(f"{key}: {value}", "`clusterkit rm` removes what a run leaves")
    if (value := tree.get(*place, "activeDeadlineSeconds")) is not None:
        sheet.key(f"activeDeadlineSeconds: {value}", "time_limit", value)
    if (value := tree.get(*place, "backoffLimit")) is not None:
        sheet.number(f"backoffLimit: {value}", "restarts", value, least=0)
    if (value := tree.get(*place, "suspend")) is not None:
        _suspended(sheet, value)


def _suspended(sheet: Sheet, value: Any) -> None:
    if value:
        sheet.refuse("suspend: true", "a run starts when it is submitted")
    else:
        sheet.drop("suspend: false", "as without it")


def _restart_policy(sheet: Sheet, tree: Tree, *place: str) -> None:
    policy = tree.get(*place, "restartPolicy")
    if policy is None:
        return
    what = f"{place[-1]}.restartPolicy: {policy}"
    if policy == "Never" or "restarts" in sheet.job:
        sheet.drop(what, "`restarts` says how often")
    elif tree.peek("spec", "elasticPolicy", "maxRestarts") is not None:
        sheet.drop(what, "maxRestarts says how often")
    else:
        sheet.key(what, "restarts", 3, "restarts: 3; it has no limit, and a job needs one")


# ---------------------------------------------------------------- pods


def _pod(
    sheet: Sheet, tree: Tree, flavor: str, *place: str | int, command: list[str] | None = None
) -> None:
    """The template of the nodes' pods."""
    _labels(sheet, tree, *place, "metadata")
    spec = (*place, "spec")
    patch: dict[str, Any] = {}
    containers = tree.peek(*spec, "containers") or []
    if len(containers) != 1:
        tree.get(*spec, "containers")
        sheet.refuse("containers", f"a pod has one, here are {len(containers)}")
        return
    claims = {str(each.get("name")): each for each in tree.peek(*spec, "volumes") or ()}
    body: dict[str, Any] = {}
    one = (*spec, "containers", 0)
    mounts = tree.peek(*one, "volumeMounts") or []
    for number, mount in enumerate(mounts):
        tree.get(*one, "volumeMounts", number)
        _mount(sheet, mount, claims, body)
    for key, value in list(tree.peek(*spec).items()):
        if key in ("containers", "volumes"):
            continue
        tree.get(*spec, key)
        _pod_key(sheet, key, value, patch)
    used = {each.get("name") for each in body.get("volumeMounts", ())}
    for number, volume in enumerate(tree.peek(*spec, "volumes") or ()):
        tree.get(*spec, "volumes", number)
        if volume.get("name") in used:
            patch.setdefault("volumes", []).append(volume)
            sheet.note(f"volumes.{volume.get('name')}", "cluster entry, patch", "cluster")
        elif volume.get("name") not in {mount.get("name") for mount in mounts}:
            sheet.drop(f"volumes.{volume.get('name')}", "nothing mounts it")
    _resources(sheet, tree, *one, "resources")
    for key, value in list(containers[0].items()):
        if key in ("volumeMounts", "resources", "command", "args"):
            continue
        tree.get(*one, key)
        if key == "name":
            sheet.drop(f"container {value}", f"it is called {_CONTAINERS[flavor]}")
        elif key in _CONTAINER:
            sheet.entry(f"{key}: {value}", _CONTAINER[key], value)
        elif key == "env":
            _environment(sheet, tree, body, *one, key)
        elif key == "ports":
            sheet.drop("ports", "ranks of a run reach each other's pods as they are")
        else:
            body[key] = value
            sheet.note(key, "cluster entry, patch", "cluster")
    if body:
        patch["containers"] = [{"name": _CONTAINERS[flavor], **body}]
    if patch:
        sheet.cluster["patch"] = patch
    _run(sheet, command if command is not None else _command(tree, *one))


def _pod_key(sheet: Sheet, key: str, value: Any, patch: dict[str, Any]) -> None:
    if key in _POD:
        sheet.entry(key, _POD[key], value)
    elif key == "imagePullSecrets":
        sheet.entry(key, "image_pull_secrets", [each.get("name") for each in value or ()])
    elif key == "restartPolicy":
        sheet.drop(f"{key}: {value}", "`restarts` says how often")
    elif key == "activeDeadlineSeconds":
        sheet.key(f"{key}: {value}", "time_limit", value)
    else:
        patch[key] = value
        sheet.note(key, "cluster entry, patch", "cluster")


def _mount(
    sheet: Sheet, mount: Mapping[str, Any], volumes: Mapping[str, Any], body: dict[str, Any]
) -> None:
    """A volume where a container sees it: a claim, memory for /dev/shm, or anything else."""
    name, path = str(mount.get("name")), str(mount.get("mountPath"))
    volume = volumes.get(name, {})
    what = f"volumeMounts.{name}: {path}"
    claim = volume.get("persistentVolumeClaim")
    if claim is not None and not set(mount) - {"name", "mountPath", "readOnly"}:
        entry = {"claim": claim.get("claimName"), "path": path}
        if mount.get("readOnly") or claim.get("readOnly"):
            entry["read_only"] = True
        sheet.more(what, "volumes", entry)
    elif path == "/dev/shm" and "emptyDir" in volume:
        size = (volume["emptyDir"] or {}).get("sizeLimit")
        if size:
            sheet.entry(what, "shm_size", str(size))
        else:
            sheet.drop(what, "8Gi, unless the entry's `shm_size` says another")
    else:
        body.setdefault("volumeMounts", []).append(dict(mount))
        sheet.note(what, "cluster entry, patch", "cluster")


def _environment(sheet: Sheet, tree: Tree, body: dict[str, Any], *place: str | int) -> None:
    for number, each in enumerate(tree.peek(*place) or ()):
        tree.get(*place, number)
        name = str(each.get("name"))
        if "valueFrom" in each:
            body.setdefault("env", []).append(dict(each))
            sheet.note(f"env.{name}", "cluster entry, patch", "cluster")
        elif "$(" in str(each.get("value", "")):
            sheet.refuse(f"env.{name}", "$(NAME) has no value here: write its value instead")
        else:
            assigned(sheet, f"env.{name}", name, str(each.get("value", "")))


def _resources(sheet: Sheet, tree: Tree, *place: str | int) -> None:
    """Amounts that a pod asks for; of a request and a limit the limit counts."""
    asked: dict[str, tuple[str, Any]] = {}
    places: dict[str, str] = {}
    for field in ("requests", "limits"):
        for key, value in tree.each(*place, field):
            if key in asked and str(asked[key][1]) != str(value):
                sheet.drop(f"{asked[key][0]}: {asked[key][1]}", f"the limit counts, {value}")
            elif key in asked:
                sheet.drop(f"{asked[key][0]}: {value}", "the limit says the same")
            asked[key], places[key] = (f"{field}.{key}", value), sheet.at
    for key, (what, value) in asked.items():
        shown_as, sheet.at = f"{what}: {value}", places[key]
        if key.endswith("/gpu"):
            if (count := sheet.whole(shown_as, value, least=0)) is not None:
                sheet.entry(shown_as, "gpus", count)
            if key != "nvidia.com/gpu":
                sheet.entry(shown_as, "gpu_resource", key)
        elif key == "cpu":
            match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(m?)", str(value))
            if match is None:
                sheet.refuse(shown_as, "not a number of cores: 8, 0.5 or 500m")
                continue
            cores = float(match[1]) / (1000 if match[2] else 1)
            sheet.entry(shown_as, "cpus", int(cores) if cores == int(cores) else cores)
        elif key == "memory":
            sheet.entry(shown_as, "memory", str(value))
        else:
            sheet.cluster.setdefault("resources", {})[key] = str(value)
            sheet.note(shown_as, f"cluster entry, resources: {value}", "cluster")


# ---------------------------------------------------------------- the command


def _command(tree: Tree, *place: str | int) -> list[str]:
    tree.get(*place, "args")
    found = tree.get(*place, "command") or []
    return [str(word) for word in (*found, *(tree.peek(*place, "args") or []))]


def _run(sheet: Sheet, words: list[str]) -> None:
    """The container's command: a launcher, a Python, or a script that has one of these."""
    if not words:
        sheet.refuse("command", "without it the image's own runs, which is not known here")
        return
    if filled := next((word for word in words if re.search(r"\$\([A-Z_]\w*\)", word)), None):
        sheet.refuse(filled, "$(NAME) has no value here: write its value instead")
    run_in_image(sheet, words)


def run_in_image(sheet: Sheet, words: list[str], key: str = "workdir") -> None:
    """A command whose program lies in the image; ``cd`` sets this key of the entry."""
    other = left("put it into the image: only the ranks run in a pod", venv=False)
    folder = lambda what, path: sheet.entry(what, key, path)  # noqa: E731
    Script(sheet, {}, _ranks, other, folder).start(words)


def _ranks(sheet: Sheet, words: Sequence[str]) -> None:
    options = [used.name for used in read_line(words).options] if words else []
    by_env = words and read_line(words).tool is TORCHRUN and "--nproc-per-node" not in options
    if by_env and "gpus_per_node" not in sheet.job:
        sheet.key("no --nproc-per-node of torchrun", "gpus_per_node", "auto")
    lines.convert(sheet, words, inside=True, ranks=None if "gpus_per_node" in sheet.job else 1)
