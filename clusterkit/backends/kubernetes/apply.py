"""Create a run's objects by the requests of its plan, and remove them all."""

from __future__ import annotations

import base64
import contextlib
import math
import posixpath
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import yaml

from clusterkit.backends.kubernetes import observe
from clusterkit.backends.kubernetes.api_server import (
    APPLY_PATCH,
    PARALLEL_REQUESTS,
    Forbidden,
    InternalError,
    NotFound,
    Refusal,
    RunObjects,
    Unreachable,
    Unreadable,
)
from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.lost_pods import MERGE_PATCH
from clusterkit.backends.kubernetes.objects import (
    ATTEMPT,
    SERVER_SIDE_APPLY,
    USER,
    Object,
    new_object,
    path_of,
)
from clusterkit.backends.kubernetes.pod import Pod, PodState, read_pod
from clusterkit.backends.kubernetes.pod_log import fetch_logs
from clusterkit.backends.kubernetes.pods import PROJECT, STOP_EXTRA, code_of
from clusterkit.backends.node_status import folder_exists
from clusterkit.errors import BadInput, ClusterkitError, SubmitFailed, Unavailable
from clusterkit.execute import carry_out_command
from clusterkit.plan import Plan, Step
from clusterkit.run.folder import OWNS_CLUSTER_OBJECTS, RunFolder, RunHandle
from clusterkit.transport import Transport

UNREACHABLE_SECONDS = 40.0
"""How long to retry while the API server does not answer."""
OPERATOR_SECONDS = 10.0
"""How long to retry while an operator is not ready for a job."""
_RUNTIME_UNKNOWN = "must be created before"
"""In the trainer's refusal of a job whose runtime it has not seen yet; its reason is Forbidden."""
KUSTOMIZATION, MANIFESTS = "kustomization.yaml", "manifests.yaml"
_OWNERS = tuple(flavor.kind for flavor in FLAVORS.values())


def objects_of(plan: Plan) -> list[Object]:
    """Return a plan's objects other than config maps of files; the job is the last."""
    text = next(file.text for file in plan.files if file.path.endswith(f"/{MANIFESTS}"))
    return list(yaml.safe_load_all(text or ""))


def all_objects(plan: Plan, project: bytes = b"") -> list[Object]:
    """Return a plan's objects, as `kubectl kustomize` would: config maps of files, then the others.

    Args:
        project: what a step of the plan has packed.
    """
    files = {posixpath.basename(file.path): file.content() for file in plan.files}
    files[PROJECT] = project
    main = yaml.safe_load(files[KUSTOMIZATION])
    labels = main["generatorOptions"]["labels"]
    maps = [
        new_object(
            "v1", "ConfigMap", {"name": each["name"], "labels": dict(labels)},
            **_data({name: files[name] for name in each["files"]}),
        )
        for each in main["configMapGenerator"]
    ]  # fmt: skip
    return [*maps, *objects_of(plan)]


def creation_steps(
    objects: Sequence[Object], namespace: str, secrets: tuple[str, ...]
) -> tuple[Step, ...]:
    """Return the requests that create a run's objects and the Secret with its secrets. Pure.

    Args:
        objects: the first is the config map of the run's files, the last its job.
    """
    *others, job = objects
    if secrets:
        others.insert(0, new_object("v1", "Secret", objects[0]["metadata"]))
    # The server checks in the role whether we may bind it. With the job, the last, the run begins.
    bindings = [each for each in others if each["kind"] == "RoleBinding"]
    in_order = [each for each in others if each not in bindings], bindings, [job]

    def patch(each: Iterable[Object], query: str = "") -> Step:
        argv = ("PATCH", *(_path(namespace, one) + query for one in each))
        return Step(kind="request", host="localhost", argv=argv)

    first, *steps = [patch(each, f"?{SERVER_SIDE_APPLY}") for each in in_order if each]
    # Whoever deletes the job deletes all that it owns.
    return (msgspec.structs.replace(first, secrets=secrets), *steps, patch(others))


