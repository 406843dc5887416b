"""`clusterkit init`: a first job file and cluster file, from a script and the machine it lies on.

The script's text is read, never imported.
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
from clusterkit.cluster import CLUSTER_TYPES, HostFacts, LocalCluster
from clusterkit.errors import BadInput, Unavailable, choices, listed
from clusterkit.files import source_of, write_new
from clusterkit.jobfile import catalogue, loader
from clusterkit.jobfile.command import SPAWN
from clusterkit.spec import parse_nodes
from clusterkit.yaml_text import documents

JOB_FILE = "job.yaml"
HOST_FILE = "hostfile"
MOST_SCRIPTS = 200
"""Python files that are looked at to find the program."""
_TORCH = re.compile(
    r"\btorch\.distributed\b|\binit_process_group\b|\bDistributedDataParallel\b|\bfully_shard\b"
    r"|\bfrom torch import distributed\b"
)
_RUNNABLE = re.compile(r"__main__|parse_args\(|\binit_process_group\b|\bAccelerator\(")
"""Of a program's text, unlike a module's."""
_LIBRARIES = ("deepspeed", "accelerate", "lightning", "pytorch_lightning", "ray")
_ENVIRONMENTS = (".venv", "venv", "env")
_COMMENT_COLUMN = 40


@dataclass(frozen=True)
class Script:
    """A Python program, as its text shows it."""

    path: str
    """As a person here would write it."""
    packages: tuple[str, ...]
    """What it and the modules beside it import."""
    distributed: str
    """The package by which its ranks work together; empty: none that is known."""
    needs: tuple[str, ...]
    """Arguments that it does not run without, as far as argparse says so."""
    alone: bool
    """Whether it starts its ranks itself."""


class Machine(Struct, frozen=True):
    """What this machine has for training."""

    cpus: int
    gpus: tuple[str, ...]
    """Their names."""
    python: str | None
    """Interpreter that has torch, where clusterkit would choose another one; by default none."""
    torch: str | None
    """Version, of the interpreter that is used."""
    backends: tuple[str, ...]
    """Kinds of cluster that can be reached from here."""


class Made(Struct, frozen=True):
    """What `write` has made."""

    files: tuple[str, ...]
    command: tuple[str, ...]
    """What to type next."""
    notes: tuple[str, ...]
    """What should be looked at before."""


def look(path: str) -> Script:
    """A program, by its text and that of the modules beside it.

    Raises:
        BadInput: no such file, or not Python.
    """
    try:
        loader.check_program(Path(path))
    except BadInput as error:
        # There is no job file yet that could have a key.
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
        alone=SPAWN.search(own) is not None,
    )


def scripts() -> list[Script]:
    """Programs in the current folder and the folders below it, the likeliest first."""
    here = loader.current_folder()
    found = []
    for path in [*sorted(here.glob("*.py")), *sorted(here.glob("*/*.py"))][:MOST_SCRIPTS]:
        name = path.relative_to(here)
        hidden = name.parts[0].startswith(".") or name.parts[0] in (*_ENVIRONMENTS, "tests")
        with contextlib.suppress(BadInput):
            if not hidden and _RUNNABLE.search(source_of(path)):
                found.append(look(str(name)))

    def rank(script: Script) -> tuple[bool, bool, bool, int, str]:
        path = Path(script.path)
        return (
            not script.distributed, "torch" not in script.packages, "train" not in path.stem,
            len(path.parts), script.path,
        )  # fmt: skip

    return sorted(found, key=rank)


def only_script() -> Script:
    """The program that is meant where nobody can be asked.

    Raises:
        BadInput: none, or more than one.
    """
    found = scripts()
    likely = [script for script in found if script.distributed] or found
    if len(likely) != 1:
        names = listed(script.path for script in likely)
        raise BadInput(
            f"which program? {f'there are {names}' if names else 'there is none here'}",
            hint=f"clusterkit init {likely[0].path if likely else 'train.py'}",
        )
    return likely[0]


def machine() -> Machine:
    """This machine, and which clusters can be reached from it."""
    host, python = _probed(None), None
    if "torch" not in host.versions:
        # Installed by pipx, clusterkit's own Python has no torch; the project's may.
        for name in (*(str(Path(folder, "bin/python")) for folder in _ENVIRONMENTS), "python3"):
            with contextlib.suppress(Unavailable):
                other = _probed(name)
                if "torch" in other.versions:
                    host, python = other, other.python
                    break
    return Machine(
        cpus=host.cpus,
        gpus=tuple(gpu.name for gpu in host.gpus),
        python=python,
        torch=host.versions.get("torch"),
        backends=tuple(name for name in backends.NAMES if _reachable(name)),
    )


def _probed(python: str | None) -> HostFacts:
    entry = LocalCluster(python=python)
    with contextlib.closing(backends.transport_for(entry)) as transport:
        return backends.backend(entry.backend).probe(entry, transport).hosts[0]


def _reachable(backend: str) -> bool:
    command = backends.backend_type(backend).command
    return not command or shutil.which(command) is not None


def takes_hosts(where: str) -> bool:
    """Whether an entry of this kind says which its hosts are."""
    return where in CLUSTER_TYPES and "hosts" in loader.fields_of(CLUSTER_TYPES[where])


def known_clusters() -> list[str]:
    """Entries of the cluster file that is here or above; none without one."""
    return [] if loader.find_clusters_file() is None else loader.cluster_names()


def write(
    script: Script,
    found: Machine,
    *,
    where: str = "local",
    nodes: str | None = None,
    hosts: str = "",
    args: Sequence[str] = (),
) -> Made:
    """Write a job file, and a cluster file unless there is one that names ``where``.

    Args:
        where: an entry of the cluster file, or a kind of cluster.
        nodes: ``2``, or ``2:4``; by default every host that is listed, or 1.
        hosts: ``[user@]host[:port],...``, or a file of them.
        args: of the program.

    Raises:
        BadInput: a file is there already, or a value cannot be used; nothing is written.
    """
    here, there = loader.current_folder(), loader.find_clusters_file()
    names = [name.strip() for name in hosts.split(",") if name.strip()]
    file = hosts if hosts and Path(hosts).is_file() else None
    texts = {}
    if where not in known_clusters():
        if where not in CLUSTER_TYPES:
            everything = sorted({*known_clusters(), *backends.NAMES})
            raise BadInput(f"cluster {where!r} is unknown", choices(everything, where))
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
        if there is not None:
            raise BadInput(f"{there} is there already, without an entry {where}",
                           hint=f"add to it:\n{line}")  # fmt: skip
        texts[loader.CLUSTERS_FILE] = _CLUSTERS_HEAD + line
    elif hosts:
        raise BadInput(f"--hosts {hosts}: {there} says which hosts {where} has")
    if nodes is None:
        nodes = str(max(1, len(names))) if file is None else "1"
    parse_nodes(nodes)
    texts[JOB_FILE] = _job_text(script, found, nodes, args)
    paths = {here / name: text.encode() for name, text in texts.items()}
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
        script: the program; by default the only one here.
        choices: ``where``, ``nodes``, ``hosts`` and ``args``, as for `write`.

    Raises:
        BadInput: a file is there already, or a value cannot be used; nothing is written.
    """
    return write(only_script() if script is None else look(script), machine(), **choices)


