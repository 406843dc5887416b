"""Convert the input of other tools to a job file and a cluster entry. Text in, data out.

Each source has a module, which maps its options or keys to those of clusterkit. A `Draft` collects
the result. An option without equivalent is refused with its place; none is dropped in silence.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from clusterkit import shell
from clusterkit.cluster import CLUSTER_TYPES
from clusterkit.convert import accelerate, batch, kubernetes, lines, nested
from clusterkit.convert.draft import Draft, Note, Read, Tree, hosts_of
from clusterkit.convert.options import job_name
from clusterkit.errors import BadInput, choices
from clusterkit.jobfile import command, values, yaml_text
from clusterkit.jobfile.yaml_file import Document, parse_yaml
from clusterkit.spec import JobSpec, check_job


class Converted(Struct, frozen=True):
    """The result of a conversion."""

    kind: str
    """The kind of the input: one of `KINDS`."""
    job: dict[str, Any] | None
    """Keys of a job file; None: the input has no program, such as a hostfile."""
    cluster: dict[str, Any] | None
    """An entry of the cluster file by its name; None: the input names no cluster."""
    notes: tuple[Note, ...]
    """One note for each option, in the order of the input."""

    def job_text(self, head: str = "") -> str:
        """Return the text of the job file."""
        return yaml_text.documents([self.job or {}], head)

    def cluster_text(self) -> str:
        """Return the text to add to the cluster file."""
        return yaml_text.documents([self.cluster or {}])


def _command(draft: Draft, text: str, words: Sequence[str]) -> None:
    lines.convert(draft, words)


def _hostfile(draft: Draft, text: str, words: Sequence[str]) -> None:
    draft.ssh(draft.name, hosts_of(draft.name, text))


def _accelerate(draft: Draft, text: str, words: Sequence[str]) -> None:
    tree = Tree(draft, parse_yaml(text, draft.name))
    if not words:
        raise BadInput(
            f"{draft.name}: an accelerate config names no program",
            hint=shell.join(["clusterkit", "convert", draft.name, "--", "train.py", "--lr", "1"]),
        )
    accelerate.config(draft, tree)
    lines.convert(draft, ["python", *words] if words[0].endswith(".py") else words, ranks=None)


Source = Callable[[Draft, str, Sequence[str]], None]
KINDS: Mapping[str, Source] = {
    "command": _command,
    "hostfile": _hostfile,
    "script": batch.script,
    "accelerate": _accelerate,
    "kubernetes": kubernetes.manifest,
}
"""Kinds of input. A converter takes the draft, the file's text and the words after ``--``."""
_WITH_WORDS = ("accelerate",)


def convert(
    text: str | None,
    words: Sequence[str] = (),
    *,
    name: str = "",
    kind: str | None = None,
    read: Read = lambda path: None,
) -> Converted:
    """Convert ``text``, or a command line.

    Args:
        text: of a file; None for a command line.
        words: the command line, or the program where a file names none.
        name: of the file, for its errors and for a job that has no name.
        kind: one of `KINDS`; None: detect it.
        read: returns the text of a file that the input names.

    Raises:
        BadInput: the kind is unknown, or an option has no equivalent.
    """
    kind = kind or ("command" if text is None else recognised(text, name))
    if kind not in KINDS:
        raise BadInput(f"--from {kind}: unknown", hint=choices(KINDS, kind))
    if text is None and kind != "command":
        raise BadInput(f"--from {kind} needs a file", hint=f"clusterkit convert --from {kind} FILE")
    if text is not None and kind == "command":
        words = shell.split(re.sub(r"\\\r?\n", " ", text))
    elif words and text is not None and kind not in _WITH_WORDS:
        raise BadInput(
            f"{name} names its own program, so no command can follow --",
            hint=shell.join(["clusterkit", "convert", name]),
        )
    draft = Draft(name, read)
    KINDS[kind](draft, text or "", words)
    draft.at = ""
    draft.check()
    job = _checked_job(draft) if draft.job else None
    cluster = None
    if draft.cluster:
        cluster = {draft.cluster_name: draft.cluster}
        entry_type = CLUSTER_TYPES[draft.cluster["backend"]]
        with _located(draft, "cluster"):
            values.convert(Document("", draft.cluster, {}), (), draft.cluster, entry_type)
    return Converted(kind, job, cluster, tuple(draft.notes))


def _checked_job(draft: Draft) -> dict[str, Any]:
    """Check the job, and return its keys in the order of `JobSpec`."""
    order = list(values.fields_of(JobSpec))
    if not draft.job.get("name"):
        draft.job["name"] = job_name(posixpath.splitext(posixpath.basename(draft.name))[0])
    with _located(draft, "job"):
        job = values.convert(Document("", draft.job, {}), (), draft.job, JobSpec)
        check_job(job)
        # As plan does, so that it accepts every job that was converted.
        nested.check(job, draft.read)
        command.take_over(job, {key: f"{key}: {value}" for key, value in draft.job.items()})
    return {key: draft.job[key] for key in sorted(draft.job, key=order.index)}


@contextlib.contextmanager
def _located(draft: Draft, where: Literal["job", "cluster"]) -> Iterator[None]:
    """Add to an error the option that set the wrong key."""
    try:
        yield
    except BadInput as error:
        message = error.message.lstrip(": ")
        key = str(error.key[0]) if error.key else re.split(r"[:.\[]", message)[0]
        origin = draft.origins.get((where, key), draft.name)
        raise BadInput(f"{origin}: {message}" if origin else message, error.hint) from None


def recognised(text: str, name: str) -> str:
    """Return the kind of a file.

    Raises:
        BadInput: the file is of no known kind.
    """
    head = text.lstrip()
    if re.search(r"^#SBATCH\b", text, re.MULTILINE) or head.startswith("#!"):
        return "script"
    data = _mapping(text, name)
    for kind, looks in _LOOKS.items():
        if data is not None and looks(data):
            return kind
    if data is not None and ({"program", "module", "command"} & data.keys()):
        raise BadInput(f"{name} is a job file already", hint=f"clusterkit plan {name}")
    rows = [row for raw in text.splitlines() if (row := raw.partition("#")[0].strip())]
    if rows and all(
        re.fullmatch(r"[\w.@:\[\]-]+(\s+(max_)?slots\s*=\s*\d+)+", row) for row in rows
    ):
        return "hostfile"
    if data is None and (name.endswith((".sh", ".sbatch", ".slurm")) or _one_line(rows)):
        return "script"
    raise BadInput(
        f"{name}: not a kind of file that can be converted",
        hint=f"name its kind with --from: {', '.join(KINDS)}",
    )


def _one_line(rows: Sequence[str]) -> bool:
    return any(re.match(r"(\S*/)?(torchrun|deepspeed|mpirun|accelerate|srun|python[\d.]*)\s",
                        row) for row in rows)  # fmt: skip


def _mapping(text: str, name: str) -> dict[str, Any] | None:
    """Return the first document of a YAML file, or None if it is no mapping."""
    try:
        data = parse_yaml(
            re.split(r"(?m)^---\s*$", text.lstrip().removeprefix("---"))[0], name
        ).data
    except BadInput:
        if name.endswith((".yaml", ".yml", ".json")):
            raise
        return None
    return data if isinstance(data, dict) else None


_LOOKS: Mapping[str, Callable[[dict[str, Any]], bool]] = {
    "kubernetes": lambda data: "apiVersion" in data and "kind" in data,
    "accelerate": lambda data: "distributed_type" in data or "compute_environment" in data,
}

__all__ = ["KINDS", "Converted", "Note", "convert", "recognised"]
