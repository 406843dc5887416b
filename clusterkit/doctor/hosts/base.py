"""Hosts to examine, and what a check of hosts consists of: collectors and a judge.

Collectors run on the hosts, where they only read. `HostCheck.judge` is a pure function of the
answers of all hosts. Its verdicts say what is wrong and which command fixes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from msgspec import Struct

from clusterkit.doctor.base import Check, Level, Verdict, fail, shortened, warn
from clusterkit.errors import ClusterkitError
from clusterkit.spec import Device, JobSpec, Launcher

T = TypeVar("T")


class Machine(Struct, frozen=True, kw_only=True):
    """One host."""

    name: str
    """As the transport knows it."""
    address: str | None = None
    """Where other hosts reach it; None: the address of the interface, or that of SSH."""
    python: str
    """Interpreter of the ranks."""
    slots: int | None = None
    """Ranks of the job on this host; None: as many as it has GPUs."""

    @property
    def at(self) -> str:
        """Its address, or its name if that is unknown."""
        return self.address or self.name


class Needs(Struct, frozen=True, kw_only=True):
    """What the job requires of every host; by default, what most jobs do."""

    device: Device = "auto"
    launcher: Launcher = "forkserver"
    without_torch: Level = "fail"
    """Level of the verdict on a host without torch."""
    deepspeed: bool = False
    elastic: bool = False
    cuda_home: str | None = None
    """CUDA_HOME in the job's ``env``."""

    @classmethod
    def of(cls, job: JobSpec | None) -> Needs:
        """Return the requirements of a job; None: those of most jobs."""
        if job is None:
            return cls()
        # A program that trains needs torch; one that only counts does not.
        without_torch: Level = "ok" if job.command is not None else "warn"
        return cls(
            device=job.device,
            launcher=job.started_by,
            without_torch="fail" if job.started_by in ("torchrun", "deepspeed") else without_torch,
            deepspeed=job.deepspeed is not None,
            elastic=job.elastic,
            cuda_home=job.env.get("CUDA_HOME"),
        )


class HostSubject(Struct, frozen=True, kw_only=True):
    """Hosts to examine, and the requirements of the job."""

    kind: ClassVar[str] = "hosts"
    cluster: str
    hosts: tuple[Machine, ...]
    """In order; the first is the head, with rank 0 and the rendezvous."""
    workdir: str
    """Folder on the hosts for runs and projects; ``~`` is the home there."""
    port: int | None = None
    """Rendezvous port on the head; None: any that is free there."""
    shared: str | None = None
    """Folder that all hosts share, if there is one."""
    interface: str = "auto"
    needs: Needs = Needs()
    over_ssh: bool = False
    """Whether hosts are reached over SSH and identify themselves by a host key."""

    @property
    def head(self) -> Machine:
        return self.hosts[0]


# ---------------------------------------------------------------- collectors


@dataclass(frozen=True)
class Collector(Generic[T]):
    """A function that runs on hosts, and how.

    Attributes:
        collect: from a module of `clusterkit.doctor.hosts.collect`, which is sent.
        kind: type of what it returns, as JSON.
        timeout: seconds after which it is killed.
        phase: 1, 2 or 3; a phase starts on all hosts once the previous one has ended.
        where: on all hosts, on the head, or on the others.
        needs_head: runs only if the head answered.
        site_packages: looks at the packages of its interpreter.
    """

    collect: Callable[[dict[str, Any]], Any]
    kind: type[T]
    timeout: float = 10.0
    phase: int = 1
    where: Literal["all", "head", "others"] = "all"
    needs_head: bool = False
    site_packages: bool = False

    @property
    def name(self) -> str:
        return self.collect.__name__

    def runs_on(self, host: str, subject: HostSubject) -> bool:
        return self.where == "all" or (self.where == "head") == (host == subject.head.name)


