"""A node's processes, each started by the agent: a launcher, or the ranks themselves."""

from __future__ import annotations

import argparse
import os
import selectors
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Protocol

from clusterkit.agent.processes import kill_all_below
from clusterkit.agent.signals import end_with_parent


class Processes(Protocol):
    """What a `launcher.Launcher` starts; ends are told to what it was made with."""

    running: dict[int, int]
    """Process ids by number, from a start on; 0: not known yet."""
    kept: set[int]
    """Processes that outlive a start, for the next one; not all are below this one."""
    failure: str | None
    """Why no more can be started, where their ends do not say it."""

    def prepare(self) -> None:
        """Do what can be done before `start`, without waiting."""

    def start(self) -> None:
        """Start them, or see to it that they are.

        Raises:
            OSError: one cannot be; none runs.
        """

    def withdraw(self) -> None:
        """Have those not started that have not been yet."""

    def close(self) -> None:
        """End what is kept."""


class Spawn:
    """One process of ``options.argv``, or with ``options.spawn`` one per rank.

    Args:
        environment: of a process, by its number.
        output: a handle that takes the output of one more process; it is closed here.
        ended: takes the id of a process that has, and its exit code.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        selector: selectors.BaseSelector,
        environment: Callable[[int], dict[str, str]],
        output: Callable[[], int],
        ended: Callable[[int, int], None],
    ) -> None:
        self._options, self._selector = options, selector
        self._environment, self._output, self._told = environment, output, ended
        self.running: dict[int, int] = {}
        self.kept: set[int] = set()
        self.failure: str | None = None
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by the handle of their end

    def prepare(self) -> None:
        pass

    def start(self) -> None:
        try:
            for number in range(self._options.nproc if self._options.spawn else 1):
                self._start_one(number)
        except OSError:
            # How they end says nothing of why the others did not start.
            kill_all_below()
            for handle in list(self._children):
                self._reap(handle)
            raise

    def _start_one(self, number: int) -> None:
        write = self._output()
        try:
            child = subprocess.Popen(
                self._options.argv, env=self._environment(number), stdin=subprocess.DEVNULL,
                stdout=write, stderr=write, process_group=0, preexec_fn=end_with_parent,
            )  # fmt: skip
        finally:
            os.close(write)
        handle = os.pidfd_open(child.pid)
        self.running[number], self._children[handle] = child.pid, child
        self._selector.register(handle, selectors.EVENT_READ, partial(self._ended, handle))

    def _reap(self, handle: int) -> subprocess.Popen[bytes]:
        child = self._children.pop(handle)
        child.wait()
        self._selector.unregister(handle)
        os.close(handle)
        self.running = {n: pid for n, pid in self.running.items() if pid != child.pid}
        return child

    def _ended(self, handle: int) -> None:
        child = self._reap(handle)
        self._told(child.pid, child.returncode)

    def withdraw(self) -> None:
        pass

    def close(self) -> None:
        pass
