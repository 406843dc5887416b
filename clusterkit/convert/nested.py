"""Find a launcher inside a job's command or its shell script. Each rank would start it again."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from clusterkit import shell
from clusterkit.convert.draft import unknown_in
from clusterkit.convert.shell_text import Unfinished, commands
from clusterkit.errors import BadInput
from clusterkit.jobfile import command
from clusterkit.jobfile.launcher_options import MODULES
from clusterkit.jobfile.sources import Read, read_source
from clusterkit.spec import JobSpec

_OTHERS = frozenset(
    {"srun", "jsrun", "aprun", "horovodrun", "orterun", "prterun", "mpiexec.hydra", "torchx"}
)
"""Launchers whose command lines `clusterkit.jobfile.command.read` does not parse."""
_WRAPPERS = frozenset(
    {"nohup", "env", "nice", "ionice", "timeout", "numactl", "stdbuf", "taskset", "chrt", "setsid",
     "time", "sudo", "exec", "command", "eval", "xvfb-run", "catchsegv", "strace", "ltrace", "perf",
     "nsys", "ncu", "gdb", "valgrind", "flock", "unbuffer", "dumb-init", "tini", "uv", "poetry",
     "conda", "mamba", "micromamba", "pipenv", "pdm", "hatch", "pixi", "rye", "apptainer",
     "singularity", "docker", "podman", "systemd-run", "prlimit", "setarch", "xargs", "coverage"}
)  # fmt: skip
"""Commands that start the command among their arguments."""
_NAMES = frozenset(
    {"-n", "--name", "-p", "--prefix", "--with", "--extra", "--group", "--only-group", "--package"}
)
"""Options of them whose value is a name."""
_KEYWORDS = frozenset({"if", "then", "elif", "else", "while", "until", "do", "!", "{", "time"})
_ASSIGNMENT = re.compile(rf"({shell.NAME})=(.*)\Z", re.DOTALL)
_PASSES_ON = re.compile(r"(exec\s+)?\"?\$[@*]")
_OPENS = re.compile(r"(function\s+)?[\w-]+\s*\(\)\s*\{?\s*|\(\s*")
_DEEPEST = 5


class Found(NamedTuple):
    """A launcher that the ranks would start."""

    launcher: str
    place: str
    """Script and line; empty: the command itself."""
    words: Sequence[str]
    """The launcher's command line."""


def check(job: JobSpec, read: Read | None = None) -> None:
    """Refuse a command that starts a launcher, unless ``launcher: forkserver`` says it is meant.

    Args:
        read: returns the text of a script; None: reads it, relative to the job's folder.

    Raises:
        BadInput: naming the launcher, its line, and the remedy.
    """
    if job.command is None or job.launcher in ("forkserver", "python"):
        return
    folder = job.workdir or "."
    words = [*job.command, *job.args]
    _check_sudo(words)
    read = read or (lambda path: read_source(posixpath.join(folder, path)))
    found = _find(words, read, "", 0)
    if found is None:
        return
    own = shell.join(["clusterkit", "submit", "--", *found.words])
    if found.launcher in _OTHERS:
        program = shell.join(found.words[_program_at(found.words) :])
        remedy = f"without {found.launcher}: clusterkit submit --nodes N --gpus RANKS -- {program}"
    elif found.place:
        remedy = f"start its line: {own}"
    else:
        before = words[: len(words) - len(found.words)]
        if words[len(before) :] == [*found.words]:
            own = shell.join([*before, "clusterkit", "submit", "--", *found.words])
        remedy = f"the launcher first: {own}"
    raise BadInput(
        f"command: {found.place or shell.join(words)[:80]} starts {found.launcher}, and clusterkit "
        "would start that once for every rank, each time with ranks of its own",
        hint=f"{remedy}; --set launcher=forkserver --gpus 1 starts it once on each node as it is",
        job="command",
    )


def _program_at(words: Sequence[str]) -> int:
    """Return where the program begins in a launcher's words, as far as they show it."""
    for at, word in enumerate(words[1:], 1):
        if re.search(r"(^|/)python[\d.]*\Z|\.(py|sh)\Z|^\./", word):
            return at
    return len(words) - 1


