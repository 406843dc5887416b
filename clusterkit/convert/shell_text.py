"""A parser for the subset of shell that job scripts use: simple commands and known variables.

No shell runs. An unknown variable, ``$(...)`` and the like become a `variable` marker in the word,
so that the user of the word can refuse it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from clusterkit import shell
from clusterkit.convert.draft import variable

_NAME = re.compile(shell.NAME)
_BRACED = re.compile(rf"({shell.NAME})(?::?[-=]((?:[^${{}}`])*))?\Z")
_OPERATORS = ("&&", "||", ";;", "|&", ";", "|", "&", "\n")
_FIELD = re.compile("(?:\ue000[^\ue001]*\ue001|\\S)+")
_QUOTED = re.compile(r"\\.|'[^']*'|\"(?:[^\"\\]|\\.)*\"|\$\{[^}]*\}|\$.", re.DOTALL)
_EXPANDED = re.compile(r"\A~|\*|\{(?=[^{}]*\})[^{}]*?(?:,|\.\.)")
_ANSI = re.compile(r"\$'(?:[^'\\]|\\.)*'", re.DOTALL)
"""``$'...'``, whose escapes are not interpreted."""
_REDIRECT = re.compile(r"(\d*|&)(>>|>&|>\||>|<<<|<<-?|<&|<)(&?)")


@dataclass
class Command:
    """A simple command of a shell script."""

    line: int
    words: list[str] = field(default_factory=list)
    raw: str = ""
    redirects: list[str] = field(default_factory=list)
    expanded: list[str] = field(default_factory=list)
    """Words that a shell would expand: globs, braces, ``~``."""
    before: str = ""
    """The operator in front of the command."""
    after: str = ""

    @property
    def name(self) -> str:
        return self.words[0].rpartition("/")[2] if self.words else ""


class Unfinished(ValueError):
    """A quote or bracket does not end; ``line`` is where it begins."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


def commands(text: str, variables: Mapping[str, str], first: int = 1) -> Iterator[Command]:
    """Yield the simple commands of a script, in order.

    Args:
        variables: values by name; looked up when a command is reached, so that earlier commands
            may set them.
        first: number of the text's first line.

    Raises:
        Unfinished: a quote or bracket does not end.
    """
    reader = _Reader(text, variables, first)
    operator = ""
    while (command := reader.command()) is not None:
        command.before, operator = operator, command.after
        if command.words or command.redirects:
            yield command


