"""The commands of a script: variables, what comes before the ranks, and what starts them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clusterkit import shell
from clusterkit.convert import lines
from clusterkit.convert.options import RENDEZVOUS, assigned
from clusterkit.convert.sheet import LOGS, Sheet, shown, unknown_in, variable
from clusterkit.convert.shell_text import Command, Unfinished, commands
from clusterkit.jobfile.launcher_options import SCRIPTS

_ASSIGNMENT = re.compile(rf"({shell.NAME})(\+?=)(.*)\Z", re.DOTALL)
_TELLS = frozenset(
    {"echo", "printf", "date", "hostname", "pwd", "nvidia-smi", "which", "true", ":", "scontrol",
     "squeue", "ls", "free", "df", "env", "printenv", "set", "shopt", "wait", "exit", "sleep",
     "lscpu", "uname", "unset", "trap"}
)  # fmt: skip
_ENDS = frozenset({"then", "fi", "do", "done", "esac", "}"})
_STRUCTURE = frozenset(
    {"if", "else", "elif", "for", "while", "until", "case", "function", "select", "{", "[", "[["}
)  # fmt: skip
_PYTHON = re.compile(r"python[\d.]*\Z")
_SETS_UP = re.compile(
    r"-m (pip|venv|ensurepip|build)\b|setup\.py (install|develop|build)|-V|--version|-c "
)
_LAUNCHERS = frozenset({name[0] for name in SCRIPTS} | {"srun", "torchx"})

Other = Callable[[Sheet, Command], None]
Launch = Callable[[Sheet, Sequence[str]], None]


def left(todo: str, *, venv: bool = True) -> Other:
    """Commands in front of the ranks, which nobody runs; one may name the Python."""

    def other(sheet: Sheet, command: Command) -> None:
        raw = shown(command.raw).partition("\n")[0]
        if venv and (match := re.match(r"(?:source|\.)\s+(\S+)/bin/activate\b", raw)):
            sheet.key(raw, "python", f"{match[1]}/bin/python")
        else:
            sheet.yours(raw, todo)

    return other


class _Variables(dict[str, str]):
    """Values by name, and which of them were asked for."""

    def __init__(self, values: Mapping[str, str]) -> None:
        super().__init__(values)
        self.used: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        return super().get(name, default)


class Script:
    """Reads a script for one source.

    Args:
        variables: that are known from the start.
        launch: takes the words of the line that starts the ranks.
        other: takes a command in front of it that has no meaning of its own here.
        folder: takes ``cd FOLDER``; by default it becomes the job's `workdir`.
    """

    def __init__(
        self,
        sheet: Sheet,
        variables: Mapping[str, str],
        launch: Launch,
        other: Other,
        folder: Callable[[str, str], None] | None = None,
    ) -> None:
        self.sheet = sheet
        self.variables = _Variables(variables)
        self.launch = launch
        self.other = other
        self.folder = folder or (lambda what, path: sheet.key(what, "workdir", path))
        self.own: set[str] = set()
        """Variables that the script itself sets to what is not known here."""
        self.launched = ""
        self.pending: dict[str, tuple[str, str]] = {}
        """Exported variables of unknown value: fine where a word of a command line is all they
        are, and lost if not."""

    def read(self, text: str, first: int = 1) -> None:
        """All of its commands."""
        sheet = self.sheet
        try:
            for command in commands(text, self.variables, first):
                sheet.at = f"{sheet.name}:{command.line}" if sheet.name else ""
                self._command(command)
        except Unfinished as error:
            sheet.at = f"{sheet.name}:{error.line}"
            sheet.refuse("script", "a quote, bracket or here-document that does not end")
        for name, (what, at) in self.pending.items():
            sheet.at = at
            if name in self.variables.used:
                sheet.drop(what, "a variable of the script, put in where it stands")
            else:
                sheet.refuse(what, "what a script works out has no place in a job file")
        sheet.at = ""

    def start(self, words: Sequence[str], launch: Launch | None = None) -> None:
        """The line that starts the ranks, or the one in ``bash -c SCRIPT`` that does."""
        sheet, at, launch = self.sheet, self.sheet.at, launch or self.launch
        if (inner := lines.script_of(words)) is None:
            launch(sheet, words)
            return
        known = {name: text for name, text in self.variables.items() if not unknown_in(text)}
        within = Script(sheet, known, launch, self.other, self.folder)
        within.own = set(self.own)
        line = re.search(r":(\d+)$", at)
        within.read(inner, int(line[1]) if line else 1)
        sheet.at = at
        if not within.launched:
            sheet.refuse(shell.join(map(shown, words))[:60], "it starts no ranks")

    def _command(self, command: Command) -> None:
        sheet, words, name = self.sheet, command.words, command.name
        raw = shown(command.raw)
        assignments = [_ASSIGNMENT.match(word) for word in words]
        if not words:
            sheet.refuse(raw, "a redirection without a command")
        elif name in _ENDS:
            pass  # its beginning has been refused
        elif name in _STRUCTURE or (len(words) > 1 and words[1].startswith("()")):
            sheet.refuse(raw.partition("\n")[0], "what a script decides while it runs is not known")
        elif command.before in ("|", "|&"):
            if name == "tee":
                sheet.drop(f"| {raw}", LOGS)
            elif not self.launched:
                return  # the rest of a line that has been judged by its beginning
            else:
                sheet.refuse(f"| {raw}", "a pipe behind the ranks")
        elif command.before == "||":
            sheet.drop(f"|| {raw}", "a run that fails says so itself")
        elif all(assignments):
            for word, match in zip(words, assignments, strict=True):
                assert match is not None
                self._assign(shown(word), match[1], match[3], exported=match[1] in RENDEZVOUS)
        elif name == "export":
            self._export(words[1:], raw)
        elif name == "cd" and len(words) == 2:
            self._folder(raw, words[1])
        elif self._starts_ranks(command):
            if self.launched:
                sheet.refuse(raw.partition("\n")[0], f"a job starts one program: {self.launched}")
                return
            self.launched = f"line {command.line} starts another"
            for redirect in command.redirects:
                if "<" in redirect and not redirect.endswith("/dev/null"):
                    sheet.refuse(redirect, "ranks have no standard input")
                else:
                    sheet.drop(redirect, LOGS)
            for word in command.expanded:
                sheet.refuse(word, "no shell reads the arguments: write what it makes of that")
            if command.after == "&":
                sheet.drop("&", "the nodes run beside each other anyway")
            self.launch(sheet, words)
        elif name in _TELLS and not command.redirects:
            sheet.drop(raw.partition("\n")[0], "it only says or waits for something")
        elif self.launched:
            sheet.refuse(raw, "nothing runs after the ranks")
        else:
            self._other(command)

    def _other(self, command: Command) -> None:
        if own := next((name for name in self.own if f"${name}" in shown(command.raw)
                        or f"${{{name}" in shown(command.raw)), None):  # fmt: skip
            self.sheet.refuse(shown(command.raw), f"${own} is worked out by the script")
        else:
            self.other(self.sheet, command)

    def _assign(self, what: str, name: str, value: str, *, exported: bool) -> None:
        """A variable; what only the script sees becomes no option of anything."""
        sheet = self.sheet
        if bad := unknown_in(value):
            self.own.add(name)
            self.variables[name] = variable(name) if value == variable(bad) else value
            if name in RENDEZVOUS:
                sheet.drop(f"{name}=...", "clusterkit works it out")
            elif exported:
                self.pending[name] = (f"{name}=...", sheet.at)
            else:
                sheet.drop(f"{name}=...", "a variable of the script")
            return
        self.variables[name] = value
        if name in RENDEZVOUS:
            # Known, but not needed: whoever uses it in an argument gets a value nevertheless.
            sheet.drop(what)
        elif exported:
            assigned(sheet, what, name, value)
        else:
            sheet.note(what, "a variable of the script, put in where it stands", "dropped")

    def _export(self, words: Sequence[str], raw: str) -> None:
        for word in words:
            match = _ASSIGNMENT.match(word)
            if match is None:
                value = self.variables.get(word)
                if value is not None and not unknown_in(value):
                    assigned(self.sheet, f"export {word}", word, value)
                elif word in RENDEZVOUS:
                    self.sheet.drop(f"export {word}")
                else:
                    self.sheet.refuse(f"export {word}", "its value is not known here")
            elif (
                (bad := unknown_in(match[3])) and match[1] not in RENDEZVOUS and not self._own(bad)
            ):
                self.other(
                    self.sheet, Command(0, ["export", word], f"export {_written(raw, match[1])}")
                )
            else:
                self._assign(shown(word), match[1], match[3], exported=True)

    def _own(self, name: str) -> bool:
        return name in self.own or name.startswith(("(", "{"))

    def _folder(self, raw: str, folder: str) -> None:
        bad = unknown_in(folder)
        if bad in ("SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "PWD"):
            self.sheet.drop(raw, "ranks start where the program is found")
        else:
            self.folder(raw, folder)

    def _starts_ranks(self, command: Command) -> bool:
        words = [word for word in command.words if not _ASSIGNMENT.match(word)]
        while words:
            if words[:2] in (["uv", "run"], ["poetry", "run"]) or words[0] == "timeout":
                words = words[2:]
            elif words[0] in ("time", "exec", "nohup", "env"):
                words = words[1:]
            else:
                break
        if not words:
            return False
        name = words[0].rpartition("/")[2]
        if _PYTHON.match(name):
            return not _SETS_UP.match(" ".join(words[1:]) + " ")
        if name in _LAUNCHERS:
            return name != "accelerate" or words[1:2] == ["launch"]
        return lines.script_of(words) is not None or (name in ("bash", "sh") and len(words) > 1)


def _written(raw: str, name: str) -> str:
    """``NAME=VALUE`` as it stands in a line, quotes and all."""
    found = re.search(rf"\b{name}=(?:\"(?:\\.|[^\"])*\"|'[^']*'|\S)*", raw)
    return found[0] if found else raw
