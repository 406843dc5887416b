"""Parse command lines, and turn one that starts a launcher into a job with that launcher. Pure.

As the command of a job, ``torchrun --nproc_per_node=2 train.py`` would start torchrun once for
each rank. `take_over` turns it into a job whose ranks clusterkit starts with that launcher.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from clusterkit import shell
from clusterkit.errors import BadInput, pluralize
from clusterkit.jobfile.launcher_options import (
    ACCELERATE,
    AGAIN,
    BY_ENVIRONMENT,
    COMMAND,
    CONVERT,
    LAUNCH,
    MISSING,
    MODULE,
    MODULES,
    MPIRUN,
    NO_VALUE,
    OURS,
    SCRIPTS,
    TORCHRUN,
    Tool,
)
from clusterkit.jobfile.prefixes import Peeled, check_peeled, peel
from clusterkit.spec import JobSpec

_PYTHON = re.compile(r"python[\d.]*\Z")
PYTHONS = ("python", "python3")
"""First words of a command that stand for the ranks' interpreter."""
SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
# Options of Python without a further word, except those with which it runs no program.
_OPTION = re.compile(r"-[bBdEIOPqRsSu]+|-[WX].+")
SPAWN = re.compile(r"\b(mp|multiprocessing)\.spawn\(|multiprocessing(\.spawn)? import .*\bspawn\b")
"""Matches the source of a program that starts its ranks itself."""
_NO_KEY = (OURS, MODULE, COMMAND, BY_ENVIRONMENT)


class Used(NamedTuple):
    """An option in a launcher's command line."""

    name: str
    """Name with dashes, not underscores."""
    value: str
    """Empty for a flag."""
    written: str
    """The words of the command line."""
    meaning: str
    """As in `clusterkit.jobfile.launcher_options.Tool`."""


@dataclass(frozen=True)
class Started:
    """A parsed command line: it starts one of ``program``, ``module`` and ``command``.

    ``python`` is the interpreter that it names; None for plain ``python``, or if it names none.
    """

    program: str | None = None
    module: str | None = None
    command: tuple[str, ...] | None = None
    args: tuple[str, ...] = ()
    python: str | None = None
    launcher: str = ""
    """The words that name the launcher, such as ``python -m torch.distributed.run``."""
    tool: Tool | None = None
    """The launcher; None: there is none."""
    options: tuple[Used, ...] = ()
    """Options of the launcher."""
    local_rank: str = ""
    """The argument with which the launcher passes the local rank, such as ``--local_rank``; it is
    not in ``args``."""

    @property
    def name(self) -> str:
        """Return the default name of a job."""
        if self.module is not None:
            return self.module.rpartition(".")[2]
        return posixpath.splitext(posixpath.basename(self.program or (self.command or ("",))[0]))[0]

    def words(self) -> list[str]:
        """Return the command line without the launcher."""
        python = self.python or "python"
        if self.module is not None:
            return [python, "-m", self.module, *self.args]
        if self.program is not None:
            return [python, self.program, *self.args]
        return [*(self.command or ()), *self.args]


def read(words: Sequence[str]) -> Started:
    """Parse a command line.

    Raises:
        BadInput: it is a launcher's, and starts no program, or several.
    """
    first = posixpath.basename(words[0])
    if _PYTHON.match(first):
        return _python(words)
    for name, tool in SCRIPTS.items():
        if (first, *words[1 : len(name)]) == name:
            # A script in an environment's bin/ runs with the Python next to it.
            folder = posixpath.dirname(words[0])
            python = posixpath.join(folder, "python3") if folder and tool is not MPIRUN else None
            return _launched(" ".join(name), tool, words[len(name) :], python)
    return Started(command=tuple(words))


def interpreter_options(words: Sequence[str]) -> int | None:
    """Return how many words after ``python`` are its options; None: no program follows them."""
    at = 0
    while at < len(words):
        if words[at] in ("-W", "-X"):
            at += 2
        elif _OPTION.fullmatch(words[at]):
            at += 1
        else:
            module = words[at] == "-m" and at + 1 < len(words)
            return at if module or not words[at].startswith("-") else None
    return None


def file_of(words: Sequence[str]) -> str | None:
    """Return the file that a command starts: a path, or the script of Python or of a shell.

    None: it names none, but a program of the PATH or a module.
    """
    words = peel(words).words or words
    name = posixpath.basename(words[0])
    if _PYTHON.match(name):
        rest = _with_module_apart(words[1:])
        at = interpreter_options(rest)
        return None if at is None or rest[at] == "-m" else rest[at]
    if name in SHELLS:
        return None if words[1:2] == [] or words[1].startswith(("-", "+")) else words[1]
    return words[0] if "/" in words[0] else None