def _check_sudo(words: Sequence[str]) -> None:
    """Refuse ``sudo`` in front, which would take RANK and the like out of the environment.

    Raises:
        BadInput: with the remedy.
    """
    if posixpath.basename(words[0]) == "sudo" and not {"-E", "--preserve-env"} & {*words}:
        at = _program_at(words) if words[1:2] and words[1].startswith("-") else 1
        raise BadInput(
            "command: sudo removes RANK, MASTER_ADDR and the like from the environment",
            hint=f"ranks run as you: clusterkit submit -- {shell.join(words[at:])}",
            job="command",
        )


def _is_shell(path: str, text: str) -> bool:
    if text.startswith("#!"):
        return re.search(r"\b(ba|da|z|k)?sh\b", text.partition("\n")[0]) is not None
    return path.endswith((".sh", ".bash", ".slurm", ".sbatch"))


def _find(words: Sequence[str], read: Read, place: str, depth: int) -> Found | None:
    while words and _ASSIGNMENT.match(words[0]):
        words = words[1:]
    if not words or depth > _DEEPEST:
        return None
    name = posixpath.basename(words[0])
    if (launcher := _launcher(words)) is not None:
        return Found(launcher, place, words)
    if name in command.SHELLS:
        return _in_shell(words[1:], read, place, depth)
    if name in ("source", "."):
        return _in_script(words[1:], read, depth, sourced=True)
    if name in _WRAPPERS:
        for at in range(1, len(words)):
            inner = words[at:]
            starts = posixpath.basename(inner[0]) in command.SHELLS or _launcher(inner) is not None
            starts = starts or inner[0].endswith(".sh")
            if starts and words[at - 1] not in _NAMES:
                return _find(inner, read, place, depth + 1)
        return None
    return _in_script(words, read, depth)


def _launcher(words: Sequence[str]) -> str | None:
    """Return the launcher that a command line begins with, if it starts a program."""
    name = posixpath.basename(words[0])
    if name in _OTHERS:
        starts = any(not word.startswith("-") for word in words[1:])
        return name if starts and (name != "torchx" or words[1] == "run") else None
    if re.fullmatch(r"python[\d.]*", name):
        for option, module in pairwise(words):  # of a debugger or profiler
            if option == "-m" and "." in module and module in MODULES:
                return f"python -m {module}"
    try:
        started = command.read(words)
    except BadInput as error:
        return None if error.message.endswith("starts no program") else name
    return started.launcher or None


def _in_shell(words: Sequence[str], read: Read, place: str, depth: int) -> Found | None:
    rest = list(words)
    while rest and rest[0][:1] in ("-", "+") and len(rest[0]) > 1:
        option = rest.pop(0)
        if not option.startswith("--") and "c" in option and rest:
            return _in_text(rest[0], rest[1:], read, place, depth)
        if option in ("-o", "+o", "-O", "--rcfile", "--init-file") and rest:
            rest.pop(0)
    text = read(rest[0]) if rest and not unknown_in(rest[0]) else None
    return None if text is None else _in_text(text, rest[1:], read, rest[0], depth, lines=True)


def _in_script(
    words: Sequence[str], read: Read, depth: int, *, sourced: bool = False
) -> Found | None:
    text = read(words[0]) if words and not unknown_in(words[0]) else None
    if text is None or not (sourced or _is_shell(words[0], text)):
        return None
    return _in_text(text, words[1:], read, words[0], depth, lines=True)


def _in_text(
    text: str,
    arguments: Sequence[str],
    read: Read,
    place: str,
    depth: int,
    *,
    lines: bool = False,
) -> Found | None:
    variables: dict[str, str] = {}
    if depth > _DEEPEST:
        return None
    try:
        for each in commands(text, variables):
            words, here = each.words, f"{place}:{each.line}" if lines else place
            if opened := _OPENS.match(each.raw):
                inner = each.raw[opened.end() :].removesuffix(")")
                if (found := _in_text(inner, arguments, read, here, depth + 1)) is not None:
                    return found
                continue
            while words and words[0] in _KEYWORDS:
                words = words[1:]
            for word in words[1:] if words[:1] in (["export"], ["local"]) else words:
                if (match := _ASSIGNMENT.match(word)) is None:
                    break
                variables[match[1]] = match[2]
            raw = each.raw.removeprefix("exec ").lstrip()
            if _PASSES_ON.match(raw):
                words = list(arguments)
            if words and (found := _find(words, read, here, depth + 1)) is not None:
                return found
    except Unfinished:
        pass
    return None