class Creation:
    """Carries out the steps of a plan that creates a run's objects."""

    def __init__(self, plan: Plan, transport: Transport) -> None:
        self._plan, self._to = plan, RunObjects(plan, transport)
        self._folder = RunFolder(Path(plan.files[0].path).parents[1])
        self._objects: dict[str, Object] = {}
        self._owner: Object = {}

    def __call__(self, step: Step, transport: Transport, env: Mapping[str, str]) -> str:
        """Carry out a step. Its secrets become the run's Secret; they are in no file.

        Raises:
            SubmitFailed: the API server refuses an object.
            Unreachable: the API server does not answer.
            BadInput: the namespace has another run of this id.
        """
        if step.kind != "request":
            return carry_out_command(step, transport, env)
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            try:
                if not self._objects:
                    self._read(step, env)
                    self._claim(pool)
                *_, self._owner = pool.map(partial(_tried, self._patch), step.argv[1:])
            except Refusal as error:
                raise SubmitFailed(error.message) from error
        return "answered"

    def _read(self, step: Step, env: Mapping[str, str]) -> None:
        project = self._folder.read(f"files/{PROJECT}") if self._plan.trees else b""
        objects = all_objects(self._plan, project)
        # Named and labelled as the run's config map.
        secrets = {name: env[name] for name in step.secrets}
        objects.append(new_object("v1", "Secret", objects[0]["metadata"], stringData=secrets))
        _renumber(objects, env["CLUSTERKIT_ATTEMPT"])
        self._objects = {_path(self._to.namespace, each): each for each in objects}

    def _claim(self, pool: ThreadPoolExecutor) -> None:
        claimed = self._folder.file(OWNS_CLUSTER_OBJECTS)
        if claimed.exists():
            return
        # Nothing was created yet: an object of the same name is of another run. (The submitter's
        # role does not allow to read other kinds.)
        kinds, absent = (*_OWNERS, "ConfigMap"), (NotFound, Forbidden)
        named = [path for path, each in self._objects.items() if each["kind"] in kinds]
        found = pool.map(partial(_tried, partial(self._to.find, absent=absent)), named)
        for path, existing in zip(named, found, strict=True):
            if existing is not None:
                each, run = self._objects[path], self._plan.run_id
                raise _another_run(run, each, existing, self._to.namespace)
        claimed.touch()

    def _patch(self, path: str) -> Object:
        of, _, applied = path.partition("?")
        if applied:
            return self._to.patch(path, self._objects[of], APPLY_PATCH)
        meta = self._owner["metadata"]
        owner = {key: self._owner[key] for key in ("apiVersion", "kind")}
        owner |= {key: meta[key] for key in ("name", "uid")}
        return self._to.patch(path, {"metadata": {"ownerReferences": [owner]}}, MERGE_PATCH)


def _another_run(run: str, each: Object, existing: Object, namespace: str) -> BadInput:
    meta = existing["metadata"]
    user = (meta.get("labels") or {}).get(USER)
    return BadInput(
        f"another run has this id: {each['kind']} {each['metadata']['name']} in namespace "
        f"{namespace}, made{f' by {user}' if user else ''} at {meta.get('creationTimestamp')}",
        hint=f"another --run-id; `clusterkit attach {run} --cluster NAME` takes that run over",
    )


def _tried(request: Callable[[str], Any], path: str) -> Any:
    """Make a request, with retries, and return the answer."""
    start = time.monotonic()
    while True:
        try:
            return request(path)
        except Unreachable:
            if time.monotonic() > start + UNREACHABLE_SECONDS:
                raise
            time.sleep(1)
        except Refusal as error:
            # The trainer sees a runtime a moment after it was created; the webhook of an operator
            # whose pod is being replaced does not answer.
            not_ready = isinstance(error, InternalError) or _RUNTIME_UNKNOWN in error.detail
            if not not_ready or time.monotonic() > start + OPERATOR_SECONDS:
                raise
            time.sleep(OPERATOR_SECONDS / 50)


def _path(namespace: str, each: Mapping[str, Any]) -> str:
    return path_of(namespace, each["apiVersion"], each["kind"], each["metadata"]["name"])


def _data(files: Mapping[str, bytes]) -> Object:
    """Return the keys of a config map with these files: text, and base64 of all else."""
    text, binary = {}, {}
    for name, content in files.items():
        try:
            text[name] = content.decode()
        except UnicodeDecodeError:
            binary[name] = base64.b64encode(content).decode()
    return {"data": text} | ({"binaryData": binary} if binary else {})


def _renumber(value: Any, attempt: str) -> None:
    if isinstance(value, dict):
        if isinstance(value.get(ATTEMPT), str):
            value[ATTEMPT] = attempt
        for inner in value.values():
            _renumber(inner, attempt)
    elif isinstance(value, list):
        for inner in value:
            _renumber(inner, attempt)


# ---------------------------------------------------------------- removing

POLL_SECONDS = 0.25
STUCK_SECONDS = 20.0
"""How long no further pod may end after the grace period before the removal fails."""
DELETE_SECONDS = 2.0
"""Pause before pods are deleted again: an operator may have created some meanwhile."""
MAX_NAMED = 3
"""How many pods an error names."""


