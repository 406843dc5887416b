"""YAML to specs. Every error names the file, the line, the key, the value and what would do.

YAML is read as people mean it, close to YAML 1.2's core schema: ``2:4`` is text and not
124, ``1e-3`` is a number, ``on`` and ``no`` are text; in ``env``, ``args`` and ``command``
every plain scalar is its own text (``FLAG: 010`` arrives as ``010``).
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml

from clusterkit import command, shell
from clusterkit.cluster import CLUSTER_TYPES, ClusterSpec, LocalCluster
from clusterkit.errors import BadInput, Place, dotted
from clusterkit.files import read_file, why
from clusterkit.spec import SCHEMA, JobSpec, check_environment, check_job

Spec = TypeVar("Spec", bound=msgspec.Struct)
CLUSTERS_FILE = "clusters.yaml"
MOST_VALUES = 100_000
"""Values in one document, each use of an alias counted: a few aliases of aliases make millions."""
_TEXT = frozenset({"env", "args", "command"})


class Document:
    """A parsed YAML file: its data, and the line of every key."""

    def __init__(self, name: str, data: Any, lines: Mapping[Place, int]) -> None:
        self.name = name
        self.data = data
        self._lines = lines
        self._parts: dict[str | int, Document] = {}

    def error(self, place: Place, message: str, hint: str | None = None) -> BadInput:
        """An error at one place of the file."""
        key = dotted(place)
        return BadInput(f"{self.where(place)}: {key + ': ' if key else ''}{message}", hint)

    def where(self, place: Place) -> str:
        """``file:line`` of a place, or of the nearest one above it that has a line."""
        if place and place[0] in self._parts:
            return self._parts[place[0]].where(place)
        while place and place not in self._lines:
            place = place[:-1]
        line = self._lines.get(place)
        return f"{self.name}:{line}" if line else self.name

    def include(self, key: str, folder: Path) -> None:
        """Where a key names a file, put what that holds into its place: JSON, or YAML.

        Args:
            folder: where a relative path starts.

        Raises:
            BadInput: as `read_yaml`.
        """
        if isinstance(named := self.data.get(key), str):
            try:
                part = read_yaml(folder / Path(named).expanduser(), base=(key,))
            except BadInput as error:
                raise BadInput(
                    f"{self.where((key,))}: {key}: {error.message}", error.hint
                ) from None
            self.data[key], self._parts[key] = part.data, part


@contextmanager
def locating(
    job: Document | None, cluster: LoadedCluster | None = None, flags: Mapping[str, str] = {}
) -> Iterator[None]:
    """Within, an error about a key of the job or of the cluster's entry gets its place in front.

    Args:
        job: the job's file, if it has one.
        cluster: the entry, once it has been read.
        flags: keys that a flag has overridden, and the flag.
    """
    try:
        yield
    except BadInput as error:
        if error.key and error.where is None:
            key = str(error.key[0])
            if key in flags:
                error.locate(flags[key], flags[key] + error.message.removeprefix(key))
            elif error.source == "job" and job is not None:
                where = job.where(error.key)
                error.locate(where, f"{where}: {error.message}")
            elif error.source == "cluster" and cluster is not None and cluster.document is not None:
                where = cluster.document.where((cluster.name, *error.key))
                error.locate(where, f"{where}: {cluster.name}.{error.message}")
        raise


# ---------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's idea of what a plain scalar is."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (pyyaml's own form)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"([-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+)\Z"),
    list("-+0123456789"),
)  # fmt: skip
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN))\Z"
    ),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"(~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"<<\Z"), ["<"])


def _float(loader: _Loader, node: yaml.Node) -> float:
    text = str(loader.construct_scalar(typing.cast(yaml.ScalarNode, node))).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _int(loader: _Loader, node: yaml.Node) -> int:
    text = str(loader.construct_scalar(typing.cast(yaml.ScalarNode, node)))
    # PyYAML's own would read 010 as 8.
    return int(text, 16) if text.startswith("0x") else int(text, 10)


_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)


def read_yaml(path: Path, *, depth: int = 0, base: Place = ()) -> Document:
    """Read one YAML file, or JSON; ``depth`` and ``base`` as for `parse_yaml`.

    Raises:
        BadInput: no such file, a folder, not text, too large, not YAML, empty, a key twice.
    """
    name = str(path)
    try:
        text = read_file(path).decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{name}: not a text file (byte {error.start} is not UTF-8)") from None
    except OSError as error:
        hint = _nearest_file(path) if isinstance(error, FileNotFoundError) else None
        raise BadInput(f"{name}: {why(error)}", hint) from None
    if path.suffix == ".json":
        text = text.replace("\t", " ")  # which JSON allows between values, and only there
    return parse_yaml(text, name, depth=depth, base=base)


def parse_yaml(text: str, name: str, *, depth: int = 0, base: Place = ()) -> Document:
    """Parse YAML text. Raises as `read_yaml`.

    Args:
        text: a whole document.
        name: stands for the file in errors.
        depth: where ``env`` and ``args`` are: at the top (0), or in the entries below it (1).
        base: where in a job the document will stand.
    """
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise BadInput(f"{name}: the file is empty")
        lines: dict[Place, int] = {}
        data = _build(loader, root, base, lines, name, depth)
    except yaml.YAMLError as error:
        raise _syntax_error(error, text, name) from None
    except RecursionError:
        raise BadInput(f"{name}: nested too deeply, or an alias that holds itself") from None
    finally:
        if loader is not None:
            loader.dispose()
    return Document(name, data, lines)


def _build(
    loader: _Loader, node: yaml.Node, place: Place, lines: dict[Place, int], name: str, depth: int
) -> Any:
    lines.setdefault(place, node.start_mark.line + 1)
    if len(lines) > MOST_VALUES:
        raise BadInput(f"{name}: more than {MOST_VALUES:,} values, aliases unfolded")
    if isinstance(node, yaml.MappingNode):
        own: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise BadInput(f"{name}:{line}: a key must be a word")
            if key in own and key != "<<":
                raise BadInput(
                    f"{name}:{line}: {dotted((*place, key))}: stands in line {own[key]} already",
                    hint="keep one of the two",
                )
            own[key] = line
        loader.flatten_mapping(node)
        found = {}
        for key_node, value_node in node.value:
            below = (*place, str(key_node.value))
            lines[below] = key_node.start_mark.line + 1
            found[str(key_node.value)] = _build(loader, value_node, below, lines, name, depth)
        return found
    if isinstance(node, yaml.SequenceNode):
        return [
            _build(loader, item, (*place, number), lines, name, depth)
            for number, item in enumerate(node.value)
        ]
    if _is_text(place, depth):
        return node.value
    plain = isinstance(node, yaml.ScalarNode) and node.style is None
    if plain and place[:1] == ("deepspeed",) and _COMMENT.search(node.value):
        raise _no_comment(f"{name}:{node.start_mark.line + 1}")
    try:
        return loader.construct_object(node)
    except (ValueError, KeyError, AttributeError, TypeError):
        kind = node.tag.rpartition(":")[2]
        raise BadInput(
            f"{name}:{node.start_mark.line + 1}: {dotted(place)}: "
            f"{str(node.value)[:40]!r} is no {kind}"
        ) from None


_COMMENT = re.compile(r"(^|\s)(//|/\*)")
"""Of JavaScript, as people have it in JSON; to YAML it is the beginning of a word, or its end."""


def _no_comment(where: str) -> BadInput:
    return BadInput(f"{where}: a comment as in JavaScript", hint="take it out, or begin it with #")


def _is_text(place: Place, depth: int) -> bool:
    """Whether a scalar here is text however it looks: ``env.X``, ``args[0]``."""
    return len(place) > depth + 1 and place[depth] in _TEXT


def _syntax_error(error: yaml.YAMLError, text: str, name: str) -> BadInput:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if mark is None:
        return BadInput(f"{name}: not YAML: {problem}")
    line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    if "\t" in line[: mark.column + 1] or "'\\t'" in problem:
        return BadInput(
            f"{name}:{mark.line + 1}: a tab where YAML wants spaces", hint="indent with two spaces"
        )
    for number in (mark.line, mark.line - 1):
        if _COMMENT.search("".join(text.splitlines()[number : number + 1])):
            return _no_comment(f"{name}:{number + 1}")
    return BadInput(
        f"{name}:{mark.line + 1}: not YAML: {problem}", hint=f"near {line.strip()[:60]!r}"
    )


def _nearest_file(path: Path) -> str | None:
    try:
        there = [str(path.with_name(entry)) for entry in os.listdir(path.parent or ".")]
    except OSError:
        return None
    near = difflib.get_close_matches(str(path), there, 1)
    return f"did you mean {near[0]}?" if near else None


# ---------------------------------------------------------------- specs


def convert(document: Document, place: Place, data: Any, kind: type[Spec]) -> Spec:
    """``data``, which stands at ``place``, as a spec.

    Raises:
        BadInput: an unknown key, a wrong type, a value out of range.
    """
    _refuse_unknown_keys(document, place, data, kind)
    if isinstance(data, dict):
        # `env:` with nothing after it is as good as no `env`.
        data = {key: value for key, value in data.items() if value is not None}
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise _type_error(document, place, data, kind, error) from None
    except UnicodeEncodeError as error:
        half = str(error.object)[error.start : error.end].encode("unicode-escape").decode()
        raise document.error(place, f"half a character ({half}), which no text can hold") from None


def _refuse_unknown_keys(document: Document, place: Place, data: Any, kind: Any) -> None:
    if not isinstance(data, dict):
        return
    fields = _fields(kind)
    for key, value in data.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1, 0.5)
            message = "unknown key" + (f" (did you mean {near[0]}?)" if near else "")
            raise document.error((*place, key), message, f"allowed: {', '.join(fields)}")
        if (inner := _struct_of(fields[key])) is not None:
            _refuse_unknown_keys(document, (*place, key), value, inner)


_AT = re.compile(r"(?s)(.*?)(?: - at `\$(.*)`)?\Z")
_SEGMENT = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_NAMES = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false",
          "array": "a list", "object": "a mapping", "null": "nothing"}  # fmt: skip


def _type_error(
    document: Document, base: Place, data: Any, kind: Any, error: msgspec.ValidationError
) -> BadInput:
    match = _AT.match(str(error))
    assert match is not None
    message = match[1]
    place: Place = ()
    value = data
    for segment in _SEGMENT.finditer(match[2] or ""):
        part: str | int = segment[1] or (0 if segment[2] == "..." else int(segment[2]))
        if segment[2] == "...":
            # msgspec does not say which key of a mapping; the first of a wrong type it is.
            wrong = [key for key, item in value.items() if not isinstance(item, str)]
            part = wrong[0] if wrong else next(iter(value), "")
        place = (*place, part)
        value = value[part] if part != "" else value
    if missing := re.match(r"Object missing required field `(.+)`", message):
        return document.error((*base, *place), f"{missing[1]} is missing")
    shown = "nothing" if value is None else repr(value)[:80]
    allowed = _choices(kind, place)
    if "Expected" in message and "got" in message:
        wanted, got = re.findall(r"`([^`]+)`", message)[:2]
        names = [_NAMES.get(name.strip(), name.strip()) for name in wanted.split("|")]
        wanted = " or ".join(name for name in names if name != "nothing") or "nothing"
        message = f"{shown} is {_NAMES.get(got, got)}, not {wanted}"
        if got.startswith(("int", "float")) and value == got:
            message = f"{shown}: {wanted}"
    else:
        message = f"{shown}: {message[0].lower()}{message[1:]}"
    hint = None
    if allowed:
        near = difflib.get_close_matches(str(value), allowed, 1)
        hint = f"allowed: {', '.join(allowed)}" + (f"; did you mean {near[0]}?" if near else "")
    return document.error((*base, *place), message, hint)


def _fields(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(kind)}


def _members(annotation: Any) -> Iterator[Any]:
    """The alternatives of an annotation, with ``Annotated`` and unions unfolded."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from _members(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _struct_of(annotation: Any) -> Any:
    return next(
        (m for m in _members(annotation) if isinstance(m, type) and issubclass(m, msgspec.Struct)),
        None,
    )


