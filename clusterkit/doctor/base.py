"""What a check is made of: what it collects on a host, and how that is judged.

A check of hosts has three parts. `Script.collect` is a function of the standard library alone; its
text is sent to the host, where it only reads (`clusterkit.doctor.driver` runs it). `Check.judge`
is a pure function of what all hosts answered. A `Finding` says what is wrong and which command
mends it. Where there are no hosts to run anything on, something else is looked at
(`clusterkit.doctor.kubernetes`); findings are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct

from clusterkit.errors import ClusterkitError
from clusterkit.spec import Device, JobSpec, Launcher

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

Level = Literal["ok", "warn", "fail", "skip"]
LEVELS: tuple[Level, ...] = ("skip", "ok", "warn", "fail")
"""From harmless to worst."""

Where = Literal["all", "head", "others"]
T = TypeVar("T")
V = TypeVar("V", bound=Hashable)


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


class Patient(Protocol):
    """Whatever can be examined, and what it is to be fit for."""

    way: ClassVar[str]
    """Module of `clusterkit.doctor` that examines it: its ``CHECKS`` and ``look``."""

    @property
    def cluster(self) -> str:
        """What the cluster is called."""

    @property
    def port(self) -> int | None:
        """Port that is listened on meanwhile, if it is a certain one."""


class Rule(Protocol):
    """What every check has, whatever it looks at."""

    @property
    def name(self) -> str:
        """As ``--only`` takes it."""

    @property
    def purpose(self) -> str:
        """One line: what has to be right."""

    @property
    def quick(self) -> bool:
        """Whether a submit makes sure of it as well."""


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
    """What the job asks of every host; the defaults are those of a job file."""

    device: Device = "auto"
    launcher: Launcher = "torchrun"
    deepspeed: bool = False
    elastic: bool = False

    @classmethod
    def of(cls, job: JobSpec | None) -> Needs:
        """What a job needs; without one, what most do."""
        if job is None:
            return cls()
        return cls(
            device=job.device,
            launcher=job.launcher,
            deepspeed=job.deepspeed is not None,
            elastic=job.elastic,
        )


class Subject(Struct, frozen=True, kw_only=True):
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


# ---------------------------------------------------------------- what runs on a host


@dataclass(frozen=True)
class Script:
    """A function that runs on hosts and looks at something.

    Attributes:
        name: unlike any other script's.
        collect: given `given` of the host, gives something that JSON can hold. Its text is
            what is sent: it imports what it needs, from the standard library alone, and must be
            understood by Python 3.8.
        limit: seconds after which it is ended.
        phase: 1, 2 or 3; the hosts begin a phase together, when the one before has ended.
        where: on all hosts, on the head, or on the others.
        with_head: only where the head answers.
        safe: reads nothing that may hang, such as a mounted folder: needs no process of its own.
        whole_module: send the text of the function's module, not of the function alone.
    """

    name: str
    collect: Callable[[dict[str, Any]], Any]
    limit: float = 10.0
    phase: int = 1
    where: Where = "all"
    with_head: bool = False
    safe: bool = False
    whole_module: bool = False

    @cached_property
    def source(self) -> str:
        import inspect

        return inspect.getsource(
            inspect.getmodule(self.collect) or self.collect if self.whole_module else self.collect
        )

    def runs_on(self, host: str, subject: Subject) -> bool:
        return self.where == "all" or (self.where == "head") == (host == subject.head.name)


class Output(Struct, frozen=True):
    """What one script gave: a JSON document, or why it gave none."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None
    timed_out: str | None = None
    """The state of its process (see proc(5)) when its time was over."""


