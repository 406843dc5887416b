"""What a backend is: five methods, and what it cannot do, as data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from msgspec import Struct

from clusterkit import execute
from clusterkit.cluster import ClusterSpec, Facts
from clusterkit.errors import BadInput, CapabilityError, ClusterkitError
from clusterkit.execute import Record
from clusterkit.plan import Plan
from clusterkit.runs import RunFolder
from clusterkit.shell import Secret
from clusterkit.spec import JobSpec
from clusterkit.status import NodeCause, NodeStatus, RankExit, State
from clusterkit.transport import LocalTransport, Transport

if TYPE_CHECKING:
    from clusterkit.doctor.base import Patient


@dataclass(frozen=True)
class Handle:
    """One attempt of a submitted run."""

    folder: RunFolder
    """On this machine, wherever the nodes write."""
    plan: Plan
    attempt: int = 1


class HandedOver(ClusterkitError):
    """Somebody else watches over the run by now; it goes on."""


class Newest(Struct, frozen=True, kw_only=True):
    """How far a run has come while nobody here watched over it."""

    attempt: int
    begun: bool = True
    """Whether the attempt has been started."""
    late: bool = False
    """Whether the run was ended at its time limit."""
    watched: bool = False
    """Whether something in the cluster goes on with it."""
    settled: bool = False
    """Whether that has ended its work, because the run has ended."""


class Observation(Struct, frozen=True, kw_only=True):
    """What a backend sees of one attempt, without anyone's memory of it."""

    state: State
    nodes: tuple[NodeStatus, ...]
    rank_exits: tuple[RankExit, ...] = ()
    oom_kills: int = 0
    """Processes that a kernel killed for want of memory meanwhile."""
    causes: tuple[NodeCause, ...] = ()
    """Why nodes or their ranks were killed, where the backend knows."""
    superseded: Newest | None = None
    """The run has gone on without us, as this tells; nothing else here counts then."""


class RemoteRun(Struct, frozen=True, kw_only=True):
    """A run that a cluster knows of, whoever submitted it. Times are Unix seconds."""

    run: str
    job: str
    state: State
    kind: str
    """What keeps it there."""
    attempt: int = 1
    pods: int | None = None
    """Nodes that it asks for."""
    user: str | None = None
    """Who submitted it."""
    started_at: float | None = None
    finished_at: float | None = None


class Recovered(Struct, frozen=True, kw_only=True):
    """A run as its cluster remembers it: what its plan is made of anew on this machine."""

    run: str
    job: JobSpec
    cluster: ClusterSpec
    facts: Facts
    attempt: int
    created_at: float
    project: bytes | None = None
    """The plan's tree as a tar.gz, if it has one."""


class Watcher(Protocol):
    """How an attempt is, as often as one wants to know; `Backend.watch` gives one."""

    def status(self) -> Observation | None:
        """As `Backend.status`.

        Raises:
            HandedOver: somebody else watches over the run by now.
        """

    def close(self) -> None:
        """Watch no more; the nodes go on."""


