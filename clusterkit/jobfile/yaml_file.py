"""Read YAML files, with the line of every key for error messages.

Scalars follow YAML 1.2's core schema rather than 1.1: ``2:4`` is text and not 124, ``1e-3`` is
a number, ``on`` and ``no`` are text. In ``env``, ``args`` and ``command`` every scalar is text
exactly as written: ``FLAG: 010`` is ``"010"``.
"""

from __future__ import annotations

import glob
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from clusterkit.errors import BadInput, KeyPath, did_you_mean, dotted
from clusterkit.files import read_file, reason

MAX_VALUES = 100_000
"""Limit of values in one document, aliases expanded: a few nested aliases can make millions."""
VERBATIM = frozenset({"env", "args", "command"})
"""Keys below which every scalar is text, exactly as written."""


OPTION = "--set"


class Document:
    """A parsed YAML file: its data and the line of every key."""

    def __init__(self, name: str, data: Any, lines: Mapping[KeyPath, int]) -> None:
        self.name = name
        self.data = data
        self._lines = dict(lines)
        self._set = set[KeyPath]()
        self._parts: dict[str | int, Document] = {}

    def error(self, place: KeyPath, message: str, hint: str | None = None) -> BadInput:
        """Return an error that begins with the file, the line and the key of a place."""
        key = dotted(place)
        error = BadInput(f"{key}: {message}" if key else message, hint)
        self.locate(error, place)
        return error

    def locate(self, error: BadInput, place: KeyPath) -> None:
        """Begin an error, whose message begins with the key, with where the place was set."""
        if where := self.where(place):
            error.locate(where, f"{where}{' ' if where == OPTION else ': '}{error.message}")

    def where(self, place: KeyPath) -> str:
        """Return ``file:line`` of a place, or of the nearest key above it that has a line.

        That is `OPTION`, if `set` has set it.
        """
        for above in (place[:end] for end in range(len(place), -1, -1)):
            if above in self._set:
                return OPTION
            if len(above) == 1 and above[0] in self._parts:
                return self._parts[above[0]].where(place)
            if above in self._lines:
                return f"{self.name}:{self._lines[above]}"
        return self.name

    def set(self, parts: Sequence[str], value: Any) -> None:
        """Set a value, as ``--set`` does.

        Raises:
            BadInput: a key above it has a value that is no mapping.
        """
        target, place = self.data, tuple(parts)
        for end, part in enumerate(place[:-1], 1):
            if part not in target:
                self._set.add(place[:end])
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise BadInput(f"{OPTION} {dotted(place)}: {dotted(place[:end])} is not a mapping")
        target[place[-1]] = value
        for known in [each for each in self._lines if each[: len(place)] == place]:
            del self._lines[known]
        if len(place) == 1:
            self._parts.pop(place[0], None)
        self._set.add(place)

    def include(self, key: str, folder: Path) -> None:
        """Replace a key's value, if it is a path relative to ``folder``, by that file's data.

        Raises:
            BadInput: as `read_yaml`.
        """
        if isinstance(named := self.data.get(key), str):
            try:
                part = read_yaml(folder / Path(named).expanduser(), base=(key,))
            except BadInput as error:
                raise self.error((key,), error.message, error.hint) from None
            self.data[key], self._parts[key] = part.data, part
            self._set.discard((key,))


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 and the line of every key."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (pyyaml's own form)

    def __init__(self, text: str, file: str, depth: int) -> None:
        super().__init__(text)
        self.file = file
        self.depth = depth
        self.lines: dict[KeyPath, int] = {}

    def build(self, node: yaml.Node, place: KeyPath) -> Any:
        """Convert a node at ``place``, and all nodes below it, to Python values."""
        line = node.start_mark.line + 1
        self.lines.setdefault(place, line)
        if len(self.lines) > MAX_VALUES:
            raise BadInput(f"{self.file}: more than {MAX_VALUES:,} values, aliases expanded")
        if isinstance(node, yaml.MappingNode):
            self._refuse_repeated_keys(node, place)
            self.flatten_mapping(node)
            found = {}
            for key_node, value_node in node.value:
                below = (*place, str(key_node.value))
                self.lines[below] = key_node.start_mark.line + 1
                found[str(key_node.value)] = self.build(value_node, below)
            return found
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*place, number)) for number, item in enumerate(node.value)]
        if is_text(place, self.depth):
            return node.value
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        if plain and place[:1] == ("deepspeed",) and _COMMENT.search(node.value):
            raise _javascript_comment(f"{self.file}:{line}")
        try:
            return self.construct_object(node)
        except (ValueError, KeyError, AttributeError, TypeError):
            kind, shown = node.tag.rpartition(":")[2], repr(str(node.value)[:40])
            message = f"{self.file}:{line}: {dotted(place)}: {shown} is not a valid {kind}"
            raise BadInput(message) from None

    def _refuse_repeated_keys(self, node: yaml.MappingNode, place: KeyPath) -> None:
        own: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise BadInput(f"{self.file}:{line}: a key must be a word")
            if key in own and key != "<<":
                where = f"{self.file}:{line}: {dotted((*place, key))}"
                raise BadInput(f"{where}: is already set in line {own[key]}", "keep one of the two")
            own[key] = line


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
              r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN)", "-+0123456789."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):  # fmt: skip
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"({_pattern})\Z"), list(_first)
    )


