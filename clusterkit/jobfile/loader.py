"""Read job and cluster files. Every error names the file, the line, the key and the remedy."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from clusterkit import shell
from clusterkit.cluster import CLUSTER_TYPES, ClusterSpec, LocalCluster
from clusterkit.errors import BadInput, choices, dotted
from clusterkit.files import read_file, reason
from clusterkit.jobfile import command, prefixes
from clusterkit.jobfile.values import convert
from clusterkit.jobfile.yaml_file import Document, is_text, parse_yaml, read_yaml, similar_file
from clusterkit.spec import JobSpec, check_environment, check_job

CLUSTERS_FILE = "clusters.yaml"


@contextmanager
def locating(
    job: Document | None, cluster: LoadedCluster | None = None, flags: Mapping[str, str] = {}
) -> Iterator[None]:
    """Add file and line, or the flag, to a `BadInput` about a key that the ``with`` block raises.

    Args:
        job: the job's file; None: it has none.
        cluster: the cluster's entry; None: not read yet.
        flags: keys of the job that a flag has set, and the flag.
    """
    try:
        yield
    except BadInput as error:
        if error.key and error.where is None:
            names = str(error.key[0]), dotted(error.key)
            if key := next((name for name in names if name in flags), None):
                error.locate(flags[key], flags[key] + error.message.removeprefix(key))
            elif error.source == "job" and job is not None:
                job.locate(error, error.key)
            elif error.source == "cluster" and cluster is not None and cluster.document is not None:
                where = cluster.document.where((cluster.name, *error.key))
                error.locate(where, f"{where}: {cluster.name}.{error.message}")
        raise


# ---------------------------------------------------------------- jobs


def load_job(path: str | Path, settings: Sequence[str] = ()) -> JobSpec:
    """Read and check a job file, and find its program. Raises as the functions that it calls."""
    job, document = read_job(path, settings)
    with locating(document):
        check_job(job)
        return locate_program(job, document)


def read_job(path: str | Path, settings: Sequence[str] = ()) -> tuple[JobSpec, Document]:
    """Read a job file and apply settings to it.

    `check_job` is left to the caller, as flags may change the job first.

    Args:
        path: the job file.
        settings: ``key=value``, with dots for nested keys (``batch.micro=4``); the value is YAML.

    Returns:
        The job, and the document with the line of every key.

    Raises:
        BadInput: anything wrong with the file or a setting.
    """
    path = Path(path)
    if (words := command.instead_of_a_job([str(path)])) is not None:
        raise BadInput(
            f"{path} is a program, not a job file",
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
    return convert(document, (), document.data, JobSpec), document


def apply_setting(document: Document, setting: str) -> None:
    """Apply one ``--set key=value`` to a job's data."""
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise BadInput(f"--set {setting!r}: not of the form key=value", hint="--set batch.micro=4")
    parts = key.strip().split(".")
    if is_text(tuple(parts), 0):
        value: Any = text
    elif not text:
        value = None
    else:
        try:
            value = parse_yaml(text, "--set", base=tuple(parts)).data
        except BadInput as error:
            raise BadInput(f"--set {setting!r}: the value is not YAML", error.message) from None
    document.set(parts, value)


def job_from_command(argv: Sequence[str], **fields: Any) -> JobSpec:
    """Return a job for a command line such as ``python my_script.py --flag``.

    ``python FILE.py ...`` and ``python -m MODULE ...`` become a program or a module; anything else
    is a command, including a launcher, which `clusterkit.jobfile.command.take_over` replaces.

    Raises:
        BadInput: the command is empty, or a Python file that is not executable.
    """
    if not argv:
        raise BadInput("no command after --", "clusterkit submit -- python train.py --steps 10")
    if argv[0].endswith(".py") and os.path.exists(argv[0]) and shutil.which(argv[0]) is None:
        raise BadInput(
            f"{argv[0]} is a Python file, not a command",
            hint=shell.join(["clusterkit", "submit", "--", "python", *argv]),
        )
    started, peeled = command.read_past(argv)
    name = re.sub(r"[^\w. -]+", "-", started.name).lstrip("-. ")[:40] or "command"
    job = JobSpec(name=name, command=tuple(argv), **fields)
    if started.tool is None:
        prefixes.check_peeled(peeled, job)
        job = msgspec.structs.replace(
            job, program=started.program, module=started.module, command=started.command,
            args=started.args, python=started.python, env=peeled.env | job.env,
        )  # fmt: skip
    check_job(job)
    return job


def current_folder() -> Path:
    """Return the current folder.

    Raises:
        BadInput: it has been removed.
    """
    try:
        return Path.cwd()
    except OSError:
        gone = "the current folder no longer exists"
        raise BadInput(gone, "cd to a folder that exists") from None


def locate_program(job: JobSpec, document: Document | None = None) -> JobSpec:
    """Return the job of `find_program`."""
    return find_program(job, document)[0]


