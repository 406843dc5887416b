"""Watches a node's ranks for standstill; on node 0 those of all nodes, as `hangs` decides.

While all goes on, a look once a second at which ranks have moved is all there is: ranks are asked
nothing and nodes send nothing. Torch in a rank is asked when its main thread has not moved for
STILL_SECONDS, when no step is made, or when node 0 asks because it is so elsewhere.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from clusterkit.agent import clock, limits, standing
from clusterkit.agent.hangs import Hangs, Steps, longest
from clusterkit.agent.protocol import Document

_SPINS = os.path.exists("/dev/nvidiactl")  # a main thread that waits for a GPU never rests
_WINDOW = 20  # steps whose median counts


class Metrics:
    """The newest lines by which the program told of its steps; `line` takes one, unread."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Another round."""
        self._lines: deque[tuple[float, bytes]] = deque(maxlen=_WINDOW)
        self._count = 0

    def line(self, text: bytes) -> None:
        if b'"metrics"' in text or b'"end"' in text:
            self._count += 1
            self._lines.append((clock.awake(), text))

    def steps(self, now: float) -> Steps:
        lines = list(self._lines)
        if not lines or b'"end"' in lines[-1][1]:
            return Steps()
        at = [moment for moment, _ in lines]
        between = [later - earlier for earlier, later in itertools.pairwise(at)]
        every = statistics.median(between) if between else 0.0
        told = [seconds for _, text in lines if (seconds := _step_seconds(text)) is not None]
        pace = statistics.median(told) if told else every
        return Steps(last=self._count, quiet=now - at[-1], every=every, pace=pace)


def _step_seconds(text: bytes) -> float | None:
    try:
        seconds = json.loads(text.partition(b" ")[2]).get("step_seconds")
    except (ValueError, AttributeError):
        return None
    return float(seconds) if isinstance(seconds, int | float) and 0 <= seconds < 1e6 else None


class Watch(threading.Thread):
    """One node's; on node 0 `Hangs` decides for all.

    Args:
        options: of ``agent run``.
        folder: where the ranks' sockets are.
        ranks: gives their lines of ``ranks.jsonl``.
        order: takes what `Hangs` has decided for this node: ``note``, ``over`` or ``hang``; words.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        ranks: Callable[[], Sequence[Document]],
        order: Callable[[str, str], None],
    ) -> None:
        super().__init__(daemon=True)
        self.metrics = Metrics()
        self.send: Callable[[Document], None] = lambda message: None
        """To node 0, or from there to all others; for whoever has the connection to set."""
        node, timeout = int(os.environ.get("NODE_RANK", "0")), options.hang_timeout
        self._hangs = None if node else Hangs(options.nodes, options.nproc, timeout)
        self._node, self._folder, self._ranks, self._order = node, folder, ranks, order
        self._news: queue.SimpleQueue[tuple[int, Document] | None] = queue.SimpleQueue()
        self._moved: dict[int, tuple[bytes, float]] = {}  # by process: what changes, since when
        self._standing = False  # whether this node said that a rank of it stands still
        self._next = 0.0  # when ranks that stand still are asked (again)
        self._pause = 0.0

    def hears(self, node: int, message: Document) -> None:
        """From another node, whichever thread it comes to."""
        self._news.put((node, message))

    def begin(self) -> None:
        """Another round begins."""
        self._news.put((self._node, {"begin": True}))

    def close(self) -> None:
        self._news.put(None)

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
                if news is None:
                    return
                self._take(*news)
            if self._hangs is not None:
                now = clock.awake()
                for what, node, words in self._hangs.turn(now, self.metrics.steps(now)):
                    if what == "ask":
                        self.send({"ask": int(words)})
                        self._answer(int(words))
                    else:
                        self._carry_out(what, node, words)

    def _take(self, node: int, message: Document) -> None:
        if "begin" in message:
            self._moved, self._standing, self._next, self._pause = {}, False, 0.0, 0.0
            self.metrics.begin()
            if self._hangs is not None:
                self._hangs.begin()
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
        ranks = [standing.record(rank, self._folder) for rank in self._ranks()]
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
