"""Watches a node's ranks for standstill; on node 0 those of all nodes, as `hangs` decides.

While all goes on, a look once a second at which ranks have moved is all there is: ranks are asked
nothing and nodes send nothing. Torch in a rank is asked when its main thread has not moved for
STILL_SECONDS, when no step is made, or when node 0 asks because it is so elsewhere.
"""

from __future__ import annotations

import argparse
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from clusterkit.agent import clock, limits, standing
from clusterkit.agent.hangs import Hangs, Steps, longest, steps_of
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.protocol import Document

HANG = "hang: "  # how the reason begins of a node whose ranks were ended because of one
_SPINS = os.path.exists("/dev/nvidiactl")  # a main thread that waits for a GPU never rests


class Watch(threading.Thread):
    """One node's; on node 0 `Hangs` decides for all.

    Args:
        options: of ``agent run``.
        folder: where the ranks' sockets are.
        log: the node's.
        order: takes what `Hangs` has decided for this node: ``note``, ``over`` or ``hang``; words.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        log: NodeLog,
        order: Callable[[str, str], None],
    ) -> None:
        super().__init__(daemon=True)
        self.send: Callable[[Document], None] = lambda message: None
        """To node 0, or from there to all others; for whoever has the connection to set."""
        node, self._nproc = int(os.environ.get("NODE_RANK", "0")), options.nproc
        self._hangs = None if node else Hangs(options.nproc, options.hang_timeout)
        self._node, self._folder, self._log, self._order = node, folder, log, order
        self._tagged = options.tagged
        self._began = 0.0  # when this round did
        self._news: queue.SimpleQueue[tuple[int, Document]] = queue.SimpleQueue()
        self._moved: dict[int, tuple[bytes, float]] = {}  # by process: what changes, since when
        self._standing = False  # whether this node said that a rank of it stands still
        self._next = 0.0  # when ranks that stand still are asked (again)
        self._pause = 0.0

    def hears(self, node: int, message: Document) -> None:
        """From another node, whichever thread it comes to."""
        self._news.put((node, message))

    def begin(self, nodes: int) -> None:
        """A round begins, the first one or another, of so many nodes."""
        if not self.is_alive():
            self.start()
        self._news.put((int(os.environ.get("NODE_RANK", "0")), {"begin": nodes}))

    def run(self) -> None:
        look = clock.awake()
        while True:
            try:
                news = self._news.get(timeout=max(0.0, look - clock.awake()))
            except queue.Empty:
                look = clock.awake() + limits.STILL_LOOK_SECONDS
                self._look()
                if self._standing:
                    look = min(look, self._next)
            else:
                self._take(*news)
            if self._hangs is not None:
                now = clock.awake()
                for what, node, words in self._hangs.turn(now, self._steps(now)):
                    if what == "ask":
                        self.send({"ask": int(words)})
                        self._answer(int(words))
                    else:
                        self._carry_out(what, node, words)

    def _take(self, node: int, message: Document) -> None:
        if "begin" in message:
            self._moved, self._standing, self._next, self._pause = {}, False, 0.0, 0.0
            self._began, self._node = clock.awake(), node
            if self._hangs is not None:
                self._hangs.begin(int(message["begin"]))
            self._order("over", "")
        elif "hang" in message:
            if message["node"] == self._node:
                self._order("hang", str(message["hang"]))
        elif "ask" in message:
            self._answer(int(message["ask"]))
        elif self._hangs is not None and message["stands"]:
            self._hangs.stands(node, message["stands"], int(message["number"]))
        elif self._hangs is not None:
            self._hangs.goes_on(node)

    def _carry_out(self, what: str, node: int, words: str) -> None:
        if what == "hang" and node != self._node:
            self.send({"hang": words, "node": node})
        else:
            self._order(what, words)

    def _steps(self, now: float) -> Steps:
        lines = list(self._log.words.metrics)
        return steps_of([line for line in lines if line[0] >= self._began], now)

    def _ranks(self) -> list[Document]:
        """Lines of ``ranks.jsonl``, one a rank; none where they are processes of other hosts."""
        newest = {each["rank"] % self._nproc: each for each in self._log.ranks}
        return [] if self._tagged else list(newest.values())

    def _answer(self, number: int) -> None:
        self._tell([standing.record(rank, self._folder) for rank in self._ranks()], number)

    def _tell(self, ranks: list[Document], number: int = 0) -> None:
        at = limits.RANKS_A_LINE
        for some in [ranks[first : first + at] for first in range(0, len(ranks), at)] or [[]]:
            message = {"stands": some, "number": number}
            if self._hangs is not None:
                self._take(self._node, message)
            else:
                self.send(message)

    def _look(self) -> None:
        """Tell when a rank of this node has been waiting for another one, or goes on."""
        now = clock.awake()
        seen = self._moved
        self._moved = {}
        for rank in self._ranks():
            state = standing.moves(rank["pid"])
            before = seen.get(rank["pid"])
            self._moved[rank["pid"]] = before if before and before[0] == state else (state, now)
        still = max((now - since for _, since in self._moved.values()), default=0.0)
        moved = still < limits.STILL_SECONDS - limits.STILL_LOOK_SECONDS
        if moved and not self._standing and not _SPINS:
            self._next = self._pause = 0.0
        elif now >= self._next or (self._standing and moved):
            self._ask(now)

    def _ask(self, now: float) -> None:
        ranks = [standing.record(rank, self._folder, place=False) for rank in self._ranks()]
        worst = longest(ranks)
        if worst > limits.STILL_SECONDS / 2:
            self._standing = True
            due = limits.STILL_SECONDS - worst + 0.1  # when it is worth telling
            self._next = now + (due if due > 0 else max(limits.STILL_AGAIN_SECONDS, worst / 10))
            self._tell(ranks)
            return
        if self._standing:
            self._standing = False
            self._tell([])
        # It waits for something else than a rank, or will for one.
        self._pause = min(max(2 * self._pause, limits.STILL_SECONDS), limits.STILL_ALONE_SECONDS)
        self._next = now + self._pause