class Output(Struct, frozen=True):
    """The result of one collector on one host: a JSON document, or why there is none."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None
    timed_out: str | None = None
    """State of its process (see proc(5)) when it timed out."""


@dataclass(frozen=True)
class Answer:
    """All that one host answered.

    Attributes:
        error: why it could not be reached; all else is empty then.
        lost: why it could not be reached in a later phase.
        sent, received: the submitter's clock around the first round trip, Unix seconds.
        began, ended: the host's clock at the beginning and end of its work; None: no interpreter
            ran there.
        interpreter: the one that ran; not that of the ranks if that does not work.
        reached_at: the address at which SSH reached it.
        installer: apt-get or dnf, whichever is there; empty: neither.
        stderr: messages of shells and of interpreters that do not work.
        outputs: by name of the collector.
    """

    error: ClusterkitError | None = None
    lost: ClusterkitError | None = None
    sent: float = 0.0
    received: float = 0.0
    began: float | None = None
    ended: float | None = None
    interpreter: str = ""
    reached_at: str = ""
    installer: str = ""
    stderr: str = ""
    outputs: Mapping[str, Output] = field(default_factory=dict)


# ---------------------------------------------------------------- checks


@dataclass
class Answers:
    """The answers of the hosts, as the judge of one check sees them.

    Attributes:
        of: each host's answer, in the subject's order.
        unread: verdicts on hosts whose output could not be read; they come before the judge's.
    """

    subject: HostSubject
    of: Mapping[str, Answer]
    unread: list[Verdict] = field(default_factory=list)

    @cached_property
    def machines(self) -> dict[str, Machine]:
        return {machine.name: machine for machine in self.subject.hosts}

    def read(self, collector: Collector[T], hosts: Collection[str] | None = None) -> dict[str, T]:
        """Return what was collected, by host, or on these hosts alone; add a verdict to `unread`
        where that failed."""
        values: dict[str, T] = {}
        for host, answer in self.of.items():
            asked = collector.runs_on(host, self.subject)
            if not asked or (hosts is not None and host not in hosts):
                continue
            output = answer.outputs.get(collector.name)
            verdict = _failed(host, answer, output, collector.timeout)
            if output is not None and verdict is None:
                try:
                    values[host] = msgspec.json.decode(output.value, type=collector.kind)
                except msgspec.MsgspecError as error:
                    verdict = warn(host, f"gave invalid output: {error}", None)
            if verdict is not None:
                self.unread.append(verdict)
        return values

    def read_silently(
        self, collector: Collector[T], hosts: Collection[str] | None = None
    ) -> dict[str, T]:
        """`read` what another check has the verdicts on."""
        return Answers(self.subject, self.of).read(collector, hosts)


def _failed(host: str, answer: Answer, output: Output | None, timeout: float) -> Verdict | None:
    """Return the verdict on a collector that returned nothing; None: it returned something."""
    if output is None and answer.lost is not None:
        return fail(host, answer.lost.message, None)
    if output is None:
        complaint = shortened(answer.stderr.strip().rpartition("\n")[2])
        cause = "no answer: the host's output was truncated"
        return warn(host, f"{cause}: {complaint}" if complaint else cause, None)
    if output.timed_out == "D":
        cause = f"no answer within {timeout:g} s: a disk or a mount does not answer"
        return fail(host, cause, None)
    if output.timed_out is not None:
        cause = f"no answer within {timeout:g} s: the host is slow, or it hangs"
        return warn(host, cause, None)
    if output.error is not None:
        return warn(host, f"the check could not run: {output.error}", None)
    return None


Judge = Callable[[Answers], Iterator[Verdict]]


@dataclass(frozen=True)
class HostCheck(Check):
    """One condition that has to hold on every host.

    Attributes:
        judge: pure; is given the hosts that answered. It may yield nothing about a host. An ``ok``
            beside a fault of the same host is dropped.
        collectors: what it needs from the hosts.
        unreachable_too: judge hosts that did not answer as well.
        skip_reason: returns why the check does not apply to this subject, or None.
    """

    judge: Judge
    quick: bool = True
    collectors: tuple[Collector[Any], ...] = ()
    unreachable_too: bool = False
    skip_reason: Callable[[HostSubject], str | None] = lambda subject: None


def check(*collectors: Collector[Any], **options: Any) -> Callable[[Judge], HostCheck]:
    """Make a `HostCheck` of the decorated judge; options are its other attributes."""
    return lambda judge: HostCheck(judge, collectors=collectors, **options)


def one_host(subject: HostSubject) -> str | None:
    return "needs two hosts or more" if len(subject.hosts) == 1 else None


def not_over_ssh(subject: HostSubject) -> str | None:
    return None if subject.over_ssh else "not reached over SSH"
