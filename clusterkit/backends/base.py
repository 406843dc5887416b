"""What a backend is: its hooks, what only some backends can do, and what one cannot do, as data.

`Backend` holds what every backend has; the ``Supports...`` classes hold what only some can do, and
are asked for with ``isinstance``. Nothing outside of `clusterkit.backends` asks which one it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec
from msgspec import Struct

from clusterkit.cluster import ClusterSpec, Facts
from clusterkit.errors import BadInput, CapabilityError
from clusterkit.plan import Plan
from clusterkit.run.folder import RunHandle
from clusterkit.run.status import NodeCause, NodeStatus, RankExit, State
from clusterkit.spec import JobSpec

if TYPE_CHECKING:  # whoever only reads of a run starts without these
    from clusterkit.assemble import Placement
    from clusterkit.doctor.base import Subject
    from clusterkit.execute import Record
    from clusterkit.shell import Secret
    from clusterkit.transport import Transport

OWN_IMAGE = "docs/containers.md, An image of your own"


IMAGE_NOTE = (
    "`image` in clusters.yaml names the {} image: one with torch and all that the program imports "
    f"({OWN_IMAGE})"
)


class Observation(Struct, frozen=True, kw_only=True):
    """What a backend sees of one attempt, without anyone's memory of it."""

    state: State
    nodes: tuple[NodeStatus, ...]
    rank_exits: tuple[RankExit, ...] = ()
    oom_kills: int = 0
    """Processes that a kernel killed for want of memory meanwhile."""
    causes: tuple[NodeCause, ...] = ()
    """Why nodes or their ranks were killed, where the backend knows."""
    final: bool = False
    """Whether the nodes' agents have decided that nothing follows this failure."""
    goes_on: int | None = None
    """The attempt that the nodes' agents have begun after this one, on the same nodes."""
    restarts_left: int | None = None
    """How many the nodes' agents have left; None: they start nothing again, or did not say."""
    queued: bool = False
    """Whether the platform still has them in hand: nodes that have not started will without us, and
    a state that we do not know is no loss."""

    @property
    def late(self) -> bool:
        """Whether the nodes have ended the run at its time limit."""
        from clusterkit.agent import LATE  # whoever only reads of a run starts without it

        return any(node.reason == LATE for node in self.nodes)

    def left_of(self, restarts: int) -> int:
        """How many of the restarts that there were before this attempt are left."""
        return restarts if self.restarts_left is None else min(restarts, self.restarts_left)


class RemoteRun(Struct, frozen=True, kw_only=True):
    """A run that a cluster knows of, whoever submitted it. Times are Unix seconds."""

    run: str
    job: str
    state: State
    kind: str
    """What keeps it there."""
    attach: str | None = None
    """What takes it up; by default `attach` with its cluster."""
    attempt: int = 1
    pods: int | None = None
    """Nodes that it asks for."""
    user: str | None = None
    """Who submitted it."""
    started_at: float | None = None
    finished_at: float | None = None


class Recovered(Struct, frozen=True, kw_only=True):
    """What a cluster keeps of a run: enough to make its plan anew on this machine."""

    run: str
    job: JobSpec
    cluster: ClusterSpec
    facts: Facts
    attempt: int
    created_at: float
    project: bytes | None = None
    """The plan's tree as a tar.gz, if it has one."""


class Monitor(Protocol):
    """Follows one attempt; made by `Backend.watch`."""

    def status(self) -> Observation | None:
        """The newest state, as of `Backend.status`."""

    def close(self) -> None:
        """Stop following; the nodes go on."""


