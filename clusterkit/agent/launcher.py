"""A node's launcher, or its ranks where the agent starts those: their start, output, end."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import selectors
import signal
import time
from pathlib import Path

from clusterkit.agent import limits
from clusterkit.agent.failure import Words, shell_code
from clusterkit.agent.fork import Fork
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.processes import all_below, is_alive, kill_all_below, send, wait_gone
from clusterkit.agent.protocol import Document
from clusterkit.agent.spawn import Processes, Spawn
from clusterkit.agent.streams import Stream


class Launcher:
    """Starts the processes of one node, again and again if that is wanted.

    What comes of them comes through ``selector``, whose data is what to do then. ``options`` are
    those of ``agent run``.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        log: NodeLog,
        selector: selectors.BaseSelector,
    ) -> None:
        self._options = options
        self._folder = folder
        self._log = log
        self._selector = selector
        self.ended: list[Document] = []  # how the processes of this start ended
        self.first: Document | None = None  # the first that failed, before it was asked to stop
        self.deadline: float | None = None  # when what still runs is killed
        self.stop_at: float | None = None
        """When the other ranks are asked to stop, after one failed."""
        self.without_ranks = False
        """Whether the launcher had no ranks left when it was asked to stop."""
        self._outputs: list[Stream] = []
        self._pipes: list[Stream] = []
        self._ranks = options.spawn or options.fork > 0  # whether the agent starts those itself
        self._processes: Processes = (
            Fork(options, folder, selector, self._output, self._ended)
            if options.fork
            else Spawn(options, selector, self._environment, self._output, self._ended)
        )

    def open_pipes(self) -> None:
        """Make and read the ranks' named pipes.

        Raises:
            OSError: that is not possible in this folder.
        """
        for slot in range(self._options.nproc):
            path = self._folder / f"pipe-{slot}"
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            # Read and write: no waiting for a writer, and no end of file between writers.
            self._pipes.append(self._read(os.open(path, os.O_RDWR | os.O_NONBLOCK)))

    def prepare(self) -> None:
        """Do what can be done before the start; to be called in the folder the ranks start in."""
        self._processes.prepare()

    def start(self) -> str | None:
        """Start all processes; why that failed, if it did."""
        self.ended, self.deadline, self.stop_at, self.without_ranks = [], None, None, False
        self.first = None
        self._log.words = Words()  # also where it is the same attempt: a lost node has come back
        try:
            self._processes.start()
        except OSError as error:
            code, why = no_start(error)
            self.ended.append({"pid": 0, "exit_code": code, "at": time.time()})
            return why
        return None

    @property
    def running(self) -> bool:
        """Whether a process of this start is left."""
        return bool(self._processes.running)

    @property
    def failure(self) -> str | None:
        """Why this start ended, where the processes' ends do not say it."""
        return self._processes.failure

    def _environment(self, number: int) -> dict[str, str]:
        env = {**os.environ, "CLUSTERKIT_PIPE": str(self._folder / "pipe")}
        if self._options.spawn:
            env |= {"LOCAL_RANK": str(number), "GROUP_WORLD_SIZE": str(self._options.nodes)}
        return env

    def _read(self, handle: int) -> Stream:
        """Log what comes from there, from now on."""
        stream = Stream(handle, self._log, tagged=self._options.tagged)

        def pump() -> None:
            if not stream.pump():
                self._selector.unregister(handle)

        self._selector.register(handle, selectors.EVENT_READ, pump)
        return stream

    def _output(self) -> int:
        """A handle whose output is logged."""
        read, write = os.pipe()
        self._outputs.append(self._read(read))
        return write

    def _ended(self, pid: int, code: int) -> None:
        """Note how a process ended; a rank that failed ends the others soon."""
        asked = self.deadline is not None
        self.ended.append({"pid": pid, "exit_code": code, "at": time.time(), "asked": asked})
        if code and self.deadline is None and self.first is None:
            self.first = self.ended[-1]
        if code and self._ranks and self.deadline is None and self.stop_at is None:
            self.stop_at = time.monotonic() + limits.RANKS_GRACE

    @property
    def exit_code(self) -> int:
        """Of the first process that failed, as a shell gives it."""
        return shell_code(next((end["exit_code"] for end in self.ended if end["exit_code"]), 0))

    def own_failure(self) -> Document | None:
        """How the first rank of this start failed, unless it was asked to stop; `Words.failure`."""
        if self.first is None:
            return None
        log, pid, code = self._log, self.first["pid"], self.first["exit_code"]
        ranks = {rank["pid"]: rank["rank"] for rank in log.ranks}
        if log.rank_ends:  # those of deepspeed and mpirun say so themselves
            first = log.rank_ends[0]
            return log.words.failure(first["rank"], shell_code(first["exit_code"]))
        pid, code = next(iter(log.words.codes.items()), (pid, code))
        return log.words.failure(ranks.get(pid), shell_code(code))

    def stop(self) -> None:
        """Ask everything to end, and kill it after the grace."""
        ranks = self._log.ranks
        all_started = not self._ranks and len(ranks) >= self._options.nproc
        self.without_ranks = all_started and not any(map(is_alive, ranks))
        self.deadline = time.monotonic() + self._options.grace
        self._processes.withdraw()
        for pid in self._processes.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)

    def patience(self) -> float:
        """Seconds until `turn` has something to do; infinite: only when something happens."""
        now = time.monotonic()
        due = [moment - now for moment in (self.deadline, self.stop_at) if moment is not None]
        if self.deadline is not None:
            due.append(limits.LAUNCHER_GRACE / 4)
            if not any(map(is_alive, self._log.ranks)):
                self.deadline = min(self.deadline, now + limits.LAUNCHER_GRACE)
        return max(0.0, min(due, default=math.inf))

    def turn(self) -> bool:
        """Kill what has outlived its grace. Whether the other ranks are to be stopped now."""
        now = time.monotonic()
        if self.deadline is not None and now >= self.deadline:
            self.deadline = now + 1
            send(all_below(self._processes.kept), signal.SIGKILL)
        if self.stop_at is None or now < self.stop_at:
            return False
        self.stop_at = None
        return True

    def end_leftovers(self) -> bool:
        """End what outlived the launcher (torchrun killed with -9 leaves ranks behind).

        Returns:
            Whether there were ranks although the launcher had ended with 0: it has failed then.
        """
        left = all_below(self._processes.kept)
        if not left:
            return False
        failed = self.exit_code == 0 and not {r["pid"] for r in self._log.ranks}.isdisjoint(left)
        if failed:
            self.ended.append({"pid": 0, "exit_code": 1, "at": time.time()})
        send(left, signal.SIGTERM)
        seconds = min(limits.LEFTOVER_GRACE, self._options.grace)
        if self.deadline is not None:
            # Ranks whose launcher left them when it was asked to stop keep the whole grace.
            seconds = max(seconds, self.deadline - time.monotonic())
        wait_gone(left, seconds)
        kill_all_below(self._processes.kept)
        return failed

    def finish_output(self) -> None:
        """Log what is left of this start's output; nothing is due any more."""
        for stream in (*self._pipes, *self._outputs):
            stream.drain()
        if not self._processes.kept:
            for stream in self._outputs:
                with contextlib.suppress(KeyError):  # it has come to its end
                    self._selector.unregister(stream.handle)
                os.close(stream.handle)
            self._outputs = []
        self.deadline = self.stop_at = None

    def close(self) -> None:
        """End what was kept for another start, log its output, remove the ranks' pipes."""
        self._processes.close()
        self.finish_output()
        for slot in range(self._options.nproc):
            with contextlib.suppress(OSError):
                os.unlink(self._folder / f"pipe-{slot}")


def no_start(error: OSError) -> tuple[int, str]:
    """The exit code, as a shell gives it, and the reason of what could not be started."""
    what = f": {error.filename}" if error.filename else ""
    return 127 if isinstance(error, FileNotFoundError) else 126, f"{error.strerror}{what}"
