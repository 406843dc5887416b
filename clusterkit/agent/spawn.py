"""A node's processes, each started by the agent: a launcher, or the ranks themselves."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
from functools import partial
from typing import Any

from clusterkit.agent.ending import Ending
from clusterkit.agent.launcher import Launcher
from clusterkit.agent.processes import all_below
from clusterkit.agent.signals import end_with_parent


class SpawnLauncher(Launcher):
    """One process of ``options.argv``, or with ``options.spawn`` one per rank."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.owns_ranks = self._options.spawn
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by process handle (pidfd)

    def _start_processes(self) -> None:
        try:
            for number in range(self._options.nproc if self._options.spawn else 1):
                self._start_one(number)
        except OSError:
            # Their ends are not why the others did not start: they are not reported.
            Ending(all_below, 0.0).complete()
            for handle in list(self._children):
                self._reap(handle)
            raise

    def _start_one(self, number: int) -> None:
        env = {**os.environ, "CLUSTERKIT_PIPE": str(self._folder / "pipe")}
        if self._options.spawn:
            env |= {"LOCAL_RANK": str(number), "GROUP_WORLD_SIZE": str(self._options.nodes)}
        elif "torch.distributed.run" in self._options.argv:
            env = without_options(env)
        output = self._new_output()
        try:
            child = subprocess.Popen(
                self._options.argv, env=env, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, process_group=0, preexec_fn=end_with_parent,
            )  # fmt: skip
        finally:
            os.close(output)
        handle = os.pidfd_open(child.pid)
        self.running[number], self._children[handle] = child.pid, child
        self._selector.register(handle, selectors.EVENT_READ, partial(self._child_ended, handle))

    def _reap(self, handle: int) -> subprocess.Popen[bytes]:
        child = self._children.pop(handle)
        child.wait()
        self._selector.unregister(handle)
        os.close(handle)
        self.running = {n: pid for n, pid in self.running.items() if pid != child.pid}
        return child

    def _child_ended(self, handle: int) -> None:
        child = self._reap(handle)
        self._ended(child.pid, child.returncode)


def without_options(env: dict[str, str]) -> dict[str, str]:
    """Rename ``PET_*``, which torchrun reads as options; rank.sh gives them to the ranks again."""
    names = [name for name in env if re.fullmatch(r"PET_\w+", name, re.ASCII)]
    kept = {name: value for name, value in env.items() if name not in names}
    hidden = {f"CLUSTERKIT_{name}": env[name] for name in names}
    short = {"CLUSTERKIT_PET": " ".join(name.removeprefix("PET_") for name in names)}
    return kept | hidden | (short if names else {})
