"""What `kubectl apply --kustomize` would do with a run's files, as far as plans have any."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from clusterkit.backends.kubernetes.client import (
    Away,
    Forbidden,
    InternalError,
    NotFound,
    Refusal,
)
from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.lost_pods import MERGE_PATCH
from clusterkit.backends.kubernetes.pods import ATTEMPT, USER
from clusterkit.backends.kubernetes.server import RunObjects
from clusterkit.backends.kubernetes.text import Object, made
from clusterkit.errors import BadInput, SubmitFailed
from clusterkit.runs import MADE

AWAY_SECONDS = 40.0
"""How long the API server may be away while a run is being made."""
RUNTIME_SECONDS = 10.0
"""How long an operator may take to be ready for a job."""
_UNHEARD = "must be created before"
"""The trainer, of a runtime that it has not heard of: "Forbidden", as of any other refusal."""
AT_ONCE = 8
"""Requests that are under way together."""
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

    made_before = folder.parent / MADE
    if not made_before.exists():
        _refuse_other_run(to, objects)
        made_before.touch()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(partial(_make, to), (each for each in rest if each not in late)))
        list(pool.map(partial(_make, to), late))
        owner = _make(to, job)
        reference = {key: owner[key] for key in ("apiVersion", "kind")}
        reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
        # With it goes all that belongs to it, whoever deletes it.
        body = {"metadata": {"ownerReferences": [reference]}}
        paths = [_path(to, each) for each in rest]
        list(pool.map(lambda path: to.request("PATCH", path, body, MERGE_PATCH), paths))


def _refuse_other_run(to: RunObjects, objects: Sequence[Object]) -> None:
    """Before anything is sent: whatever has one of the names is not of this run.

    Raises:
        BadInput: something has.
    """
    for each in objects:
        if each["kind"] not in (*_OWNERS, "ConfigMap"):
            continue  # the role need not allow to read these
        try:
            meta = to.get(_path(to, each))["metadata"]
        except (NotFound, Forbidden):
            continue
        user = (meta.get("labels") or {}).get(USER)
        by = f" by {user}" if user else ""
        raise BadInput(
            f"another run has this id: {each['kind']} {each['metadata']['name']} in namespace "
            f"{to.namespace}, made{by} at {meta.get('creationTimestamp')}",
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