def _with_module_apart(words: Sequence[str]) -> list[str]:
    """Return Python's words with ``-mMODULE`` and ``-um`` as ``-m MODULE`` and ``-u -m``."""
    at = 0
    while at < len(words):
        if match := re.fullmatch(r"-([bBdEIOPqRsSu]*)m(.*)", words[at]):
            flags, module = [f"-{match[1]}"] * bool(match[1]), [match[2]] * bool(match[2])
            return [*words[:at], *flags, "-m", *module, *words[at + 1 :]]
        if not _OPTION.fullmatch(words[at]) and words[at] not in ("-W", "-X"):
            break
        at += 2 if words[at] in ("-W", "-X") else 1
    return list(words)


def _python(words: Sequence[str]) -> Started:
    named = None if words[0] in PYTHONS else words[0]
    rest = _with_module_apart(words[1:])
    while rest[:1] == ["-u"]:
        rest = rest[1:]
    # A launcher does not pass the options of its own Python on to the ranks.
    at = (interpreter_options(rest) or 0) + 2
    if rest[at - 2 : at - 1] == ["-m"] and (tool := MODULES.get("".join(rest[at - 1 : at]))):
        return _launched(shell.join(["python", *rest[:at]]), tool, rest[at:], named)
    if rest[:1] == ["-m"] and len(rest) > 1:
        return Started(module=rest[1], args=tuple(rest[2:]), python=named)
    if rest and not rest[0].startswith("-"):
        return Started(program=rest[0], args=tuple(rest[1:]), python=named)
    return Started(command=("python", *words[1:]), python=named)


def options(tool: Tool, words: Sequence[str], launcher: str) -> tuple[list[Used], list[str]]:
    """Split a launcher's words into its options and the words after them."""
    rest, found = list(words), []
    while rest and rest[0].startswith("-") and len(rest[0]) > 1:
        word = rest.pop(0)
        if word == "--":
            break
        name, value = tool.named(word)
        takes = 1 if name in tool.values else 2 if name in tool.pairs else 0
        meaning = tool.known.get(name)
        if meaning is None:
            meaning = tool.unknown or f"!clusterkit does not know this option of {launcher}"
            follows = rest and (tool.unknown or not rest[0].startswith("-"))
            program = follows and (rest[0].endswith(".py") or _PYTHON.match(rest[0]))
            takes = 1 if follows and (tool.unknown or not program) else 0
        elif name in tool.flags and value is not None:
            meaning = NO_VALUE
        more = rest[: max(0, takes - (value is not None))]
        rest = rest[len(more) :]
        if takes > len(more) + (value is not None):
            meaning = MISSING
        value = value if value is not None else "=".join(more)
        found.append(Used(name, value, shell.join([word, *more]), meaning))
    last = {used.name: used for used in found}
    for at, used in enumerate(found):
        if used is not last[used.name] and used.name not in tool.repeated:
            found[at] = used._replace(meaning=AGAIN)
    return found, rest


def _launched(launcher: str, tool: Tool, words: Sequence[str], python: str | None) -> Started:
    found, rest = options(tool, words, launcher)
    # argparse drops a `--` after the script unless one was before it; deepspeed parses twice.
    before = len(rest) < len(words) and words[-len(rest) - 1] == "--"
    for _ in range(tool.parses - before):
        rest = [*rest[:1], *rest[2:]] if rest[1:2] == ["--"] else rest
    kinds = {used.meaning for used in found}
    if not any(rest[:1]):
        raise BadInput(f"{launcher} starts no program", hint=f"{launcher} train.py --lr 0.1")
    by_argument = tool.local_rank if BY_ENVIRONMENT not in kinds else ""
    if tool is MPIRUN:
        if ":" in rest:
            raise BadInput(f"{launcher} starts several programs: all ranks of a job run the same")
        inner = read(rest)
        if inner.tool is not None:
            raise BadInput(f"{launcher} starts {inner.launcher}: only one of them starts ranks")
    elif COMMAND in kinds and by_argument:
        inner = Started(command=(rest[0],), args=tuple(rest[1:]), local_rank=by_argument)
    elif COMMAND in kinds:
        inner = Started(command=tuple(rest))
    elif MODULE in kinds:
        inner = Started(module=rest[0], args=tuple(rest[1:]), local_rank=by_argument)
    else:
        inner = Started(program=rest[0], args=tuple(rest[1:]), local_rank=by_argument)
    return replace(
        inner, python=inner.python or python, launcher=launcher, tool=tool, options=tuple(found)
    )


