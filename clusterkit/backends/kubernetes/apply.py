"""Making what a run has in the cluster, as `kubectl apply --kustomize` would, and ending it all."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import yaml

from clusterkit.backends.kubernetes.client import (
    Away,
    Forbidden,
    InternalError,
    NotFound,
    Refusal,
)
from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.judge import read_pod
from clusterkit.backends.kubernetes.lost_pods import MERGE_PATCH
from clusterkit.backends.kubernetes.observe import (
    Removed,
    keep,
    pods_of,
    put_removed,
    removed,
    snapshot,
    with_seen,
)
from clusterkit.backends.kubernetes.pods import ATTEMPT, STOP_EXTRA, USER, code_of
from clusterkit.backends.kubernetes.server import AT_ONCE, RunObjects, objects_of
from clusterkit.backends.kubernetes.text import Object, made
from clusterkit.backends.node_status import folder_exists
from clusterkit.errors import BadInput, ClusterkitError, SubmitFailed, Unavailable
from clusterkit.plan import Plan
from clusterkit.run.folder import MADE, RunHandle
from clusterkit.transport import Transport

AWAY_SECONDS = 40.0
"""How long the API server may be away while a run is being made."""
RUNTIME_SECONDS = 10.0
"""How long an operator may take to be ready for a job."""
_UNHEARD = "must be created before"
"""The trainer, of a runtime that it has not heard of: "Forbidden", as of any other refusal."""
KUSTOMIZATION = "kustomization.yaml"
_OWNERS = tuple(flavor.kind for flavor in FLAVORS.values())


def apply(to: RunObjects, folder: Path, env: Mapping[str, str]) -> None:
    """Make the objects of a kustomization.

    Whatever is in ``env`` besides the attempt's number becomes the run's Secret; no word and no
    file holds it.

    Raises:
        Refusal, Away: by the API server.
        SubmitFailed: a file is gone.
        BadInput: the namespace has another run of this id.
    """
    attempt = env.get("CLUSTERKIT_ATTEMPT", "1")
    secrets = {name: value for name, value in env.items() if name != "CLUSTERKIT_ATTEMPT"}
    objects = kustomized(folder)
    if secrets:
        # Named and labelled as the run's config map.
        meta = json.loads(json.dumps(objects[0]["metadata"]))
        objects.insert(0, made("v1", "Secret", meta, stringData=secrets))
    if attempt != "1":
        _renumber(objects, attempt)
    # The job last: with it the run begins, and it owns all the rest.
    *rest, job = objects
    # Whether we may bind a role is looked up in the role.
    late = [each for each in rest if each["kind"] == "RoleBinding"]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        made_before = folder.parent / MADE
        if not made_before.exists():
            # Before anything is sent: whatever has one of the names is not of this run. (The role
            # need not allow to read the others.)
            named = [each for each in objects if each["kind"] in (*_OWNERS, "ConfigMap")]
            taken = pool.map(lambda each: to.find(_path(to, each), (NotFound, Forbidden)), named)
            for each, there in zip(named, taken, strict=True):
                if there is not None:
                    raise _another_run(each, there, to.namespace)
            made_before.touch()
        list(pool.map(partial(_make, to), (each for each in rest if each not in late)))
        list(pool.map(partial(_make, to), late))
        owner = _make(to, job)
        reference = {key: owner[key] for key in ("apiVersion", "kind")}
        reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
        # With it goes all that belongs to it, whoever deletes it.
        body = {"metadata": {"ownerReferences": [reference]}}
        paths = [_path(to, each) for each in rest]
        list(pool.map(lambda path: to.request("PATCH", path, body, MERGE_PATCH), paths))


def _another_run(each: Object, there: Object, namespace: str) -> BadInput:
    meta = there["metadata"]
    user = (meta.get("labels") or {}).get(USER)
    return BadInput(
        f"another run has this id: {each['kind']} {each['metadata']['name']} in namespace "
        f"{namespace}, made{f' by {user}' if user else ''} at {meta.get('creationTimestamp')}",
        hint="another --run-id; `clusterkit attach` takes up a run that is there",
    )


def _make(to: RunObjects, each: Object) -> Object:
    """The object as the server has it now."""
    start = time.monotonic()
    while True:
        try:
            return to.apply(_path(to, each), each)
        except Away:
            # What is applied twice is applied once.
            if time.monotonic() > start + AWAY_SECONDS:
                raise
            time.sleep(1)
        except Refusal as error:
            # The trainer hears of a runtime a moment after it was made; an operator whose pod
            # is being replaced is not there to be asked.
            soon = isinstance(error, InternalError) or _UNHEARD in error.said
            if not soon or time.monotonic() > start + RUNTIME_SECONDS:
                raise
            time.sleep(RUNTIME_SECONDS / 50)


def _path(to: RunObjects, each: Mapping[str, Any]) -> str:
    return to.path(each["apiVersion"], each["kind"], each["metadata"]["name"])


def kustomized(folder: Path) -> list[Object]:
    """The objects of a kustomization: config maps of files, then the resources.

    Raises:
        SubmitFailed: a file of it is gone.
    """
    try:
        main = yaml.safe_load((folder / KUSTOMIZATION).read_bytes())
        labels = main.get("generatorOptions", {}).get("labels", {})
        objects: list[Object] = [
            made(
                "v1", "ConfigMap", {"name": each["name"], "labels": dict(labels)},
                **_data({name: (folder / name).read_bytes() for name in each["files"]}),
            )
            for each in main.get("configMapGenerator", ())
        ]  # fmt: skip
        for name in main.get("resources", ()):
            objects += yaml.safe_load_all((folder / name).read_bytes())
    except OSError as error:
        raise SubmitFailed(
            f"{error.filename}: {(error.strerror or 'unreadable').lower()}"
        ) from None
    return objects


def _data(files: Mapping[str, bytes]) -> Object:
    """Files as a config map holds them: text, and what is none."""
    text, binary = {}, {}
    for name, content in files.items():
        try:
            text[name] = content.decode()
        except UnicodeDecodeError:
            binary[name] = base64.b64encode(content).decode()
    return {"data": text} | ({"binaryData": binary} if binary else {})


def _renumber(value: Any, attempt: str) -> None:
    """Give every label that numbers the attempt this number."""
    if isinstance(value, dict):
        if isinstance(value.get(ATTEMPT), str):
            value[ATTEMPT] = attempt
        for inner in value.values():
            _renumber(inner, attempt)
    elif isinstance(value, list):
        for inner in value:
            _renumber(inner, attempt)


# ---------------------------------------------------------------- removing

LOOK_SECONDS = 0.25
GONE_SECONDS = 20.0
"""How long no pod may go, beyond the time that they have to end."""
AGAIN_SECONDS = 2.0
"""Pause before pods are asked to end once more: an operator may have been making some."""
NAMED = 3
"""How many pods an error names."""


def remove(handle: RunHandle, transport: Transport) -> None:
    """End and remove everything of the run; how its pods were is kept. What this run did not make
    stays: another one of the same id may be there, which somebody submitted elsewhere.

    Raises:
        Unavailable: the API server does not answer, will not, or a node does not.
    """
    plan, objects = handle.plan, RunObjects(handle.plan, transport)
    if folder_exists(handle) and not handle.folder.file(MADE).exists():
        return
    job, *others = _made_by(plan, objects)
    try:
        if folder_exists(handle):
            pods = pods_of(handle, transport)
            keep(handle, with_seen(snapshot(handle), pods, plan))
            if removed(handle) is None:
                ended = frozenset(pod.name for pod in pods.values() if pod.ran)
                put_removed(handle, Removed(ended))
        # Before the pods: without it nobody makes new ones.
        objects.delete(job)
        _delete_pods(objects)
        for path in others:
            objects.delete(path)
        lost = _await_gone(plan, objects)
        if folder_exists(handle):
            by_us = removed(handle) or Removed()
            after = msgspec.structs.replace(by_us, lost=by_us.lost | lost, complete=True)
            if after != by_us:
                put_removed(handle, after)
    except ClusterkitError as error:
        raise Unavailable(
            f"could not end run {plan.run_id}: {error.message}",
            hint=f"clusterkit cancel {plan.run_id} again, once it answers",
        ) from error


def _made_by(plan: Plan, objects: RunObjects) -> list[str]:
    """Where the API server has what the run's plan made there; the job is the first."""
    named = [(each["apiVersion"], each["kind"], each["metadata"]["name"])
             for each in reversed(objects_of(plan))]  # fmt: skip
    files = [("v1", kind, objects.name) for kind in ("ConfigMap", "Secret")]
    code = [("v1", "ConfigMap", code_of(objects.name))] if plan.trees else []
    return [objects.path(*each) for each in (*named, *files, *code)]


