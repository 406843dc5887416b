"""What the doctor speaks of: findings, who is examined, verdicts and the words in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from clusterkit.spec import Device, JobSpec, Launcher

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

Level = Literal["ok", "warn", "fail", "skip"]
LEVELS: tuple[Level, ...] = ("skip", "ok", "warn", "fail")
"""From harmless to worst."""

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


def described(judge: Callable[..., object]) -> tuple[str, str]:
    """A check's name and purpose: the name and the docstring of the function that judges."""
    return judge.__name__.replace("_", "-"), " ".join((judge.__doc__ or "").split())


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
        return cls(
            device=job.device,
            launcher=job.started_by,
            without_torch=_without_torch(job),
            deepspeed=job.deepspeed is not None,
            elastic=job.elastic,
        )


def _without_torch(job: JobSpec) -> Level:
    if job.started_by in ("torchrun", "deepspeed"):
        return "fail"
    # A program that trains needs it; one that only counts does not.
    return "ok" if job.command is not None else "warn"


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


class Process(Struct):
    """A process on a host that holds what the job needs."""

    pid: int
    user: str
    command: str


def end_processes(processes: Collection[Process], me: str) -> str:
    """What frees what these processes hold: ``kill`` for those of user ``me``; the owners of the
    others are to be asked."""
    own = [str(process.pid) for process in processes if process.user == me]
    asked = [
        f"ask {each.user} to end process {each.pid} ({shortened(each.command, 80)})"
        for each in processes
        if each.user != me
    ]
    return "; ".join([f"kill {' '.join(own)}", *asked] if own else asked)


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