def _choices(kind: Any, place: Place) -> list[str]:
    """What may stand at a place whose values are listed; a number among them in words."""
    annotation = kind
    for part in place:
        struct = _struct_of(annotation)
        if struct is None:
            return []
        annotation = _fields(struct).get(str(part))
    members = list(_members(annotation))
    listed = [
        str(choice)
        for member in members
        if typing.get_origin(member) is Literal
        for choice in typing.get_args(member)
    ]
    return ["a whole number", *listed] if listed and int in members else listed


# ---------------------------------------------------------------- jobs


@dataclass(frozen=True)
class LoadedJob:
    """A job, the file it came from, for errors that are found later, and its program's folders."""

    job: JobSpec
    document: Document
    bases: Sequence[Path]


def load_job(path: str | Path, settings: Sequence[str] = ()) -> JobSpec:
    """The job of `read_job` with its program found."""
    loaded = read_job(path, settings)
    with locating(loaded.document):
        return locate_program(loaded.job, loaded.bases)


def read_job(path: str | Path, settings: Sequence[str] = ()) -> LoadedJob:
    """A job file as a `JobSpec`, with ``key=value`` settings applied.

    Args:
        path: the job file.
        settings: ``key=value``, with dots for keys below (``batch.micro=4``); the value is YAML.

    Raises:
        BadInput: anything wrong with the file or a setting.
    """
    path = Path(path)
    if (words := command.instead_of_a_job([str(path)])) is not None:
        raise BadInput(
            f"{path} is no job file, but a program",
            hint=shell.join(["clusterkit", "submit", "--", *words]),
        )
    document = read_yaml(path)
    if not isinstance(document.data, dict):
        raise BadInput(f"{path}: a job file is a mapping of keys like `name:` and `program:`")
    if document.data.get("name") is None:
        document.data["name"] = path.stem
    document.include("deepspeed", path.parent)
    for setting in settings:
        apply_setting(document, setting)
    document.include("deepspeed", path.parent)
    job = convert(document, (), document.data, JobSpec)
    with locating(document):
        check_job(job)
    return LoadedJob(job, document, [current_folder(), *path.absolute().parents])