# ---------------------------------------------------------------- in front of a launcher


def read_past(words: Sequence[str]) -> tuple[Started, Peeled]:
    """Parse a command line, past what can be peeled: all of it only if a launcher follows.

    Raises:
        BadInput: as `read`; nothing follows.
    """
    peeled = peel(words)
    if peeled.words and (started := read(peeled.words)).tool is not None:
        return started, peeled
    peeled = peel(words, programs=False)
    if not peeled.words:
        raise BadInput(f"command: {shell.join(words)} starts no program", job="command")
    return read(peeled.words), peeled


# ---------------------------------------------------------------- as a job


@dataclass(frozen=True)
class Taken:
    """The result of `take_over`."""

    job: JobSpec
    note: str | None = None
    """Remark on what was taken over; None: nothing."""
    local_rank: str = ""
    """As in `Started`."""


_OF_SHAPE = {
    "PET_NNODES": ("--nnodes", "nodes"),
    "PET_NPROC_PER_NODE": ("--nproc-per-node", "gpus_per_node"),
    "PET_MAX_RESTARTS": ("--max-restarts", "restarts"),
}
"""Variables that torchrun reads as options: the option, and the job's key for it."""


def _check_torchruns_variables(
    started: Started, given: Mapping[str, str], environ: Mapping[str, str]
) -> None:
    """Refuse variables of the shell from which torchrun would take what the job must say."""
    said = {used.name for used in started.options}
    for name, (option, key) in _OF_SHAPE.items():
        if name in environ and option not in said and key not in given:
            raise BadInput(
                f"command: torchrun would take {option} {environ[name]} from {name} in your "
                "environment",
                hint=f"write {option} {environ[name]}, or unset {name}",
                job="command",
            )


