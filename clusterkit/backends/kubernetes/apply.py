"""What `kubectl apply --kustomize` would do with a run's files, as far as plans have any."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.lost_pods import JSON, MERGE_PATCH
from clusterkit.backends.kubernetes.pods import ATTEMPT, MANAGER, USER
from clusterkit.backends.kubernetes.text import Object
from clusterkit.errors import BadInput, SubmitFailed, Unavailable
from clusterkit.runs import MADE

AWAY_SECONDS = 40.0
"""How long the API server may be away while a run is being made."""
RUNTIME_SECONDS = 10.0
"""How long an operator may take to be ready for a job."""
_SOON = ("must be created before", "failed calling webhook")
"""Parts of refusals that are none a moment later."""
AT_ONCE = 8
"""Requests that are under way together."""
KUSTOMIZATION = "kustomization.yaml"
_PLURALS = {
    "ConfigMap": "configmaps", "Secret": "secrets", "Service": "services",
    "TrainingRuntime": "trainingruntimes", "ServiceAccount": "serviceaccounts", "Role": "roles",
    "RoleBinding": "rolebindings",
    **{flavor.kind: flavor.plural for flavor in FLAVORS.values()},
}  # fmt: skip
_OWNERS = tuple(flavor.kind for flavor in FLAVORS.values())
APPLY_PATCH = "application/apply-patch+yaml"
Request = Callable[[str, str, object, str], str]
"""Method, path, body and its content type to the answer."""


class Refusal(Unavailable):
    """The API server understood, and said no.

    Attributes:
        reason: ``NotFound``, ``Forbidden``, ``Conflict``.
        said: its own words.
    """

    def __init__(self, reason: str, said: str) -> None:
        super().__init__(f"Error from server ({reason}): {said}")
        self.reason, self.said = reason, said


class Away(Unavailable):
    """The API server does not answer."""


def apply(request: Request, namespace: str, folder: Path, env: Mapping[str, str]) -> None:
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
    objects = _kustomized(folder)
    if secrets:
        # Named and labelled as the run's config map.
        meta = json.loads(json.dumps(objects[0]["metadata"]))
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": secrets}
        objects.insert(0, secret)
    if attempt != "1":
        _renumber(objects, attempt)
    # The job last: with it the run begins, and it owns all the rest.
    *rest, job = objects
    # Whether we may bind a role is looked up in the role.
    late = [each for each in rest if each["kind"] == "RoleBinding"]

    made_before = folder.parent / MADE
    if not made_before.exists():
        _refuse_other_run(request, namespace, objects)
        made_before.touch()

    def make(each: Object) -> Object:
        return _made(request, path_of(each, namespace), each)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        made = list(pool.map(make, (each for each in rest if each not in late)))
        made += pool.map(make, late)
        owner = make(job)
        reference = {key: owner[key] for key in ("apiVersion", "kind")}
        reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
        # With it goes all that belongs to it, whoever deletes it.
        body = {"metadata": {"ownerReferences": [reference]}}
        paths = [path_of(each, namespace) for each in made]
        list(pool.map(lambda path: request("PATCH", path, body, MERGE_PATCH), paths))


def _refuse_other_run(request: Request, namespace: str, objects: Sequence[Object]) -> None:
    """Before anything is sent: whatever has one of the names is not of this run.

    Raises:
        BadInput: something has.
    """
    for each in objects:
        if each["kind"] not in (*_OWNERS, "ConfigMap"):
            continue  # the role need not allow to read these
        path, name = path_of(each, namespace), each["metadata"]["name"]
        try:
            found = json.loads(request("GET", path, None, JSON))
        except Refusal as error:
            if error.reason in ("NotFound", "Forbidden"):
                continue
            raise
        meta = found["metadata"]
        user = (meta.get("labels") or {}).get(USER)
        by = f" by {user}" if user else ""
        raise BadInput(
            f"another run has this id: {each['kind']} {name} in namespace {namespace}, made{by} at "
            f"{meta.get('creationTimestamp')}",
            hint="another --run-id; `clusterkit attach` takes up a run that is there",
        )


def _made(request: Request, path: str, each: Object) -> Object:
    """The object as the server has it now."""
    path += f"?fieldManager={MANAGER}&force=true&fieldValidation=Strict"
    start = time.monotonic()
    while True:
        try:
            made: Object = json.loads(request("PATCH", path, each, APPLY_PATCH))
            return made
        except Away:
            # What is applied twice is applied once.
            if time.monotonic() > start + AWAY_SECONDS:
                raise
            time.sleep(1)
        except Refusal as error:
            # The trainer hears of a runtime a moment after it was made; an operator whose pod
            # is being replaced is not there to be asked.
            late = time.monotonic() > start + RUNTIME_SECONDS
            if late or not any(words in error.said for words in _SOON):
                raise
            time.sleep(RUNTIME_SECONDS / 50)


def collection(each: Mapping[str, Any], namespace: str) -> str:
    """The path of all objects of its kind."""
    version = each["apiVersion"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{root}/namespaces/{namespace}/{_PLURALS[each['kind']]}"


def path_of(each: Mapping[str, Any], namespace: str) -> str:
    """The object's own path."""
    return f"{collection(each, namespace)}/{each['metadata']['name']}"


def _kustomized(folder: Path) -> list[Object]:
    """The objects of a kustomization: config maps of files, then the resources.

    Raises:
        SubmitFailed: a file of it is gone.
    """
    try:
        main = yaml.safe_load((folder / KUSTOMIZATION).read_bytes())
        labels = main.get("generatorOptions", {}).get("labels", {})
        objects: list[Object] = [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": each["name"], "labels": dict(labels)},
                **_data({name: (folder / name).read_bytes() for name in each["files"]}),
            }
            for each in main.get("configMapGenerator", ())
        ]
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