def apply_setting(document: Document, setting: str) -> None:
    """Put one ``--set key=value`` into a job's data."""
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise BadInput(f"--set {setting!r}: not of the form key=value", hint="--set batch.micro=4")
    parts = key.strip().split(".")
    if _is_text(tuple(parts), 0):
        value: Any = text
    elif not text:
        value = None
    else:
        try:
            value = parse_yaml(text, "--set", base=tuple(parts)).data
        except BadInput as error:
            raise BadInput(f"--set {setting!r}: the value is not YAML", error.message) from None
    target = document.data
    for depth, part in enumerate(parts[:-1]):
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise BadInput(f"--set {setting!r}: {'.'.join(parts[: depth + 1])} holds no keys")
    target[parts[-1]] = value


def job_from_command(argv: Sequence[str], **fields: Any) -> JobSpec:
    """A job from a command line such as ``python my_script.py --flag``.

    ``python FILE.py ...`` and ``python -m MODULE ...`` become a program or a module; anything
    else is a command, a launcher's too (`clusterkit.command.take_over`).

    Raises:
        BadInput: the command is empty, or no command.
    """
    if not argv:
        raise BadInput(
            "no command after --", hint="clusterkit submit -- python train.py --steps 10"
        )
    if argv[0].endswith(".py") and shutil.which(argv[0]) is None:
        raise BadInput(
            f"{argv[0]} is a Python file and no command",
            hint=shell.join(["clusterkit", "submit", "--", "python", *argv]),
        )
    started = command.read(argv)
    name = re.sub(r"[^\w. -]+", "-", started.name).lstrip("-. ")[:40] or "command"
    job = JobSpec(name=name, command=tuple(argv), **fields)
    if started.tool is None:
        job = msgspec.structs.replace(
            job, program=started.program, module=started.module, command=started.command,
            args=started.args, python=started.python,
        )  # fmt: skip
    check_job(job)
    return job


