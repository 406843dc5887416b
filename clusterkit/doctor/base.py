"""What the doctor speaks of: findings, who is examined, verdicts and the words in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from msgspec import Struct

from clusterkit.spec import Device, JobSpec, Launcher

Level = Literal["ok", "warn", "fail", "skip"]
LEVELS: tuple[Level, ...] = ("skip", "ok", "warn", "fail")
"""From harmless to worst."""


class Finding(Struct, frozen=True):
    """What one check says of one host."""

    check: str
    host: str
    level: Level
    cause: str = ""
    """What was seen; for ``skip``, why nothing was."""
    remedy: str | None = None
    """The command that mends it, on that host unless it says otherwise."""


# ---------------------------------------------------------------- whom to examine


class Subject(Protocol):
    """Whatever can be examined, and what it is to be fit for."""

    way: ClassVar[str]
    """Module of `clusterkit.doctor` that examines it: its ``CHECKS`` and ``look``."""

    @property
    def cluster(self) -> str:
        """What the cluster is called."""

    @property
    def port(self) -> int | None:
        """Port that is listened on meanwhile, if it is a certain one."""


@dataclass(frozen=True)
class Rule:
    """One thing that has to be right, whatever it is looked for in.

    Attributes:
        judge: says of what was seen whether it is. Its name is the check's, as ``--only`` takes it,
            and its docstring the purpose: what has to be right.
        quick: whether a submit makes sure of it as well: below 50 ms where all is well.
    """

    judge: Callable[..., Any]
    quick: bool = False

    @property
    def name(self) -> str:
        return self.judge.__name__.strip("_").replace("_", "-")

    @property
    def purpose(self) -> str:
        return " ".join((self.judge.__doc__ or "").split())


class Machine(Struct, frozen=True, kw_only=True):
    """One host as the doctor sees it."""

    name: str
    """What the transport calls it."""
    address: str | None = None
    """What the other hosts reach it at; None: that of the interface, or that of SSH."""
    python: str
    """Interpreter of the ranks."""
    slots: int | None = None
    """Ranks that the job puts here; None: as many as it has GPUs."""

    @property
    def at(self) -> str:
        """Its address, or its name where that is not known."""
        return self.address or self.name


class Needs(Struct, frozen=True, kw_only=True):
    """What the job asks of every host; without one, what most do."""

    device: Device = "auto"
    launcher: Launcher = "forkserver"
    without_torch: Level = "fail"
    """What it means that a host does not have torch."""
    deepspeed: bool = False
    elastic: bool = False

    @classmethod
    def of(cls, job: JobSpec | None) -> Needs:
        """What a job needs; without one, what most do."""
        if job is None:
            return cls()
        # A program that trains needs it; one that only counts does not.
        without_torch: Level = "ok" if job.command is not None else "warn"
        return cls(
            device=job.device,
            launcher=job.started_by,
            without_torch="fail" if job.started_by in ("torchrun", "deepspeed") else without_torch,
            deepspeed=job.deepspeed is not None,
            elastic=job.elastic,
        )


class HostSubject(Struct, frozen=True, kw_only=True):
    """Hosts to examine, and what they are to be fit for."""

    way: ClassVar[str] = "hosts"
    cluster: str
    hosts: tuple[Machine, ...]
    """In order; the first is the head: rank 0 and the rendezvous are there."""
    workdir: str
    """Folder on the hosts for runs and projects; ``~`` is the home there."""
    port: int | None = None
    """Rendezvous port on the head; None: any that is free there."""
    shared: str | None = None
    """Folder that all hosts share, if there is one."""
    interface: str = "auto"
    needs: Needs = Needs()
    over_ssh: bool = False
    """Whether hosts are reached over SSH and prove who they are with a host key."""

    @property
    def head(self) -> Machine:
        return self.hosts[0]


# ---------------------------------------------------------------- verdicts


class Verdict(NamedTuple):
    """What a judge says of one host; see `Finding`."""

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
    """The worst of several levels; ``skip`` of none."""
    return max(levels, key=LEVELS.index, default="skip")