class _Reader:
    def __init__(self, text: str, variables: Mapping[str, str], first: int) -> None:
        self.text = text.replace("\r\n", "\n")
        self.variables = variables
        self.at = 0
        self._counted = (0, first)
        self._ends: list[tuple[str, bool]] = []
        """End markers of the here-documents that follow this line."""

    def line(self, at: int | None = None) -> int:
        """Return the line number of a position, which must not lie before that of the last call."""
        before, number = self._counted
        at = max(before, self.at if at is None else at)
        self._counted = (at, number + self.text.count("\n", before, at))
        return self._counted[1]

    def command(self) -> Command | None:
        """Return the next command, which may be empty; None at the end."""
        text = self.text
        self._skip_blanks()
        if self.at >= len(text):
            return None
        found = Command(self.line())
        begin = self.at
        while True:
            self._skip_blanks()
            if self.at >= len(text) or text.startswith(_OPERATORS, self.at):
                break
            if match := _REDIRECT.match(text, self.at):
                start = self.at
                self.at = match.end()
                self._skip_blanks()
                end = self.at
                word = self._word()
                found.redirects.append(text[start : self.at].strip())
                if match[2] in ("<<", "<<-"):
                    plain = "".join(word) or text[end : self.at]
                    self._ends.append((plain, match[2] == "<<-"))
            else:
                start, name = self.at, bool(found.words)
                found.words += self._word()
                if name and _EXPANDED.search(_QUOTED.sub("", text[start : self.at])):
                    found.expanded.append(text[start : self.at])
        found.raw = text[begin : self.at].strip()
        for operator in _OPERATORS:
            if text.startswith(operator, self.at):
                found.after = operator
                self.at += len(operator)
                break
        if self._ends and (found.after == "\n" or self.at >= len(text)):
            found.raw += "\n" + self._here_documents()
        return found

    def _here_documents(self) -> str:
        """Their lines, which are no commands."""
        begin = self.at
        for word, tabs in self._ends:
            line = None
            while line != word:
                if self.at >= len(self.text):
                    raise Unfinished(self.line(begin - 1))
                end = self.text.find("\n", self.at) % (len(self.text) + 1)
                line = self.text[self.at : end]
                line = line.lstrip("\t") if tabs else line
                self.at = end + 1
        self._ends = []
        return self.text[begin : self.at].rstrip("\n")

    def _skip_blanks(self) -> None:
        text = self.text
        while self.at < len(text):
            if text[self.at] in " \t":
                self.at += 1
            elif text.startswith("\\\n", self.at):
                self.at += 2
            elif text[self.at] == "#" and (self.at == 0 or text[self.at - 1] in " \t\n;"):
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            else:
                break

    def _word(self) -> list[str]:
        """The next word, which an unquoted variable may make several or none."""
        text, begin = self.text, self.at
        words, quoted = [""], False
        while self.at < len(text):
            here = text[self.at]
            if here in " \t\n;|&<>":
                break
            if here == "(":
                # An array: NAME=(...); as one value that nobody knows.
                words[-1] += variable(self._bracket("(", ")"))
            elif here == "\\":
                pair = text[self.at : self.at + 2]
                words[-1] += "" if pair == "\\\n" else pair[1:]
                self.at += 2
            elif here == "'":
                end = text.find("'", self.at + 1)
                if end < 0:
                    raise Unfinished(self.line(begin))
                words[-1] += text[self.at + 1 : end]
                quoted, self.at = True, end + 1
            elif here == '"':
                words[-1] += self._double()
                quoted = True
            elif text.startswith('$"', self.at):
                self.at += 1  # a translation, which there is none of
            elif ansi := _ANSI.match(text, self.at):
                words[-1] += variable(ansi[0][1:])
                quoted, self.at = True, ansi.end()
            elif here in "$`":
                value = self._expansion()
                assignment = re.match(rf"{shell.NAME}=", text[begin : self.at])
                parts = [value] if assignment else _FIELD.findall(value)
                if parts:
                    words[-1] += parts[0]
                    words += parts[1:]
            elif here == ")":
                raise Unfinished(self.line(begin))
            else:
                words[-1] += here
                self.at += 1
        return words if quoted or words != [""] else []

    def _double(self) -> str:
        text, begin = self.text, self.at
        self.at += 1
        found = ""
        while self.at < len(text):
            here = text[self.at]
            if here == '"':
                self.at += 1
                return found
            if here == "\\" and text[self.at + 1 : self.at + 2] in '"\\$`\n':
                found += text[self.at + 1].replace("\n", "")
                self.at += 2
            elif here in "$`":
                found += self._expansion()
            else:
                found += here
                self.at += 1
        raise Unfinished(self.line(begin))

    def _expansion(self) -> str:
        text = self.text
        if text[self.at] == "`":
            end = text.find("`", self.at + 1)
            if end < 0:
                raise Unfinished(self.line())
            inner = text[self.at + 1 : end]
            self.at = end + 1
            return variable(f"({inner})")
        self.at += 1
        if text.startswith("(", self.at):
            inner = self._bracket("(", ")")
            total = _sum(inner, self.variables) if inner.startswith("((") else None
            return variable(inner) if total is None else str(total)
        if text.startswith("{", self.at):
            inner = self._bracket("{", "}")[1:-1]
            if match := _BRACED.match(inner):
                value = self.variables.get(match[1])
                if value is None:
                    return variable(match[1]) if match[2] is None else match[2]
                return value
            return variable(f"{{{inner}}}")
        if match := _NAME.match(text, self.at):
            self.at = match.end()
            return self.variables.get(match[0], variable(match[0]))
        if self.at < len(text) and text[self.at] in "@*#?$!0123456789":
            self.at += 1
            return variable(text[self.at - 1])
        return "$"

    def _bracket(self, opened: str, closed: str) -> str:
        """Return the text of a bracket up to its end; respects quotes."""
        text, begin, depth = self.text, self.at, 0
        while self.at < len(text):
            here = text[self.at]
            if here == "'" and (end := text.find("'", self.at + 1)) > 0:
                self.at = end
            elif here == opened:
                depth += 1
            elif here == closed:
                depth -= 1
            self.at += 1
            if depth == 0:
                return text[begin : self.at]
        raise Unfinished(self.line(begin))


def _sum(expression: str, variables: Mapping[str, str]) -> int | None:
    """Evaluate ``$((...))``; None if a value is unknown."""
    text = _NAME.sub(lambda match: variables.get(match[0], "?"), expression.replace("$", ""))
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) // _value(right)
    raise ValueError(node)
