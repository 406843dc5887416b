"""Whether an entry of the cluster file can be used: its amounts, its volumes, and its ``patch:``,
which has to be part of a pod's spec by the official client's own models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from clusterkit.backends.kubernetes.connect import not_installed
from clusterkit.backends.kubernetes.text import quantity
from clusterkit.cluster import KubernetesCluster
from clusterkit.errors import BadInput, about, did_you_mean

_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "date": (str,),
    "datetime": (str,),
}


def check_entry(cluster: KubernetesCluster) -> None:
    """Refuse what no pod could have.

    Raises:
        BadInput: names the key.
        Unavailable: the official client is not installed.
    """
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


def check_patch(patch: Mapping[str, Any]) -> None:
    """Refuse what the API server would: unknown keys and values of another type.

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
    if value is None:  # takes the key away
        return
    # Releases of the client write "list[X]" and "dict(str, X)", or "List[X]" and "Dict[str, X]".
    if match := re.match(r"[Ll]ist\[(.*)\]\Z", kind):
        if not isinstance(value, list | tuple):
            raise _wrong(place, value, "a list")
        for number, inner in enumerate(value):
            _check(inner, match[1], f"{place}[{number}]", client)
        return
    if match := re.match(r"[Dd]ict[\[(]str, (.*)[\])]\Z", kind):
        if not isinstance(value, Mapping):
            raise _wrong(place, value, "a mapping")
        for key, inner in value.items():
            # Amounts may be numbers as well.
            if not (match[1] == "str" and _is_amount(place) and isinstance(inner, int | float)):
                _check(inner, match[1], f"{place}.{key}", client)
        return
    if kind in _TYPES:
        if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise _wrong(place, value, {"str": "text", "bool": "true or false"}.get(kind, kind))
        return
    model = getattr(client, kind, None)
    if model is None:  # anything goes, such as a port's number or name
        return
    if not isinstance(value, Mapping):
        raise _wrong(place, value, "a mapping")
    names = {theirs: ours for ours, theirs in model.attribute_map.items()}
    for key, inner in value.items():
        where = f"{place}.{key}" if place else str(key)
        if key not in names:
            raise BadInput(
                f"patch: {where}: pods have no such key",
                hint=did_you_mean(key, names) or f"it goes into a pod's spec ({kind})",
                cluster="patch",
            )
        _check(inner, model.openapi_types[names[key]], where, client)


def _is_amount(place: str) -> bool:
    return place.rpartition(".")[2] in ("limits", "requests", "overhead")


def _wrong(place: str, value: Any, wanted: str) -> BadInput:
    return BadInput(
        f"patch: {place or 'it'} is {value!r}, but should be {wanted}",
        hint="`kubectl explain pod.spec` tells the keys and their types",
        cluster="patch",
    )
