"""End processes: SIGTERM to those at the top, SIGKILL to all after a grace, never for ever."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from clusterkit.agent import limits
from clusterkit.agent.files import read_json, read_lines
from clusterkit.agent.processes import (
    ancestors,
    command_line,
    is_alive,
    is_stopped,
    process_table,
    processes_with,
    send,
    wait_gone,
)
from clusterkit.agent.protocol import AGENT, Document

_NAMED = 6  # processes in a line of the log
_HELPERS = re.compile(
    r"from multiprocessing\.(resource_tracker|forkserver) |/torch/_inductor/compile_worker/"
)


class Ending:
    """The end of some processes, a `step` at a time: the caller goes on with its own work.

    SIGTERM goes to a rank and not to what it started, such as the workers of its data loader,
    which it needs to save its work; to these only once they have lost the rank. See `ask`.

    Args:
        find: returns the processes that are left.
        seconds: from SIGTERM to SIGKILL.
        told: those that have got SIGTERM already.
    """

    def __init__(
        self, find: Callable[[], list[int]], seconds: float, told: Iterable[int] = ()
    ) -> None:
        self.killed: set[int] = set()
        self.stuck: list[int] = []
        """Those that SIGKILL did not end either."""
        self._find, self._told = find, set(told)
        self._kill_at = time.monotonic() + seconds
        self._give_up_at: float | None = None

    def step(self) -> bool:
        """Do what is due; return whether it is over."""
        if not (left := self._find()):
            return True
        now = time.monotonic()
        if now < self._kill_at:
            self._told |= ask(top(left), self._told)
            return False
        if self._give_up_at is None:
            self._give_up_at = now + limits.KILL_SECONDS
        elif now >= self._give_up_at:
            self.stuck = left
            return True
        self.killed.update(left)
        send(left, signal.SIGKILL)
        return False

    def complete(self, meanwhile: Callable[[float], None] | None = None) -> None:
        """Take steps until it is over.

        Args:
            meanwhile: called between two, with the seconds that it may take.
        """
        while not self.step():
            if meanwhile is not None:
                meanwhile(limits.ENDING_SECONDS)
            else:
                wait_gone(self._find(), limits.ENDING_SECONDS)


def top(pids: Iterable[int]) -> list[int]:
    """Return those whose parent is none of them."""
    table, those = process_table(), set(pids)
    return [pid for pid in those if pid in table and table[pid].parent not in those]


def ask(pids: Iterable[int], told: Container[int] = ()) -> set[int]:
    """Send SIGTERM to these processes, or to the ranks where they are what starts those.

    deepspeed's launcher asks its ranks one after the other, each for up to 30 s: the last ones
    would not be asked within the grace. It has nothing to save, so it is killed. The shell that
    started a rank (``rank.sh``) waits for it and passes no signal on.

    Args:
        told: those that have got SIGTERM already.

    Returns:
        Those that have got it now.
    """
    table, places, killed, asked = process_table(), list(pids), [], []
    for pid in places:
        words = command_line(pid)[1:4]
        launcher, runner = (f"deepspeed.launcher.{name}" in words for name in ("launch", "runner"))
        shell = bool(words) and words[0].endswith("/rank.sh")
        if launcher or runner or shell:
            places += [each for each, process in table.items() if process.parent == pid]
        if launcher:
            killed.append(pid)
        elif not shell and pid not in told:
            asked.append(pid)  # the runner ends on it at once, and leaves the launcher
    send(killed, signal.SIGKILL)
    send(asked, signal.SIGTERM)
    return set(asked)


class Family:
    """Processes, and all that they start from now on: call it for those that live."""

    def __init__(self, pids: Iterable[int]) -> None:
        table = process_table()
        self._known = {pid: table[pid].started for pid in pids if pid in table}

    def __call__(self) -> list[int]:
        table, spared = process_table(), {os.getpid(), *ancestors(os.getpid())}
        known = {
            pid for pid, started in self._known.items()
            if pid in table and table[pid].started == started
        }  # fmt: skip
        groups = {table[pid].group for pid in known if table[pid].group == pid}
        more = True
        while more:
            found = {
                pid for pid, each in table.items()
                if (each.parent in known or each.group in groups) and pid not in known
            } - spared  # fmt: skip
            known |= found
            more = bool(found)
        self._known.update((pid, table[pid].started) for pid in known)
        return sorted(known - spared)


def left_of(run_dir: str, node: str = "*", agent: str | None = None) -> list[int]:
    """Return the living processes of a run on this host, or of one of its nodes (``node-3``).

    They are those in whose environment the folder is, and the recorded ranks with their groups.
    The caller, and what it was started by, are left out.

    Args:
        agent: instead of those of the folder: of the agent of this name alone (AGENT).
    """
    folders = list(Path(run_dir).glob(f"attempts/*/{node}"))
    if agent is not None:
        found = processes_with({f"{AGENT}={agent}"})
    elif node == "*":
        found = processes_with({f"CLUSTERKIT_RUN_DIR={run_dir}"})
    else:
        found = processes_with({f"CLUSTERKIT_NODE_DIR={folder}" for folder in folders})
    ranks = [rank for folder in folders for rank in read_lines(folder / "ranks.jsonl")]
    return Family({*found, *(rank["pid"] for rank in ranks if is_alive(rank))})()


def end_left_of(folder: Path, grace: float) -> list[str]:
    """End what agents that were killed have left of a node; ``folder``: its own of an attempt.

    Returns:
        A sentence for each process that could not be ended.
    """
    ending = Ending(Family(left_of(str(folder.parents[2]), folder.name)), grace)
    ending.complete()
    return [describe(pid) for pid in ending.stuck]


def stop(run_dir: str, grace: float) -> Document:
    """End every process of a run on this host. Idempotent.

    Agents find the reason in the command line of the process that signals them (`signals.sender`).

    Returns:
        ``{"asked": [...], "killed": [...], "left": [...]}``: process ids that got SIGTERM; those
        that needed SIGKILL; a sentence for each process that this did not end either.
    """
    started = (read_json(path) for path in Path(run_dir).glob("attempts/*/node-*/started.json"))
    living = {each["pid"]: each for each in started if each and is_alive(each)}.values()
    agents = [int(each["pid"]) for each in living]
    frozen = [int(each["pid"]) for each in living if is_stopped(each)]
    send(agents, signal.SIGTERM)
    send(frozen, signal.SIGCONT)  # so that they end as the others do, and log it
    wait_gone(agents, grace + limits.LEFTOVER_GRACE + 2.0)
    orphans = left_of(run_dir)
    ending = Ending(lambda: left_of(run_dir), grace)
    ending.complete()
    return {
        "asked": sorted({*agents, *orphans}), "killed": sorted(ending.killed),
        "left": [describe(pid) for pid in ending.stuck],
    }  # fmt: skip


def started_by_programs(pids: Iterable[int]) -> str:
    """Name these processes, without those that libraries have started for themselves."""
    lines = {pid: " ".join(command_line(pid)) for pid in pids}
    found = [
        f"{pid} ({line[:80]})"
        for pid, line in sorted(lines.items())
        if line and not _HELPERS.search(line)
    ]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def describe(pid: int) -> str:
    """Say which process cannot be ended, and why."""
    state = process_table().get(pid)
    return (
        f"process {pid} ({state.name if state else '?'}) does not end on SIGKILL"
        f"{': state D, it waits for a device or a file system' if state and state.blocked else ''}"
    )
