"""PyTorchJob and MPIJob of Kubernetes: the job, and an entry with the pod's keys.

Sources: the API of Kubeflow's training operator 1.9 and MPI operator 0.7, and Kubernetes' core/v1.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from clusterkit.convert import lines
from clusterkit.convert.draft import OURS, Draft, Tree
from clusterkit.convert.options import assigned, job_name
from clusterkit.jobfile.command import read as read_line
from clusterkit.jobfile.launcher_options import MPIRUN, TORCHRUN
from clusterkit.jobfile.yaml_file import parse_yaml

_QUEUE = "kueue.x-k8s.io/queue-name"
_CONTAINERS = {"pytorchjob": "pytorch", "mpijob": "mpi"}
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
_TEMPLATES = tuple(f"{each}.*.template" for each in _REPLICAS)
_TYPES: dict[str, type] = {
    "kind": str, "metadata": dict, "spec": dict, "spec.runPolicy": dict, "spec.elasticPolicy": dict,
    **{each + end: dict for each in _REPLICAS for end in ("", ".*")},
    **{each + end: of for each in _TEMPLATES for end, of in _PARTS.items()},
    **{place + end: of
       for place in (f"{each}.spec.containers.*" for each in _TEMPLATES)
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
        _restart_policy(draft, tree, *place, default="OnFailure")
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
        _restart_policy(draft, tree, *role, default="Never")
    one = ("template", "spec", "containers", 0)
    command = _command(draft, tree, *launcher, *one)
    command = _passed_on(draft, tree, command, *launcher, *one, "env")
    for key in ("image", "name", "resources", "securityContext", "imagePullPolicy"):
        value = tree.get(*launcher, *one, key)
        if key == "image" and value != tree.peek(*worker, *one, key):
            draft.refuse(f"Launcher.image: {value}", "all nodes have one image")
        elif value is not None and key not in ("name", "image"):
            draft.drop(f"Launcher.{key}", "clusterkit defines the launcher's pod")
    server = tree.peek(*worker, *one, "command") or [""]
    if str(server[0]).rpartition("/")[2] == "sshd":
        for key in ("command", "args"):
            tree.get(*worker, *one, key)
        draft.drop("Worker.command: sshd", OURS)
    _pod(draft, tree, "mpijob", *worker, "template", command=command)


def _passed_on(draft: Draft, tree: Tree, command: list[str], *place: str | int) -> list[str]:
    """Return mpirun's command with the values of what ``-x NAME`` passes on to the ranks."""
    given: dict[str, str | None] = {}
    for number, each in enumerate(tree.peek(*place) or ()):
        name = str(each.get("name"))
        given[name] = None if "valueFrom" in each else str(each.get("value", ""))
        tree.get(*place, number)
        passed = any(word.partition("=")[0] == name for word in command)
        if not passed:
            draft.drop(f"Launcher.env.{name}", "mpirun passes on what -x names")
    words, rest = [], list(command)
    while rest:
        word = rest.pop(0)
        name = rest[0] if word == "-x" and rest and "=" not in rest[0] else ""
        if name and given.get(name, "") is None:
            draft.refuse(f"-x {name}", "write its valueFrom into the Worker's env")
        if not name:
            words.append(word)
        elif name in given:
            words += [word, f"{rest.pop(0)}={given[name]}"]
        else:
            draft.drop(f"-x {rest.pop(0)}", "ranks have what the image sets")
    return words


_KINDS = {"PyTorchJob": _pytorch, "MPIJob": _mpi}


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


def _restart_policy(draft: Draft, tree: Tree, *place: str, default: str) -> None:
    """Convert the policy of a role; ``default``: the operator's."""
    given = tree.get(*place, "restartPolicy")
    policy = given or default
    origin = f"{place[-1]}.restartPolicy: {policy}{'' if given else ', the default'}"
    if policy == "Never" or "restarts" in draft.job:
        if given:
            draft.drop(origin, "`restarts` is the limit")
    elif policy == "ExitCode":
        draft.refuse(origin, "write Never or OnFailure; `retry_on` of the job says what is retried")
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
    _defaults(draft, tree, *spec)
    _run(draft, command if command is not None else _command(draft, tree, *one))


def _defaults(draft: Draft, tree: Tree, *spec: str | int) -> None:
    """Say no where the entry's default is yes, and name the default that stays."""
    contexts = [
        tree.peek(*spec, *part, "securityContext") or {} for part in ((), ("containers", 0))
    ]
    asked = {key: value for context in contexts for key, value in context.items()}
    draft.at = tree.document.where(spec)
    if "gpus" not in draft.cluster:
        draft.entry("no GPUs in resources", "gpus", 0)
    if not asked.get("readOnlyRootFilesystem"):
        draft.entry("no readOnlyRootFilesystem", "read_only_root", False)
    user = asked.get("runAsUser")
    if isinstance(user, int) and user > 0:
        draft.entry(f"runAsUser: {user}", "user", user)
    else:
        todo = "ranks run as user 1000, not as the image's; `user` of the entry sets another id"
        draft.todo("no runAsUser", todo)


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


def _command(draft: Draft, tree: Tree, *place: str | int) -> list[str]:
    tree.get(*place, "args")
    found, args = tree.get(*place, "command") or [], tree.peek(*place, "args") or []
    if args and not found:
        draft.refuse("args", "the image's own entry point gets them: write the command")
        return []
    return [str(word) for word in (*found, *args)]


def _run(draft: Draft, words: list[str]) -> None:
    """Convert the container's command: a launcher or a Python, also within `bash -c`."""
    if not words:
        if not draft.refused:
            why = "the image's default command is not known: write the command"
            draft.refuse("command", why)
        return
    if filled := next((word for word in words if re.search(r"\$\([A-Z_]\w*\)", word)), None):
        draft.refuse(filled, "$(NAME) has no value here: write its value instead")
    if (inner := lines.script_of(words)) is not None:
        words = lines.inside_shell(draft, inner, {})
    if not words:
        return
    if not lines.starts_ranks(words):
        draft.refuse(words[0], "only a launcher or a Python is converted: what this starts is not "
                     "known here")  # fmt: skip
    elif draft.cluster.get("flavor") == "mpijob" and read_line(words).tool is not MPIRUN:
        draft.refuse(words[0], "the launcher of an MPIJob starts mpirun")
    else:
        _ranks(draft, words)
        _check_folder(draft)


def _check_folder(draft: Draft) -> None:
    """Refuse a path in the image that is relative to a folder that only the image knows."""
    if "workdir" in draft.cluster:
        return
    path = draft.job.get("command", ["", ""])[-1]
    if "command" in draft.job and not str(path).startswith("/"):
        draft.refuse(path, "relative to the image's folder, which is not known: write workingDir")
    else:
        draft.todo("no workingDir", "ranks start in `workdir` of the entry, not in the image's own "
                   "folder")  # fmt: skip


def _ranks(draft: Draft, words: Sequence[str]) -> None:
    options = [used.name for used in read_line(words).options] if words else []
    by_env = words and read_line(words).tool is TORCHRUN and "--nproc-per-node" not in options
    if by_env and "gpus_per_node" not in draft.job:
        draft.key("no --nproc-per-node of torchrun", "gpus_per_node", "auto")
    lines.convert(draft, words, inside=True, ranks=None if "gpus_per_node" in draft.job else 1)
