"""The interface of a backend.

`Backend` holds the methods that every backend has. The ``Supports...`` classes hold what only some
can do; callers ask for them with ``isinstance``, and never for a backend's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct

from clusterkit.cluster import ClusterSpec, Facts
from clusterkit.errors import BadInput, CapabilityError
from clusterkit.plan import Plan
from clusterkit.run.folder import RunHandle
from clusterkit.run.status import NodeCause, NodeStatus, RankExit, State
from clusterkit.spec import JobSpec

if TYPE_CHECKING:  # commands that only read a run folder start without these
    from clusterkit.assemble import Placement
    from clusterkit.doctor.base import Subject
    from clusterkit.execute import Record
    from clusterkit.shell import Secret
    from clusterkit.transport import Stream, Transport

OWN_IMAGE = "docs/containers.md, An image of your own"
IMAGE_NOTE = (
    "`image` in clusters.yaml names the {} image: one with torch and all that the program imports "
    f"({OWN_IMAGE})"
)


class Observation(Struct, frozen=True, kw_only=True):
    """The state of one attempt, from what a backend can read now."""

    state: State
    nodes: tuple[NodeStatus, ...]
    rank_exits: tuple[RankExit, ...] = ()
    oom_kills: int = 0
    """Processes that the kernel killed for lack of memory during the attempt."""
    causes: tuple[NodeCause, ...] = ()
    """Why nodes or their ranks were killed, where the backend knows."""
    final: bool = False
    """Whether the agents have decided not to restart after this failure."""
    next_attempt: int | None = None
    """The attempt that the agents have begun after this one, on the same nodes."""
    restarts_left: int | None = None
    """Restarts that the agents have left; None: they restart nothing, or have not reported it."""
    queued: bool = False
    """Whether the platform will still start the nodes that are pending; until then, a node in an
    unknown state is not lost."""

    removed: str | None = None
    """By what the object that owns the nodes was removed from the platform, a decision that ends
    the run; None: it was not."""

    @property
    def over_time_limit(self) -> bool:
        """Whether the agents have ended the run at its time limit."""
        # Commands that only read a run folder start without it.
        from clusterkit.agent import OVER_TIME_LIMIT

        return any(node.reason == OVER_TIME_LIMIT for node in self.nodes)

    def remaining_restarts(self, restarts: int) -> int:
        """Return how many of the ``restarts`` left before this attempt are left after it."""
        return restarts if self.restarts_left is None else min(restarts, self.restarts_left)


class RemoteRun(Struct, frozen=True, kw_only=True):
    """A run that a cluster lists, whoever submitted it. Times are Unix seconds."""

    run: str
    job: str
    state: State
    kind: str
    """The cluster's object that holds it, such as ``PyTorchJob`` or ``job 17``."""
    attach: str | None = None
    """The command that attaches to it; None: ``clusterkit attach`` with its cluster."""
    attempt: int = 1
    pods: int | None = None
    """Number of nodes that it requests."""
    user: str | None = None
    """Who submitted it."""
    started_at: float | None = None
    finished_at: float | None = None


class Recovered(Struct, frozen=True, kw_only=True):
    """A run as its cluster stores it: enough to make the same plan on this machine."""

    run: str
    job: JobSpec
    cluster: ClusterSpec
    facts: Facts
    attempt: int
    created_at: float
    project: bytes | None = None
    """The project's files as a tar.gz; None: the run copies none."""


EntryT = TypeVar("EntryT", bound=ClusterSpec)
"""The kind of cluster entry of a backend."""


class Inside(NamedTuple):
    """How a command is started where a node's agent runs, in its container and as its user."""

    where: str
    """Where that is; the same for nodes whose agents share a host and a container."""
    open: Callable[[Sequence[str]], Stream]
    """Starts a command there, whose input and output are a stream. Raises as `Transport.open`."""


class Monitor(Protocol):
    """Follows one attempt; made by `Backend.watch`."""

    def status(self) -> Observation | None:
        """Return the newest state, as `Backend.status` does."""

    def close(self) -> None:
        """Stop following. The nodes keep running."""


