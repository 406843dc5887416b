"""A node's launcher (or, with ``spawn``, its ranks): its start, its output, its end."""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path

from clusterkit.agent import limits
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.processes import descendants, is_alive, kill_all_below, send, wait_gone
from clusterkit.agent.protocol import Document
from clusterkit.agent.signals import end_with_parent
from clusterkit.agent.streams import Stream


class Launcher:
    """Starts the processes of one node, again and again if that is wanted.

    Their ends and output come through ``selector``, with a `subprocess.Popen` or a `Stream` as
    data, to be handed to `child_ended` and `pump`. ``options`` are those of ``agent run``.
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
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.ended: list[Document] = []  # how the processes of this start ended
        self.deadline: float | None = None  # when what still runs is killed
        self.stop_at: float | None = None
        """When the other ranks are asked to stop, after one failed."""
        self.without_ranks = False
        """Whether the launcher had no ranks left when it was asked to stop."""
        self._outputs: list[Stream] = []
        self._pipes: list[Stream] = []

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
            self._pipes.append(Stream(os.open(path, os.O_RDWR | os.O_NONBLOCK), self._log))
            self._selector.register(self._pipes[-1].handle, selectors.EVENT_READ, self._pipes[-1])

    def start(self) -> str | None:
        """Start all processes; why that failed, if it did."""
        self.ended, self.deadline, self.stop_at = [], None, None
        try:
            for local_rank in range(self._options.nproc if self._options.spawn else 1):
                self._start_one(local_rank)
        except OSError as error:
            code, why = no_start(error)
            self._undo_start()
            self.ended.append({"pid": 0, "exit_code": code, "at": time.time()})
            return why
        return None

    def _undo_start(self) -> None:
        """End the processes that did start: how they end says nothing of why the others did not."""
        kill_all_below()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, subprocess.Popen):
                self._selector.unregister(key.fileobj)
                os.close(key.fd)
        for child in self.children.values():
            child.wait()
        self.children.clear()

    def _start_one(self, local_rank: int) -> None:
        env = {**os.environ, "CLUSTERKIT_PIPE": str(self._folder / "pipe")}
        if self._options.spawn:
            env["LOCAL_RANK"] = str(local_rank)
        read, write = os.pipe()
        stream = Stream(read, self._log, tagged=self._options.tagged)
        self._outputs.append(stream)
        self._selector.register(read, selectors.EVENT_READ, stream)
        try:
            child = subprocess.Popen(
                self._options.argv, env=env, stdin=subprocess.DEVNULL, stdout=write,
                stderr=write, process_group=0, preexec_fn=end_with_parent,
            )  # fmt: skip
        finally:
            os.close(write)
        self.children[child.pid] = child
        self._selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ, child)

    def pump(self, stream: Stream) -> None:
        """Log what has come."""
        if not stream.pump():
            self._selector.unregister(stream.handle)

    def child_ended(self, child: subprocess.Popen[bytes]) -> None:
        """Note how a process ended; a rank that failed ends the others soon."""
        code = child.wait()
        del self.children[child.pid]
        self.ended.append({"pid": child.pid, "exit_code": code, "at": time.time()})
        if code and self._options.spawn and self.deadline is None and self.stop_at is None:
            self.stop_at = time.monotonic() + limits.RANKS_GRACE

    @property
    def exit_code(self) -> int:
        """Of the first process that failed, as a shell gives it."""
        first = next((end["exit_code"] for end in self.ended if end["exit_code"]), 0)
        return 128 - first if first < 0 else int(first)

    def stop(self) -> None:
        """Ask everything to end, and kill it after the grace."""
        ranks = self._log.ranks
        all_started = not self._options.spawn and len(ranks) >= self._options.nproc
        self.without_ranks = all_started and not any(map(is_alive, ranks))
        self.deadline = time.monotonic() + self._options.grace
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)

    def patience(self) -> float | None:
        """Seconds until `turn` has something to do; None: only when something happens."""
        now = time.monotonic()
        due = [moment - now for moment in (self.deadline, self.stop_at) if moment is not None]
        if self.deadline is not None:
            due.append(limits.LAUNCHER_GRACE / 4)
            if not any(map(is_alive, self._log.ranks)):
                self.deadline = min(self.deadline, now + limits.LAUNCHER_GRACE)
        return max(0.0, min(due)) if due else None

    def turn(self) -> bool:
        """Kill what has outlived its grace. Whether the other ranks are to be stopped now."""
        now = time.monotonic()
        if self.deadline is not None and now >= self.deadline:
            self.deadline = now + 1
            send(descendants(os.getpid()), signal.SIGKILL)
        if self.stop_at is None or now < self.stop_at:
            return False
        self.stop_at = None
        return True

    def end_leftovers(self) -> bool:
        """End what outlived the launcher (torchrun killed with -9 leaves ranks behind).

        Returns:
            Whether there were ranks although the launcher had ended with 0: it has failed then.
        """
        left = descendants(os.getpid())
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
        kill_all_below()
        return failed

    def finish_output(self) -> None:
        """Log what is left of this start's output; nothing is due any more."""
        for stream in (*self._pipes, *self._outputs):
            stream.drain()
        for stream in self._outputs:
            with contextlib.suppress(KeyError):  # it has come to its end
                self._selector.unregister(stream.handle)
            os.close(stream.handle)
        self._outputs = []
        self.deadline = self.stop_at = None

    def close(self) -> None:
        """Remove the ranks' pipes."""
        for slot in range(self._options.nproc):
            with contextlib.suppress(OSError):
                os.unlink(self._folder / f"pipe-{slot}")


def no_start(error: OSError) -> tuple[int, str]:
    """The exit code, as a shell gives it, and the reason of what could not be started."""
    what = f": {error.filename}" if error.filename else ""
    return 127 if isinstance(error, FileNotFoundError) else 126, f"{error.strerror}{what}"
