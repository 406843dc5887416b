"""Kubernetes objects as dicts: labels, names, amounts, escapes. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from decimal import Decimal
from typing import Any
from urllib.parse import quote

from clusterkit.errors import BadInput

Object = dict[str, Any]
"""A Kubernetes object, or a part of one."""

MANAGER = "clusterkit"
SERVER_SIDE_APPLY = f"fieldManager={MANAGER}&force=true&fieldValidation=Strict"
"""The query of a PATCH that creates or changes an object."""
RUN, ATTEMPT, ROLE = "clusterkit/run", "clusterkit/attempt", "clusterkit/role"
JOB = "clusterkit/job"
USER = "clusterkit/user"
"""Label of a run's objects: who submitted it."""

NAME_MAX = 46
"""Names have at most 63 characters; kinds of jobs append up to ``-node-0-12345``."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?\Z")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?\Z")


def object_name(run_id: str) -> str:
    """Return the name of a run's objects: its id, or one that a service may have."""
    if _NAME.match(run_id) and len(run_id) <= NAME_MAX:
        return run_id
    digest = hashlib.sha256(run_id.encode()).hexdigest()[:6]
    kept = run_id[: NAME_MAX - len("ck--") - len(digest)].strip("-")
    return f"ck-{kept}-{digest}"


def without_empty(**values: Any) -> Object:
    """Return the keys whose values are not empty."""
    return {key: value for key, value in values.items() if value}


def new_object(api: str, kind: str, metadata: Object | None = None, **rest: Any) -> Object:
    return {"apiVersion": api, "kind": kind, **without_empty(metadata=metadata), **rest}


def plural(kind: str) -> str:
    """Return the resource name of a kind, of those that a run has."""
    return f"{kind.lower()}s"


def path_of(namespace: str, api: str, kind: str, name: str = "") -> str:
    """Return the API server's path of an object, or of all of its kind."""
    root = f"/apis/{api}" if "/" in api else f"/api/{api}"
    listed = f"{root}/namespaces/{quote(namespace)}/{plural(kind)}"
    return f"{listed}/{quote(name)}" if name else listed


def literal(value: str) -> str:
    """Escape a word of a container's command or environment: Kubernetes expands ``$(NAME)``."""
    return value.replace("$", "$$")


def quantity(key: str, value: str | float) -> str:
    """Return an amount as text; Kubernetes takes numbers as well.

    Raises:
        BadInput: it is not an amount; the message begins with ``key``.
    """
    if not _QUANTITY.match(str(value)):
        raise BadInput(f"{key}: {value!r} is not an amount", hint="such as 4, 500m, 16Gi")
    return str(value)


def parse_amount(text: object) -> Decimal:
    """Return what an amount of Kubernetes is; 0 if it is none."""
    from kubernetes.utils.quantity import parse_quantity

    try:
        return Decimal(parse_quantity(str(text)))  # type: ignore[no-untyped-call]
    except ValueError:
        return Decimal(0)


def as_yaml(body: object) -> str:
    """Encode as JSON that is YAML as well: server-side apply reads YAML, which does not know the
    surrogate pairs by which JSON escapes characters beyond U+FFFF."""
    text = json.dumps(body, ensure_ascii=False)
    return re.sub(r"[^ -~]", lambda found: f"\\U{ord(found[0]):08x}", text)