def _delete_pods(objects: RunObjects) -> None:
    """Ask all of them to end, in one request; and the services that an operator made, one a pod.

    The cluster's own garbage collection asks for one after the other: 200 take it 15 s. It does
    get there, so that it is no error if we may not.
    """
    collections = [objects.pods_path()]
    if objects.flavor.kind == "PyTorchJob":
        selector = quote(f"training.kubeflow.org/job-name={objects.name}", safe="")
        collections.append(f"{objects.path('v1', 'Service')}?labelSelector={selector}")
    for path in collections:
        with contextlib.suppress(Forbidden):
            objects.delete(path)


def _await_gone(plan: Plan, objects: RunObjects) -> frozenset[str]:
    """Wait for the end of all pods; gives those whose nodes of the cluster do not answer."""
    lost: set[str] = set()
    started = again = time.monotonic()
    late_at = started + plan.stop_grace + STOP_EXTRA
    deadline, fewest = late_at + GONE_SECONDS, math.inf
    while True:
        now = time.monotonic()
        late = now > late_at
        # One pod tells as well as all of them that not all are gone.
        items = objects.get(objects.pods_path(**({} if late else {"limit": "1"})))["items"]
        if not items:
            return frozenset(lost)
        if now > again + AGAIN_SECONDS:
            again = now
            _delete_pods(objects)
        if late:
            if len(items) < fewest:
                fewest, deadline = len(items), max(deadline, now + GONE_SECONDS)
            lost |= _end_lost(objects, items)
        if now > deadline:
            names = sorted(each["metadata"]["name"] for each in items)
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            raise Unavailable(f"pods that do not end: {', '.join(names[:NAMED])}{more}")
        time.sleep(LOOK_SECONDS)


def _end_lost(objects: RunObjects, items: list[Object]) -> set[str]:
    """Remove by force the pods on nodes that do not answer: nobody there will say that they have
    ended."""
    ready = cache(objects.node_ready)
    lost: set[str] = set()
    for pod in (read_pod(each, None) for each in items):
        gone = pod.host and ready(pod.host) is False
        if pod.leaving and (gone or pod.silent_since is not None):
            lost.add(pod.name)
            objects.force(pod)
    return lost
