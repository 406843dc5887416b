"""A job file, and an entry of the cluster file, from what other tools take. Text in, data out.

Every source is a module of its own: options or keys, each with what becomes of it. A `Sheet`
collects that; what has no equivalent is refused with its place, and nothing is dropped in silence.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from clusterkit import shell, yaml_text
from clusterkit.cluster import CLUSTER_TYPES
from clusterkit.convert import accelerate, clouds, compose, kubernetes, lines, slurm
from clusterkit.convert.options import job_name
from clusterkit.convert.sheet import Note, Read, Sheet, Tree, hosts_of
from clusterkit.errors import BadInput, choices
from clusterkit.jobfile import loader
from clusterkit.spec import JobSpec, check_job
from clusterkit.yaml_file import Document, parse_yaml


class Converted(Struct, frozen=True):
    """What a conversion gives."""

    kind: str
    """What it was: one of `KINDS`."""
    job: dict[str, Any] | None
    """Keys of a job file; None: the input has no program, such as a hostfile."""
    cluster: dict[str, Any] | None
    """A name and an entry of the cluster file; None: the input says nothing of one."""
    notes: tuple[Note, ...]
    """What became of every option, in the input's order."""

    def job_text(self, head: str = "") -> str:
        """The job file."""
        return yaml_text.documents([self.job or {}], head)

    def cluster_text(self) -> str:
        """What to add to the cluster file."""
        return yaml_text.documents([self.cluster or {}])


def _command(sheet: Sheet, text: str, words: Sequence[str]) -> None:
    lines.convert(sheet, words)


def _hostfile(sheet: Sheet, text: str, words: Sequence[str]) -> None:
    sheet.ssh(sheet.name, hosts_of(sheet.name, text))


def _plan(sheet: Sheet, text: str, words: Sequence[str]) -> None:
    """What `clusterkit plan` printed, as text or JSON, or wrote with ``--out``."""
    if text.lstrip().startswith("{"):
        found = parse_yaml(text.replace("\t", " "), sheet.name).data.get("job")
    else:
        part = text.rpartition("\njob\n")[2].rpartition("\nsteps\n")[0]
        body = "\n".join(line.removeprefix("  | ") for line in part.splitlines())
        found = parse_yaml(body, sheet.name).data if part else None
    if not isinstance(found, dict):
        raise BadInput(f"{sheet.name}: this plan does not hold its job", "clusterkit plan JOB")
    for key, value in found.items():
        sheet.job[key] = value
        sheet.note(key, "as it was", "job")


def _accelerate(sheet: Sheet, text: str, words: Sequence[str]) -> None:
    tree = Tree(sheet, parse_yaml(text, sheet.name))
    if not words:
        raise BadInput(
            f"{sheet.name}: an accelerate config names no program",
            hint=shell.join(["clusterkit", "convert", sheet.name, "--", "train.py", "--lr", "1"]),
        )
    accelerate.config(sheet, tree)
    lines.convert(sheet, ["python", *words] if words[0].endswith(".py") else words, ranks=None)


Source = Callable[[Sheet, str, Sequence[str]], None]
KINDS: Mapping[str, Source] = {
    "command": _command,
    "hostfile": _hostfile,
    "script": slurm.script,
    "accelerate": _accelerate,
    "kubernetes": kubernetes.manifest,
    "compose": compose.file,
    "skypilot": clouds.skypilot,
    "dstack": clouds.dstack,
    "plan": _plan,
}
"""What can be converted, and what converts it: a sheet, the file's text, the words after --."""
_WITH_WORDS = ("accelerate",)


def convert(
    text: str | None,
    words: Sequence[str] = (),
    *,
    name: str = "",
    kind: str | None = None,
    read: Read = lambda path: None,
) -> Converted:
    """What ``text``, or a command line, becomes.

    Args:
        text: of a file; None for a command line.
        words: the command line, or the program where a file names none.
        name: of the file, for its errors and for a job that has no name.
        kind: one of `KINDS`; by default what the text looks like.
        read: gives the text of further files that are named.

    Raises:
        BadInput: it is of no kind that is known, or something in it has no equivalent.
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
            f"{name} names its program itself, so no command can follow --",
            hint=shell.join(["clusterkit", "convert", name]),
        )
    sheet = Sheet(name, read)
    KINDS[kind](sheet, text or "", words)
    sheet.at = ""
    sheet.check()
    job = _checked_job(sheet) if sheet.job else None
    cluster = None
    if sheet.cluster:
        cluster = {sheet.cluster_name: sheet.cluster}
        entry_type = CLUSTER_TYPES[sheet.cluster["backend"]]
        with _located(sheet, "cluster"):
            loader.convert(Document("", sheet.cluster, {}), (), sheet.cluster, entry_type)
    return Converted(kind, job, cluster, tuple(sheet.notes))


def _checked_job(sheet: Sheet) -> dict[str, Any]:
    """The job's keys in the order of `JobSpec`, which takes them."""
    order = list(loader.fields_of(JobSpec))
    if not sheet.job.get("name"):
        sheet.job["name"] = job_name(posixpath.splitext(posixpath.basename(sheet.name))[0])
    with _located(sheet, "job"):
        check_job(loader.convert(Document("", sheet.job, {}), (), sheet.job, JobSpec))
    return {key: sheet.job[key] for key in sorted(sheet.job, key=order.index)}


@contextlib.contextmanager
def _located(sheet: Sheet, where: Literal["job", "cluster"]) -> Iterator[None]:
    """Have an error name what gave the key that is wrong."""
    try:
        yield
    except BadInput as error:
        message = error.message.lstrip(": ")
        key = str(error.key[0]) if error.key else re.split(r"[:.\[]", message)[0]
        origin = sheet.origins.get((where, key), sheet.name)
        raise BadInput(f"{origin}: {message}" if origin else message, error.hint) from None


def recognised(text: str, name: str) -> str:
    """What a file looks like.

    Raises:
        BadInput: like nothing that is known.
    """
    head = text.lstrip()
    if head.startswith("plan ") and "\nsteps\n" in text:
        return "plan"
    if re.search(r"^#SBATCH\b", text, re.MULTILINE) or head.startswith("#!"):
        return "script"
    if head.startswith("{") and '"run_id"' in text and '"steps"' in text:
        return "plan"
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
        f"{name}: none of the files that can be converted",
        hint=f"--from KIND says what it is: {', '.join(KINDS)}",
    )


def _one_line(rows: Sequence[str]) -> bool:
    return any(re.match(r"(\S*/)?(torchrun|deepspeed|mpirun|accelerate|srun|torchx|python[\d.]*)\s",
                        row) for row in rows)  # fmt: skip


def _mapping(text: str, name: str) -> dict[str, Any] | None:
    """The first document of a YAML file, if it is a mapping."""
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
    "compose": lambda data: isinstance(data.get("services"), dict),
    "dstack": lambda data: data.get("type") in ("task", "dev-environment", "service", "fleet"),
    "accelerate": lambda data: "distributed_type" in data or "compute_environment" in data,
    "skypilot": lambda data: "run" in data,
}

__all__ = ["KINDS", "Converted", "Note", "convert", "recognised"]
