"""What a backend is: six methods, and what it cannot do, as data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from msgspec import Struct

from clusterkit.cluster import ClusterSpec, Facts
from clusterkit.errors import CapabilityError
from clusterkit.execute import Record
from clusterkit.logs import LogLine
from clusterkit.plan import Plan
from clusterkit.shell import Secret
from clusterkit.spec import JobSpec
from clusterkit.status import NodeStatus, RankExit, State
from clusterkit.transport import Transport


@dataclass(frozen=True)
class Handle:
    """What is needed to speak of a submitted run: its plan and which attempt is meant."""

    plan: Plan
    attempt: int = 1


class Observation(Struct, frozen=True, kw_only=True):
    """What a backend sees of one attempt, without anyone's memory of it."""

    state: State
    nodes: tuple[NodeStatus, ...]
    rank_exits: tuple[RankExit, ...] = ()
    oom_kills: int = 0
    """Processes that a kernel killed for want of memory meanwhile."""


class Backend(ABC):
    """Starts nodes and looks after them; reaches the world through a `Transport` only."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for the table of backends."""
    unsupported: ClassVar[Mapping[str, str]] = {}
    """Job field (or ``launcher=NAME``) that cannot be honoured: the reason."""

    @abstractmethod
    def probe(self, cluster: ClusterSpec, transport: Transport) -> Facts:
        """Look at the cluster: the only reading of the outside world before a submit.

        Raises:
            Unavailable: a tool or service that the backend needs is missing.
        """

    @abstractmethod
    def plan(self, job: JobSpec, cluster: ClusterSpec, facts: Facts, run_id: str) -> Plan:
        """What submitting does, as data. Pure: the same arguments give the same plan for ever.

        Raises:
            BadInput: the job does not fit the cluster.
        """

    @abstractmethod
    def submit(
        self,
        plan: Plan,
        transport: Transport,
        *,
        attempt: int = 1,
        secrets: Mapping[str, Secret] | None = None,
        record: Record | None = None,
    ) -> Handle:
        """Carry the plan out: exactly its files and its steps.

        Raises:
            SubmitFailed: a step failed.
        """

    @abstractmethod
    def status(self, handle: Handle, transport: Transport) -> Observation | None:
        """What is there to be seen of an attempt; None when nothing of the run is known."""

    @abstractmethod
    def logs(
        self,
        handle: Handle,
        transport: Transport,
        *,
        rank: int | None = None,
        node: int | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> Iterator[LogLine]:
        """One attempt's lines in order of time; ``follow`` as in `clusterkit.logs.merged`."""

    @abstractmethod
    def cancel(self, handle: Handle, transport: Transport) -> None:
        """End everything that belongs to the run; fine to repeat, and on a run that has ended."""


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
