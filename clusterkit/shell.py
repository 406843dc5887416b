"""The only place where an argument list becomes a line of POSIX shell.

Everything else handles words: a ``str`` stands for itself, a `Var` for the value
that a shell variable has on the node. Secrets are never words; a plan holds their
names and the transport hands their values over in the environment.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from clusterkit.errors import BadInput

NAME = "[A-Za-z_][A-Za-z0-9_]*"
"""What can name an environment variable, as a regular expression."""


_PLAIN = re.compile(rb"([\t -~]*\n)*")
"""Text that a reader of any kind takes for the same lines."""


@dataclass(frozen=True)
class Var:
    """A shell variable, read on the node: ``Var("NODE_RANK")`` is rendered ``"$NODE_RANK"``."""

    name: str

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ValueError(f"not a shell variable: {self.name!r}")


@dataclass(frozen=True)
class Joined:
    """One word made of several: ``Joined(("n=", Var("N")))`` is rendered ``n="$N"``."""

    parts: tuple[str | Var, ...]


Word = str | Var | Joined


@dataclass(frozen=True)
class Secret:
    """A value that every printed form masks; only `reveal` gives it."""

    name: str
    _value: str = field(repr=False)

    def __str__(self) -> str:
        return f"<secret {self.name}>"

    def reveal(self) -> str:
        return self._value


def is_name(text: str) -> bool:
    """Whether ``text`` can name an environment variable in every POSIX shell."""
    return re.fullmatch(NAME, text) is not None


def quote(word: Word) -> str:
    """One word, quoted so that ``sh`` reads back exactly its characters."""
    match word:
        case Var():
            return f'"${word.name}"'
        case Joined():
            return "".join(map(quote, word.parts))
        case _:
            return shlex.quote(word)


def join(argv: Iterable[Word]) -> str:
    """An argument list as one line (or more, where a word holds a newline)."""
    return " ".join(map(quote, argv))


def exports(env: Mapping[str, Word]) -> str:
    """``export`` lines, in the order given.

    Raises:
        ValueError: a name that no shell takes or a value with a NUL character.
    """
    lines = []
    for name, value in env.items():
        if not is_name(name) or (isinstance(value, str) and "\0" in value):
            raise ValueError(f"cannot be an environment variable: {name}={value!r}")
        lines.append(f"export {name}={quote(value)}\n")
    return "".join(lines)


def here_document(path: str, content: bytes, mode: int) -> str:
    """Lines that write a file, in a folder that is there; what is not plain text is packed."""
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
    """``NAME=value ... command``, as a person would type it."""
    words = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    return " ".join([*words, join(argv)])


def check_text(key: str, text: str) -> None:
    """Refuse what no program can be given: NUL characters, halves of characters.

    Raises:
        BadInput: the message begins with ``key``.
    """
    if "\0" in text:
        raise BadInput(f"{key}: the value holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{key}: character {error.start} is not valid UTF-8") from None


def split(text: str) -> list[str]:
    """The words of a line as ``sh`` would read them.

    Raises:
        BadInput: a quote that does not end.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadInput(f"{text!r}: {error}") from None