class Backend(ABC, Generic[EntryT]):
    """Starts, watches and ends the nodes of a run; does all its I/O through a `Transport`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for the table of backends."""
    unsupported: ClassVar[Mapping[str, str]] = {}
    """Job fields (or ``launcher=NAME``) that this backend refuses, each with the reason."""
    command: ClassVar[str] = ""
    """Program that this machine needs to use such a cluster; empty: none."""
    init_entry: ClassVar[Mapping[str, Any]] = {}
    """Further keys of the cluster entry that `clusterkit init` writes."""
    init_note: ClassVar[str] = ""
    """What `clusterkit init` tells the user to check in that entry."""
    runs_here: ClassVar[bool] = False
    """Whether nodes are processes of the machine that submits, which no other machine can see."""
    start_seconds: ClassVar[float] = 60.0
    """Seconds for a node to show a first sign of life; infinite where nodes wait in a queue."""

    # -- before a run ---------------------------------------------------------

    @classmethod
    def resolved(
        cls, cluster: EntryT, folder: Path, include: str | None, exclude: str | None
    ) -> EntryT:
        """Return the cluster entry with the files that it names read, and its values checked.

        Args:
            folder: the folder of the cluster file, where relative paths start.
            include, exclude: which hosts to use, instead of what the entry says.

        Raises:
            BadInput: a file or value cannot be used, or no host can be chosen so.
        """
        if include or exclude:
            flag = "include" if include else "exclude"
            raise BadInput(f"{flag}: backend {cls.name} has no hosts to choose from", cluster=flag)
        return cluster

    @classmethod
    def transport(cls, cluster: EntryT) -> Transport:
        """Return the transport to the cluster's hosts."""
        from clusterkit.transport import LocalTransport

        return LocalTransport()

    # What these need is imported when they are called: not every command that reads a run needs it.

    @abstractmethod
    def probe(self, cluster: EntryT, transport: Transport, job: JobSpec | None = None) -> Facts:
        """Look at the cluster. Nothing else reads the outside world before a submit.

        Args:
            job: probe the hosts that this job gets, and its project; None: all hosts.

        Raises:
            BadInput: the job asks for more hosts than there are.
            Unavailable: a tool or service that the backend needs is missing.
        """

    def capacity(self, cluster: EntryT, transport: Transport) -> int:
        """Return how many nodes the cluster has room for with one host each.

        Raises:
            ClusterkitError: the cluster cannot be probed.
        """
        return len(self.probe(cluster, transport).hosts)

    @abstractmethod
    def place(self, job: JobSpec, cluster: EntryT, facts: Facts, run_id: str) -> Placement:
        """Decide where the job's nodes run and how their ranks find each other. Pure.

        Raises:
            BadInput: the job does not fit the cluster.
        """

    def plan(self, job: JobSpec, cluster: EntryT, facts: Facts, run_id: str) -> Plan:
        """Return what `submit` carries out. Pure: the same arguments always give the same plan.

        Raises:
            BadInput: the job does not fit the cluster.
        """
        return self.place(job, cluster, facts, run_id).plan(self.name, facts)

    def home(self, facts: Facts) -> Path:
        """Return the folder on this machine whose ``runs`` holds the run folders."""
        return Path(facts.home)

    def claim(self, plan: Plan, transport: Transport, owner: str) -> None:
        """Make sure that the run's folder on other machines is no other run's; see
        `execute.claim`.

        Raises:
            BadInput: it is.
        """

    # -- an attempt -----------------------------------------------------------

    def before_attempt(
        self, cluster: EntryT, facts: Facts, transport: Transport, *, fresh: bool
    ) -> tuple[Facts, str] | None:
        """Check again what may have changed since the probe, such as a port that was free.

        Args:
            fresh: the cluster was probed just now, and no attempt has started since.

        Returns:
            Facts for a new plan, and a sentence for the user about the change; None: no change.

        Raises:
            ClusterkitError: the entry does not allow the change.
        """
        return None

    def submit(
        self,
        plan: Plan,
        transport: Transport,
        *,
        attempt: int = 1,
        secrets: Mapping[str, Secret] | None = None,
        record: Record | None = None,
    ) -> None:
        """Write the plan's files and run its steps, nothing else.

        Raises:
            SubmitFailed: a step failed.
        """
        from clusterkit import execute

        execute.write_files(plan, transport)
        execute.run_steps(plan, transport, attempt=attempt, secrets=secrets, record=record)

    def node_plan(self, plan: Plan, node: int) -> Plan:
        """Return a plan that starts one node of this plan while the others run. Pure."""
        steps = tuple(step for step in plan.steps if step.node == node)
        return msgspec.structs.replace(plan, steps=steps, hosts=(plan.hosts[node],))

    @abstractmethod
    def status(self, handle: RunHandle, transport: Transport) -> Observation | None:
        """Return the state of an attempt; None: nothing of the run can be found."""

    def watch(self, handle: RunHandle, transport: Transport) -> Monitor:
        """Follow an attempt, for a supervisor that polls many times a second."""
        return _Polling(partial(self.status, handle, transport))

    def inside(
        self, handle: RunHandle, transport: Transport, nodes: Sequence[int]
    ) -> dict[int, Inside]:
        """Return how commands are started beside these nodes' agents, as far as they run.

        Raises:
            Unavailable: what would start them does not answer.
        """
        hosts = {node: handle.plan.hosts[node] for node in nodes}
        return {
            node: Inside(host, partial(transport.open, host, own_group=True))
            for node, host in hosts.items()
        }

    @abstractmethod
    def cancel(self, handle: RunHandle, transport: Transport, reason: str = "cancelled") -> None:
        """End everything that belongs to the run. Idempotent.

        Args:
            reason: what the agents record as the reason.

        Raises:
            Unavailable: a host does not answer; the run is ended on all others.
        """


