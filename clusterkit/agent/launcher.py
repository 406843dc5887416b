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
from functools import partial
from pathlib import Path

from clusterkit.agent import limits
from clusterkit.agent.ending import Ending, ask, started_by_programs
from clusterkit.agent.failure import RankOutput, shell_code, start_failure
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.processes import descendants_except, is_alive
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
        self.stuck: list[int] = []
        """Processes that SIGKILL did not end: nothing may be started beside them."""
        self.other_nodes = False
        """Whether ranks of other nodes may be why the ones here fail."""
        self._failures: list[Document] = []  # of ``ends``, before any was asked to stop
        self._ending: Ending | None = None  # of what is left
        self._kill_at: float | None = None  # None: nothing was asked to stop
        self._told: set[int] = set()  # those that were asked to
        self._past_ranks = 0  # of `NodeLog.ranks`: those of earlier rounds
        self._stop_at: float | None = None  # when the other ranks are stopped, after one failed
        self._wait_until = 0.0  # for the rank that the others fail of
        self._outputs: list[Stream] = []
        self.pipes: list[Stream] = []
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
            self.pipes.append(self._log_from(os.open(path, os.O_RDWR | os.O_NONBLOCK)))

    def start(self) -> str | None:
        """Start all processes; return why that failed, None if it did not."""
        self.ends, self._kill_at, self._stop_at = [], None, None
        self.failure, self._failures, self.ranks_were_done = None, [], False
        self._ending, self.stuck, self._told = None, [], set()
        self._past_ranks = len(self._log.ranks)
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
        if pid in self.stuck:
            return
        asked = self._kill_at is not None
        self.ends.append({"pid": pid, "exit_code": code, "at": time.time(), "asked": asked})
        if code and not asked:
            self._failures.append(self.ends[-1])
            if len(self._failures) == 1:
                self._wait_until = time.monotonic() + limits.ECHO_SECONDS
            if self.owns_ranks:
                stop_at = time.monotonic() + limits.RANKS_GRACE
                self._stop_at = min(stop_at, self._stop_at or math.inf)

    @property
    def exit_code(self) -> int:
        """The exit code of the process that failed first, as a shell gives it; 0: none did."""
        return shell_code(next((end["exit_code"] for end in self._failed_first()), 0))

    def rank_failure(self) -> Document | None:
        """Return `RankOutput.failure` of the first that failed before any was asked to stop."""
        return self._failure_of(self._failed_first()[0]) if self._failures else None

    def _failed_first(self) -> list[Document]:
        """Return the ends of those that failed: first one that did not fail of another one."""
        failed = [end for end in self.ends if end["exit_code"]]
        own = [end for end in self._failures if not self._failure_of(end)["echo"]]
        return [*own, *self._failures, *failed]

    def _failure_of(self, end: Document) -> Document:
        log, pid, code = self._log, end["pid"], end["exit_code"]
        # Ranks of deepspeed and mpirun report their own end.
        if first := next((each for each in log.rank_ends if each["exit_code"]), None):
            return log.output.failure(first["rank"], shell_code(first["exit_code"]))
        pid, code = next(iter(log.output.codes.items()), (pid, code))
        ranks = {rank["pid"]: rank["rank"] for rank in log.ranks}
        return log.output.failure(ranks.get(pid), shell_code(code))

    def _awaits_cause(self) -> bool:
        """Return whether all failed of a rank that is still to fail: it may clean up first."""
        if self._kill_at is not None or time.monotonic() >= self._wait_until:
            return False
        return bool(self._failures) and all(self._failure_of(end)["echo"] for end in self._failures)

    # -- stopping

    def stop(self) -> None:
        """Ask everything to end, and kill it after the grace. Nothing is asked twice."""
        if self._kill_at is not None:
            return
        self._check_stopped(now=True)
        ranks = self._log.ranks[self._past_ranks :]
        all_started = not self.owns_ranks and len(ranks) >= self._options.nproc
        self.ranks_were_done = all_started and not any(map(is_alive, ranks))
        self._kill_at = time.monotonic() + self._options.grace
        self._cancel_pending()
        # Not its group: a rank that saves its work needs the workers of its data loader for that.
        self._told = ask(pid for pid in self.running.values() if pid)

    def tick(self) -> float:
        """Do what is due; return the seconds until the next call, at most LOOK_SECONDS."""
        now = time.monotonic()
        self._check_stopped()
        if self._kill_at is not None and now >= self._kill_at and self.running:
            self._kill(now)
        if self._stop_at is not None and now >= self._stop_at:
            self._stop_at = now + limits.ENDING_SECONDS if self._awaits_cause() else None
            if self._stop_at is None:
                self.stop()
        due = [now + limits.LOOK_SECONDS, self._stop_at or math.inf]
        if self._kill_at is not None and self.running:
            if not any(map(is_alive, self._log.ranks)):
                self._kill_at = min(self._kill_at, now + limits.LAUNCHER_GRACE)
            due += [self._kill_at, now + limits.LAUNCHER_GRACE / 4]
        if self._ending is not None:
            due.append(now + limits.ENDING_SECONDS)
        return max(0.0, min(due) - now)

    def _kill(self, now: float) -> None:
        """Kill all that is left, again and again, but not for ever."""
        self._kill_at = now + 1
        if self._ending is None:
            self._ending = Ending(partial(descendants_except, self.kept), 0.0)
        if self._ending.step() and self._ending.stuck:
            self.stuck = self._ending.stuck
            ends, self.running = [pid for pid in self.running.values() if pid], {}
            asked = {"exit_code": -signal.SIGKILL, "at": time.time(), "asked": True}
            self.ends += [{"pid": pid, **asked} for pid in ends]

    def _check_stopped(self, *, now: bool = False) -> None:
        self._stopped_ranks.check(ending=self._kill_at is not None, now=now)

    def causes(self) -> list[str]:
        """Return what was done to the ranks that this node, and others, may have failed of."""
        return self._stopped_ranks.causes()

    def has_ended(self) -> bool:
        """Return whether nothing of this start is left; to be called until it is so.

        What outlived its launcher is ended (torchrun killed with -9 leaves ranks behind). It has
        failed if it had ended with 0 although there were ranks.
        """
        if self.running or self.stuck:
            return not self.running
        if self._ending is None:
            left = descendants_except(self.kept)
            if self.exit_code == 0 and any(rank["pid"] in left for rank in self._log.ranks):
                self.ends.append({"pid": 0, "exit_code": 1, "at": time.time()})
                self.failure = "the launcher exited with 0 while ranks were still running"
            seconds = min(limits.LEFTOVER_GRACE, self._options.grace)
            if self._kill_at is not None:
                # Ranks whose launcher left them when it was asked to stop keep the whole grace.
                seconds = max(seconds, self._kill_at - time.monotonic())
            elif self.exit_code == 0 and (names := started_by_programs(left)):
                self._log.line(f"the ranks left processes running, which are ended now: {names}")
            self._ending = Ending(partial(descendants_except, self.kept), seconds, self._told)
        if not self._ending.step():
            return False
        self.stuck = self._ending.stuck
        for stream in (*self.pipes, *self._outputs):
            stream.drain()
        return not (self.other_nodes and self._awaits_cause())

    def finish_output(self) -> None:
        """Log what is left of this start's output."""
        for stream in (*self.pipes, *self._outputs):
            stream.drain()
        if not self.kept:
            for stream in self._outputs:
                with contextlib.suppress(KeyError):  # it has come to its end
                    self._selector.unregister(stream.handle)
                os.close(stream.handle)
            self._outputs = []
        self._kill_at = self._stop_at = self._ending = None

    def close(self) -> None:
        """End what was kept for another start, log its output, remove the ranks' pipes."""
        self._end_kept()
        self.finish_output()
        for local_rank in range(self._options.nproc):
            with contextlib.suppress(OSError):
                os.unlink(self._folder / f"pipe-{local_rank}")