def current_folder() -> Path:
    """The current folder.

    Raises:
        BadInput: it has been removed.
    """
    try:
        return Path.cwd()
    except OSError:
        raise BadInput("the current folder is gone", hint="cd to one that is there") from None


def locate_program(job: JobSpec, bases: Sequence[Path]) -> JobSpec:
    """The job with its working folder filled in: the first of ``bases`` that holds the program.

    A relative path of its interpreter counts from there.

    Raises:
        BadInput: the program is nowhere, or is not Python.
    """
    replace = msgspec.structs.replace
    if job.workdir is not None:
        bases = [Path(job.workdir).expanduser().absolute()]
        if not bases[0].is_dir():
            raise BadInput(f"workdir: {job.workdir} is not a folder", job="workdir")
    for base in bases:
        path = base / (job.program or "")
        if path.exists():
            python = job.python
            if python is not None and "/" in python:
                python = str(base / Path(python).expanduser())
            if job.program is not None:
                check_program(path)
            return replace(job, workdir=str(base), python=python)
    assert job.program is not None
    near = difflib.get_close_matches(
        Path(job.program).name, _python_files((bases[0] / job.program).parent), 1
    )
    raise BadInput(
        f"program: {job.program} is neither in {bases[0]} nor in the job file's folder or above it",
        hint=f"did you mean {Path(job.program).with_name(near[0])}?" if near else None,
        job="program",
    )