@dataclass(frozen=True)
class _Polling:
    """The `Monitor` of backends whose `status` is cheap."""

    status: Callable[[], Observation | None]

    def close(self) -> None:
        pass


# ---------------------------------------------------------------- what only some backends can do


class SupportsDoctor(ABC, Generic[EntryT]):
    """A backend whose clusters `clusterkit.doctor` can examine."""

    @abstractmethod
    def subject(self, name: str, cluster: EntryT, job: JobSpec | None = None) -> Subject:
        """Return the hosts and requirements that the doctor checks. Pure.

        Args:
            name: the name of the cluster entry.
            job: check the hosts that this job gets for what it needs; None: all hosts.

        Raises:
            BadInput: the job asks for more hosts than there are.
        """


class SupportsPreflight(SupportsDoctor[EntryT]):
    """A backend whose clusters are also examined by every submit, while it probes."""


class SupportsCleanup(ABC):
    """A backend whose nodes, once ended, stay in a container engine or an API server."""

    @abstractmethod
    def clean_up(self, handle: RunHandle, transport: Transport) -> None:
        """Remove what an attempt that has ended left there. Idempotent.

        Raises:
            Unavailable: the engine or API server does not answer.
        """


class SupportsSync(ABC):
    """A backend whose `status` does not copy the nodes' logs to the run folder."""

    @abstractmethod
    def sync(self, handle: RunHandle, transport: Transport) -> None:
        """Copy the new part of an attempt's logs to the run folder.

        Raises:
            Unavailable: the server that holds them does not answer.
        """


class SupportsForget(ABC):
    """A backend whose runs leave a folder on other machines."""

    @abstractmethod
    def remove_remote_files(self, handle: RunHandle, transport: Transport) -> None:
        """Remove the folders of a run that has ended from those machines.

        Raises:
            Unavailable: a host does not answer; on all others they are removed.
        """


class SupportsFile(ABC, Generic[EntryT]):
    """A backend whose plans can be written as one file that other tools can submit."""

    @abstractmethod
    def one_file(self, plan: Plan, cluster: EntryT, head: list[str]) -> str:
        """Return the plan's files and steps as the text of one file.

        Args:
            head: lines to put in front as comments.

        Raises:
            BadInput: part of the plan cannot be expressed in such a file.
        """

    @abstractmethod
    def assumed_facts(self, cluster: EntryT, job: JobSpec) -> Facts:
        """Return facts for a cluster that cannot be probed, from its entry and the job alone.

        Raises:
            BadInput: entry and job do not hold enough.
        """


class SupportsRemoteRuns(ABC, Generic[EntryT]):
    """A backend whose clusters list the runs that other machines submitted."""

    @abstractmethod
    def listing(self, cluster: EntryT, transport: Transport) -> list[RemoteRun]:
        """Return the runs that the cluster lists, newest first.

        Raises:
            Unavailable: the cluster does not answer.
        """

    @abstractmethod
    def recover(self, run: str, cluster: EntryT, transport: Transport) -> Recovered:
        """Return a run as the cluster stores it.

        Args:
            run: its id, the beginning of its id, or ``last``.

        Raises:
            RunNotFound: the cluster has no such run.
            Unavailable: the cluster does not answer.
        """


def check_capabilities(
    backend: type[Backend[Any]], job: JobSpec, others: Iterable[type[Backend[Any]]]
) -> None:
    """Refuse a job that uses a field which the backend cannot honour.

    Args:
        others: all backends; iterated only for the hint of an error.

    Raises:
        CapabilityError: names the backend, the field, the reason and the backends that can.
    """
    default = JobSpec(name=job.name)
    for field, reason in backend.unsupported.items():
        key, _, value = field.partition("=")
        used = getattr(job, key) == value if value else getattr(job, key) != getattr(default, key)
        if used:
            able = [other.name for other in others if field not in other.unsupported]
            raise CapabilityError(
                f"backend {backend.name} does not support {field}: {reason}",
                hint=f"backends that do: {', '.join(able) or 'none'}",
            )