def take_over(
    job: JobSpec,
    given: Mapping[str, str],
    typed: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Taken:
    """Return the job with the interpreter and the launcher that its command names.

    Args:
        given: keys that have been set explicitly, and how: ``--gpus 4`` or ``nodes: 2``.
        typed: clusterkit's own options in front of ``--``; None for a job file.
        environ: the variables of the shell in which a command line was typed.

    Raises:
        BadInput: an option of the launcher has no equivalent, with what to type instead as the
            hint, or differs from a key of the job.
    """
    words = job.command
    if not words:
        return Taken(job)
    line = ["clusterkit", "convert", "--", *words, *job.args]
    started, peeled = read_past(words)
    words = tuple(peeled.words)
    check_peeled(peeled, job)
    if started.tool is None:
        job = msgspec.structs.replace(job, command=words, env=peeled.env | job.env)
    if started.python is not None:
        if job.python not in (None, started.python):
            raise BadInput(
                f"python: {job.python}, but the command names {started.python}",
                hint="leave one of the two out",
                job="python",
            )
        job = msgspec.structs.replace(job, python=started.python, command=("python", *words[1:]))
    if (tool := started.tool) is None:
        return Taken(job, peeled.remark)
    if tool in (TORCHRUN, LAUNCH):
        _check_torchruns_variables(started, given, environ or {})
    started = replace(started, args=(*started.args, *job.args))
    keys = {"launcher": (tool.launcher, started.launcher), **_values(started, job, given)}
    keys |= peeled.keys
    for used in started.options:
        if used.meaning.startswith("!"):
            raise BadInput(
                f"command: {started.launcher} {used.written} cannot be taken over: "
                f"{used.meaning[1:] or 'clusterkit has no equivalent'}",
                hint=shell.join(line)
                if used.meaning == CONVERT
                else _instead(started.words(), keys, given, typed),
                job="command",
            )
    if tool is MPIRUN and "gpus_per_node" not in {**keys, **given}:
        raise BadInput(
            f"command: {started.launcher} without -np starts one rank for each core",
            hint="--gpus N says how many ranks a node has",
            job="command",
        )
    for key, (value, written) in keys.items():
        if key in given and str(getattr(job, key)) != str(value):
            raise BadInput(
                f"{given[key]}, but the command says {written}",
                hint="leave one of the two out",
                job=key if given[key].startswith(f"{key}:") else (),
            )
    env = {key[4:]: value for key, (value, _) in keys.items() if key.startswith("env.")}
    fields: dict[str, Any] = {key: value for key, (value, _) in keys.items() if "." not in key}
    taken = msgspec.structs.replace(
        job, program=started.program, module=started.module, command=started.command,
        args=started.args, env=env | job.env, **fields,
    )  # fmt: skip
    values = [f"{key} {value} ({written})" for key, (value, written) in [*keys.items()][1:]]
    ours = [*peeled.dropped, *(used.written for used in started.options if used.meaning == OURS)]
    left = f"; left to clusterkit: {' '.join(ours)}" if ours else ""
    summary = ", ".join([f"launcher {tool.launcher}", *values])
    note = f"{started.launcher} in the command is taken over: {summary}{left}"
    return Taken(taken, note, started.local_rank)


def _values(started: Started, job: JobSpec, given: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Return the keys of a job that the launcher's options set: value and option as written.

    ``gpus_per_node`` has the launcher's default, unless it was given.
    """
    found: dict[str, tuple[Any, str]] = {}
    for used in started.options:
        key, is_set, constant = used.meaning.partition("=")
        if key in _NO_KEY or key.startswith(("!", "-")):
            continue
        value, written = constant if is_set else used.value, used.written
        whole = key in ("gpus_per_node", "threads_per_rank", "restarts", "ranks")
        if key == "gpus_per_node" and value in ("auto", "gpu", "-1"):
            found[key] = ("auto", written)
        elif value.isdecimal() and (whole or key == "nodes"):
            found[key] = (int(value), written)
        elif whole:
            raise BadInput(
                f"command: {started.launcher} {written}: {value or 'nothing'} is not a number",
                hint="--gpus N says how many ranks a node has",
                job="command",
            )
        else:
            found[key] = (value, written)
    if "ranks" in found:
        ranks, written = found.pop("ranks")
        nodes = found["nodes"][0] if "nodes" in found else job.nodes
        if not str(nodes).isdecimal() or not int(nodes) or ranks % int(nodes):
            raise BadInput(
                f"command: {started.launcher} {written}: {pluralize(ranks, 'rank')} cannot be "
                f"divided among {nodes} nodes",
                hint="--gpus N says how many ranks a node has",
                job="command",
            )
        found["gpus_per_node"] = (ranks // int(nodes), written)
    if started.tool is ACCELERATE and "device" in found:
        found["gpus_per_node"] = (1, "--cpu")  # its launcher for CPUs starts one process
    elif started.tool in (TORCHRUN, LAUNCH) and "gpus_per_node" not in {**found, **given}:
        found["gpus_per_node"] = (1, "without --nproc-per-node")
    return found


def _instead(
    words: Sequence[str],
    keys: Mapping[str, tuple[Any, str]],
    given: Mapping[str, str],
    typed: Sequence[str] | None,
) -> str:
    """Return what to type, or to write into the job file, instead of the launcher's line."""
    wanted = {key: value for key, (value, _) in keys.items() if key not in given}
    if wanted.get("launcher") == "torchrun":
        del wanted["launcher"]  # the default launcher is equivalent
    if typed is None:
        keys_wanted = [f"{key}: {value}" for key, value in wanted.items()]
        return "; ".join([*keys_wanted, f"command: {list(words)}"])
    options = list(typed)
    for key, value in wanted.items():
        short = {"nodes": "--nodes", "gpus_per_node": "--gpus"}.get(key)
        options += [short, str(value)] if short else ["--set", f"{key}={value}"]
    return shell.join(["clusterkit", "submit", *options, "--", *words])


def check_source(job: JobSpec, source: str) -> str | None:
    """Return a warning, for several ranks on a node, if a program starts its ranks itself."""
    if job.launcher not in ("forkserver", "python") and SPAWN.search(source):
        return (
            f"{job.program} starts its ranks itself (mp.spawn), but {job.started_by} starts it "
            "once per rank: they would wait for each other forever. launcher: forkserver with "
            "gpus_per_node: 1 starts it once on each node; jobs/tour/ddp-spawn.yaml is an example"
        )
    return None


def instead_of_a_job(words: Sequence[str]) -> list[str] | None:
    """Return the command if words such as ``train.py --lr 1`` are no job file; otherwise None."""
    first = posixpath.basename(words[0])
    suffix = posixpath.splitext(first)[1]
    if suffix == ".py":
        return ["python", *words]
    if suffix == ".sh":
        return ["bash", *words]
    started = read(words)
    return list(words) if started.tool is not None or _PYTHON.match(first) else None
