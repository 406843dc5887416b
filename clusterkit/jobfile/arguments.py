"""Check the arguments of functions of the API as the values of a job file are checked."""

from __future__ import annotations

import functools
import os
from collections import abc
from collections.abc import Callable
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

import msgspec

from clusterkit.errors import BadInput, choices

P = ParamSpec("P")
R = TypeVar("R")


class _List:
    """``Sequence[str]``: a list or tuple, and no text, whose letters would be taken."""

    def __class_getitem__(cls, item: Any) -> Any:
        return tuple[item, ...]


class _Function:
    """``Callable[...]``: anything that can be called."""

    def __class_getitem__(cls, item: Any) -> Any:
        return abc.Callable


_MEANING = {"Sequence": _List, "Callable": _Function, "os": SimpleNamespace(PathLike={str: str})}
"""What names in annotations mean here, if not what they mean where the function is defined."""
_PLAIN = frozenset({str, int, float, bool, None, NoneType})


_VARKEYWORDS = 0x08
"""`inspect.CO_VARKEYWORDS`, without the import: the code has a parameter ``**name``."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function raise `BadInput` for an argument of another type than its annotation says,
    and for a keyword that it does not have.

    The annotations have to be text (``from __future__ import annotations``). What they name has to
    be defined when the function is called; otherwise the argument is not checked.
    """
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    keywords = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not code.co_flags & _VARKEYWORDS:
            for name in kwargs.keys() - set(keywords):
                known = [each for each in keywords if each != "self"]
                raise BadInput(f"{name}: unknown argument", choices(known, name, "known"))
        plain, classes = _types_of(function)
        given = dict(zip(names, args, strict=False)) | kwargs
        values = {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name, value in given.items()
            if name in plain.__struct_fields__
        }
        try:
            msgspec.convert(values, plain)
        except msgspec.ValidationError:
            from clusterkit.jobfile.values import of_fields  # deferred: most calls need no words

            of_fields(values, plain)
        for name in given.keys() & classes.keys():
            if not isinstance(given[name], classes[name]):
                shown = repr(given[name])[:80]
                wanted = function.__annotations__[name]
                raise BadInput(f"{name}: {shown} is not {wanted}")
        return function(*args, **kwargs)

    return call


@functools.cache
def _types_of(function: Callable[..., Any]) -> tuple[type[msgspec.Struct], dict[str, Any]]:
    """Return the types of arguments: a struct with those of a job file, and all other classes."""
    fields, classes = [], {}
    for name, annotation in function.__annotations__.items():
        try:
            kind = eval(annotation, {**function.__globals__, **_MEANING})
        except (NameError, AttributeError):
            continue
        if _is_plain(kind):
            fields.append((name, kind, None))
        elif name != "return" and not any(map(get_origin, _members(kind))):
            classes[name] = kind
    return msgspec.defstruct(function.__name__, fields, kw_only=True), classes


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_plain(kind: Any) -> bool:
    """Return whether a type is one of a job file's: numbers, text, and lists of them."""
    return all(
        _is_plain(get_args(each)[0]) if get_origin(each) is tuple else each in _PLAIN
        for each in _members(kind)
    )
