"""YAML as clusterkit writes it: plain words, shared parts, text of several lines as such. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

_PLAIN = re.compile(
    r"[A-Za-z/_][A-Za-z0-9/_.$()-]*(:[A-Za-z0-9/_.-]+)*\Z"
    r"|--?[A-Za-z][A-Za-z0-9-]*(=[A-Za-z0-9$().-]+)?\Z"
    r"|[0-9]+[KMGTPE]i\Z"
)
"""Names and paths, options, amounts of memory: what no reader, of YAML 1.1 or 1.2, takes for
something else. All other text is quoted."""
_RESERVED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "."})
_FLOW_LENGTH = 80
"""Characters that a list may have which stands in one line."""


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
    return comment(head) + "---\n".join(
        yaml.dump(each, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
        for each in objects
    )


def comment(text: str) -> str:
    """Lines of text as those of a comment, of YAML or of shell."""
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


class _Dumper(yaml.SafeDumper):
    """Indents lists, and refers by anchor to what is `Shared` alone."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return not isinstance(data, Shared)

    def generate_anchor(self, node: Any) -> str:
        return str(node.anchor)


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    style = None if _PLAIN.match(text) and text.lower() not in _RESERVED else '"'
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, "|" if "\n" in text.rstrip("\n") else style
    )


def _list(dumper: _Dumper, items: Sequence[Any]) -> yaml.Node:
    node = dumper.represent_list(items)
    scalars = all(
        isinstance(each, yaml.ScalarNode) and "\n" not in each.value for each in node.value
    )
    node.flow_style = scalars and sum(len(each.value) + 2 for each in node.value) <= _FLOW_LENGTH
    return node


def _shared(dumper: _Dumper, content: Shared) -> Any:
    node: Any = dumper.represent_dict(content.items())
    node.anchor = content.anchor
    return node


_Dumper.add_representer(str, _text)
_Dumper.add_multi_representer(str, _text)
_Dumper.add_multi_representer(dict, _Dumper.represent_dict)
_Dumper.add_representer(list, _list)
_Dumper.add_representer(tuple, _list)
_Dumper.add_representer(Shared, _shared)
_Dumper.add_representer(
    _Merge, lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:merge", "<<")
)
