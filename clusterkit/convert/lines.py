"""Command lines: what stands in front of a launcher, its options by a table, the program. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from clusterkit import shell
from clusterkit.convert import accelerate, deepspeed, mpirun, torchx
from clusterkit.convert.options import assigned, by_meaning, job_name
from clusterkit.convert.sheet import Sheet, unknown_in
from clusterkit.errors import BadInput
from clusterkit.jobfile import command
from clusterkit.jobfile.command import Started, Used
from clusterkit.jobfile.launcher_options import (
    ACCELERATE,
    DEEPSPEED,
    LAUNCH,
    MISUSED,
    MPIRUN,
    TORCHRUN,
    Tool,
)

_ASSIGNMENT = re.compile(rf"({shell.NAME})=(.*)\Z", re.DOTALL)
_PLAIN_WRAPPERS = frozenset({"exec", "nohup", "time"})
_WRAPPERS = _PLAIN_WRAPPERS | {"env", "timeout"}
_SHELLS = frozenset({"bash", "sh", "/bin/bash", "/bin/sh"})
_LOCAL_RANK = re.compile(r"--local[_-]rank\b")

Rule = Callable[[Sheet, Used], None]


def _torchrun(sheet: Sheet, used: Used) -> None:
    name, value = used.name, used.value
    if name == "--nnodes":
        low, colon, high = value.partition(":")
        same = not colon or low == high
        sheet.key(used.written, "nodes", _whole(low) if same else value)
    elif name == "--nproc-per-node" and value in ("auto", "gpu"):
        sheet.key(used.written, "gpus_per_node", "auto")
    elif name == "--nproc-per-node" and value == "cpu":
        sheet.key(used.written, "device", "cpu")
        sheet.refuse(used.written, "one rank per core: write the number of cores instead")
    elif name == "--shutdown-timeout":
        sheet.yours(used.written, f"`stop_grace: {value}` in the cluster's entry is that time")
    elif name == "--rdzv-backend" and value not in ("c10d", "static"):
        sheet.drop(used.written, "clusterkit brings a meeting place of its own")
    else:
        by_meaning(sheet, used)


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
_FINISH: Mapping[str, Callable[[Sheet], None]] = {
    "deepspeed": deepspeed.finish,
    "mpirun": mpirun.finish,
    "accelerate": accelerate.finish,
}


def convert(
    sheet: Sheet, words: Sequence[str], *, inside: bool = False, ranks: int | None = 1
) -> None:
    """A command line, which becomes the job's program and what its launcher's options say.

    Args:
        inside: the program lies in an image or on the nodes, not on the submitter's machine.
        ranks: that the line starts if no launcher says; None: whatever else says so.
    """
    words = _without_wrappers(sheet, list(words))
    if not words or not words[0]:
        if not sheet.refused:
            sheet.refuse("the command", "nothing is started")
        return
    if unknown_in(words[0]):
        sheet.refuse(words[0], "which command that is, is not known here")
        return
    if words[0].rpartition("/")[2] == "torchx":
        torchx.command(sheet, words)
        return
    try:
        started = command.read(words)
    except BadInput as error:
        where = f"{sheet.at}: " if sheet.at else ""
        raise BadInput(f"{where}{error.message}", error.hint) from None
    launched(sheet, started, inside=inside, ranks=ranks)


def launched(
    sheet: Sheet, started: Started, *, inside: bool = False, ranks: int | None = 1
) -> None:
    """What `command.read` found."""
    if (tool := started.tool) is None:
        if ranks is not None:
            why = "as one rank" if ranks == 1 else "a rank for each task"
            sheet.key(started.name, "gpus_per_node", ranks, f"gpus_per_node: {ranks}, {why}")
    else:
        name = next(name for name, of in _TOOLS if tool is of)
        for used in started.options:
            rule = by_meaning if used.meaning in MISUSED else _RULES[name]
            rule(sheet, used)
        sheet.key(started.launcher, "launcher", tool.launcher)
        if name in _FINISH:
            _FINISH[name](sheet)
        elif "gpus_per_node" not in sheet.job and not sheet.refused:
            sheet.key(f"no --nproc-per-node of {started.launcher}", "gpus_per_node", 1)
    program(sheet, started, inside=inside)


def program(sheet: Sheet, started: Started, *, inside: bool) -> None:
    """The program, its arguments and its interpreter."""
    if "name" not in sheet.job:
        sheet.job["name"] = job_name(started.name)
    if started.local_rank and _takes_local_rank(sheet, started, inside):
        words = shell.join([started.python or "python", *_target(started)])
        script = f'exec {words} {started.local_rank}="$LOCAL_RANK" "$@"'
        said = f"command: the launcher gives it {started.local_rank}, so a shell does here"
        sheet.key(started.name, "command", ["sh", "-c", script, "sh"], said)
        started = replace(started, python=None)
    elif started.module is not None:
        sheet.key(f"-m {started.module}", "module", started.module)
    elif started.program is not None and inside:
        words_of = [started.python or "python", started.program]
        sheet.key(started.program, "command", words_of)
        started = replace(started, python=None)
    elif started.program is not None:
        sheet.key(started.program, "program", started.program)
    elif started.command is not None:
        sheet.key(started.command[0], "command", list(started.command))
    if started.python is not None and started.module != "":
        sheet.key(started.python, "python", started.python)
    if started.args:
        for word in started.args:
            if bad := unknown_in(word):
                sheet.refuse(word, f"${bad} is not known here, and no shell reads the arguments")
        sheet.job["args"] = list(started.args)


def _target(started: Started) -> list[str]:
    return ["-m", started.module] if started.module else [started.program or ""]


def _takes_local_rank(sheet: Sheet, started: Started, inside: bool) -> bool:
    """Whether the program asks for its local rank as an argument; yes where nobody can look."""
    if started.program is None and started.module is None:
        return False
    source = sheet.read(started.program) if started.program and not inside else None
    if source is not None and not _LOCAL_RANK.search(source):
        sheet.drop(started.local_rank, "the program does not read it: LOCAL_RANK says the same")
        return False
    return True


def _without_wrappers(sheet: Sheet, words: list[str]) -> list[str]:
    """The line without variables, `env`, `nohup` and the like in front of it."""
    while words:
        if match := _ASSIGNMENT.match(words[0]):
            assigned(sheet, words[0], match[1], match[2])
            words = words[1:]
        elif words[:2] == ["env", "-u"]:
            sheet.drop(shell.join(words[:3]), "ranks have the variables of the job alone")
            words = ["env", *words[3:]]
        elif words[0] in _WRAPPERS and words[1:2] and words[1].startswith("-"):
            sheet.refuse(shell.join(words[:2]), f"clusterkit knows no options of {words[0]}")
            return []
        elif words[0] == "env":
            words = words[1:]
        elif words[0] in _PLAIN_WRAPPERS:
            sheet.drop(words[0], "a run outlives the terminal")
            words = words[1:]
        elif words[0] == "timeout" and len(words) > 2:
            sheet.key(f"timeout {words[1]}", "time_limit", words[1])
            words = words[2:]
        elif words[:2] in (["uv", "run"], ["poetry", "run"], ["pipenv", "run"], ["pixi", "run"]):
            sheet.yours(
                shell.join(words[:2]), "submit with that environment active, or set `python:`"
            )
            words = words[2:]
        elif words[0] in ("sudo", "numactl", "taskset", "conda", "docker", "apptainer", "ssh",
                          "srun", "sbatch"):  # fmt: skip
            sheet.refuse(words[0], f"clusterkit does not start ranks through {words[0]}")
            return words
        else:
            break
    return words


def script_of(words: Sequence[str]) -> str | None:
    """The script of ``bash -c SCRIPT``; None: it is no such line."""
    if len(words) >= 3 and words[0] in _SHELLS and re.fullmatch(r"-[lexuo]*c", words[1]):
        return words[2]
    return None


def _whole(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
