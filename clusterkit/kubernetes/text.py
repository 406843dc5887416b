"""YAML of manifests, names that Kubernetes takes, values that it leaves alone. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clusterkit.errors import BadInput

Object = dict[str, Any]
"""A Kubernetes object, or a part of one."""

NAME_MAX = 46
"""Kinds of jobs add as much as ``-node-0-12345`` to it; 63 characters at most are a name."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?\Z")
_PLAIN = re.compile(r"[A-Za-z/_][A-Za-z0-9/_.$()-]*(:[A-Za-z0-9/_.-]+)*\Z")
_FLAG = re.compile(r"--?[A-Za-z][A-Za-z0-9-]*(=[A-Za-z0-9$().-]+)?\Z")
_AMOUNT = re.compile(r"[0-9]+[KMGTPE]i\Z")
_RESERVED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "."})
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?\Z")


class Noted:
    """A value with a comment above its key, for whoever edits the manifest."""

    def __init__(self, value: Any, comment: str) -> None:
        self.value = value
        self.comment = comment


def object_name(run_id: str) -> str:
    """What the objects of a run are called: its id, where Kubernetes takes that for a service."""
    if _NAME.match(run_id) and len(run_id) <= NAME_MAX:
        return run_id
    digest = hashlib.sha256(run_id.encode()).hexdigest()[:6]
    kept = run_id[: NAME_MAX - len("ck--") - len(digest)].strip("-")
    return f"ck-{kept}-{digest}"


def literal(value: str) -> str:
    """A value of a pod's environment or a word of its command, kept from being expanded."""
    return value.replace("$", "$$")


def quantity(key: str, value: str) -> str:
    """``value`` itself.

    Raises:
        BadInput: it is no amount; the message begins with ``key``.
    """
    if not _QUANTITY.match(value):
        raise BadInput(f"{key}: {value!r} is no amount", hint="such as 4, 500m, 16Gi")
    return value


def plain(value: Any) -> Any:
    """The value without its comments."""
    if isinstance(value, Noted):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def documents(objects: Sequence[Mapping[str, Any]], head: str = "") -> str:
    """Several objects as one YAML text, in the order given."""
    comment = "".join(f"# {line}\n" if line else "#\n" for line in head.splitlines())
    return comment + "---\n".join(_text(each) for each in objects)


def _text(document: Mapping[str, Any]) -> str:
    return "".join(line + "\n" for line in _lines(document, ""))


def _lines(value: Any, indent: str) -> Iterator[str]:
    items = value.items() if isinstance(value, Mapping) else ((None, item) for item in value)
    for key, item in items:
        if isinstance(item, Noted):
            yield from (f"{indent}# {line}" for line in item.comment.splitlines())
            item = item.value
        head = f"{indent}-" if key is None else f"{indent}{_scalar(str(key))}:"
        if isinstance(item, Mapping) and item:
            inner = list(_lines(item, indent + "  "))
            if key is None and not inner[0].lstrip().startswith("#"):
                yield f"{head} {inner[0].lstrip()}"
                yield from inner[1:]
            else:
                yield head
                yield from inner
        elif isinstance(item, list | tuple):
            if any(isinstance(part, Mapping | Noted) for part in item):
                yield head
                yield from _lines(item, indent + "  ")
            else:
                flow = f"{head} [{', '.join(map(_scalar, item))}]"
                if len(flow) <= 100 or not item:
                    yield flow
                else:
                    yield head
                    yield from (f"{indent}  - {_scalar(part)}" for part in item)
        elif isinstance(item, str) and _is_block(item):
            yield f"{head} |"
            yield from (f"{indent}  {line}".rstrip() for line in item.splitlines())
        else:
            yield f"{head} {_scalar(item)}"


def _is_block(text: str) -> bool:
    """Whether it reads better as lines of its own, and can."""
    lines = text.split("\n")
    return (
        len(lines) > 2
        and lines[-1] == ""
        and bool(lines[0])
        and not lines[0][0].isspace()
        and all(line.isprintable() and line == line.rstrip() for line in lines)
        and bool(lines[-2])
    )


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, Mapping):
        return "{}"
    text = str(value)
    if _PLAIN.match(text) and text.lower() not in _RESERVED:
        return text
    if _FLAG.match(text) or _AMOUNT.match(text):
        return text
    # A JSON string is a YAML string, but for the few characters that end a line in YAML.
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
