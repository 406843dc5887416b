"""Errors that clusterkit raises on purpose: a message, a remedy, an exit code.

Only the command line catches them; a notebook sees them as ordinary exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

KeyPath = tuple[str | int, ...]
Source = Literal["job", "cluster"]

EXIT_FAILURE = 1
"""The answer is no: a check failed, a run has not ended."""
EXIT_TIMEOUT = 124
EXIT_REFUSED = 125
"""Clusterkit itself refused or failed, as docker and timeout have it: nothing of the user's ran."""
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141
"""128 + SIGPIPE: the reader of standard output has closed it."""


def pluralize(number: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def join_some(words: Iterable[str], most: int = 6) -> str:
    """Join words as ``a, b and 3 more``, at most ``most`` of them by name."""
    words = list(words)
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def did_you_mean(word: object, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``did you mean NAME?`` with the most similar name, or "" if none is similar.

    Similar names begin with the same letter, or one is a part of the other: by their letters alone
    `extends` is as similar to `nodes` as `nodz` is.
    """
    import difflib

    typed = str(word).lower()
    near = [
        name
        for name in difflib.get_close_matches(str(word), list(names), 5, cutoff)
        if typed[:1] == name[:1].lower() or typed in name.lower() or name.lower() in typed
    ]
    return f"did you mean {near[0]}?" if near else ""


def choices(names: Iterable[str], word: object, heading: str = "allowed") -> str:
    """Return a hint for a word that is none of ``names``: ``allowed: A, B; did you mean B?``."""
    names = list(names)
    return "; ".join(filter(None, [f"{heading}: {', '.join(names)}", did_you_mean(word, names)]))


class ClusterkitError(Exception):
    """Base class of all errors that clusterkit raises on purpose.

    Args:
        message: what is wrong, with the place and the value.
        hint: the remedy, shown on a line of its own; None: there is none to give.
    """

    exit_code = EXIT_REFUSED
    answered = False
    """Whether a host or service was reached: what it answered is the problem."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class BadInput(ClusterkitError, ValueError):
    """A job file, cluster file, flag or value that cannot be used; nothing was started.

    Args:
        message: what is wrong; with ``job`` or ``cluster`` it begins with the key (see `dotted`).
        hint: the remedy.
        job: key of the job that holds the value: one key, or a path of keys.
        cluster: key of the cluster's entry that holds the value, likewise.
    """

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        *,
        job: str | KeyPath = (),
        cluster: str | KeyPath = (),
    ) -> None:
        super().__init__(message, hint)
        key = job or cluster
        self.key: KeyPath = (key,) if isinstance(key, str) else key
        """Path of keys to the value; empty if the error is about no key."""
        self.source: Source = "job" if job else "cluster"
        """Whether `key` is a key of the job or of the cluster's entry."""
        self.where: str | None = None
        """``file:line``, or the flag, once `locate` has set it."""

    def locate(self, where: str, message: str) -> None:
        """Set where the value was given, and the message that begins with it."""
        self.where, self.message, self.args = where, message, (message,)


def dotted(place: KeyPath) -> str:
    """Return a path of keys as text: ``("args", 1)`` is ``args[1]``."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]
    return "".join(parts).lstrip(".")


@contextmanager
def error_key(source: Source, *key: str | int) -> Iterator[None]:
    """Give every `BadInput` raised in the ``with`` block this key, unless it has one."""
    try:
        yield
    except BadInput as error:
        if not error.key:
            error.key, error.source = key, source
        raise


class CapabilityError(BadInput):
    """A field that this backend does not support; the message names backends that do."""


class RunNotFound(BadInput, LookupError):
    """No run has this id, or several runs match it."""


class Unavailable(ClusterkitError):
    """A tool or a service that a backend needs is missing or does not answer."""


class RunFolderError(ClusterkitError):
    """The run folder could not be written or read: no space, no permission, files missing."""


class PortTaken(BadInput):
    """The rendezvous port of the cluster entry is in use."""

    def __init__(self, port: int, address: str) -> None:
        super().__init__(
            f"port {port} on {address} is in use",
            hint="leave `port` out of the cluster entry to have a free one chosen",
        )


class SubmitFailed(ClusterkitError):
    """A step of the plan failed; the message holds its command, exit status and stderr."""


class RunFailed(ClusterkitError):
    """A run that was waited for has failed; the message names the first failed rank and why.

    Its exit code is the run's.
    """

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        exit_code: int = EXIT_FAILURE,
        status: Any = None,
    ) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code
        self.status = status
        """The `RunStatus` of the run, with ``failure``."""


class RunNotOver(ClusterkitError, TimeoutError):
    """A run was waited for, and had not ended in time; it goes on."""

    exit_code = EXIT_TIMEOUT