def check_program(path: Path) -> None:
    """Refuse what Python cannot run as a program.

    Raises:
        BadInput: a folder, unreadable, or not Python by its name and first bytes.
    """
    try:
        head = read_file(path, 4096, whole=False)
    except IsADirectoryError:
        raise BadInput(
            f"program: {path} is a folder", "name the file, or use `module:`", job="program"
        ) from None
    except OSError as error:
        raise BadInput(f"program: {path}: {why(error)}", job="program") from None
    shebang = head.split(b"\n", 1)[0] if head.startswith(b"#!") else b""
    if b"\0" in head or (path.suffix not in (".py", ".pyw") and b"python" not in shebang):
        raise BadInput(
            f"program: {path} is not a Python file",
            hint=f"command: [{path}] runs any other kind of program",
            job="program",
        )


def _python_files(folder: Path) -> list[str]:
    try:
        return [entry for entry in os.listdir(folder) if entry.endswith(".py")]
    except OSError:
        return []


# ---------------------------------------------------------------- clusters


@dataclass(frozen=True)
class LoadedCluster:
    """A cluster's entry, the folder that paths in it start from, and the file it came from."""

    name: str
    cluster: ClusterSpec
    folder: Path
    document: Document | None = None


def load_cluster(name: str, path: str | os.PathLike[str] | None = None) -> ClusterSpec:
    """The cluster of `read_cluster`."""
    return read_cluster(name, path).cluster


