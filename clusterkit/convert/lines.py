"""Command lines: wrappers in front of a launcher, its options, the program. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from clusterkit import shell
from clusterkit.agent import LOCAL_RANK_WORD
from clusterkit.convert import accelerate, deepspeed, mpirun
from clusterkit.convert.draft import Draft, all_unknown, shown, unknown_in
from clusterkit.convert.options import RENDEZVOUS, apply_option, assigned, job_name
from clusterkit.convert.shell_text import Command, Unfinished, commands
from clusterkit.errors import BadInput
from clusterkit.jobfile import command
from clusterkit.jobfile.command import Started, Used
from clusterkit.jobfile.launcher_options import (
    ACCELERATE,
    DEEPSPEED,
    LAUNCH,
    MISUSED,
    MPIRUN,
    SCRIPTS,
    TORCHRUN,
    Tool,
)
from clusterkit.jobfile.prefixes import plain_script
from clusterkit.jobfile.sources import imported, local_rank_argument, starts

_ASSIGNMENT = re.compile(rf"({shell.NAME})=(.*)\Z", re.DOTALL)
_NOT_NEEDED = {
    "exec": "a rank becomes its program anyway",
    "nohup": "a run outlives the terminal",
    "time": "`clusterkit status` shows how long a run took",
}
PLAIN_WRAPPERS = frozenset(_NOT_NEEDED)
_WRAPPERS = PLAIN_WRAPPERS | {"env", "timeout"}
_STARTERS = frozenset(
    {"sudo", "numactl", "taskset", "conda", "mamba", "docker", "podman", "apptainer", "singularity",
     "ssh", "srun", "sbatch", "torchx", "uv", "poetry", "pipenv", "pixi", "nsys", "ncu"}
)  # fmt: skip
_LAUNCHERS = frozenset(name[0] for name in SCRIPTS) | {"srun"}
_PRINTS = frozenset({"echo", "printf", "date", "hostname", "pwd", "nvidia-smi"})
_SHELLS = frozenset({"bash", "sh", "/bin/bash", "/bin/sh"})

Rule = Callable[[Draft, Used], None]


def _torchrun(draft: Draft, used: Used) -> None:
    name, value = used.name, used.value
    if name == "--nnodes":
        low, colon, high = value.partition(":")
        same = not colon or low == high
        draft.key(used.written, "nodes", _whole(low) if same else value)
    elif name == "--nproc-per-node" and value in ("auto", "gpu"):
        draft.key(used.written, "gpus_per_node", "auto")
    elif name == "--nproc-per-node" and value == "cpu":
        draft.key(used.written, "device", "cpu")
        draft.refuse(used.written, "one rank per core: write the number of cores instead")
    elif name == "--shutdown-timeout":
        draft.todo(used.written, f"`stop_grace: {value}` in the cluster's entry is that time")
    elif name == "--rdzv-backend" and value not in ("c10d", "static"):
        draft.drop(used.written, "clusterkit provides the rendezvous")
    else:
        apply_option(draft, used)


_TOOLS: Sequence[tuple[str, Tool]] = (
    ("torchrun", TORCHRUN), ("torchrun", LAUNCH), ("deepspeed", DEEPSPEED), ("mpirun", MPIRUN),
    ("accelerate", ACCELERATE),
)  # fmt: skip
_RULES: Mapping[str, Rule] = {
    "torchrun": _torchrun,
    "deepspeed": deepspeed.option,
    "mpirun": mpirun.option,
    "accelerate": accelerate.option,
}
_FINISH: Mapping[str, Callable[[Draft], None]] = {
    "deepspeed": deepspeed.finish,
    "mpirun": mpirun.finish,
    "accelerate": accelerate.finish,
}


def convert(
    draft: Draft, words: Sequence[str], *, inside: bool = False, ranks: int | None = 1
) -> None:
    """Convert a command line: wrappers, the launcher's options, the program.

    Args:
        inside: the program is in an image or on the nodes, not on the submitter's machine.
        ranks: number of ranks if there is no launcher; None: set elsewhere.
    """
    words = _without_wrappers(draft, list(words))
    if not words or not words[0]:
        if not draft.refused:
            draft.refuse("the command", "it starts no command")
        return
    if unknown_in(words[0]):
        draft.refuse(words[0], "the command is a variable whose value is not known")
        return
    try:
        started = command.read(words)
    except BadInput as error:
        where = f"{draft.at}: " if draft.at else ""
        raise BadInput(f"{where}{error.message}", error.hint) from None
    if (tool := started.tool) is None:
        if ranks is not None:
            why = "as one rank" if ranks == 1 else "a rank for each task"
            draft.key(started.name, "gpus_per_node", ranks, f"gpus_per_node: {ranks}, {why}")
    else:
        name, line = next(name for name, of in _TOOLS if tool is of), shell.join(words)
        for used in started.options:
            rule = apply_option if used.meaning in MISUSED else _RULES[name]
            before = len(draft.refused)
            rule(draft, used)
            if len(draft.refused) > before:
                line = line.replace(f" {used.written}", "", 1)
        if line != shell.join(words) and not (draft.at or unknown_in(line)):
            hint = f"without what is refused: clusterkit convert -- {line}"
            draft.instead = (len(draft.refused), hint)
        draft.key(started.launcher, "launcher", tool.launcher)
        if name in _FINISH:
            _FINISH[name](draft)
        elif "gpus_per_node" not in draft.job and not draft.refused:
            draft.key(f"no --nproc-per-node of {started.launcher}", "gpus_per_node", 1)
    program(draft, started, inside=inside)


def program(draft: Draft, started: Started, *, inside: bool) -> None:
    """Set the program, its arguments and its interpreter."""
    if "name" not in draft.job:
        draft.job["name"] = job_name(started.name)
    for word in started.args:
        if "${clusterkit." in word:
            draft.refuse(word, "a job file has values of clusterkit's own for ${clusterkit...}")
    if started.local_rank:
        files, roots = starts(started.program, started.module)
        read = (lambda path: None) if inside else draft.read
        texts = [text for _, text in imported(files, roots, read)]
        argument = f"{local_rank_argument(started.local_rank, texts)}={LOCAL_RANK_WORD}"
        draft.note(started.local_rank, f"args: {argument}", "job")
        started = replace(started, args=(argument, *started.args))
    if started.module is not None:
        draft.key(f"-m {started.module}", "module", started.module)
    elif started.program is not None and inside:
        words_of = [started.python or "python", started.program]
        draft.key(started.program, "command", words_of)
        started = replace(started, python=None)
    elif started.program is not None:
        draft.key(started.program, "program", started.program)
    elif started.command is not None:
        draft.key(started.command[0], "command", list(started.command))
    if started.python is not None and started.module != "":
        draft.key(started.python, "python", started.python)
    if started.args:
        for word in started.args:
            if bad := unknown_in(word):
                draft.refuse(word, f"${bad} has no known value, and no shell expands the arguments")
        draft.job["args"] = list(started.args)


def _without_wrappers(draft: Draft, words: list[str]) -> list[str]:
    """Convert and remove variables, `env`, `nohup` and the like in front of a command."""
    while words:
        if match := _ASSIGNMENT.match(words[0]):
            assigned(draft, words[0], match[1], match[2])
            words = words[1:]
        elif words[0] in _WRAPPERS and words[1:2] and words[1].startswith("-"):
            draft.refuse(
                shell.join(words[:2]), f"clusterkit does not know the options of {words[0]}"
            )
            return []
        elif words[0] == "env":
            words = words[1:]
        elif words[0] in PLAIN_WRAPPERS:
            draft.drop(words[0], _NOT_NEEDED[words[0]])
            words = words[1:]
        elif words[0] == "timeout" and len(words) > 2:
            draft.key(f"timeout {words[1]}", "time_limit", words[1])
            words = words[2:]
        elif (inner := plain_script(words)) is not None:
            words = inner
        elif words[0] in _STARTERS:
            draft.refuse(words[0], f"clusterkit does not start ranks through {words[0]}")
            return []
        else:
            break
    return words


def script_of(words: Sequence[str]) -> str | None:
    """Return the script of ``bash -c SCRIPT``; None for any other command."""
    if len(words) >= 3 and words[0] in _SHELLS and re.fullmatch(r"-[lexuo]*c", words[1]):
        return words[2]
    return None


def starts_ranks(words: Sequence[str]) -> bool:
    """Whether a command line begins with a launcher, srun, or a Python."""
    words = [word for word in words if not _ASSIGNMENT.match(word)]
    while words and words[0] in (*PLAIN_WRAPPERS, "env"):
        words = words[1:]
    name = words[0].rpartition("/")[2] if words else ""
    return name in _LAUNCHERS or re.fullmatch(r"python[\d.]*", name) is not None


def only_prints(command: Command) -> bool:
    """Whether a command of a script is an `echo` or the like that runs nothing else."""
    return command.name in _PRINTS and not command.redirects and not any(map(_calls, command.words))


def _calls(word: str) -> bool:
    """Whether a word has more to be expanded than variables."""
    plain = rf"{shell.NAME}|[@*#?$!0-9]"
    return any(re.fullmatch(plain, each) is None for each in all_unknown(word))


def inside_shell(draft: Draft, text: str, variables: Mapping[str, str]) -> list[str]:
    """Return the launcher line of ``bash -c TEXT``; refuse a text with more in it."""
    at, found = draft.at, list[str]()
    place, _, first = at.rpartition(":")
    try:
        inner = list(commands(text, variables, int(first) if first.isdecimal() else 1))
    except Unfinished:
        draft.refuse("bash -c", "a quote or bracket does not end")
        return []
    for each in inner:
        draft.at = f"{place}:{each.line}" if place else at
        names = {word.partition("=")[0] for word in each.words[1:]}
        alone = {each.before, each.after} <= {"", "\n", ";"}
        if alone and not found and not each.redirects and starts_ranks(each.words):
            found = each.words
            for word in each.expanded:
                draft.refuse(word, "a shell may expand it: quote it, or write the value")
        elif alone and each.name == "export" and names <= RENDEZVOUS:
            draft.drop(shown(each.raw))
        elif alone and only_prints(each):
            draft.drop(shown(each.raw).partition("\n")[0], "it only prints")
        else:
            draft.refuse(shown(each.raw), "of `bash -c` only a launcher line is converted")
    draft.at = at
    if not found and not draft.refused:
        draft.refuse("bash -c", "no line of it starts ranks")
    return [] if draft.refused else found


def _whole(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
