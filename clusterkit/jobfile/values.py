"""Check values by the types of a spec, from a YAML file, an option or Python code alike."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect, structs

from clusterkit import shell
from clusterkit.errors import BadInput, KeyPath, choices, did_you_mean
from clusterkit.jobfile.yaml_file import Document

Spec = TypeVar("Spec", bound=msgspec.Struct)

_REMOVED = {"warm": "removed: it changed what programs compute; leave it out"}  # keys
_INTEGERS = range(-(2**63), 2**63)
"""What JSON files of a run can hold."""
_TYPES: dict[type[inspect.Type], tuple[str, tuple[type, ...]]] = {
    inspect.BoolType: ("true or false", (bool,)),
    inspect.IntType: ("a whole number", (int,)),
    inspect.FloatType: ("a number", (int, float)),
    inspect.StrType: ("text", (str,)),
    inspect.LiteralType: ("text", (str,)),
    inspect.VarTupleType: ("a list", (list,)),
    inspect.DictType: ("a mapping", (dict,)),
    inspect.StructType: ("a mapping", (dict,)),
    inspect.AnyType: ("text, a number, a list or a mapping", (object,)),
}
"""Types of fields: their words in messages, and the Python types that they take."""
_KINDS = {type(None): "nothing", bool: "a boolean", int: "a whole number", float: "a number",
          str: "text", list: "a list", dict: "a mapping"}  # fmt: skip
MAX_DEPTH = 100
_LIMITS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}


def of_fields(fields: Mapping[str, Any], kind: type[Spec]) -> Spec:
    """Return a struct with fields that Python code gives. Raises as `convert`."""
    return _converted(Document("", None, {}), (), fields, kind)


def checked(spec: Spec, name: str = "") -> Spec:
    """Return a struct that Python code has made with its values checked. Raises as `convert`."""
    document = document_of(spec, name)
    return _converted(document, (), document.data, type(spec))


def document_of(spec: msgspec.Struct, name: str = "") -> Document:
    """Return what a file with the values of a spec would hold. A struct itself checks no types.

    Raises:
        BadInput: a value that no file can hold.
    """
    document = Document(name, None, {})
    document.data = _plain(document, (), 0, spec, type(spec))
    return document


def convert(document: Document, place: KeyPath, data: Any, kind: type[Spec]) -> Spec:
    """Convert ``data``, which is at ``place`` of the document, to a spec.

    Raises:
        BadInput: an unknown key, a wrong type, a value out of range.
    """
    if isinstance(data, dict):
        # `env:` without a value means no `env`, but an unknown key is an error with or without.
        known = fields_of(kind)
        data = {key: value for key, value in data.items() if value is not None or key not in known}
    return _converted(document, place, data, kind)


def _converted(document: Document, place: KeyPath, data: Any, kind: type[Spec]) -> Spec:
    data = _plain(document, place, len(place), data, kind)
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise _type_error(document, place, data, kind, error) from None


def _plain(document: Document, place: KeyPath, base: int, value: Any, kind: type[Spec]) -> Any:
    """Return a value of Python as YAML would have it: structs as mappings, tuples as lists.

    Args:
        base: how many keys of ``place`` lie above the spec of type ``kind``.

    Raises:
        BadInput: YAML has no such value.
    """
    if isinstance(value, msgspec.Struct):
        value = {
            one.encode_name: item
            for one in structs.fields(value)
            if (item := getattr(value, one.name)) is not None or one.required
        }
    if len(place) > MAX_DEPTH:
        raise document.error(place[:1], "nested too deeply, or a value that contains itself")
    if isinstance(value, Mapping):
        found = {}
        for key, item in value.items():
            if not isinstance(key, str):
                message = f"the key {key!r} is {_kind(key)}, not text"
                raise document.error(place, message, f'"{key}"')
            found[_text(document, place, key)] = _plain(document, (*place, key), base, item, kind)
        return found
    if isinstance(value, list | tuple):
        return [
            _plain(document, (*place, number), base, item, kind)
            for number, item in enumerate(value)
        ]
    if isinstance(value, str):
        return _text(document, place, value)
    if isinstance(value, int) and value not in _INTEGERS:
        raise document.error(place, f"{value:.3g}: it has to be below {2**63:,}")
    if isinstance(value, float) and not math.isfinite(value):
        raise document.error(place, f"{value} is not a finite number")
    if value is None or isinstance(value, int | float):
        return value
    raise _mismatch(document, place, value, _type_at(kind, place[base:]))


def _text(document: Document, place: KeyPath, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start : error.end].encode("unicode-escape").decode()
        raise document.error(
            place, f"{half} is half of a surrogate pair, which text cannot hold"
        ) from None
    return str.__str__(text)  # of an enum's member its value


def fields_of(kind: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    """Return the keys of a struct and the type of each."""
    return _fields(inspect.type_info(kind))


def _fields(kind: inspect.Type) -> dict[str, inspect.Type]:
    structs = [each for each in _alternatives(kind) if isinstance(each, inspect.StructType)]
    return {field.encode_name: field.type for struct in structs for field in struct.fields}


def _alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        yield from _alternatives(kind.type)
    elif isinstance(kind, inspect.UnionType):
        yield from (each for member in kind.types for each in _alternatives(member))
    elif not isinstance(kind, inspect.NoneType):
        yield kind


_MESSAGE = re.compile(r"(?s)(.*?)(?: - at `\$(.*)`)?\Z")
_SEGMENT = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


def _type_error(
    document: Document, base: KeyPath, data: Any, kind: type[Spec], error: msgspec.ValidationError
) -> BadInput:
    """Turn an error of msgspec into one with file, line, key, value and allowed values."""
    match = _MESSAGE.match(str(error))
    assert match is not None
    message = match[1]
    below, value = _place_and_value(match[2] or "", data, kind)
    expected = _type_at(kind, below)
    place = (*base, *below)
    if missing := re.match(r"Object missing required field `(.+)`", message):
        return document.error(place, f"{missing[1]} is missing")
    if unknown := re.match(r"(?s)Object contains unknown field `(.*)`", message):
        fields = _fields(expected)
        near = _REMOVED.get(unknown[1]) or did_you_mean(unknown[1], fields, 0.5)
        message = f"unknown key ({near})" if near else "unknown key"
        return document.error((*place, unknown[1]), message, f"allowed: {', '.join(fields)}")
    if "got" in message:
        return _mismatch(document, place, value, expected)
    if limit := re.search(r"` (of length )?(>=|<=|>|<) (\S+)\Z", message):
        rule = f"{'its length' if limit[1] else 'it'} has to be {_LIMITS[limit[2]]} {limit[3]}"
        return document.error(place, "it is empty" if value == "" else f"{_shown(value)}: {rule}")
    message = f"{_shown(value)} is not {_description(expected) or 'a valid value'}"
    return document.error(place, message, _allowed(expected, value))


def _mismatch(document: Document, place: KeyPath, value: Any, expected: inspect.Type) -> BadInput:
    """Return the error for a value of another type than the expected one."""
    names = [_TYPES[type(one)][0] for one in _alternatives(expected)]
    wanted = " or ".join(dict.fromkeys(names))
    if value is None:
        return document.error(place, f"no value; expected {wanted}")
    message = f"{_shown(value)} is {_kind(value)}, not {wanted}"
    return document.error(place, message, _remedy(expected, value))


def _takes(kind: inspect.Type, value: object) -> bool:
    taken = tuple(python for one in _alternatives(kind) for python in _TYPES[type(one)][1])
    number = isinstance(value, bool) and not {bool, object} & {*taken}  # a bool is an int, too
    return isinstance(value, taken) and not number


def _kind(value: object) -> str:
    return _KINDS.get(type(value)) or f"of type {type(value).__name__}"


def _shown(value: object) -> str:
    """Return a value in few words: a boolean as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else repr(value)[:80]