def read_cluster(name: str, path: str | os.PathLike[str] | None = None) -> LoadedCluster:
    """One entry of the cluster file; ``local`` is there without one.

    Args:
        name: the entry.
        path: the file; by default ``$CLUSTERKIT_CLUSTERS``, or ``clusters.yaml`` here or in a
            folder above.

    Raises:
        BadInput: no such entry, no such file, anything wrong with the entry.
    """
    found = Path(path) if path is not None else find_clusters_file()
    clusters: dict[str, Any] = {}
    document = None
    if found is not None:
        document = read_yaml(found, depth=1)
        if not isinstance(document.data, dict):
            raise BadInput(f"{found}: a cluster file is a mapping of names to entries")
        clusters = document.data
    if name not in clusters:
        if name == "local":
            return LoadedCluster(name, LocalCluster(), current_folder())
        known = sorted({"local", *clusters})
        near = difflib.get_close_matches(name, known, 1)
        where = (
            f" in {found}" if found is not None else f"; there is no {CLUSTERS_FILE} here or above"
        )
        raise BadInput(
            f"cluster {name!r} is unknown{where}",
            hint=f"known: {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else ""),
        )
    assert document is not None
    entry = {} if clusters[name] is None else clusters[name]
    if not isinstance(entry, dict):
        raise document.error((name,), "an entry is a mapping like {backend: local}")
    backend = entry.get("backend", "local" if name == "local" else None)
    if not isinstance(backend, str) or backend not in CLUSTER_TYPES:
        known = sorted(CLUSTER_TYPES)
        message = "backend is missing" if backend is None else f"{backend!r} is no backend"
        near = difflib.get_close_matches(str(backend), known, 1)
        raise document.error(
            (name, "backend"),
            message,
            f"allowed: {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else ""),
        )
    cluster = convert(document, (name,), entry, CLUSTER_TYPES[backend])
    assert found is not None
    loaded = LoadedCluster(name, cluster, found.absolute().parent, document)
    with locating(None, loaded):
        check_environment(cluster.env, "cluster")
    return loaded


def find_clusters_file() -> Path | None:
    """``$CLUSTERKIT_CLUSTERS``, or the nearest ``clusters.yaml`` from here upwards, or None."""
    named = os.environ.get("CLUSTERKIT_CLUSTERS")
    if named:
        return Path(named)
    here = current_folder()
    candidates = (folder / CLUSTERS_FILE for folder in (here, *here.parents))
    return next((path for path in candidates if path.is_file()), None)


def cluster_names(path: str | Path | None = None) -> list[str]:
    """Names that ``--cluster`` takes here."""
    found = Path(path) if path is not None else find_clusters_file()
    data = read_yaml(found, depth=1).data if found is not None else {}
    return sorted({"local", *(data if isinstance(data, dict) else {})})


# ---------------------------------------------------------------- schema


def json_schema() -> dict[str, Any]:
    """JSON schema of job files, for editors; cluster files under ``$defs/clusters``."""
    job = msgspec.json.schema(JobSpec)
    kinds = list(CLUSTER_TYPES.values())
    definitions = dict(job["$defs"])
    for kind in kinds:
        definitions |= msgspec.json.schema(kind)["$defs"]
    # `name` is taken from the file's own name when it is left out.
    required = definitions["JobSpec"].pop("required", [])
    assert required == ["name"]
    definitions["JobSpec"] |= SCHEMA
    definitions["JobSpec"]["properties"]["deepspeed"]["anyOf"].append({"type": "string"})
    for name in ("JobSpec", *(kind.__name__ for kind in kinds)):
        for key, schema in definitions[name]["properties"].items():
            if key in _TEXT:
                _take_scalars(schema)
            # A key with nothing after it is as good as none.
            if "anyOf" in schema:
                schema["anyOf"].append({"type": "null"})
            elif "enum" in schema:
                schema["enum"].append(None)
            else:
                schema["type"] = [schema["type"], "null"]
    definitions["clusters"] = {
        "type": "object",
        "description": f"{CLUSTERS_FILE}: names and entries",
        "additionalProperties": {"anyOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in kinds]},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "clusterkit job file",
        "$ref": "#/$defs/JobSpec",
        "$defs": definitions,
    }


def _take_scalars(schema: dict[str, Any]) -> None:
    """Let every scalar stand where text is wanted below: it is its own text there."""
    for below in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(below, dict):
            below["type"] = ["string", "number", "boolean", "null"]
    for alternative in schema.get("anyOf", ()):
        _take_scalars(alternative)
