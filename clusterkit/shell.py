"""Turn argument lists into lines of POSIX shell; no other module quotes for a shell.

Everything else handles lists of words: a ``str`` is taken literally, a `Var` is the value of a
shell variable on the node. Secrets are never words: a plan holds their names, and the transport
passes their values in the environment.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from clusterkit.errors import BadInput

NAME = "[A-Za-z_][A-Za-z0-9_]*"
"""Regular expression of an environment variable's name."""
VARIABLE = "a valid name of an environment variable"
_PLAIN = re.compile(rb"([\t -~]*\n)*")
"""ASCII lines, which a here-document keeps unchanged."""


@dataclass(frozen=True)
class Var:
    """A shell variable, expanded on the node: ``Var("NODE_RANK")`` is written ``"$NODE_RANK"``."""

    name: str

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ValueError(f"not a shell variable: {self.name!r}")


@dataclass(frozen=True)
class Concat:
    """Several words joined to one: ``Joined(("n=", Var("N")))`` is written ``n="$N"``."""

    parts: tuple[str | Var, ...]


@dataclass(frozen=True)
class Default:
    """A shell variable, or this text where it is not set: ``"${N-4}"``."""

    name: str
    otherwise: str

    def __post_init__(self) -> None:
        if not is_name(self.name) or not self.otherwise.isalnum():
            raise ValueError(f"not a shell variable with a plain value: {self}")


Word = str | Var | Concat | Default


@dataclass(frozen=True)
class Secret:
    """A secret value: `str` and `repr` mask it, `reveal` returns it."""

    name: str
    _value: str = field(repr=False)

    def __str__(self) -> str:
        return f"<secret {self.name}>"

    def reveal(self) -> str:
        return self._value


def is_name(text: str) -> bool:
    """Return whether ``text`` is a valid name of an environment variable in POSIX shells."""
    return re.fullmatch(NAME, text) is not None


def quote(word: Word) -> str:
    """Quote one word so that ``sh`` reads back exactly its characters."""
    match word:
        case Var():
            return f'"${word.name}"'
        case Default():
            return f'"${{{word.name}-{word.otherwise}}}"'
        case Concat():
            return "".join(map(quote, word.parts))
        case _:
            return shlex.quote(word)


def join(argv: Iterable[Word]) -> str:
    """Quote an argument list as one line (more, if a word contains a newline)."""
    return " ".join(map(quote, argv))


def exports(env: Mapping[str, Word]) -> str:
    """Return ``export`` lines for variables, in the order given.

    Raises:
        ValueError: an invalid name, or a value with a NUL character.
    """
    lines = []
    for name, value in env.items():
        if not is_name(name) or (isinstance(value, str) and "\0" in value):
            raise ValueError(f"cannot be an environment variable: {name}={value!r}")
        lines.append(f"export {name}={quote(value)}\n")
    return "".join(lines)


def here_document(path: str, content: bytes, mode: int) -> str:
    """Return lines that write a file into an existing folder; binary content is compressed."""
    import base64
    import gzip
    import hashlib

    end = f"END-OF-{hashlib.sha256(content).hexdigest()[:12]}"
    if _PLAIN.fullmatch(content):
        body = f"cat >{quote(path)} <<'{end}'\n{content.decode()}"
    else:
        packed = base64.encodebytes(gzip.compress(content, mtime=0)).decode()
        body = f"base64 -d <<'{end}' | gzip -d >{quote(path)}\n{packed}"
    return f"{body}{end}\nchmod {mode:o} {quote(path)}\n"


def assignments(env: Mapping[str, str], argv: Iterable[Word]) -> str:
    """Return ``NAME=value ... command``, as a person would type it."""
    words = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    return " ".join([*words, join(argv)])


def check_text(key: str, text: str) -> None:
    """Check that text can be an argument or a variable of a process.

    Raises:
        BadInput: a NUL character or a lone surrogate; the message begins with ``key``.
    """
    if "\0" in text:
        raise BadInput(f"{key}: the value contains a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{key}: character {error.start} is not valid UTF-8") from None


def split(text: str) -> list[str]:
    """Split a line into words as ``sh`` would.

    Raises:
        BadInput: a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadInput(f"{text!r}: {error}") from None