class Backend(ABC):
    """Starts nodes and looks after them; reaches the world through a `Transport` only."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for the table of backends."""
    unsupported: ClassVar[Mapping[str, str]] = {}
    """Job field (or ``launcher=NAME``) that cannot be honoured: the reason."""

    elsewhere: ClassVar[bool] = False
    """Whether nodes write their files on other machines, to be brought to the run's folder."""
    managed: ClassVar[bool] = False
    """Whether a service keeps the nodes: it is asked by the supervisor alone while that lives, and
    what has ended stays there until `cancel` takes it away."""
    own_network: ClassVar[bool] = False
    """Whether each run has a network of its own, where its port is free."""
    start_seconds: ClassVar[float] = 60.0
    """How long a node may take to show a sign of life; infinite where they queue."""

    @classmethod
    def settled(
        cls, cluster: ClusterSpec, folder: Path, include: str | None, exclude: str | None
    ) -> ClusterSpec:
        """The entry with all that it refers to read, so that it can stand alone.

        Args:
            folder: where the cluster file lies.
            include, exclude: which hosts, instead of the entry's own.

        Raises:
            BadInput: a file that cannot be used, hosts that cannot be chosen.
        """
        if include or exclude:
            flag = "include" if include else "exclude"
            raise BadInput(f"{flag}: backend {cls.name} has no hosts to choose from", cluster=flag)
        return cluster

    @classmethod
    def transport(cls, cluster: ClusterSpec) -> Transport:
        """What reaches the cluster's hosts."""
        return LocalTransport()

    @abstractmethod
    def probe(
        self, cluster: ClusterSpec, transport: Transport, job: JobSpec | None = None
    ) -> Facts:
        """Look at the cluster: the only reading of the outside world before a submit.

        Args:
            job: whose hosts and project to look at; without one, at all hosts.

        Raises:
            BadInput: the job asks for more hosts than there are.
            Unavailable: a tool or service that the backend needs is missing.
        """

    def places(self, cluster: ClusterSpec, transport: Transport) -> int:
        """How many hosts nodes can have to themselves.

        Raises:
            ClusterkitError: that cannot be found out.
        """
        return len(self.probe(cluster, transport).hosts)

    def subject(self, name: str, cluster: ClusterSpec, job: JobSpec | None = None) -> Patient:
        """What `clusterkit.doctor` examines, and what for. Pure.

        Args:
            name: what the cluster is called.
            job: whose hosts and needs; without one, all hosts.

        Raises:
            BadInput: the job asks for more hosts than there are.
            CapabilityError: there is nothing to examine.
        """
        raise CapabilityError(f"backend {self.name} has no doctor yet")

    @abstractmethod
    def plan(self, job: JobSpec, cluster: ClusterSpec, facts: Facts, run_id: str) -> Plan:
        """What submitting does, as data. Pure: the same arguments give the same plan for ever.

        Raises:
            BadInput: the job does not fit the cluster.
        """

    def submit(
        self,
        plan: Plan,
        transport: Transport,
        *,
        attempt: int = 1,
        secrets: Mapping[str, Secret] | None = None,
        record: Record | None = None,
    ) -> None:
        """Carry the plan out: exactly its files and its steps.

        Raises:
            SubmitFailed: a step failed.
        """
        execute.write_files(plan, transport)
        execute.run_steps(
            plan, transport, attempt=attempt, secrets=secrets, record=record or (lambda *_: None)
        )

    @abstractmethod
    def status(self, handle: Handle, transport: Transport) -> Observation | None:
        """What is there to be seen of an attempt; None when nothing of the run is known."""

    def watch(self, handle: Handle, transport: Transport) -> Watcher:
        """`status`, to be asked many times in a row."""
        return _Asking(self, handle, transport)

    def newest(self, handle: Handle, transport: Transport) -> Newest:
        """How far the run has come; what was written of it elsewhere is brought to its folder.

        Raises:
            Unavailable: what would know does not answer.
        """
        return Newest(attempt=handle.attempt)

    def collect(self, handle: Handle, transport: Transport) -> None:  # noqa: B027 (nothing to do)
        """Bring what an attempt's nodes have written to the run's folder, where nobody watched.

        Raises:
            Unavailable: what keeps it does not answer.
        """

    @abstractmethod
    def cancel(self, handle: Handle, transport: Transport, reason: str = "cancelled") -> None:
        """End everything that belongs to the run; fine to repeat, and on a run that has ended.

        Args:
            reason: for the nodes' records, where their agents can be told.

        Raises:
            Unavailable: a host does not answer; on the others it is done.
        """

    def listing(self, cluster: ClusterSpec, transport: Transport) -> list[RemoteRun]:
        """The runs that the cluster itself knows of, newest first; none where it keeps no record.

        Raises:
            Unavailable: it does not answer.
        """
        return []

    def recover(self, run: str, cluster: ClusterSpec, transport: Transport) -> Recovered:
        """A run that another machine submitted.

        Args:
            run: its id, the beginning of its id, or ``last``.

        Raises:
            CapabilityError: such clusters remember nothing.
            RunNotFound: this one knows of no such run.
            Unavailable: it does not answer.
        """
        raise CapabilityError(
            f"backend {self.name}: its clusters keep no record of a run's job",
            hint="attach on the machine and with the CLUSTERKIT_HOME that submitted it",
        )

    def forget(self, handle: Handle, transport: Transport) -> None:  # noqa: B027 (nothing to do)
        """Remove what a run that has ended left on other machines.

        Raises:
            Unavailable: a host does not answer; on the others it is done.
        """


class _Asking:
    """Asks anew each time: for backends to which that is cheap."""

    def __init__(self, backend: Backend, handle: Handle, transport: Transport) -> None:
        self._about = (backend, handle, transport)

    def status(self) -> Observation | None:
        backend, handle, transport = self._about
        return backend.status(handle, transport)

    def close(self) -> None:
        pass


def check_capabilities(
    backend: type[Backend], job: JobSpec, others: Mapping[str, type[Backend]]
) -> None:
    """Refuse what the backend cannot honour.

    Raises:
        CapabilityError: names the backend, the field, the reason and the backends that can.
    """
    default = JobSpec(name=job.name)
    for field, reason in backend.unsupported.items():
        key, _, value = field.partition("=")
        used = getattr(job, key) == value if value else getattr(job, key) != getattr(default, key)
        if used:
            able = [name for name, other in others.items() if field not in other.unsupported]
            raise CapabilityError(
                f"backend {backend.name} does not support {field}: {reason}",
                hint=f"backends that do: {', '.join(able) or 'none'}",
            )
