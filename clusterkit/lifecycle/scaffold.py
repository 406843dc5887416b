"""`clusterkit init`: write a first job file and cluster file for a script and this machine.

The script's source is read, never imported.
"""

from __future__ import annotations

import ast
import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from clusterkit import backends
from clusterkit.backends.probing import PROJECT_ENVIRONMENTS
from clusterkit.cluster import CLUSTER_TYPES, HostFacts, LocalCluster
from clusterkit.errors import BadInput, choices, join_some
from clusterkit.files import source_of, write_new
from clusterkit.jobfile import catalogue, loader, values
from clusterkit.jobfile.arguments import checked
from clusterkit.jobfile.command import SPAWN
from clusterkit.jobfile.yaml_text import documents
from clusterkit.spec import parse_nodes

JOB_FILE = "job.yaml"
HOST_FILE = "hostfile"
MAX_SCRIPTS = 200
"""Python files that are read to find the program."""
_TORCH = re.compile(
    r"\btorch\.distributed\b|\binit_process_group\b|\bDistributedDataParallel\b|\bfully_shard\b"
    r"|\bfrom torch import distributed\b"
)
_RUNNABLE = re.compile(r"__main__|parse_args\(|\binit_process_group\b|\bAccelerator\(")
"""Matches the source of a program, as opposed to a module that others import."""
_LIBRARIES = ("deepspeed", "accelerate", "lightning", "pytorch_lightning", "ray")
_COMMENT_COLUMN = 40


@dataclass(frozen=True)
class Script:
    """A Python program, as far as its source shows."""

    path: str
    """Path, relative to the current folder where possible."""
    packages: tuple[str, ...]
    """What it and the modules next to it import."""
    distributed: str
    """The package with which its ranks communicate; empty: no known one."""
    needs: tuple[str, ...]
    """Arguments that argparse requires."""
    spawns: bool
    """Whether it starts its ranks itself."""


class Machine(Struct, frozen=True):
    """CPUs, GPUs and Python of this machine."""

    cpus: int
    gpus: tuple[str, ...]
    """Names of the GPUs."""
    python: str | None
    """Interpreter with torch, if it is another one than clusterkit would choose by default."""
    torch: str | None
    """Version of torch in the interpreter that is used; None: it has none."""
    backends: tuple[str, ...]
    """Backends whose commands are installed on this machine."""


class Made(Struct, frozen=True):
    """The result of `write`."""

    files: tuple[str, ...]
    command: tuple[str, ...]
    """Command to start the job."""
    notes: tuple[str, ...]
    """What to check or change first."""


def inspect(path: str) -> Script:
    """Read the source of a program and of the modules next to it.

    Raises:
        BadInput: no such file, or not Python.
    """
    try:
        loader.check_program(Path(path))
    except BadInput as error:
        # There is no job file yet, so the message names no key.
        raise BadInput(error.message.removeprefix("program: "), error.hint) from None
    own = source_of(Path(path))
    texts, packages = own, set[str]()
    for module, names in catalogue.followed(Path(path)):
        packages |= names
        texts += source_of(module)
    library = next((name for name in _LIBRARIES if name in packages), "")
    if not library and "transformers" in packages and re.search(r"\bTrainer\(", texts):
        library = "transformers.Trainer"
    return Script(
        path=path,
        packages=tuple(sorted(packages)),
        distributed=library or ("torch.distributed" if _TORCH.search(texts) else ""),
        needs=tuple(_needs(own)),
        spawns=SPAWN.search(own) is not None,
    )


def scripts() -> list[Script]:
    """Return the programs in the current folder and its subfolders, most likely one first."""
    current = loader.current_folder()
    found = []
    for path in [*sorted(current.glob("*.py")), *sorted(current.glob("*/*.py"))][:MAX_SCRIPTS]:
        name = path.relative_to(current)
        hidden = name.parts[0].startswith(".") or name.parts[0] in (*PROJECT_ENVIRONMENTS, "tests")
        with contextlib.suppress(BadInput):
            if not hidden and _is_program(source_of(path)):
                found.append(inspect(str(name)))

    def rank(script: Script) -> tuple[bool, bool, bool, int, str]:
        path = Path(script.path)
        return (
            not script.distributed, "torch" not in script.packages, "train" not in path.stem,
            len(path.parts), script.path,
        )  # fmt: skip

    return sorted(found, key=rank)


