"""A node's processes, each started by the agent: a launcher, or the ranks themselves."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from clusterkit.agent import limits, recorder
from clusterkit.agent.ending import Ending
from clusterkit.agent.failure import shell_code
from clusterkit.agent.launcher import Launcher
from clusterkit.agent.processes import descendants_except
from clusterkit.agent.protocol import Document
from clusterkit.agent.retries import Retries
from clusterkit.agent.signals import unblock_signals

_NETWORK = re.compile(r"NCCL|[Gg]loo|Dist\w*Error")


class SpawnLauncher(Launcher):
    """One process of ``options.argv``, or with ``options.spawn`` one per rank."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.owns_ranks = self._options.spawn
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by process handle (pidfd)
        self._elastic = _restarts_ranks(self._options.argv)
        self._rounds, self._round_began = Retries(0), 0.0  # of an elastic torchrun

    def _start_processes(self) -> None:
        self._rounds, self._round_began = Retries(0), time.monotonic()
        try:
            for number in range(self._options.nproc if self._options.spawn else 1):
                self._start_one(number)
        except OSError:
            # Their ends are not why the others did not start: they are not reported.
            Ending(descendants_except, 0.0).complete()
            for handle in list(self._children):
                self._reap(handle)
            raise

    def _start_one(self, number: int) -> None:
        env = {**os.environ, "CLUSTERKIT_PIPE": str(self._folder / "pipe")}
        env |= recorder.settings(env, env.get("CLUSTERKIT_NODE_DIR", str(self._folder)))
        if self._options.spawn:
            env |= {"LOCAL_RANK": str(number), "GROUP_WORLD_SIZE": str(self._options.nodes)}
        elif "torch.distributed.run" in self._options.argv:
            env = without_options(env)
        output = self._new_output()
        try:
            child = subprocess.Popen(
                self._options.argv, env=env, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, process_group=0, preexec_fn=unblock_signals,
            )  # fmt: skip
        finally:
            os.close(output)
        handle = os.pidfd_open(child.pid)
        self.running[number], self._children[handle] = child.pid, child
        self._selector.register(handle, selectors.EVENT_READ, partial(self._child_ended, handle))

    def tick(self) -> float:
        if self._elastic and self._kill_at is None and self._log.output.codes:
            self._judge_round()
        return super().tick()

    def _judge_round(self) -> None:
        """End an elastic torchrun whose rank failed by itself: ``restarts`` counts that failure.

        torchrun starts its ranks again after any failure. It is left to do so when they failed of
        a node that was lost, which is nearly all that tells the two apart.
        """
        for stream in self.pipes:
            stream.drain()  # the traceback comes through another pipe than torchrun's words
        output, now = self._log.output, time.monotonic()
        lasted, self._round_began = now - self._round_began, now
        ranks = {rank["pid"]: rank["rank"] for rank in self._log.ranks}
        failures = {pid: output.failure(ranks.get(pid), shell_code(code))
                    for pid, code in output.codes.items()}  # fmt: skip
        if all(map(_may_be_of_another, failures.values())):
            if self._rounds.lost(lasted) is not None:
                output.codes.clear()
                self._past_ranks = len(self._log.ranks)
                return
            self.failure = f"its ranks failed {limits.FREE_RESTARTS + 1} times in a row"
        for pid, code in output.codes.items():
            self._ended(pid, code)
        self.stop()

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


def _restarts_ranks(argv: Sequence[str]) -> bool:
    """Return whether this is torchrun, and starts its ranks again after a failure."""
    if not {"torch.distributed.run", "--max-restarts"} <= {*argv}:
        return False
    return argv[argv.index("--max-restarts") + 1] != "0"


def _may_be_of_another(failure: Document) -> bool:
    """Return whether a rank may have failed because a node was lost: also in words of NCCL that
    `failure.ECHOES` does not know, or by a signal, as of NCCL's watchdog."""
    return failure["echo"] or failure["code"] >= 128 or bool(_NETWORK.search(failure["error"]))


def without_options(env: dict[str, str]) -> dict[str, str]:
    """Rename ``PET_*``, which torchrun reads as options; rank.sh gives them to the ranks again."""
    names = [name for name in env if re.fullmatch(r"PET_\w+", name, re.ASCII)]
    kept = {name: value for name, value in env.items() if name not in names}
    hidden = {f"CLUSTERKIT_{name}": env[name] for name in names}
    short = {"CLUSTERKIT_PET": " ".join(name.removeprefix("PET_") for name in names)}
    return kept | hidden | (short if names else {})
