"""What a check is made of: what it collects on a host, and how that is judged.

A check of hosts has three parts. `Script.collect` is a function of the standard library alone; its
text is sent to the host, where it only reads (`clusterkit.doctor.driver` runs it). `Check.judge`
is a pure function of what all hosts answered. Its verdicts say what is wrong and which command
mends it. Where there are no hosts to run anything on, something else is looked at
(`clusterkit.doctor.kubernetes`); findings are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct

from clusterkit.errors import ClusterkitError
from clusterkit.spec import Device, JobSpec, Launcher

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

Level = Literal["ok", "warn", "fail", "skip"]
LEVELS: tuple[Level, ...] = ("skip", "ok", "warn", "fail")
"""From harmless to worst."""

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


class Rule(Protocol):
    """What every check has, whatever it looks at; see `Check`."""

    @property
    def name(self) -> str: ...
    @property
    def purpose(self) -> str: ...
    @property
    def quick(self) -> bool: ...


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


# ---------------------------------------------------------------- what runs on a host


@dataclass(frozen=True)
class Script(Generic[T]):
    """A function that runs on hosts and looks at something.

    Attributes:
        name: unlike any other script's.
        collect: called with what `clusterkit.doctor.hosts` gives every script. Its text is what
            is sent: it imports what it needs, from the standard library alone, may call what
            `driver.HELPERS` names, and must be understood by Python 3.8.
        kind: type of what it gives, as JSON.
        limit: seconds after which it is ended.
        phase: 1, 2 or 3; the hosts begin a phase together, when the one before has ended.
        where: on all hosts, on the head, or on the others.
        with_head: only where the head answers.
        safe: reads nothing that may hang, such as a mounted folder: needs no process of its own.
        whole_module: send the text of the function's module, not of the function alone.
    """

    name: str
    collect: Callable[[dict[str, Any]], Any]
    kind: type[T]
    limit: float = 10.0
    phase: int = 1
    where: Literal["all", "head", "others"] = "all"
    with_head: bool = False
    safe: bool = False
    whole_module: bool = False

    @cached_property
    def source(self) -> str:
        import inspect

        module = inspect.getmodule(self.collect) if self.whole_module else None
        return inspect.getsource(module or self.collect)

    def runs_on(self, host: str, subject: HostSubject) -> bool:
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


# ---------------------------------------------------------------- judging


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


@dataclass
class Answers:
    """What hosts answered, as the judge of one check sees it.

    Attributes:
        of: each host's answer, in the subject's order.
        unread: verdicts on hosts of which something could not be read; they stand before the
            judge's own.
    """

    subject: HostSubject
    of: Mapping[str, Answer]
    unread: list[Verdict] = field(default_factory=list)

    @cached_property
    def machines(self) -> dict[str, Machine]:
        return {machine.name: machine for machine in self.subject.hosts}

    def read(
        self, script: Script[T], among: Collection[str] | None = None, *, quiet: bool = False
    ) -> dict[str, T]:
        """What a script collected, by host; what could not be had becomes a verdict.

        Args:
            among: only these hosts.
            quiet: without a verdict.
        """
        seen: dict[str, T] = {}
        for host, answer in self.of.items():
            if not script.runs_on(host, self.subject) or (among is not None and host not in among):
                continue
            output = answer.outputs.get(script.name)
            verdict = _unread(host, answer, output, script.limit)
            if output is not None and verdict is None:
                try:
                    seen[host] = msgspec.json.decode(output.value, type=script.kind)
                except msgspec.MsgspecError as error:
                    verdict = warn(host, f"answered with something unreadable: {error}", None)
            if verdict is not None and not quiet:
                self.unread.append(verdict)
        return seen


def _unread(host: str, answer: Answer, output: Output | None, limit: float) -> Verdict | None:
    """Why a script gave nothing, if it did not."""
    if output is None and answer.lost is not None:
        return fail(host, answer.lost.message, None)
    if output is None:
        complaint = shortened(answer.stderr.strip().rpartition("\n")[2])
        cause = "no answer: the host's output was cut short"
        return warn(host, f"{cause}: {complaint}" if complaint else cause, None)
    if output.timed_out == "D":
        cause = f"no answer within {limit:g} s: a disk or a mount does not answer"
        return fail(host, cause, None)
    if output.timed_out is not None:
        cause = f"no answer within {limit:g} s: the host is slow, or it hangs"
        return warn(host, cause, None)
    if output.error is not None:
        return warn(host, f"could not look: {output.error}", None)
    return None


def always(subject: HostSubject) -> str | None:
    """No reason to leave a check out."""
    return None


def alone(subject: HostSubject) -> str | None:
    return "one host has no others" if len(subject.hosts) == 1 else None


def without_ssh(subject: HostSubject) -> str | None:
    return None if subject.over_ssh else "not reached over SSH"


@dataclass(frozen=True)
class Check:
    """One thing that has to be right on every host.

    Attributes:
        name: as ``--only`` takes it.
        purpose: one line: what has to be right.
        judge: pure; is given the hosts that answered. About a host that it does not concern it
            says nothing.
        scripts: what it needs from the hosts.
        quick: cheap enough for every submit: below 50 ms where all is well.
        silent_too: judges hosts that did not answer as well.
        pointless: the reason why the check says nothing of this subject, or None.
    """

    name: str
    purpose: str
    judge: Callable[[Answers], Iterator[Verdict]]
    scripts: tuple[Script[Any], ...] = ()
    quick: bool = True
    silent_too: bool = False
    pointless: Callable[[HostSubject], str | None] = always


# ---------------------------------------------------------------- helpers of judges


class Process(Struct):
    """A process on a host that holds what the job needs."""

    pid: int
    user: str
    command: str


def end_processes(processes: Iterable[Process], me: str) -> str:
    """What frees what these processes hold: ``kill`` for those of user ``me``; the owners of the
    others are to be asked."""
    own = [str(process.pid) for process in processes if process.user == me]
    asked = [
        f"ask {process.user} to end process {process.pid} ({process.command})"
        for process in processes
        if process.user != me
    ]
    return "; ".join([*(["kill " + " ".join(own)] if own else []), *asked])


def common(values: Iterable[V], of_none: V) -> V:
    """What most hosts have; between equals, what the first of them has; ``of_none`` of no hosts."""
    return next((value for value, _ in Counter(values).most_common(1)), of_none)


def listed(words: Collection[str], most: int = 6) -> str:
    """``a, b and 3 more``."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(list(words)[:most]) + more


def worst(levels: Iterable[Level]) -> Level:
    """The worst of several levels; ``skip`` of none."""
    return max(levels, key=LEVELS.index, default="skip")


def is_about_host_key(message: str) -> bool:
    """Whether a transport's error is about the key that proves who a host is."""
    return "host key" in message.lower()


def parsed_address(text: str) -> IPv4Address | IPv6Address | None:
    """An address, None for a name; an IPv4 address written as an IPv6 one as itself."""
    import ipaddress

    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


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
