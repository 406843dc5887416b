"""Start the processes of one node, log their output, end them; `spawn` and `fork` say how."""

from __future__ import annotations

import argparse
import contextlib
import enum
import math
import os
import selectors
import signal
import time
from pathlib import Path

from clusterkit.agent import limits
from clusterkit.agent.failure import RankOutput, shell_code
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.processes import all_below, is_alive, kill_all_below, send, wait_gone
from clusterkit.agent.protocol import Document
from clusterkit.agent.stopped import StoppedRanks
from clusterkit.agent.streams import Stream


class Phase(enum.Enum):
    """The state of a node's launcher. It runs in RUNNING and INTERRUPTED."""

    NEW = enum.auto()
    """It was not started yet."""
    SPARE = enum.auto()
    """It was not started yet, and will be if another node is lost."""
    RUNNING = enum.auto()
    INTERRUPTED = enum.auto()
    """It was asked to stop by the coordinator's order."""
    WAITING = enum.auto()
    """It has ended after that order; the node waits for the next one."""
    ENDED = enum.auto()
    """It has ended by itself, or was stopped for a reason of this node."""

    @property
    def runs(self) -> bool:
        return self in (Phase.RUNNING, Phase.INTERRUPTED)


class Launcher:
    """The processes of one node, which are started as often as the run starts its ranks.

    Args:
        options: of ``agent run``.
        folder: the node's, for the ranks' pipes.
        log: takes the output.
        selector: gets what is waited for; its data is what to call then.
    """

    owns_ranks: bool
    """Whether the processes are the ranks; False: a launcher that starts them."""

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        log: NodeLog,
        selector: selectors.BaseSelector,
    ) -> None:
        self._options, self._folder, self._log, self._selector = options, folder, log, selector
        self.running: dict[int, int] = {}
        """Process ids by number, from a start on; 0: not known yet."""
        self.kept: set[int] = set()
        """Processes that outlive a start, for the next one."""
        self.failure: str | None = None
        """Why this start ended, where the processes' ends do not say it."""
        self.ends: list[Document] = []
        """How the processes of this start ended, for ``exit.json``."""
        self.ranks_were_done = False
        """Whether a launcher had no ranks left when it was asked to stop."""
        self._first_failure: Document | None = None  # of ``ends``, before any was asked to stop
        self._kill_at: float | None = None  # None: nothing was asked to stop
        self._stop_at: float | None = None  # when the other ranks are stopped, after one failed
        self._outputs: list[Stream] = []
        self._pipes: list[Stream] = []
        self._stopped_ranks = StoppedRanks(log, local=not options.tagged)

    # -- what a kind of launcher does

    def _start_processes(self) -> None:
        """Start them, or see to it that they are.

        Raises:
            OSError: one cannot be started; none runs then.
        """
        raise NotImplementedError

    def _cancel_pending(self) -> None:
        """Have those not started that have not been yet."""

    def _end_kept(self) -> None:
        """End the processes that outlive a start."""

    # -- start

    def prepare(self) -> None:
        """Do what can be done before the first start, in the folder that the ranks start in.

        Raises:
            OSError: the node's folder takes no named pipes.
        """
        for local_rank in range(self._options.nproc):
            path = self._folder / f"pipe-{local_rank}"
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            # Read and write: no waiting for a writer, and no end of file between writers.
            self._pipes.append(self._log_from(os.open(path, os.O_RDWR | os.O_NONBLOCK)))

    def start(self) -> str | None:
        """Start all processes; return why that failed, None if it did not."""
        self.ends, self._kill_at, self._stop_at = [], None, None
        self.failure, self._first_failure, self.ranks_were_done = None, None, False
        # Also in the same attempt: a lost node has come back.
        self._log.output = RankOutput()
        try:
            self._start_processes()
        except OSError as error:
            code, reason = start_failure(error)
            self.ends.append({"pid": 0, "exit_code": code, "at": time.time()})
            return reason
        return None

    def _log_from(self, handle: int) -> Stream:
        """Log what comes through a handle, from now on."""
        stream = Stream(handle, self._log, tagged=self._options.tagged)

        def pump() -> None:
            if not stream.pump():
                self._selector.unregister(handle)

        self._selector.register(handle, selectors.EVENT_READ, pump)
        return stream

    def _new_output(self) -> int:
        """Return a new handle whose output is logged; the caller closes it."""
        read, write = os.pipe()
        self._outputs.append(self._log_from(read))
        return write

    # -- ends of processes

    def _ended(self, pid: int, code: int) -> None:
        """Note how a process ended (``pid`` 0: it never began); a failed rank ends the others."""
        asked = self._kill_at is not None
        self.ends.append({"pid": pid, "exit_code": code, "at": time.time(), "asked": asked})
        if code and not asked and self._first_failure is None:
            self._first_failure = self.ends[-1]
            if self.owns_ranks:
                self._stop_at = time.monotonic() + limits.RANKS_GRACE

    @property
    def exit_code(self) -> int:
        """The exit code of the first process that failed, as a shell gives it; 0: none did."""
        return shell_code(next((end["exit_code"] for end in self.ends if end["exit_code"]), 0))

    def rank_failure(self) -> Document | None:
        """Return `RankOutput.failure` of the first that failed before any was asked to stop."""
        if self._first_failure is None:
            return None
        log, pid, code = self._log, self._first_failure["pid"], self._first_failure["exit_code"]
        if log.rank_ends:  # ranks of deepspeed and mpirun report their own end
            first = log.rank_ends[0]
            return log.output.failure(first["rank"], shell_code(first["exit_code"]))
        pid, code = next(iter(log.output.codes.items()), (pid, code))
        ranks = {rank["pid"]: rank["rank"] for rank in log.ranks}
        return log.output.failure(ranks.get(pid), shell_code(code))

    # -- stopping

    def stop(self) -> None:
        """Ask everything to end, and kill it after the grace."""
        self._check_stopped(now=True)
        ranks = self._log.ranks
        all_started = not self.owns_ranks and len(ranks) >= self._options.nproc
        self.ranks_were_done = all_started and not any(map(is_alive, ranks))
        self._kill_at = time.monotonic() + self._options.grace
        self._cancel_pending()
        for pid in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)

    def tick(self) -> float:
        """Do what is due; return the seconds until the next call, at most LOOK_SECONDS."""
        now = time.monotonic()
        self._check_stopped()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + 1
            send(all_below(self.kept), signal.SIGKILL)
        if self._stop_at is not None and now >= self._stop_at:
            self._stop_at = None
            self.stop()
        due = [now + limits.LOOK_SECONDS]
        if self._kill_at is not None:
            if not any(map(is_alive, self._log.ranks)):
                self._kill_at = min(self._kill_at, now + limits.LAUNCHER_GRACE)
            due += [self._kill_at, now + limits.LAUNCHER_GRACE / 4]
        return max(0.0, min(*due, self._stop_at or math.inf) - now)

    def _check_stopped(self, *, now: bool = False) -> None:
        self._stopped_ranks.check(ending=self._kill_at is not None, now=now)

    def causes(self) -> list[str]:
        """Return what was done to the ranks that this node, and others, may have failed of."""
        return self._stopped_ranks.causes()

    def end_leftovers(self) -> bool:
        """End what outlived the launcher (torchrun killed with -9 leaves ranks behind).

        Returns:
            Whether there were ranks although the launcher had ended with 0: it has failed then.
        """
        left = all_below(self.kept)
        if not left:
            return False
        failed = self.exit_code == 0 and not {r["pid"] for r in self._log.ranks}.isdisjoint(left)
        if failed:
            self.ends.append({"pid": 0, "exit_code": 1, "at": time.time()})
        send(left, signal.SIGTERM)
        seconds = min(limits.LEFTOVER_GRACE, self._options.grace)
        if self._kill_at is not None:
            # Ranks whose launcher left them when it was asked to stop keep the whole grace.
            seconds = max(seconds, self._kill_at - time.monotonic())
        wait_gone(left, seconds)
        kill_all_below(self.kept)
        return failed

    def finish_output(self) -> None:
        """Log what is left of this start's output."""
        for stream in (*self._pipes, *self._outputs):
            stream.drain()
        if not self.kept:
            for stream in self._outputs:
                with contextlib.suppress(KeyError):  # it has come to its end
                    self._selector.unregister(stream.handle)
                os.close(stream.handle)
            self._outputs = []
        self._kill_at = self._stop_at = None

    def close(self) -> None:
        """End what was kept for another start, log its output, remove the ranks' pipes."""
        self._end_kept()
        self.finish_output()
        for local_rank in range(self._options.nproc):
            with contextlib.suppress(OSError):
                os.unlink(self._folder / f"pipe-{local_rank}")


def start_failure(error: OSError) -> tuple[int, str]:
    """Return the exit code, as a shell gives it, and the reason of a start that failed."""
    place = f": {error.filename}" if error.filename else ""
    return 127 if isinstance(error, FileNotFoundError) else 126, f"{error.strerror}{place}"
