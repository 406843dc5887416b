"""A process that outlives an agent that is killed, and ends the ranks that this one leaves."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from clusterkit.agent.ending import Ending, Family, describe, left_of, top
from clusterkit.agent.files import read_json, read_lines, write_json
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.processes import identity, is_alive, oom_kills, process_table, wait_gone
from clusterkit.agent.protocol import AGENT, Document
from clusterkit.agent.signals import adopt_orphans
from clusterkit.agent.streams import Stream, pump


class Guard:
    """A fork of the agent, not below it; make it before there are threads.

    When the agent is killed, it sends SIGTERM to ranks and launchers, once; the fork server's ranks
    have it from the kernel (PR_SET_PDEATHSIG), as their only parent dies with the agent. The guard
    logs their output for the grace, and then kills what is left with all that it started.

    Args:
        folder: the node's.
        log: the node's.
        pipes: take the ranks' output.
        options: of ``agent run``.
    """

    def __init__(
        self, folder: Path, log: NodeLog, pipes: Sequence[Stream], options: argparse.Namespace
    ) -> None:
        self._folder, self._log, self._pipes = folder, log, pipes
        self._grace, self._forked = options.grace, options.fork > 0
        self.identity: Document | None = None
        """None: there is none, as the first process of a container takes all others along."""
        self._handle: int | None = None
        if os.getpid() != 1:
            with contextlib.suppress(OSError):
                self._start()

    def _start(self) -> None:
        agent = os.pidfd_open(os.getpid())
        adopt_orphans(False)
        try:
            pid = _fork_apart(lambda: self._run(agent), {agent, self._log.handle, *self._handles()})
        finally:
            adopt_orphans()
            os.close(agent)
        self.identity, self._handle = identity(pid), os.pidfd_open(pid)

    def _handles(self) -> list[int]:
        return [stream.handle for stream in self._pipes]

    def end(self) -> None:
        """End it: the agent itself has ended all others."""
        if self._handle is not None and self.identity is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            wait_gone([self.identity["pid"]], 1.0)
            os.close(self._handle)
            self._handle = None

    # -- in the fork

    def _run(self, agent: int) -> None:
        poll = select.poll()
        poll.register(agent, select.POLLIN)
        poll.poll()
        run_dir, name = self._folder.parents[2], self._folder.name
        left = left_of(str(run_dir), name, os.environ[AGENT])
        folders = sorted(run_dir.glob(f"attempts/*/{name}"), key=lambda path: int(path.parts[-2]))
        self._log.warn = self._log.line
        with contextlib.suppress(OSError):
            self._log.move(folders[-1])
            started = read_json(folders[-1] / "started.json")
            if started is not None and not is_alive(started):
                killed = oom_kills() - started["oom_kills"]
                write_json(folders[-1] / "started.json", {**started, "killed": killed})
        self._log.line(f"this node's agent was killed; its ranks end within {self._grace:g} s")
        told = set()
        if self._forked:
            # The server and its ranks lead groups; others at the top have lost a rank just now.
            table = process_table()
            told = {pid for pid in top(left) if pid in table and table[pid].group == pid}
            told |= {each["pid"] for each in read_lines(folders[-1] / "ranks.jsonl")}
        ending = Ending(Family(left), self._grace, told)
        ending.complete(lambda seconds: pump(self._pipes, seconds))
        for stream in self._pipes:
            stream.drain()
        for pid in ending.stuck:
            self._log.line(describe(pid))


def _fork_apart(work: Callable[[], None], handles: set[int]) -> int:
    """Do ``work`` in a process of its own, with these handles alone; return its id."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if pid := os.fork():
                os.write(write, str(pid).encode())
            else:
                _close_others(handles)
                work()
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    try:
        return int(os.read(read, 20))
    finally:
        os.close(read)


def _close_others(handles: set[int]) -> None:
    """Close all other handles: of sockets and pipes whose end others wait for."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in handles:
            with contextlib.suppress(OSError):
                os.close(int(name))
