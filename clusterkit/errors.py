"""Errors that clusterkit raises on purpose: a message, a remedy, an exit code.

Only the command line catches them; a notebook sees them as ordinary exceptions.
"""

from __future__ import annotations

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_UNAVAILABLE = 3
EXIT_INTERRUPTED = 130


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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
    """A job file, cluster file, flag or value that cannot be used; nothing was started."""

    exit_code = EXIT_BAD_INPUT


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
