"""Names that Kubernetes takes, values that it leaves alone. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from clusterkit.errors import BadInput

Object = dict[str, Any]
"""A Kubernetes object, or a part of one."""

NAME_MAX = 46
"""Kinds of jobs add as much as ``-node-0-12345`` to it; 63 characters at most are a name."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?\Z")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?\Z")


def object_name(run_id: str) -> str:
    """What the objects of a run are called: its id, where Kubernetes takes that for a service."""
    if _NAME.match(run_id) and len(run_id) <= NAME_MAX:
        return run_id
    digest = hashlib.sha256(run_id.encode()).hexdigest()[:6]
    kept = run_id[: NAME_MAX - len("ck--") - len(digest)].strip("-")
    return f"ck-{kept}-{digest}"


def given(**values: Any) -> Object:
    """Keys of an object: those of which something is said."""
    return {key: value for key, value in values.items() if value}


def made(api: str, kind: str, metadata: Object | None = None, **rest: Any) -> Object:
    """An object of this kind."""
    return {"apiVersion": api, "kind": kind, **given(metadata=metadata), **rest}


def plural(kind: str) -> str:
    """What the API calls all objects of a kind, of those that a run has."""
    return f"{kind.lower()}s"


def literal(value: str) -> str:
    """A value of a pod's environment or a word of its command, kept from being expanded."""
    return value.replace("$", "$$")


def quantity(key: str, value: str | float) -> str:
    """An amount as text; Kubernetes takes numbers as well.

    Raises:
        BadInput: it is not an amount; the message begins with ``key``.
    """
    if not _QUANTITY.match(str(value)):
        raise BadInput(f"{key}: {value!r} is not an amount", hint="such as 4, 500m, 16Gi")
    return str(value)


def as_yaml(body: object) -> str:
    """JSON that is YAML as well: the server reads what is to be applied as that, and refuses the
    pairs by which JSON escapes characters beyond U+FFFF."""
    text = json.dumps(body, ensure_ascii=False)
    return re.sub(r"[^ -~]", lambda found: f"\\U{ord(found[0]):08x}", text)
