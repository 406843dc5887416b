"""Errors that clusterkit raises on purpose: a message, a remedy, an exit code.

Only the command line catches them; a notebook sees them as ordinary exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

Place = tuple[str | int, ...]
Source = Literal["job", "cluster"]

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_UNAVAILABLE = 3
EXIT_INTERRUPTED = 130


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(words: Iterable[str], most: int = 6) -> str:
    """``a, b and 3 more``."""
    words = list(words)
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def did_you_mean(word: object, names: Iterable[str], cutoff: float = 0.6) -> str:
    """``did you mean NAME?``, of the nearest name; empty if none is near."""
    import difflib

    near = difflib.get_close_matches(str(word), list(names), 1, cutoff)
    return f"did you mean {near[0]}?" if near else ""


def choices(names: Iterable[str], word: object, heading: str = "allowed") -> str:
    """``allowed: NAME, NAME; did you mean NAME?``: a hint where a word is none of the names."""
    names = list(names)
    return "; ".join(filter(None, [f"{heading}: {', '.join(names)}", did_you_mean(word, names)]))


class ClusterkitError(Exception):
    """Anything clusterkit can explain.

    Args:
        message: what is wrong, naming the place and the value.
        hint: what to do about it; shown on a line of its own.
    """

    exit_code = EXIT_FAILURE

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class BadInput(ClusterkitError, ValueError):
    """A job file, cluster file, flag or value that cannot be used; nothing was started.

    Args:
        message: as ever; where there is a key, it begins with it, as `dotted` writes it.
        hint: as ever.
        job: the key of the job that holds the value; a path of keys, or one.
        cluster: likewise, of the cluster's entry.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        *,
        job: str | Place = (),
        cluster: str | Place = (),
    ) -> None:
        super().__init__(message, hint)
        key = job or cluster
        self.key: Place = (key,) if isinstance(key, str) else key
        """Path of keys to the value; empty where it is no key's."""
        self.source: Source = "job" if job else "cluster"
        """What has that key."""
        self.where: str | None = None
        """File and line, or flag, once that is known; the message begins with it then."""

    def locate(self, where: str, message: str) -> None:
        """Say where the value was given, in a message that begins with it."""
        self.where, self.message, self.args = where, message, (message,)


def dotted(place: Place) -> str:
    """``("args", 1)`` as ``args[1]``."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]
    return "".join(parts).lstrip(".")


@contextmanager
def about(source: Source, *key: str | int) -> Iterator[None]:
    """Within, an error that names no key is about this one."""
    try:
        yield
    except BadInput as error:
        if not error.key:
            error.key, error.source = key, source
        raise


class CapabilityError(BadInput):
    """A field that this backend cannot honour; the message names backends that can."""


class RunNotFound(BadInput, LookupError):
    """No run has this id, or several do."""


class Unavailable(ClusterkitError):
    """A tool or a service that a backend needs is missing or does not answer."""

    exit_code = EXIT_UNAVAILABLE


class RunFolderError(ClusterkitError):
    """The run folder could not be written or read: no space, no permission, pieces missing."""


class PortTaken(BadInput):
    """The rendezvous port that was probed as free is in use by now."""

    def __init__(self, port: int, address: str) -> None:
        super().__init__(
            f"port {port} on {address} is in use",
            hint="leave `port` out of the cluster entry to have a free one chosen",
        )
        self.port = port


class SubmitFailed(ClusterkitError):
    """A step of the plan failed; the message holds its command, exit status and stderr."""


class RunFailed(ClusterkitError):
    """A run whose result was waited for has failed; the message says who failed first and why."""

    def __init__(self, message: str, hint: str | None = None, exit_code: int = EXIT_FAILURE):
        super().__init__(message, hint)
        self.exit_code = exit_code
