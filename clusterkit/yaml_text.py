"""YAML as clusterkit writes it, on PyYAML's safe dumper: plain words, shared parts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

_PLAIN = re.compile(
    r"[A-Za-z/_][A-Za-z0-9/_.$()-]*(:[A-Za-z0-9/_.-]+)*\Z"
    r"|--?[A-Za-z][A-Za-z0-9-]*(=[A-Za-z0-9$().-]+)?\Z"
    r"|[0-9]+[KMGTPE]i\Z"
)
"""Names and paths, options, amounts of memory."""
_FLOW_LENGTH = 80
"""Characters that a list may have which stands in one line."""
_RESERVED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "."})


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
    texts = (
        yaml.dump(
            each, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"),
            default_flow_style=False,
        )
        for each in objects
    )  # fmt: skip
    return comment + "---\n".join(texts)


class _Dumper(yaml.SafeDumper):
    """Indents lists, and writes short ones in one line."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return not isinstance(data, Shared)

    def generate_anchor(self, node: Any) -> str:
        return str(node.anchor)

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        node = super().represent_sequence(tag, sequence, flow_style)
        words = [each for each in node.value if isinstance(each, yaml.ScalarNode)]
        simple = all(each.style != "|" for each in words)
        length = sum(len(each.value) + 2 for each in words)
        node.flow_style = simple and len(words) == len(node.value) and length <= _FLOW_LENGTH
        return node


def _shared(dumper: yaml.SafeDumper, data: Shared) -> yaml.Node:
    node = dumper.represent_dict(data.items())
    vars(node)["anchor"] = data.anchor
    return node


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Quoted where any reader, of YAML 1.1 or 1.2, might take it for something else (``1e3``)."""
    plain = _PLAIN.match(text) and text.lower() not in _RESERVED
    style = "|" if "\n" in text.rstrip("\n") else None if plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_multi_representer(str, _string)
_Dumper.add_representer(str, _string)
_Dumper.add_representer(Shared, _shared)
_Dumper.add_representer(
    _Merge, lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:merge", "<<")
)
