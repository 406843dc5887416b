"""Write YAML: words without quotes, anchors for shared parts, blocks for text of several lines."""

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
"""Names, paths, options and amounts of memory: text to every reader of YAML 1.1 and 1.2. All
other text is quoted."""
_RESERVED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "."})
_FLOW_LENGTH = 80
"""Length up to which a list is written in one line."""


class Shared(dict[str, Any]):
    """A mapping that is written once, with an anchor to which `merged` refers."""

    def __init__(self, anchor: str, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.anchor = anchor


class _Merge:
    """The key ``<<``, which YAML calls a merge key."""


def merged(shared: Shared, own: Mapping[str, Any]) -> dict[Any, Any]:
    """Return ``own`` with a merge key that refers to ``shared``."""
    return {_Merge(): shared, **own}


def documents(objects: Sequence[Mapping[str, Any]], head: str = "") -> str:
    """Write documents in the order given, below the comment ``head``."""
    return comment(head) + "---\n".join(
        yaml.dump(each, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
        for each in objects
    )


def comment(text: str) -> str:
    """Turn text into comment lines of YAML or shell."""
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


class _Dumper(yaml.SafeDumper):
    """SafeDumper that indents lists and writes anchors only for `Shared` mappings."""

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