def _notes(script: Script, found: Machine, where: str, args: Sequence[str]) -> Iterator[str]:
    if not script.distributed and not script.alone:
        yield (
            f"{script.path} uses neither torch.distributed nor a library that does: with several "
            "ranks each would do all of the work"
        )
    given = {word.partition("=")[0] for word in args}
    missing = [name for name in script.needs if name.startswith("-") and name not in given]
    if missing:
        names = ", ".join(missing)
        yield f"{script.path} does not run without {names}: add it to args in {JOB_FILE}"
    if where == "local" and "torch" in script.packages and found.torch is None:
        yield "no Python here has torch: make an environment in .venv and install it there"
    if where in CLUSTER_TYPES and (note := backends.backend_type(where).init_note):
        yield note


# ---------------------------------------------------------------- the files

_CLUSTERS_HEAD = "# Where jobs run: clusterkit submit JOB --cluster NAME\n"


def _job_text(script: Script, found: Machine, nodes: str, args: Sequence[str]) -> str:
    ranks: str | int = "auto" if script.distributed and not script.alone else 1
    if script.alone:
        why = "it starts its ranks itself"
    elif ranks == 1:
        why = "nothing in it divides the work among several"
    elif found.gpus:
        why = f"one for each GPU: {len(found.gpus)} x {found.gpus[0]} on this machine"
    else:
        why = "one for each GPU; one on CPU threads where there is none, as on this machine"
    number = int(nodes) if nodes.isdecimal() else nodes
    lines: list[tuple[str, object, str]] = [
        ("name", _name(script), "begins the id of every run"),
        ("program", script.path, f"uses {script.distributed}" if script.distributed else ""),
        ("args", list(args), f"needs {', '.join(script.needs)}" if script.needs else ""),
        ("nodes", number, "2, or elastic: 2:4"),
        ("gpus_per_node", ranks, f"ranks of a node: {why}"),
    ]
    if script.alone:
        lines.append(("launcher", "forkserver", "starts it once on every node"))
    text = "# What runs. Every key: clusterkit schema\n"
    for key, value, comment in lines:
        line = documents([{key: value}]).rstrip("\n")
        text += f"{line:<{_COMMENT_COLUMN}}# {comment}\n" if comment else f"{line}\n"
    return text


def _name(script: Script) -> str:
    return re.sub(r"[^\w.-]+", "-", Path(script.path).stem).strip("-.")[:40] or "job"


# ---------------------------------------------------------------- a program's text


def _needs(text: str) -> Iterator[str]:
    """Options that argparse is told are required, and arguments that have no default."""
    try:
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError):
        return
    for call in calls:
        words = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
        names = [word for word in words if isinstance(word, str)]
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "add_argument":
            continue
        said = {key.arg: key.value for key in call.keywords}
        required = said.get("required")
        is_set = isinstance(required, ast.Constant) and required.value is True
        optional = {"nargs", "default", "action"} & set(said)
        if names and (is_set if names[0].startswith("-") else not optional):
            yield names[-1]