def remove(handle: RunHandle, transport: Transport) -> None:
    """End the run's pods, recording them, and remove its objects.

    Objects that this run did not create stay: somebody may have submitted another run of this id.

    Raises:
        Unavailable: the API server does not answer or refuses, or pods do not end.
    """
    plan, objects = handle.plan, RunObjects(handle.plan, transport)
    if folder_exists(handle) and not handle.folder.file(OWNS_CLUSTER_OBJECTS).exists():
        return
    job, *others = _paths(plan, objects)
    try:
        removed = observe.Removed()
        if folder_exists(handle):
            pods = observe.list_pods(handle, transport)
            known = observe.known_after(observe.read_known(handle), pods, plan)
            _bring_logs(handle, transport, [known[name] for name in pods])
            observe.write_known(handle, known)
            ended = frozenset(pod.name for pod in pods.values() if pod.running)
            removed = observe.removed_pods(handle) or observe.Removed(ended)
            observe.write_removed(handle, removed)
        # Before the pods, so that nothing creates new ones.
        objects.delete(job)
        _delete_pods(objects)
        for path in others:
            objects.delete(path)
        lost = _await_gone(plan, objects)
        if folder_exists(handle):
            removed = msgspec.structs.replace(removed, lost=removed.lost | lost, complete=True)
            observe.write_removed(handle, removed)
    except ClusterkitError as error:
        raise Unavailable(
            f"could not end run {plan.run_id}: {error.message}",
            hint=f"clusterkit cancel {plan.run_id} again, once it answers",
        ) from error


def _bring_logs(handle: RunHandle, transport: Transport, pods: list[Pod]) -> None:
    """Copy what is not in the run's folder of the logs of pods, before these are deleted.

    Raises:
        Unreadable: something else answers for the API server.
    """

    def bring(pod: Pod) -> None:
        try:
            fetch_logs(handle, transport, [pod])
        except Unreadable:
            raise
        except ClusterkitError:
            pass  # it is on a node that does not answer, or the disk is full

    with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        list(pool.map(bring, (pod for pod in pods if not pod.logged)))


def _paths(plan: Plan, objects: RunObjects) -> list[str]:
    """Return the paths of the run's objects; the job's is the first."""
    named = [(each["apiVersion"], each["kind"], each["metadata"]["name"])
             for each in reversed(objects_of(plan))]  # fmt: skip
    files = [("v1", kind, objects.name) for kind in ("ConfigMap", "Secret")]
    code = [("v1", "ConfigMap", code_of(objects.name))] if plan.trees else []
    return [objects.path(*each) for each in (*named, *files, *code)]


def _delete_pods(objects: RunObjects) -> None:
    """Delete the run's pods in one request, and the services that an operator made for them.

    Without the right to do so this is left to the cluster's garbage collection, which deletes them
    one by one: 200 take it 15 s.
    """
    collections = [objects.pods_path()]
    if objects.flavor.kind == "PyTorchJob":
        selector = quote(f"training.kubeflow.org/job-name={objects.name}", safe="")
        collections.append(f"{objects.path('v1', 'Service')}?labelSelector={selector}")
    for path in collections:
        with contextlib.suppress(Forbidden):
            objects.delete(path)


def _await_gone(plan: Plan, objects: RunObjects) -> frozenset[str]:
    """Wait until all pods are gone; returns the names of those on nodes that do not answer.

    Raises:
        Unavailable: some do not end.
    """
    lost: set[str] = set()
    started = deleted_at = time.monotonic()
    grace_ends = started + plan.stop_grace + STOP_EXTRA
    deadline, fewest = grace_ends + STUCK_SECONDS, math.inf
    while True:
        now = time.monotonic()
        late = now > grace_ends
        # During the grace period it only matters whether there are any.
        items = objects.items(objects.pods_path(**({} if late else {"limit": "1"})))
        if not items:
            return frozenset(lost)
        if now > deleted_at + DELETE_SECONDS:
            deleted_at = now
            _delete_pods(objects)
        if late:
            if len(items) < fewest:
                fewest, deadline = len(items), max(deadline, now + STUCK_SECONDS)
            lost |= _remove_lost(objects, items)
        if now > deadline:
            names = sorted(each["metadata"]["name"] for each in items)
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            raise Unavailable(f"pods that do not terminate: {', '.join(names[:MAX_NAMED])}{more}")
        time.sleep(POLL_SECONDS)


def _remove_lost(objects: RunObjects, items: list[Object]) -> set[str]:
    """Remove by force the pods on nodes that do not answer, which cannot report their end."""
    ready = cache(objects.node_ready)
    lost: set[str] = set()
    for pod in (read_pod(each, None, objects.flavor.container) for each in items):
        not_ready = pod.host and ready(pod.host) is False
        if pod.state is PodState.TERMINATING and (not_ready or pod.unreachable_since is not None):
            lost.add(pod.name)
            objects.force(pod)
    return lost