def _float(loader: _Loader, node: yaml.Node) -> float:
    text = str(loader.construct_scalar(typing.cast(yaml.ScalarNode, node))).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _int(loader: _Loader, node: yaml.Node) -> int:
    text = str(loader.construct_scalar(typing.cast(yaml.ScalarNode, node)))
    # PyYAML's own constructor reads 010 as 8.
    return int(text, 16) if text.startswith("0x") else int(text, 10)


_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)


def read_yaml(path: Path, *, depth: int = 0, base: KeyPath = ()) -> Document:
    """Read one YAML or JSON file; ``depth`` and ``base`` as for `parse_yaml`.

    Raises:
        BadInput: no such file, a folder, not text, too large, not YAML, empty, a repeated key.
    """
    name = str(path)
    try:
        text = read_file(path).decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{name}: not a text file (byte {error.start} is not UTF-8)") from None
    except OSError as error:
        hint = similar_file(path) if isinstance(error, FileNotFoundError) else None
        raise BadInput(f"{name}: {reason(error)}", hint) from None
    if path.suffix == ".json":
        text = text.replace("\t", " ")  # JSON allows tabs, and only between values
    return parse_yaml(text, name, depth=depth, base=base)


def parse_yaml(text: str, name: str, *, depth: int = 0, base: KeyPath = ()) -> Document:
    """Parse YAML text.

    Args:
        text: one document.
        name: the file's name, for errors.
        depth: level of the keys in `VERBATIM`: 0 in a job file, 1 in a cluster file's entries.
        base: keys of the job under which the document will be placed.

    Raises:
        BadInput: as `read_yaml`.
    """
    try:
        loader = _Loader(text, name, depth)
        root = loader.get_single_node()
        if root is None:
            raise BadInput(f"{name}: the file is empty")
        return Document(name, loader.build(root, base), loader.lines)
    except yaml.YAMLError as error:
        raise _syntax_error(error, text, name) from None
    except RecursionError:
        raise BadInput(f"{name}: nested too deeply, or an alias that contains itself") from None


_COMMENT = re.compile(r"(^|\s)(//|/\*)")
"""A JavaScript comment, which people write in JSON files; YAML takes it for part of a word."""


def _javascript_comment(where: str) -> BadInput:
    return BadInput(f"{where}: a JavaScript comment (// or /*)", "remove it, or begin it with #")


def is_text(place: KeyPath, depth: int) -> bool:
    """Return whether a scalar at this place is text exactly as written: ``env.X``, ``args[0]``."""
    return len(place) > depth + 1 and place[depth] in VERBATIM


def _syntax_error(error: yaml.YAMLError, text: str, name: str) -> BadInput:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if mark is None:
        return BadInput(f"{name}: not YAML: {problem}")
    where = f"{name}:{mark.line + 1}"
    if "another document" in problem:
        return BadInput(
            f"{where}: a second YAML document begins here", "a file holds one document: split it"
        )
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in line[: mark.column + 1] or "'\\t'" in problem:
        return BadInput(f"{where}: a tab where YAML needs spaces", "indent with two spaces")
    for number in (mark.line, mark.line - 1):
        if _COMMENT.search("".join(lines[number : number + 1])):
            return _javascript_comment(f"{name}:{number + 1}")
    problem = problem.replace("'<stream end>'", "the end of the file")
    near = f"near {line.strip()[:60]!r}" if line.strip() else None
    return BadInput(f"{where}: not YAML: {problem}", near)


def similar_file(path: Path, folder: Path = Path()) -> str | None:
    """Return "did you mean" with a file like a missing one; None: there is none.

    One of its name in a folder beside it, or in one beside its folder: such a file was moved. Else
    the most similar one in its folder, by name without suffix. A relative path starts in
    ``folder``.
    """
    try:
        for base in path.parents[:2]:
            for each in sorted((folder / base).glob(f"*/{glob.escape(path.name)}")):
                if each.is_file():
                    return f"did you mean {base / each.relative_to(folder / base)}?"
        beside = [each for each in sorted((folder / path).parent.iterdir()) if each.is_file()]
    except OSError:
        return None
    stems = {
        each.stem: path.with_name(each.name)
        for each in beside
        if each.suffix == path.suffix or each.stem == path.stem
    }
    near = did_you_mean(path.stem, stems)
    stem = near.removeprefix("did you mean ").removesuffix("?")
    return f"did you mean {stems[stem]}?" if near else None
