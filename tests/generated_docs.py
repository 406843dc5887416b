"""The generated parts of README.md and docs/: written anew from the code, or checked against it.

    python -m tests.generated_docs              rewrite them
    python -m tests.generated_docs --check      exit 1 and name the files that are stale

A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- /generated -->``; NAME is
a key of `PARTS`. What is outside the markers is written by hand and left alone.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest import mock

import click
import msgspec
from msgspec import inspect as types

from clusterkit import backends
from clusterkit.cli import VERBS, cli
from clusterkit.cluster import (
    Claim,
    ComposeCluster,
    Host,
    KubernetesCluster,
    LocalCluster,
    NotifySpec,
    SlurmCluster,
    SshCluster,
)
from clusterkit.doctor import every_check
from clusterkit.jobfile import catalogue, schema
from clusterkit.spec import BatchSpec, CheckpointSpec, JobSpec
from tests import troubleshooting

ROOT = Path(__file__).parents[1]
WIDTH = 96
"""Columns of every help text, whatever the terminal's width is."""
_PART = re.compile(
    r"(?P<open><!-- generated: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(?P<close><!-- /generated -->)",
    re.DOTALL,
)
_MARKER = re.compile(r"<!-- /?generated")


def documents(root: Path = ROOT) -> list[Path]:
    """The pages that people read, README first."""
    return [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").glob("**/*.md"))]


def renewed(text: str, name: str) -> str:
    """A page with every generated part as the code has it now.

    Raises:
        ValueError: a part that nothing generates, or a marker without its other half.
    """

    def part(match: re.Match[str]) -> str:
        if match["name"] not in PARTS:
            raise ValueError(f"{name}: nothing generates {match['name']!r}: {', '.join(PARTS)}")
        return f"{match['open']}\n{PARTS[match['name']]().strip()}\n\n{match['close']}"

    whole, pairs = _PART.subn(part, text)
    if len(_MARKER.findall(text)) != 2 * pairs:
        raise ValueError(f"{name}: a <!-- generated --> marker without its other half")
    return whole


def stale(root: Path = ROOT) -> list[Path]:
    """The pages whose generated parts are not what the code says."""
    return [
        page for page in documents(root) if page.read_text() != renewed(page.read_text(), page.name)
    ]


# ---------------------------------------------------------------- tables


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; a ``|`` inside a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def keys(struct: type[msgspec.Struct]) -> str:
    """Every key of a struct: what it takes, what it is when left out, what it means."""
    info = types.type_info(struct)
    assert isinstance(info, types.StructType)
    fields = {field.encode_name: field for field in info.fields}
    rows = []
    for name, meaning in schema.meanings(struct).items():
        takes = " or ".join(dict.fromkeys(words(fields[name].type)))
        rows.append([f"`{name}`", takes, default(fields[name]), meaning])
    return table(["Key", "Takes", "Default", "Meaning"], rows)


def words(kind: types.Type) -> Iterator[str]:
    """The alternatives that a type stands for, in words."""
    match kind:
        case types.UnionType():
            for member in kind.types:
                yield from words(member)
        case types.Metadata():
            yield from words(kind.type)
        case types.NoneType():
            return
        case types.LiteralType():
            yield from (f"`{value}`" for value in kind.values)
        case types.IntType() | types.FloatType():
            number = "a whole number" if isinstance(kind, types.IntType) else "a number"
            yield number + _limits(kind)
        case types.StrType():
            yield "text"
        case types.BoolType():
            yield "`true` or `false`"
        case types.VarTupleType():
            item = kind.item_type
            item = item.type if isinstance(item, types.Metadata) else item
            if isinstance(item, types.StructType):
                yield f"a list of mappings, [below]({_SECTIONS[item.cls]})"
            elif isinstance(item, types.DictType):
                yield "a list of mappings"
            else:
                numbers = isinstance(item, types.IntType)
                yield f"a list of {'whole numbers' if numbers else 'text'}"
        case types.DictType(value_type=types.StrType() | types.Metadata(type=types.StrType())):
            yield "a mapping of names to text"
        case types.DictType():
            yield "a mapping"
        case types.StructType():
            section = _SECTIONS[kind.cls]
            yield f"a mapping, [{'below' if section[0] == '#' else 'there'}]({section})"
        case _:
            raise TypeError(f"no words for {kind}")


def _limits(kind: types.IntType | types.FloatType) -> str:
    if kind.le is not None:
        least = f"above {kind.gt}, up" if kind.ge is None else kind.ge
        return f" ({least} to {kind.le})"
    return "" if kind.ge is None else f" ({kind.ge} or more)"


_SECTIONS = {
    BatchSpec: "#batch", CheckpointSpec: "#checkpoint", Host: "#one-host", Claim: "#one-volume",
    NotifySpec: "start.md#notifications",
}  # fmt: skip
"""Struct to the heading above its keys."""


def default(field: types.Field) -> str:
    """What a key is when it is left out, as YAML."""
    if field.required:
        return "the file's name" if field.name == "name" else "required"
    value = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory()
    if value is None or value == "":
        return "none"
    return f"`{msgspec.json.encode(value).decode()}`".replace('"', "")


def jobs() -> str:
    """The job files of jobs/, and what each needs: `clusterkit jobs`."""
    rows = []
    for job in catalogue.entries(ROOT / "jobs"):
        if job.error is not None:
            raise ValueError(job.error)
        rows.append([
            f"[`{job.label}`](../jobs/{job.label}.yaml)", job.description,
            ", ".join(job.packages), job.nodes, job.ranks, job.device,
        ])  # fmt: skip
    return table(["Job", "What it does", "Packages", "Nodes", "Ranks", "Device"], rows)


def backend_table() -> str:
    """The backends that there are."""
    rows = []
    for name in backends.NAMES:
        kind = backends.backend_type(name)
        cannot = "; ".join(f"`{field}`: {why}" for field, why in kind.unsupported.items())
        rows.append([f"`{name}`", kind.summary, cannot or "nothing"])
    return table(["Backend", "Where nodes run", "Job keys it refuses"], rows)


def packages() -> str:
    """What pyproject.toml asks for, beside the version in constraints.txt that tests run with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    rows = []
    for extra in ("", "ssh", "kubernetes", "top", "plot", "s3", "track", "ansible", "train"):
        for wanted in extras[extra]:
            name = re.split(r"[^\w.-]", wanted)[0]
            if name != "clusterkit":
                pin = next(pins[key] for key in pins if key.lower() == name.lower())
                rows.append([name, f"`[{extra}]`" if extra else "always", f"`{wanted}`", pin])
    return table(["Package", "Extra", "Asked for", "Tried"], rows)


def doctor_checks(of: str) -> str:
    """What `clusterkit doctor` looks at."""
    return table(
        ["Check", "At every submit", "What has to be right"],
        [
            [f"`{check.name}`", "yes" if check.quick else "", check.purpose]
            for check in every_check()[of]
        ],
    )


def failures() -> str:
    """What `diagnose` says of failed ranks."""
    return _messages(
        troubleshooting.Entry(failure.cause, meaning, failure.hint or "")
        for failure, meaning in troubleshooting.RANKS
    )


def _messages(entries: Iterable[troubleshooting.Entry]) -> str:
    return table(
        ["Message", "What it means", "What to do"],
        [[_code(message), meaning, remedy] for message, meaning, remedy in entries],
    )


def _refusals() -> str:
    return table(
        ["Message", "What to do"],
        [[_code(message), _code(remedy)] for message, _, remedy in troubleshooting.refusals()],
    )


def _code(text: str) -> str:
    """A text as it is on the screen; with backquotes of its own between double ones."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


# ---------------------------------------------------------------- help texts


def verbs() -> str:
    """``--help`` of every verb, under a heading of its own."""
    parts = [_block("clusterkit --help", _help(cli, "clusterkit"))]
    for verb in VERBS:
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None
        full = f"clusterkit {verb}"
        parts.append(f"## {full}\n\n" + _block(f"{full} --help", _help(command, full)))
    return "\n\n".join(parts)


def _help(command: click.Command, name: str) -> str:
    context = click.Context(command, info_name=name, terminal_width=WIDTH, **cli.context_settings)
    return click.unstyle(command.get_help(context))


def _block(command: str, text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"```console\n$ {command}\n{lines}\n```"


def gpt_flags() -> str:
    """The flags of jobs/train/gpt/train.py, from its own parser."""
    rows = []
    for action in _gpt_parser()._actions:
        if action.dest == "help":
            continue
        value = action.metavar
        if value is None and action.choices is not None:
            value = "|".join(map(str, action.choices))
        if value is None and action.nargs != 0:
            value = "N" if action.type is not None else "TEXT"
        flag = f"`{action.option_strings[-1]}{f' {value}' if value else ''}`"
        given = action.default
        rows.append([
            flag, "" if given is None or given is False else f"`{given}`", action.help or "",
        ])  # fmt: skip
    return table(["Flag", "Default", "Meaning"], rows)


def _gpt_parser() -> argparse.ArgumentParser:
    """The parser that train.py makes, caught when it is about to parse."""
    folder = str(ROOT / "jobs" / "train" / "gpt")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    settings, train = map(importlib.import_module, ("gpt_settings", "train"))
    # A run's own environment would show as defaults.
    inherited = {key: os.environ.pop(key) for key in [*os.environ] if key.startswith("CLUSTERKIT_")}
    try:
        with mock.patch.object(settings.Parser, "parse_args", lambda self: self):
            parser: argparse.ArgumentParser = train.parse_args()
    finally:
        os.environ.update(inherited)
    return parser


PARTS: dict[str, Callable[[], str]] = {
    "jobs": jobs,
    "backends": backend_table,
    "job-keys": lambda: keys(JobSpec),
    "batch-keys": lambda: keys(BatchSpec),
    "checkpoint-keys": lambda: keys(CheckpointSpec),
    "local-cluster-keys": lambda: keys(LocalCluster),
    "ssh-cluster-keys": lambda: keys(SshCluster),
    "compose-cluster-keys": lambda: keys(ComposeCluster),
    "kubernetes-cluster-keys": lambda: keys(KubernetesCluster),
    "slurm-cluster-keys": lambda: keys(SlurmCluster),
    "notify-keys": lambda: keys(NotifySpec),
    "claim-keys": lambda: keys(Claim),
    "host-keys": lambda: keys(Host),
    "verbs": verbs,
    "doctor-checks": lambda: doctor_checks("hosts"),
    "doctor-checks-kubernetes": lambda: doctor_checks("kubernetes"),
    "doctor-checks-slurm": lambda: doctor_checks("slurm"),
    "gpt-flags": gpt_flags,
    "packages": packages,
    "failures": failures,
    "platform-messages": lambda: _messages(troubleshooting.PLATFORMS),
    "refusals": _refusals,
}
"""Name in the marker to what belongs there."""


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generated_docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    options = parser.parse_args(arguments)
    old = stale(root)
    for page in old:
        if options.check:
            print(f"{page.relative_to(root)} is stale: make docs writes it anew", file=sys.stderr)
        else:
            page.write_text(renewed(page.read_text(), page.name))
            print(page.relative_to(root))
    return 1 if old and options.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