def _is_program(text: str) -> bool:
    """Return whether a file does something when it runs, unlike a module that others import."""
    if _RUNNABLE.search(text):
        return True
    try:
        return any(map(_does, ast.parse(text).body))
    except (SyntaxError, ValueError, RecursionError):
        return False


def _does(node: ast.stmt) -> bool:
    """Return whether a statement at the top of a file is a loop, or a call like `main()`."""
    match node:
        case ast.Expr(ast.Call(ast.Attribute(attr=name))):
            return name in ("fit", "train", "run", "main")
        case ast.Expr(ast.Call(ast.Name())) | ast.For() | ast.While():
            return True
    return False


def only_script() -> Script:
    """Return the only program, or the only one that uses several ranks.

    Raises:
        BadInput: there is none, or more than one.
    """
    found = scripts()
    likely = [script for script in found if script.distributed] or found
    if len(likely) != 1:
        names = join_some(script.path for script in likely)
        raise BadInput(
            f"which program? {f'there are {names}' if names else 'none in this folder'}",
            hint=f"clusterkit init {likely[0].path if likely else 'train.py'}",
        )
    return likely[0]


def machine() -> Machine:
    """Probe this machine for CPUs, GPUs, a Python with torch and the commands of backends."""
    host = _probed()
    python = host.python if host.python_origin.endswith("own has no torch") else None
    return Machine(
        cpus=host.cpus,
        gpus=tuple(gpu.name for gpu in host.gpus),
        python=python,
        torch=host.versions.get("torch"),
        backends=tuple(name for name in backends.NAMES if _reachable(name)),
    )


def _probed() -> HostFacts:
    entry = LocalCluster()
    with contextlib.closing(backends.transport_for(entry)) as transport:
        return backends.backend(entry.backend).probe(entry, transport).hosts[0]


def _reachable(backend: str) -> bool:
    command = backends.backend_type(backend).command
    return not command or shutil.which(command) is not None


def takes_hosts(where: str) -> bool:
    """Return whether ``where`` is a backend whose entry lists hosts."""
    return where in CLUSTER_TYPES and "hosts" in values.fields_of(CLUSTER_TYPES[where])


def known_clusters() -> list[str]:
    """Return the entries of the cluster file; none if there is no file."""
    return [] if loader.find_clusters_file() is None else loader.cluster_names()


@checked
def write(
    script: Script,
    found: Machine,
    *,
    where: str | None = None,
    nodes: str | None = None,
    hosts: str = "",
    args: Sequence[str] = (),
) -> Made:
    """Write a job file, and a cluster file unless there is one that has an entry ``where``.

    Args:
        where: an entry of the cluster file, or a backend; by default ``ssh`` with ``hosts``,
            otherwise ``local``.
        nodes: ``2``, or ``2:4``; by default the number of ``hosts``, or 1.
        hosts: ``[user@]host[:port],...``, or a file of them.
        args: arguments of the program.

    Raises:
        BadInput: a file exists already, or a value is invalid; nothing is written.
    """
    folder, clusters_file = loader.current_folder(), loader.find_clusters_file()
    where = where or ("ssh" if hosts else "local")
    names = [name.strip() for name in hosts.split(",") if name.strip()]
    file = hosts if hosts and Path(hosts).is_file() else None
    texts = {}
    if where not in known_clusters():
        if where not in CLUSTER_TYPES:
            everything = sorted({*known_clusters(), *backends.NAMES})
            raise BadInput(f"cluster {where!r} is unknown", choices(everything, where))
        if hosts and not takes_hosts(where):
            raise BadInput(f"--hosts {hosts}: cluster {where} takes no hosts", "--cluster ssh")
        entry: dict[str, object] = {"backend": where, **backends.backend_type(where).init_entry}
        if takes_hosts(where):
            if not names:
                raise BadInput("which hosts?", f"clusterkit init --cluster {where} --hosts h1,h2")
            entry["inventory"] = file or HOST_FILE
            if file is None:
                texts[HOST_FILE] = "".join(f"{name}\n" for name in names)
        if found.python is not None and where == "local":
            entry["python"] = found.python
        line = documents([{where: entry}])
        if clusters_file is not None:
            raise BadInput(f"{clusters_file} exists, without an entry {where}",
                           hint=f"add to it:\n{line}")  # fmt: skip
        texts[loader.CLUSTERS_FILE] = _CLUSTERS_HEAD + line
    elif hosts:
        raise BadInput(f"--hosts {hosts}: {clusters_file} already lists the hosts of {where}")
    if nodes is None:
        nodes = str(max(1, len(names))) if file is None else "1"
    parse_nodes(nodes)
    texts[JOB_FILE] = _job_text(script, found, nodes, args)
    paths = {folder / name: text.encode() for name, text in texts.items()}
    made = write_new(paths)
    try:
        loader.load_job(JOB_FILE)
        loaded = loader.read_cluster(where)
        kind = backends.backend_type(loaded.cluster.backend)
        kind.resolved(loaded.cluster, loaded.folder, None, None)
    except BadInput:
        for path in made:
            path.unlink(missing_ok=True)
        raise
    target = () if where == "local" else ("--cluster", where)
    return Made(
        files=tuple(texts),
        command=("clusterkit", "submit", JOB_FILE, *target),
        notes=tuple(_notes(script, found, where, args)),
    )