class Backend(ABC):
    """Starts nodes and looks after them; reaches the world through a `Transport` only."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for the table of backends."""
    unsupported: ClassVar[Mapping[str, str]] = {}
    """Job field (or ``launcher=NAME``) that cannot be honoured: the reason."""
    command: ClassVar[str] = ""
    """What a machine has that reaches such clusters; empty: every machine does."""
    first_entry: ClassVar[Mapping[str, Any]] = {}
    """Keys of the entry that `clusterkit init` writes."""
    first_note: ClassVar[str] = ""
    """What whoever has such an entry should look at first."""
    start_seconds: ClassVar[float] = 60.0
    """How long a node may take to show a sign of life; infinite where they queue."""

    # -- before a run ---------------------------------------------------------

    @classmethod
    def resolved(cls, cluster: Any, folder: Path, include: str | None, exclude: str | None) -> Any:
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
    def transport(cls, cluster: Any) -> Transport:
        """What reaches the cluster's hosts."""
        from clusterkit.transport import LocalTransport

        return LocalTransport()

    # A hook's ``cluster`` is an entry of the backend's own kind, by which each backend types it.
    # `probe` and `place` are functions of modules beside the backend's own, which import much:
    # a supervisor, or a command that looks at a run, needs neither.

    def probe(self, cluster: Any, transport: Transport, job: JobSpec | None = None) -> Facts:
        """Look at the cluster: the only reading of the outside world before a submit.

        Args:
            job: whose hosts and project to look at; without one, at all hosts.

        Raises:
            BadInput: the job asks for more hosts than there are.
            Unavailable: a tool or service that the backend needs is missing.
        """
        found: Facts = self._module("probe").probe(cluster, transport, job)
        return found

    def places(self, cluster: Any, transport: Transport) -> int:
        """How many hosts nodes can have to themselves.

        Raises:
            ClusterkitError: that cannot be found out.
        """
        return len(self.probe(cluster, transport).hosts)

    def preflight(self, name: str, cluster: Any, job: JobSpec) -> Subject | None:
        """What `clusterkit.doctor` examines while `submit` probes; None: nothing. Pure.

        Args:
            name: what the cluster is called.
        """
        return None

    def place(self, job: JobSpec, cluster: Any, facts: Facts, run_id: str) -> Placement:
        """Where the job's nodes run and how their ranks find each other. Pure, as `plan` is.

        Raises:
            BadInput: the job does not fit the cluster.
        """
        found: Placement = self._module("place").place(job, cluster, facts, run_id)
        return found

    def _module(self, name: str) -> Any:
        return import_module(f"clusterkit.backends.{self.name}.{name}")

    def plan(self, job: JobSpec, cluster: Any, facts: Facts, run_id: str) -> Plan:
        """What submitting does, as data. Pure: the same arguments give the same plan for ever.

        Raises:
            BadInput: the job does not fit the cluster.
        """
        return self.place(job, cluster, facts, run_id).plan(self.name)

    def home(self, facts: Facts) -> Path:
        """The folder on this machine whose ``runs`` holds the run folders."""
        return Path(facts.home)

    # -- an attempt -----------------------------------------------------------

    def before_attempt(
        self, cluster: Any, facts: Facts, transport: Transport, *, fresh: bool
    ) -> tuple[Facts, str] | None:
        """Check once more what may have changed since the probe, such as a port that was free.

        Args:
            fresh: the facts were found a moment ago, and no attempt has used them.

        Returns:
            Facts for a new plan, and a sentence that says what has changed; None: nothing has.

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
        """Carry the plan out: exactly its files and its steps.

        Raises:
            SubmitFailed: a step failed.
        """
        from clusterkit import execute

        execute.write_files(plan, transport)
        execute.run_steps(
            plan, transport, attempt=attempt, secrets=secrets, record=record or (lambda *_: None)
        )

    def only(self, plan: Plan, node: int) -> Plan:
        """What starts one node of a plan whose others run: a plan as well. Pure."""
        steps = tuple(step for step in plan.steps if step.node == node)
        return msgspec.structs.replace(plan, steps=steps, hosts=(plan.hosts[node],))

    @abstractmethod
    def status(self, handle: RunHandle, transport: Transport) -> Observation | None:
        """The state of an attempt; None when nothing of the run is known."""

    def watch(self, handle: RunHandle, transport: Transport) -> Monitor:
        """Follow an attempt: for its supervisor, who asks many times a second."""
        return _Polling(partial(self.status, handle, transport))

    @abstractmethod
    def cancel(self, handle: RunHandle, transport: Transport, reason: str = "cancelled") -> None:
        """End everything that belongs to the run; fine to repeat, and on a run that has ended.

        Args:
            reason: for the nodes' records, where their agents can be told.

        Raises:
            Unavailable: a host does not answer; on the others it is done.
        """


@dataclass(frozen=True)
class _Polling:
    """Asks the backend each time: for those to which that is cheap."""

    status: Callable[[], Observation | None]

    def close(self) -> None:
        pass


# ---------------------------------------------------------------- what only some backends can do


class SupportsDoctor(ABC):
    """Backends whose clusters `clusterkit.doctor` can examine."""

    @abstractmethod
    def subject(self, name: str, cluster: Any, job: JobSpec | None = None) -> Subject:
        """What is examined, and what for. Pure.

        Args:
            name: what the cluster is called.
            job: whose hosts and needs; without one, all hosts.

        Raises:
            BadInput: the job asks for more hosts than there are.
        """


class SupportsCleanup(ABC):
    """Backends whose ended nodes stay with a service: an engine, an API server."""

    @abstractmethod
    def clean_up(self, handle: RunHandle, transport: Transport) -> None:
        """Remove what an attempt that has ended left with the service; fine to repeat.

        Raises:
            Unavailable: it does not answer.
        """


class SupportsSync(ABC):
    """Backends whose nodes write what `status` does not bring here."""

    @abstractmethod
    def sync(self, handle: RunHandle, transport: Transport) -> None:
        """Bring what is new of an attempt's logs to the run's folder.

        Raises:
            Unavailable: what keeps them does not answer.
        """


class SupportsForget(ABC):
    """Backends whose runs leave a folder on other machines."""

    @abstractmethod
    def forget(self, handle: RunHandle, transport: Transport) -> None:
        """Remove what a run that has ended left there.

        Raises:
            Unavailable: a host does not answer; on the others it is done.
        """


class SupportsFile(ABC):
    """Backends whose plans fit into one file, for somebody who has to hand one in."""

    name: ClassVar[str]

    @abstractmethod
    def one_file(self, plan: Plan, cluster: Any, head: list[str]) -> str:
        """All that the plan's files and steps are, as one text.

        Args:
            head: what is to stand in front, as comments.

        Raises:
            BadInput: something of it does not fit into a file.
        """

    def unprobed(self, cluster: Any, job: JobSpec) -> Facts:
        """Facts of a cluster that cannot be looked at, as far as entry and job say them.

        Raises:
            BadInput: they do not say enough.
        """
        raise BadInput(
            f"backend {self.name} has to look at its hosts",
            hint="--cluster NAME, or the --facts of an earlier run",
        )


class SupportsRemoteRuns(ABC):
    """Backends whose clusters know of runs that other machines submitted."""

    @abstractmethod
    def listing(self, cluster: Any, transport: Transport) -> list[RemoteRun]:
        """The runs that the cluster knows of, newest first.

        Raises:
            Unavailable: it does not answer.
        """

    @abstractmethod
    def recover(self, run: str, cluster: Any, transport: Transport) -> Recovered:
        """What the cluster keeps of a run.

        Args:
            run: its id, the beginning of its id, or ``last``.

        Raises:
            RunNotFound: the cluster knows of no such run.
            Unavailable: it does not answer.
        """


def check_capabilities(
    backend: type[Backend], job: JobSpec, others: Iterable[type[Backend]]
) -> None:
    """Refuse what the backend cannot honour.

    Args:
        others: all backends; looked at only where something is refused.

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
