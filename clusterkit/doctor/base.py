"""What all examinations share: findings, checks, subjects, verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from msgspec import Struct

Level = Literal["ok", "warn", "fail", "skip"]
LEVELS: tuple[Level, ...] = ("skip", "ok", "warn", "fail")
"""From harmless to worst."""


class Finding(Struct, frozen=True):
    """The result of one check on one host."""

    check: str
    host: str
    level: Level
    cause: str = ""
    """What was seen; for ``skip``, why nothing was."""
    remedy: str | None = None
    """The command that fixes it, on that host unless it names another."""


class Verdict(NamedTuple):
    """What a check's judge yields; see `Finding`."""

    host: str
    level: Level
    cause: str = ""
    remedy: str | None = None


def ok(host: str, cause: str = "") -> Verdict:
    return Verdict(host, "ok", cause)


def skip(host: str, reason: str) -> Verdict:
    return Verdict(host, "skip", reason)


def warn(host: str, cause: str, remedy: str | None) -> Verdict:
    return Verdict(host, "warn", cause, remedy)


def fail(host: str, cause: str, remedy: str | None) -> Verdict:
    return Verdict(host, "fail", cause, remedy)


def worst(levels: Iterable[Level]) -> Level:
    """Return the worst of several levels; ``skip`` if there are none."""
    return max(levels, key=LEVELS.index, default="skip")


class Subject(Protocol):
    """What is examined, with the requirements of the job."""

    kind: ClassVar[str]
    """Key of `clusterkit.doctor.EXAMINERS`."""

    @property
    def cluster(self) -> str:
        """Name of the cluster."""

    @property
    def port(self) -> int | None:
        """Port on which the examination listens, if it is fixed."""


@dataclass(frozen=True)
class Check:
    """One condition that has to hold.

    Attributes:
        judge: returns or yields verdicts on what was seen. Its name is the check's, as ``--only``
            takes it; its docstring is the check's purpose: the condition.
        quick: whether a submit makes this check as well: below 50 ms where all is well.
    """

    judge: Callable[..., Any]
    quick: bool = False

    @property
    def name(self) -> str:
        return self.judge.__name__.strip("_").replace("_", "-")

    @property
    def purpose(self) -> str:
        return " ".join((self.judge.__doc__ or "").split())


def shortened(text: str, most: int = 160) -> str:
    """Return the text as one line of at most ``most`` characters, without control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else line[: most - 3] + "..."