@dataclass(frozen=True)
class Answer:
    """What one host answered.

    Attributes:
        error: why it could not be reached; all else is empty then.
        lost: why it did not answer a later time.
        sent, received: our clock around the first round trip, Unix seconds.
        began, ended: the host's clock when it began and ended to answer; None: no interpreter
            ran there, or the answer was cut short.
        interpreter: which one ran; the one of the ranks unless that does not work.
        reached_at: under which of its addresses SSH reached it.
        stderr: what interpreters that do not work, and shells, complained.
        outputs: by name of the script.
    """

    error: ClusterkitError | None = None
    lost: ClusterkitError | None = None
    sent: float = 0.0
    received: float = 0.0
    began: float | None = None
    ended: float | None = None
    interpreter: str = ""
    reached_at: str = ""
    stderr: str = ""
    outputs: Mapping[str, Output] = field(default_factory=dict)


Answers = Mapping[str, Answer]
"""Host to answer, in the subject's order."""
Judge = Callable[[Answers, Subject], list[Finding]]


@dataclass(frozen=True)
class Check:
    """One thing that has to be right on every host.

    Attributes:
        name: as ``--only`` takes it.
        purpose: one line: what it looks at, and why.
        scripts: what it needs from the hosts.
        judge: pure; is given the hosts that answered, in the subject's order. About a host that
            it does not concern it says nothing.
        quick: cheap enough for every submit: below 50 ms where all is well.
        silent_too: judges hosts that did not answer as well.
        pointless: the reason why the check says nothing of this subject, or None.
    """

    name: str
    purpose: str
    judge: Judge
    scripts: tuple[Script, ...] = ()
    quick: bool = True
    silent_too: bool = False
    pointless: Callable[[Subject], str | None] = lambda subject: None


# ---------------------------------------------------------------- helpers of judges


def read(
    check: str, script: Script, answers: Answers, subject: Subject, kind: type[T]
) -> tuple[dict[str, T], list[Finding]]:
    """What a script collected, by host; and findings for hosts where it could not be had."""
    seen: dict[str, T] = {}
    findings = []
    for host, answer in answers.items():
        if not script.runs_on(host, subject):
            continue
        output = answer.outputs.get(script.name)
        if output is None:
            level: Level = "warn" if answer.lost is None else "fail"
            said = shortened(answer.stderr.strip().rpartition("\n")[2])
            cut = f"no answer: the host's output was cut short{': ' if said else ''}{said}"
            cause = cut if answer.lost is None else answer.lost.message
        elif output.timed_out is not None:
            hangs = output.timed_out == "D"
            level = "fail" if hangs else "warn"
            why = "a disk or a mount does not answer" if hangs else "the host is slow, or it hangs"
            cause = f"no answer within {script.limit:g} s: {why}"
        elif output.error is not None:
            level, cause = "warn", f"the check could not run: {output.error}"
        else:
            try:
                seen[host] = msgspec.json.decode(output.value, type=kind)
                continue
            except msgspec.MsgspecError as error:
                level, cause = "warn", f"answered with something unreadable: {error}"
        findings.append(Finding(check, host, level, cause))
    return seen, findings


def common(values: Mapping[str, V], of_none: V) -> V:
    """What most hosts have; between equals, what the first of them has; ``of_none`` of no hosts."""
    return Counter(values.values()).most_common(1)[0][0] if values else of_none


def worst(levels: Iterable[Level]) -> Level:
    """The worst of several levels; ``skip`` of none."""
    return max(levels, key=LEVELS.index, default="skip")


def is_about_host_key(message: str) -> bool:
    """Whether a transport's error is about the key that proves who a host is."""
    return "host key" in message.lower()


def parsed_address(text: str) -> IPv4Address | IPv6Address | None:
    """An address, None for a name; an IPv4 address in the clothes of an IPv6 one as itself."""
    import ipaddress

    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def size(count: float) -> str:
    """Bytes as people say them: ``512 MiB``, ``1.5 GiB``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            value = count / scale
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{count:.0f} B"


def shortened(text: str, most: int = 160) -> str:
    """One line of at most ``most`` characters, without control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else line[: most - 3] + "..."
