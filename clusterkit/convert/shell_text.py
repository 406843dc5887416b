"""Split a shell script into simple commands and their words, as a shell does. No shell runs.

What a shell would replace becomes a `variable` marker in its word, so that the user of the word can
refuse it: every variable but those that are given, ``$(...)``, arithmetic, ``${NAME:-...}``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from clusterkit import shell
from clusterkit.convert.draft import variable

_NAME = re.compile(shell.NAME)
_OPERATOR = re.compile(r"&&|\|\||;;|\|&|[;|&\n]")
_SKIPPED = re.compile(r"(?:[ \t\r]|\\\r?\n)+|(?<![^ \t\n;])#[^\n]*")
"""Blanks, lines that go on, comments."""
_REDIRECT = re.compile(r"(\d*|&)(>>|>&|>\||>|<<<|<<-?|<&|<)")
_FIELD = re.compile("(?:\ue000[^\ue001]*\ue001|\\S)+")
_EXPANDED = re.compile(r"\A~|[*?]|\[[^\]]*\]|\{[^{}]*?(?:,|\.\.)[^{}]*\}")
"""A home folder, a pattern, words in braces."""


@dataclass
class Command:
    """A simple command of a shell script."""

    line: int
    words: list[str] = field(default_factory=list)
    raw: str = ""
    redirects: list[str] = field(default_factory=list)
    expanded: list[str] = field(default_factory=list)
    """Words that a shell would expand: patterns, braces, ``~``."""
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
    while reader.at < len(reader.text):
        command = reader.command()
        command.before, operator = operator, command.after
        if command.words or command.redirects:
            yield command


class _Reader:
    def __init__(self, text: str, variables: Mapping[str, str], first: int) -> None:
        self.text = text.replace("\r\n", "\n")
        self.variables = variables
        self.first = first
        self.at = 0
        self._ends: list[str] = []
        """Words that end the here-documents which follow this line."""

    def command(self) -> Command:
        """Return the next command, which may be empty, and go behind the operator that ends it."""
        self._skip()
        found, begin = Command(self._line(self.at)), self.at
        while self.at < len(self.text) and not (operator := _OPERATOR.match(self.text, self.at)):
            start = self.at
            if redirect := _REDIRECT.match(self.text, self.at):
                self.at = redirect.end()
                self._skip()
                word = "".join(self._word()[0])
                if redirect[2] in ("<<", "<<-"):
                    self._ends.append(word)
                found.redirects.append(self.text[start : self.at])
            else:
                words, bare = self._word()
                if found.words and _EXPANDED.search(bare):
                    found.expanded.append(self.text[start : self.at])
                found.words += words
            self._skip()
        found.raw = self.text[begin : self.at].strip()
        if self.at < len(self.text) and operator:
            found.after, self.at = operator[0], operator.end()
        while self._ends and found.after == "\n":
            line, _, _ = self.text[self.at :].partition("\n")
            if self.at >= len(self.text):
                raise Unfinished(found.line)
            self.at += len(line) + 1
            if line.lstrip("\t") == self._ends[0]:
                self._ends.pop(0)
        return found

    def _line(self, at: int) -> int:
        return self.first + self.text.count("\n", 0, at)

    def _skip(self) -> None:
        while skipped := _SKIPPED.match(self.text, self.at):
            self.at = skipped.end()

    def _word(self) -> tuple[list[str], str]:
        """Return the next word, which an unquoted variable may make several or none, and the word
        without what is quoted in it."""
        text, begin = self.text, self.at
        words, bare, quoted = [""], "", False
        while self.at < len(text) and (here := text[self.at]) not in " \t\n;|&<>":
            if here in "\\'\"" or text.startswith(('$"', "$'"), self.at):
                part = self._quoted()
                words[-1] += part
                quoted, bare = True, bare + "_"
            elif here == "(":  # NAME=(...), or a function
                words[-1] += variable(self._bracket("(", ")"))
            elif here in "$`":
                value = self._expansion()
                if re.match(rf"{shell.NAME}=", text[begin : self.at]):
                    words[-1] += value
                elif parts := _FIELD.findall(value):
                    words[-1] += parts[0]
                    words += parts[1:]
            elif here == ")":
                raise Unfinished(self._line(begin))
            else:
                words[-1] += here
                bare += here
                self.at += 1
        return (words if quoted or words != [""] else []), bare

    def _quoted(self) -> str:
        """Return the value of a quoted part."""
        text, begin = self.text, self.at
        if text[begin] == "\\":
            self.at += 2
            pair = text[begin : self.at]
            return "" if pair == "\\\n" else pair[1:]
        if text[begin] == "'":
            if (end := text.find("'", begin + 1)) < 0:
                raise Unfinished(self._line(begin))
            self.at = end + 1
            return text[begin + 1 : end]
        if text.startswith("$'", begin):  # with escapes
            if (found := re.compile(r"\$'(?:[^'\\]|\\.)*'", re.DOTALL).match(text, begin)) is None:
                raise Unfinished(self._line(begin))
            self.at = found.end()
            return variable(found[0][1:])
        self.at += 1 + (text[begin] == "$")
        value = ""
        while self.at < len(text):
            here = text[self.at]
            if here == '"':
                self.at += 1
                return value
            if here == "\\" and text[self.at + 1 : self.at + 2] in '"\\$`\n':
                value += text[self.at + 1].replace("\n", "")
                self.at += 2
            elif here in "$`":
                value += self._expansion()
            else:
                value += here
                self.at += 1
        raise Unfinished(self._line(begin))

    def _expansion(self) -> str:
        """Return the value of ``$NAME`` or ``${NAME}``; a marker for anything else."""
        text, begin = self.text, self.at
        self.at += 1
        if text[begin] == "`":
            if (end := text.find("`", self.at)) < 0:
                raise Unfinished(self._line(begin))
            self.at = end + 1
            return variable(f"({text[begin + 1 : end]})")
        if text.startswith("(", self.at):
            return variable(self._bracket("(", ")"))
        if text.startswith("{", self.at):
            inner = self._bracket("{", "}")[1:-1]
            known = self.variables.get(inner)
            braced = inner if _NAME.fullmatch(inner) else f"{{{inner}}}"
            return variable(braced) if known is None else known
        if name := _NAME.match(text, self.at):
            self.at = name.end()
            return self.variables.get(name[0], variable(name[0]))
        if text[self.at : self.at + 1] and text[self.at] in "@*#?$!0123456789":
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
            depth += (here == opened) - (here == closed)
            self.at += 1
            if depth == 0:
                return text[begin : self.at]
        raise Unfinished(self._line(begin))
