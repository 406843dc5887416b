"""YAML as clusterkit writes it: plain words, shared parts, text of several lines as such. Pure.

PyYAML's own writer takes 30 times as long, which a compose file of thousands of nodes would show.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

_PLAIN = re.compile(
    r"[A-Za-z/_][A-Za-z0-9/_.$()-]*(:[A-Za-z0-9/_.-]+)*\Z"
    r"|--?[A-Za-z][A-Za-z0-9-]*(=[A-Za-z0-9$().-]+)?\Z"
    r"|[0-9]+[KMGTPE]i\Z"
)
"""Names and paths, options, amounts of memory."""
_FLOW_LENGTH = 80
"""Characters that a list may have which stands in one line."""
_RESERVED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "."})
_ESCAPED = re.compile('[^\x20-\x7e\xa0-\ud7ff\ue000-\ufffd]|["\\\\\u2028\u2029\ufeff]')
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\x1b": "\\e"}
_NO_BLOCK = re.compile("[^\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd]|[\u2028\u2029\ufeff]| \n| \\Z")
"""What keeps a text from standing in lines of its own."""


class Shared(dict[str, Any]):
    """A mapping that is written once, with an anchor; `merged` refers to it."""

    def __init__(self, anchor: str, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.anchor = anchor


class _Merge:
    """The key ``<<``."""


def merged(shared: Shared, own: Mapping[str, Any]) -> dict[Any, Any]:
    """``own`` with all keys of ``shared`` that it lacks, by reference."""
    return {_Merge(): shared, **own}


def documents(objects: Sequence[Mapping[str, Any]], head: str = "") -> str:
    """Several documents as one text, in the order given, below ``head`` as a comment."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head.splitlines())
    return comment + "---\n".join(_document(each) for each in objects)


def _document(content: Mapping[str, Any]) -> str:
    written: set[str] = set()  # anchors

    def mapping(content: Mapping[Any, Any], pad: str) -> Iterator[str]:
        for key, value in content.items():
            name = "<<" if isinstance(key, _Merge) else _scalar(key)
            yield from entry(f"{pad}{name}:", value, f"{pad}  ")

    def entry(begin: str, value: Any, pad: str) -> Iterator[str]:
        """What follows ``begin`` in its line, and the lines below that."""
        if isinstance(value, Shared):
            if value.anchor in written:
                yield f"{begin} *{value.anchor}"
                return
            written.add(value.anchor)
            begin = f"{begin} &{value.anchor}"
        if isinstance(value, Mapping):
            yield begin if value else f"{begin} {{}}"
            yield from mapping(value, pad)
        elif isinstance(value, (list, tuple)):
            if _in_one_line(value):
                yield f"{begin} [{', '.join(map(_scalar, value))}]"
            else:
                yield begin
                for each in value:
                    yield from item(each, pad)
        elif isinstance(value, str) and _is_block(value):
            # The digit: the first line may begin with spaces.
            hint = "2" if value[0] in " \n" else ""
            hint += "+" if value.endswith("\n\n") else "" if value[-1] == "\n" else "-"
            yield f"{begin} |{hint}"
            for line in value.removesuffix("\n").split("\n"):
                yield f"{pad}{line}" if line else ""
        else:
            yield f"{begin} {_scalar(value)}"

    def item(value: Any, pad: str) -> Iterator[str]:
        if isinstance(value, Mapping) and value and not isinstance(value, Shared):
            lines = mapping(value, f"{pad}  ")
        elif isinstance(value, (list, tuple)) and not _in_one_line(value):
            lines = (line for each in value for line in item(each, f"{pad}  "))
        else:
            yield from entry(f"{pad}-", value, f"{pad}  ")
            return
        yield f"{pad}- {next(lines).lstrip(' ')}"
        yield from lines

    return "".join(f"{line}\n" for line in mapping(content, "")) or "{}\n"


def _in_one_line(content: Sequence[Any]) -> bool:
    length = 0
    for each in content:
        if isinstance(each, (Mapping, list, tuple)) or (isinstance(each, str) and _is_block(each)):
            return False
        length += len(each if isinstance(each, str) else _scalar(each)) + 2
    return length <= _FLOW_LENGTH


def _is_block(text: str) -> bool:
    return "\n" in text.rstrip("\n") and not _NO_BLOCK.search(text)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _string(str(value))
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text else text.replace("e", ".0e")
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


@lru_cache(maxsize=1024)
def _string(text: str) -> str:
    """Quoted where any reader, of YAML 1.1 or 1.2, might take it for something else (``1e3``)."""
    if _PLAIN.match(text) and text.lower() not in _RESERVED:
        return text
    return f'"{_ESCAPED.sub(_escape, text)}"'


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    width, letter = (2, "x") if code < 1 << 8 else (4, "u") if code < 1 << 16 else (8, "U")
    return _ESCAPES.get(found[0]) or f"\\{letter}{code:0{width}X}"