def init(script: str | None = None, **choices: Any) -> Made:
    """Write a first ``job.yaml`` and ``clusters.yaml`` for a program into the current folder.

    Args:
        script: the program; by default as `only_script`.
        choices: ``where``, ``nodes``, ``hosts`` and ``args``, as for `write`.

    Raises:
        BadInput: a file exists already, or a value is invalid; nothing is written.
    """
    return write(only_script() if script is None else inspect(script), machine(), **choices)


def _notes(script: Script, found: Machine, where: str, args: Sequence[str]) -> Iterator[str]:
    try:
        ast.parse(source_of(Path(script.path)))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        yield f"{script.path}{f':{line}' if line else ''}: {type(error).__name__}: {error.args[0]}"
    if not script.distributed and not script.spawns:
        yield (
            f"{script.path} uses neither torch.distributed nor a library that does: several ranks "
            "would each do all of the work"
        )
    given = {word.partition("=")[0] for word in args}
    # Which of the words are positional arguments is the program's to say.
    missing = [n for n in script.needs if (n not in given if n.startswith("-") else not args)]
    if missing:
        names = ", ".join(missing)
        yield f"{script.path} requires {names}: add it to args in {JOB_FILE}"
    if where == "local" and "torch" in script.packages and found.torch is None:
        yield "no Python of this project has torch: create .venv and install torch in it"
    if where in CLUSTER_TYPES and (note := backends.backend_type(where).init_note):
        yield note


# ---------------------------------------------------------------- the files

_CLUSTERS_HEAD = "# Where jobs run: clusterkit submit JOB --cluster NAME\n"


def _job_text(script: Script, found: Machine, nodes: str, args: Sequence[str]) -> str:
    ranks: str | int = "auto" if script.distributed and not script.spawns else 1
    if script.spawns:
        reason = "it starts its ranks itself"
    elif ranks == 1:
        reason = "nothing in it divides the work among several"
    elif found.gpus:
        reason = f"one for each GPU: {len(found.gpus)} x {found.gpus[0]} on this machine"
    else:
        reason = "one for each GPU; one on CPU threads without GPUs, as on this machine"
    number = int(nodes) if nodes.isdecimal() else nodes
    lines: list[tuple[str, object, str]] = [
        ("name", _name(script), "run ids begin with it"),
        ("program", script.path, f"uses {script.distributed}" if script.distributed else ""),
        ("args", list(args), f"needs {', '.join(script.needs)}" if script.needs else ""),
        ("nodes", number, "2, or elastic: 2:4"),
        ("gpus_per_node", ranks, f"ranks of a node: {reason}"),
    ]
    if script.spawns:
        lines.append(("launcher", "forkserver", "starts it once on every node"))
    text = "# What to run. All keys: clusterkit schema\n"
    for key, value, comment in lines:
        line = documents([{key: value}]).rstrip("\n")
        text += f"{line:<{_COMMENT_COLUMN}}# {comment}\n" if comment else f"{line}\n"
    return text


def _name(script: Script) -> str:
    return re.sub(r"[^\w.-]+", "-", Path(script.path).stem).strip("-.")[:40] or "job"


# ---------------------------------------------------------------- a program's text


def _needs(text: str) -> Iterator[str]:
    """Yield argparse's required options, and its positional arguments without a default."""
    try:
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError):
        return
    for call in calls:
        words = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
        names = [word for word in words if isinstance(word, str)]
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "add_argument":
            continue
        keywords = {key.arg: key.value for key in call.keywords}
        required = keywords.get("required")
        is_set = isinstance(required, ast.Constant) and required.value is True
        optional = {"nargs", "default", "action"} & set(keywords)
        if names and (is_set if names[0].startswith("-") else not optional):
            yield names[-1]