def find_program(job: JobSpec, document: Document | None = None) -> tuple[JobSpec, BadInput | None]:
    """Find a job's program, or the file that its command starts, and set ``workdir``.

    Folders are tried in this order: the current one, the job file's, and those above that. A
    relative path in ``python`` starts in the folder that was found.

    Returns:
        The job, and the error for the file of a command that was not found: the hosts or the image
        may have it.

    Raises:
        BadInput: the program was not found, or is not Python.
    """
    key = "command" if job.command else "program"
    name = (command.file_of(job.command) if job.command else job.program) or ""
    bases = [current_folder()]
    where = f"not in {bases[0]}"
    if document is not None:
        bases += Path(document.name).absolute().parents
        where = f"neither in {bases[0]} nor in the job file's folder or above it"
    if job.workdir is not None:
        bases = [Path(job.workdir).expanduser().absolute()]
        if not bases[0].is_dir():
            raise BadInput(f"workdir: {job.workdir} is not a folder", job="workdir")
        where = f"not in {bases[0]}"
    missing = None
    if not any(os.path.exists(base / name) for base in bases):
        hint = similar_file(Path(name), bases[0])
        where = "missing" if name.startswith("/") else where
        missing = BadInput(f"{key}: {name} is {where}", hint, job=key)
        if not job.command:
            raise missing
        bases, name = bases[:1], ""
    base = next(base for base in bases if os.path.exists(base / name))
    shell.check_text(f"the folder {os.fsencode(base)!r}", str(base))
    python = job.python
    if python is not None and "/" in python:
        python = str(base / Path(python).expanduser())
    if job.program is not None:
        check_program(base / job.program)
    if job.command:
        _check_command(job.command[0], base)
    return msgspec.structs.replace(job, workdir=str(base), python=python), missing


def check_program(path: Path) -> None:
    """Check that a path is a Python program: a file, or a folder or zip with a ``__main__.py``.

    Raises:
        BadInput: unreadable, or not Python by its name and first bytes.
    """
    try:
        head = read_file(path, 4096, whole=False)
        if zipfile.is_zipfile(path):
            _check_zip(path)
            return
    except IsADirectoryError:
        if (path / "__main__.py").is_file():
            return
        raise BadInput(
            f"program: {path} is a folder without a __main__.py", "name the file", job="program"
        ) from None
    except OSError as error:
        raise BadInput(f"program: {path}: {reason(error)}", job="program") from None
    shebang = head.split(b"\n", 1)[0] if head.startswith(b"#!") else b""
    if b"\0" in head or (path.suffix not in (".py", ".pyw") and b"python" not in shebang):
        raise BadInput(
            f"program: {path} is not a Python file",
            hint=f"command: [python, {path}] has Python run it, command: [{path}] the system",
            job="program",
        )


def _check_zip(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        if not {"__main__.py", "__main__.pyc"} & {*archive.namelist()}:
            raise BadInput(f"program: {path} has no __main__.py in it", job="program")


def _check_command(first: str, folder: Path) -> None:
    """Check that a script of the project can be executed; a shell would only say ``not found``.

    Raises:
        BadInput: it is not executable, or its first line ends with CRLF.
    """
    path = folder / first
    if "/" not in first or first.startswith("/") or not path.is_file():
        return
    if not os.access(path, os.X_OK):
        raise BadInput(
            f"command: {first} is not executable",
            hint=f"chmod +x {shell.quote(first)}",
            job="command",
        )
    # A program may be executable but not readable.
    head = read_file(path, 4096, whole=False) if os.access(path, os.R_OK) else b""
    line = head.partition(b"\n")[0]
    if line.startswith(b"#!") and line.endswith(b"\r"):
        raise BadInput(
            f"command: {first} has Windows line ends (CRLF), which its #! line cannot have",
            hint=f"sed -i 's/\\r$//' {shell.quote(first)}",
            job="command",
        )


# ---------------------------------------------------------------- clusters


@dataclass(frozen=True)
class LoadedCluster:
    """A cluster's entry, the folder in which its relative paths start, and the cluster file."""

    name: str
    cluster: ClusterSpec
    folder: Path
    document: Document | None = None


def read_cluster(name: str, path: str | os.PathLike[str] | None = None) -> LoadedCluster:
    """Read one entry of the cluster file; ``local`` exists even without a file.

    Args:
        name: the entry.
        path: the file; by default as `find_clusters_file`.

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
        none = f"; there is no {CLUSTERS_FILE} in this folder or above"
        where = f" in {found}" if found else none
        raise BadInput(
            f"cluster {name!r} is unknown{where}",
            choices(sorted({"local", *clusters}), name, "known")
            + ("" if found else f"; clusterkit init writes a {CLUSTERS_FILE}"),
        )
    assert document is not None
    entry = {} if clusters[name] is None else clusters[name]
    if not isinstance(entry, dict):
        raise document.error((name,), "an entry is a mapping like {backend: local}")
    backend = entry.get("backend", "local" if name == "local" else None)
    if not isinstance(backend, str) or backend not in CLUSTER_TYPES:
        message = "backend is missing" if backend is None else f"{backend!r} is not a backend"
        raise document.error((name, "backend"), message, choices(sorted(CLUSTER_TYPES), backend))
    cluster = convert(document, (name,), entry, CLUSTER_TYPES[backend])
    assert found is not None
    loaded = LoadedCluster(name, cluster, found.absolute().parent, document)
    with locating(None, loaded):
        check_environment(cluster.env, "cluster")
        if cluster.notify is not None and bool(cluster.notify.command) == bool(
            cluster.notify.url_from
        ):
            raise BadInput(
                "notify: give one of `command` and `url_from`",
                "url_from: SLACK_WEBHOOK",
                cluster="notify",
            )
    return loaded


def find_clusters_file() -> Path | None:
    """Return ``$CLUSTERKIT_CLUSTERS``, or the nearest ``clusters.yaml`` in this folder or above.

    None: neither exists.
    """
    named = os.environ.get("CLUSTERKIT_CLUSTERS")
    if named:
        return Path(named)
    here = current_folder()
    candidates = (folder / CLUSTERS_FILE for folder in (here, *here.parents))
    return next((path for path in candidates if path.is_file()), None)


def cluster_names(path: str | os.PathLike[str] | None = None) -> list[str]:
    """Return the names that ``--cluster`` accepts in this folder, or with that cluster file."""
    found = Path(path) if path is not None else find_clusters_file()
    data = read_yaml(found, depth=1).data if found is not None else {}
    return sorted({"local", *(data if isinstance(data, dict) else {})})
