"""The commands of a script: variables, set-up, and the line that starts the ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clusterkit import shell
from clusterkit.convert import lines
from clusterkit.convert.draft import LOGS, Draft, shown, unknown_in, variable
from clusterkit.convert.options import RENDEZVOUS, assigned
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

Other = Callable[[Draft, Command], None]
Launch = Callable[[Draft, Sequence[str]], None]


def left(todo: str, *, venv: bool = True) -> Other:
    """Return a handler that leaves set-up commands to the user; one may name the Python."""

    def other(draft: Draft, command: Command) -> None:
        raw = shown(command.raw).partition("\n")[0]
        if venv and (match := re.match(r"(?:source|\.)\s+(\S+)/bin/activate\b", raw)):
            draft.key(raw, "python", f"{match[1]}/bin/python")
        else:
            draft.todo(raw, todo)

    return other


class _Variables(dict[str, str]):
    """Values by name, and the names that were looked up."""

    def __init__(self, values: Mapping[str, str]) -> None:
        super().__init__(values)
        self.used: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        return super().get(name, default)


class Script:
    """Converts a script of one source.

    Args:
        variables: known from the start.
        launch: converts the words of the line that starts the ranks.
        other: converts any other command in front of it.
        folder: converts ``cd FOLDER``; by default it sets the job's `workdir`.
    """

    def __init__(
        self,
        draft: Draft,
        variables: Mapping[str, str],
        launch: Launch,
        other: Other,
        folder: Callable[[str, str], None] | None = None,
    ) -> None:
        self.draft = draft
        self.variables = _Variables(variables)
        self.launch = launch
        self.other = other
        self.folder = folder or (lambda origin, path: draft.key(origin, "workdir", path))
        self.own: set[str] = set()
        """Variables that the script sets to an unknown value."""
        self.launched = ""
        self.pending: dict[str, tuple[str, str]] = {}
        """Exported variables of unknown value: refused unless a command line uses them."""

    def read(self, text: str, first: int = 1) -> None:
        """Convert all commands of a script."""
        draft = self.draft
        try:
            for command in commands(text, self.variables, first):
                draft.at = f"{draft.name}:{command.line}" if draft.name else ""
                self._command(command)
        except Unfinished as error:
            draft.at = f"{draft.name}:{error.line}"
            draft.refuse("script", "a quote, bracket or here-document that does not end")
        for name, (origin, at) in self.pending.items():
            draft.at = at
            if name in self.variables.used:
                draft.drop(origin, "a variable of the script, replaced by its value")
            else:
                draft.refuse(origin, "its value is computed by the script: write the value")
        draft.at = ""

    def start(self, words: Sequence[str], launch: Launch | None = None) -> None:
        """Convert the line that starts the ranks, or the ``bash -c SCRIPT`` that contains it."""
        draft, at, launch = self.draft, self.draft.at, launch or self.launch
        if (inner := lines.script_of(words)) is None:
            launch(draft, words)
            return
        known = {name: text for name, text in self.variables.items() if not unknown_in(text)}
        within = Script(draft, known, launch, self.other, self.folder)
        within.own = set(self.own)
        line = re.search(r":(\d+)$", at)
        within.read(inner, int(line[1]) if line else 1)
        draft.at = at
        if not within.launched:
            draft.refuse(shell.join(map(shown, words))[:60], "no line of it starts ranks")

    def _command(self, command: Command) -> None:
        draft, words, name = self.draft, command.words, command.name
        raw = shown(command.raw)
        assignments = [_ASSIGNMENT.match(word) for word in words]
        if not words:
            draft.refuse(raw, "a redirection without a command")
        elif name in _ENDS:
            pass  # its beginning has been refused
        elif name in _STRUCTURE or (len(words) > 1 and words[1].startswith("()")):
            draft.refuse(
                raw.partition("\n")[0], "conditions, loops and functions cannot be converted"
            )
        elif command.before in ("|", "|&"):
            if name == "tee":
                draft.drop(f"| {raw}", LOGS)
            elif not self.launched:
                return  # the rest of a line that has been judged by its beginning
            else:
                draft.refuse(f"| {raw}", "the output of ranks cannot be piped into a command")
        elif command.before == "||":
            draft.drop(f"|| {raw}", "a failed run is reported anyway")
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
                draft.refuse(raw.partition("\n")[0], f"a job has one program: {self.launched}")
                return
            self.launched = f"line {command.line} starts another"
            for redirect in command.redirects:
                if "<" in redirect and not redirect.endswith("/dev/null"):
                    draft.refuse(redirect, "ranks have no standard input")
                else:
                    draft.drop(redirect, LOGS)
            for word in command.expanded:
                draft.refuse(word, "no shell expands the arguments: write the expanded value")
            if command.after == "&":
                draft.drop("&", "all nodes run at once anyway")
            self.launch(draft, words)
        elif name in _TELLS and not command.redirects:
            draft.drop(raw.partition("\n")[0], "it only prints or waits")
        elif self.launched:
            draft.refuse(raw, "a job runs no command after the ranks")
        else:
            self._other(command)

    def _other(self, command: Command) -> None:
        if own := next((name for name in self.own if f"${name}" in shown(command.raw)
                        or f"${{{name}" in shown(command.raw)), None):  # fmt: skip
            self.draft.refuse(shown(command.raw), f"${own} is worked out by the script")
        else:
            self.other(self.draft, command)

    def _assign(self, origin: str, name: str, value: str, *, exported: bool) -> None:
        """Convert a variable; only exported ones reach the job."""
        draft = self.draft
        if bad := unknown_in(value):
            self.own.add(name)
            self.variables[name] = variable(name) if value == variable(bad) else value
            if name in RENDEZVOUS:
                draft.drop(f"{name}=...", "clusterkit works it out")
            elif exported:
                self.pending[name] = (f"{name}=...", draft.at)
            else:
                draft.drop(f"{name}=...", "a variable of the script")
            return
        self.variables[name] = value
        if name in RENDEZVOUS:
            # Known, but not needed: whoever uses it in an argument gets a value nevertheless.
            draft.drop(origin)
        elif exported:
            assigned(draft, origin, name, value)
        else:
            draft.note(origin, "a variable of the script, replaced by its value", "dropped")

    def _export(self, words: Sequence[str], raw: str) -> None:
        for word in words:
            match = _ASSIGNMENT.match(word)
            if match is None:
                value = self.variables.get(word)
                if value is not None and not unknown_in(value):
                    assigned(self.draft, f"export {word}", word, value)
                elif word in RENDEZVOUS:
                    self.draft.drop(f"export {word}")
                else:
                    self.draft.refuse(f"export {word}", "its value is not known here")
            elif (
                (bad := unknown_in(match[3])) and match[1] not in RENDEZVOUS and not self._own(bad)
            ):
                self.other(
                    self.draft, Command(0, ["export", word], f"export {_written(raw, match[1])}")
                )
            else:
                self._assign(shown(word), match[1], match[3], exported=True)

    def _own(self, name: str) -> bool:
        return name in self.own or name.startswith(("(", "{"))

    def _folder(self, raw: str, folder: str) -> None:
        bad = unknown_in(folder)
        if bad in ("SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "PWD"):
            self.draft.drop(raw, "ranks start where the program is found")
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
    """Return ``NAME=VALUE`` as written, with its quotes."""
    found = re.search(rf"\b{name}=(?:\"(?:\\.|[^\"])*\"|'[^']*'|\S)*", raw)
    return found[0] if found else raw
