"""Notice that ranks of a node, or the agent itself, were stopped (SIGSTOP)."""

from __future__ import annotations

import time

from clusterkit.agent import limits
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.processes import is_stopped


class StoppedRanks:
    """Log which ranks of a node are stopped, and which of those continue.

    Args:
        log: the node's, which knows its ranks.
        local: whether the ranks are processes of this host.
    """

    def __init__(self, log: NodeLog, *, local: bool) -> None:
        self._log, self._local = log, local
        self._check_at = 0.0
        self._stopped: set[int] = set()  # process ids of ranks that are, or were when they ended

    def check(self, *, ending: bool, now: bool = False) -> None:
        """Look at the ranks, unless that was done less than LOOK_SECONDS ago.

        Args:
            ending: ranks are being killed; a stopped one runs for a moment then.
            now: look in any case.
        """
        if not now and time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + limits.LOOK_SECONDS
        for rank in self._log.ranks if self._local else ():
            stopped, pid = is_stopped(rank), rank["pid"]
            if stopped and pid not in self._stopped:
                self._stopped.add(pid)
                self._log.line(f"rank {rank['rank']} was stopped (SIGSTOP)")
            elif stopped is False and pid in self._stopped and not ending:
                self._stopped.remove(pid)
                self._log.line(f"rank {rank['rank']} continues (SIGCONT)")

    def causes(self) -> list[str]:
        """Return a sentence for each rank whose stop may be why the node failed."""
        newest = {rank["rank"]: rank["pid"] for rank in self._log.ranks}
        stopped = sorted(rank for rank, pid in newest.items() if pid in self._stopped)
        return [f"rank {rank} was stopped (SIGSTOP)" for rank in stopped]


class AgentPause:
    """Notice that this process was stopped, by how late its event loop wakes up."""

    def __init__(self) -> None:
        self._woke = time.monotonic()
        self._delays = (0.0, 0.0)  # in seconds, of the last two wake-ups
        self._ended: tuple[float, float] | None = None  # when the last pause did; its seconds

    def woke_up(self, timeout: float) -> None:
        """Note that a wait of at most ``timeout`` seconds is over."""
        now = time.monotonic()
        self._delays = self._delays[1], now - self._woke - timeout
        self._woke = now

    def resumed(self) -> float | None:
        """Return how many seconds the pause that SIGCONT ends took; None: no real pause."""
        # A wait whose time was up in the pause returns without the signal; the next one has it.
        delay = max(self._delays)
        if delay <= limits.LOOK_SECONDS:
            return None
        self._ended = time.monotonic(), delay
        return delay

    def causes(self) -> list[str]:
        """Return a sentence on a pause that is so recent that the node may have failed of it."""
        if self._ended is None or time.monotonic() >= self._ended[0] + limits.RECENT_SECONDS:
            return []
        return [f"its agent was stopped (SIGSTOP) for {self._ended[1]:.0f} s"]