def _place_and_value(path: str, data: Any, kind: type[Spec]) -> tuple[KeyPath, Any]:
    """Return the keys of msgspec's path ``.env[...]`` and the value at that place in ``data``."""
    place: KeyPath = ()
    for name, index in _SEGMENT.findall(path):
        part: str | int = name or (0 if index == "..." else int(index))
        if index == "...":
            # msgspec does not name the key of a mapping: take the first with a value of wrong type.
            item_type = _type_at(kind, (*place, ""))
            part = next((key for key, item in data.items() if not _takes(item_type, item)), "")
        place = (*place, part)
        data = data[part]
    return place, data


def _remedy(expected: inspect.Type, value: Any) -> str | None:
    """Return a hint with the value in a form that the type takes, or what it allows."""
    members = list(_alternatives(expected))
    taken = {type(one) for one in members}
    if allowed := _allowed(expected, value):
        return allowed
    if isinstance(value, str) and inspect.VarTupleType in taken:
        try:
            words = shell.split(value)
        except BadInput:  # a single quote may be an apostrophe
            words = value.split()
        return json.dumps(words, ensure_ascii=False)
    if isinstance(value, bool | int | float) and taken == {inspect.StrType}:
        return f'quote it: "{_shown(value)}"'
    if isinstance(value, os.PathLike) and inspect.StrType in taken:
        return f'text: "{os.fspath(value)}"'
    if isinstance(value, str) and re.fullmatch(r"-?\d+|true|false", value):
        return f"without quotes: {value}"
    if inspect.StructType in taken:
        return f"its keys: {', '.join(_fields(expected))}"
    return "NAME: VALUE" if inspect.DictType in taken else None


def _allowed(expected: inspect.Type, value: Any) -> str | None:
    """Return a hint: the values that a type allows."""
    members = list(_alternatives(expected))
    allowed = [
        str(each) for one in members if isinstance(one, inspect.LiteralType) for each in one.values
    ]
    if allowed and any(isinstance(one, inspect.IntType) for one in members):
        allowed.insert(0, "a whole number")
    return choices(allowed, value) if allowed else None


def _type_at(kind: type[Spec], place: KeyPath) -> inspect.Type:
    """Return the type of a place in a struct; any type where it has none."""
    found: inspect.Type = inspect.type_info(kind)
    for part in place:
        items: list[inspect.Type] = []
        for one in _alternatives(found):
            if isinstance(one, inspect.VarTupleType) and isinstance(part, int):
                items.append(one.item_type)
            elif isinstance(one, inspect.DictType):
                items.append(one.value_type)
        found = items[0] if items else _fields(found).get(str(part), inspect.AnyType())
    return found


def _description(kind: inspect.Type) -> str | None:
    """Return what a type with a pattern says of itself (`msgspec.Meta.description`)."""
    if isinstance(kind, inspect.UnionType):
        return next(filter(None, map(_description, kind.types)), None)
    if isinstance(kind, inspect.Metadata):
        return (kind.extra_json_schema or {}).get("description") or _description(kind.type)
    return None
