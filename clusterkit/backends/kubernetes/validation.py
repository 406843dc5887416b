"""Check a cluster entry: its amounts, its volumes, and its ``patch:`` against the official client's
models of a pod's spec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from clusterkit.backends.kubernetes.connect import not_installed
from clusterkit.backends.kubernetes.objects import quantity
from clusterkit.cluster import KubernetesCluster
from clusterkit.errors import BadInput, did_you_mean, error_key

_TYPES: Mapping[str, tuple[Any, str]] = {
    "str": (str, "text"),
    "bool": (bool, "true or false"),
    "int": (int, "int"),
    "float": (int | float, "float"),
    "date": (str, "date"),
    "datetime": (str, "datetime"),
    "amount": (str | int | float, "text"),
}
# Releases of the client write "list[X]" and "dict(str, X)", or "List[X]" and "Dict[str, X]".
_OF = re.compile(r"(list|dict)[\[(](?:str, )?(.*)[\])]\Z", re.IGNORECASE)
_AMOUNTS = ("limits", "requests", "overhead")


def check_entry(cluster: KubernetesCluster) -> None:
    """Check what the schema of the cluster file does not.

    Raises:
        BadInput: names the key.
        Unavailable: the official client is not installed.
    """
    for key in ("memory", "shm_size"):
        if (size := getattr(cluster, key)) is not None:
            with error_key("cluster", key):
                quantity(key, size)
    with error_key("cluster", "resources"):
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


def check_patch(patch: Mapping[str, Any]) -> None:
    """Check a patch for unknown keys and values of a wrong type, as the API server would.

    Raises:
        BadInput: names the key.
        Unavailable: the official client is not installed.
    """
    if not patch:
        return
    try:
        from kubernetes import client
    except ImportError:
        raise not_installed() from None
    _check(patch, "V1PodSpec", "", client)


def _check(value: Any, kind: str, place: str, client: Any) -> None:
    """Check a value against a type, as the client's models write it."""
    if value is None:  # removes the key
        return
    within = _OF.match(kind)
    model: Any = getattr(client, kind, None)
    of = within[2] if within else ""
    types, wanted = _TYPES.get(kind, (object, ""))  # else anything goes, such as a port's name
    if within or model is not None:
        types, wanted = Mapping, "a mapping"
    if within and within[1].lower() == "list":
        types, wanted = list | tuple, "a list"
    truth = isinstance(value, bool) and kind in _TYPES and kind != "bool"  # an int in Python
    if truth or not isinstance(value, types):
        raise BadInput(
            f"patch: {place or 'it'} is {value!r}, but should be {wanted}",
            hint="`kubectl explain pod.spec` tells the keys and their types",
            cluster="patch",
        )
    if wanted == "a list":
        for number, inner in enumerate(value):
            _check(inner, of, f"{place}[{number}]", client)
    elif wanted == "a mapping":
        names = {} if within else {theirs: ours for ours, theirs in model.attribute_map.items()}
        if within and place.rpartition(".")[2] in _AMOUNTS:
            of = "amount"
        for key, inner in value.items():
            where = f"{place}.{key}" if place else str(key)
            if not within and key not in names:
                raise BadInput(
                    f"patch: {where}: pods have no such key",
                    hint=did_you_mean(key, names) or f"it goes into a pod's spec ({kind})",
                    cluster="patch",
                )
            _check(inner, of or model.openapi_types[names[key]], where, client)
