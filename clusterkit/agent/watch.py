"""Watches a node's ranks; on node 0 those of all nodes, as `hangs` and `stragglers` decide.

While all goes on, there is a look once a second at which ranks have moved, and every
ARRIVALS_SECONDS torch in them is asked when they came to collectives. Torch is asked how a rank
stands when its main thread has not moved for STILL_SECONDS, when no step is made, or when node 0
asks because it is so elsewhere.
"""

from __future__ import annotations

import argparse
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from clusterkit.agent import clock, host, limits, rank_state
from clusterkit.agent.hangs import Hangs, Steps, longest, steps_of
from clusterkit.agent.messages import EndHang, Note, Order
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.protocol import Document
from clusterkit.agent.stragglers import Stragglers
from clusterkit.agent.usage import Usage

HANG = "hang: "  # how the reason begins of a node whose ranks were ended because of one
_SPINS = os.path.exists("/dev/nvidiactl")  # a main thread that waits for a GPU never rests


class Watch(threading.Thread):
    """Watches one node's ranks; on node 0 `Hangs` and `Stragglers` decide for all.

    Args:
        options: of ``agent run``.
        folder: where the ranks' sockets are.
        log: the node's.
        on_order: takes an order for this node's main loop.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        log: NodeLog,
        on_order: Callable[[Order], None],
    ) -> None:
        super().__init__(daemon=True)
        self.send: Callable[[Document], None] = lambda message: None
        """To node 0, or from there to all others; for whoever has the connection to set."""
        node, self._nproc = int(os.environ.get("NODE_RANK", "0")), options.nproc
        self._hangs = None if node else Hangs(options.nproc, options.hang_timeout)
        self._slow = None if node else Stragglers(options.nproc)
        self._look_before: host.Look | None = None  # since a rank of this node is a suspect
        self._node, self._folder, self._log, self._on_order = node, folder, log, on_order
        self._tagged = options.tagged
        self._usage = Usage(log, self._ranks, options.nodes)
        self._began = 0.0  # when this round did
        self._places: list[int] = []  # on node 0: the next round's nodes, in the order of ranks
        self._messages: queue.SimpleQueue[tuple[int, Document]] = queue.SimpleQueue()
        self._moved: dict[int, tuple[bytes, float]] = {}  # by process: what changes, since when
        self._standing = False  # whether this node said that a rank of it stands still
        self._next = 0.0  # when ranks that stand still are asked (again)
        self._pause = 0.0

    def receive(self, node: int, message: Document) -> None:
        """Take a message of another node, from any thread."""
        self._messages.put((node, {**message, "came": time.time()}))

    def begin(self, node: int, nodes: int) -> None:
        """Begin a round of ``nodes`` nodes, of which this one is number ``node``."""
        if not self.is_alive():
            self.start()
            self._usage.start()
        self._messages.put((node, {"begin": nodes}))

    def run(self) -> None:
        look = clock.awake()
        while True:
            try:
                news = self._messages.get(timeout=max(0.0, look - clock.awake()))
            except queue.Empty:
                look = clock.awake() + limits.STILL_LOOK_SECONDS
                self._look()
                if self._standing:
                    look = min(look, self._next)
            else:
                self._handle(*news)
            if self._hangs is not None:
                now = clock.awake()
                for what, node, words in self._hangs.tick(now, self._steps(now)):
                    if what == "ask":
                        self.send({"ask": int(words)})
                        self._answer(int(words))
                    else:
                        self._carry_out(what, node, words)
            if self._slow is not None:
                for what, words in self._slow.tick(clock.awake()):
                    self._ask_all(self._slow, what, words)

    def _handle(self, node: int, message: Document) -> None:
        if "begin" in message:
            self._moved, self._standing, self._next, self._pause = {}, False, 0.0, 0.0
            self._began, self._node = clock.awake(), node
            if self._hangs is not None:
                self._hangs.begin(self._places or range(message["begin"]))
            if self._slow is not None:
                self._slow.begin(self._places or range(message["begin"]), self._began)
            self._look_before = None
            self._on_order(Note("hang"))
            self._on_order(Note("slow"))
        elif "places" in message:
            self._places = message["places"]
        elif "report" in message and "stands" in message:
            if self._slow is not None:
                self._slow.receive(node, message)
        elif "report" in message:
            self._report(message)
        elif "look" in message:
            self._look_before = self._host(message["look"])
        elif "hang" in message:
            if message["node"] == self._node:
                self._on_order(EndHang(str(message["hang"])))
        elif "ask" in message:
            self._answer(int(message["ask"]))
        elif self._hangs is not None and message["stands"]:
            self._hangs.receive(node, message["stands"], int(message["number"]))
        elif self._hangs is not None:
            self._hangs.resumed(node)

    def _ask_all(self, slow: Stragglers, what: str, words: str) -> None:
        """Do what `Stragglers` has decided."""
        if what == "slow":
            self._on_order(Note("slow", words))
        elif what == "look":
            message: Document = {"look": slow.suspects}
            self.send(message)
            self._handle(self._node, message)
        else:
            message = {"report": slow.number, "until": {}}
            self._report(message)  # first: it says of which collectives the others are to tell
            self.send(message)

    def _report(self, message: Document) -> None:
        """Send when this node's ranks came to collectives, and why they may be slow."""
        ranks, until = self._ranks(), message["until"]
        records = [rank_state.arrivals(rank, self._folder, until) for rank in ranks]
        knows, before = "", self._look_before
        if before is not None:
            self._look_before = self._host(list(before.waited))
            knows = host.words(before, self._look_before) if self._look_before else ""
        at = limits.RANKS_A_LINE
        for some in [records[first : first + at] for first in range(0, len(records), at)]:
            answer = {"stands": some, "report": message["report"], "knows": knows[:1000]}
            if self._slow is not None:
                self._slow.receive(self._node, answer)
            else:
                times = {"asked": message["sent"], "heard": message["came"], "said": time.time()}
                self.send({**answer, **times})

    def _host(self, suspects: list[int]) -> host.Look | None:
        """Return a look at this host, if it has some of these ranks."""
        pids = {each["rank"]: each["pid"] for each in self._ranks() if each["rank"] in suspects}
        return host.look(pids, os.environ["CLUSTERKIT_RUN_DIR"], _SPINS) if pids else None

    def _carry_out(self, what: str, node: int, words: str) -> None:
        if what == "hang" and node != self._node:
            self.send({"hang": words, "node": node})
        elif what == "hang":
            self._on_order(EndHang(words))
        else:
            self._on_order(Note("hang", words))

    def _steps(self, now: float) -> Steps:
        lines = list(self._log.words.metrics)
        return steps_of([line for line in lines if line[0] >= self._began], now)

    def _ranks(self) -> list[Document]:
        """Return each rank's newest line of ``ranks.jsonl``; none of ranks on other hosts."""
        newest = {each["rank"] % self._nproc: each for each in self._log.ranks}
        return [] if self._tagged else list(newest.values())

    def _answer(self, number: int) -> None:
        self._send_records(
            [rank_state.record(rank, self._folder) for rank in self._ranks()], number
        )

    def _send_records(self, ranks: list[Document], number: int = 0) -> None:
        at = limits.RANKS_A_LINE
        for some in [ranks[first : first + at] for first in range(0, len(ranks), at)] or [[]]:
            message = {"stands": some, "number": number}
            if self._hangs is not None:
                self._handle(self._node, message)
            else:
                self.send(message)

    def _look(self) -> None:
        """Report when a rank of this node has been waiting for another one, or resumes."""
        now = clock.awake()
        seen = self._moved
        self._moved = {}
        for rank in self._ranks():
            state = rank_state.context_switches(rank["pid"])
            before = seen.get(rank["pid"])
            self._moved[rank["pid"]] = before if before and before[0] == state else (state, now)
        still = max((now - since for _, since in self._moved.values()), default=0.0)
        moved = still < limits.STILL_SECONDS - limits.STILL_LOOK_SECONDS
        if moved and not self._standing and not _SPINS:
            self._next = self._pause = 0.0
        elif now >= self._next or (self._standing and moved):
            self._ask(now)

    def _ask(self, now: float) -> None:
        ranks = [rank_state.record(rank, self._folder, place=False) for rank in self._ranks()]
        worst = longest(ranks)
        if worst > limits.STILL_SECONDS / 2:
            self._standing = True
            due = limits.STILL_SECONDS - worst + 0.1  # when it is worth telling
            self._next = now + (due if due > 0 else max(limits.STILL_AGAIN_SECONDS, worst / 10))
            self._send_records(ranks)
            return
        if self._standing:
            self._standing = False
            self._send_records([])
        # It waits for something else than a rank, or will for one.
        self._pause = min(max(2 * self._pause, limits.STILL_SECONDS), limits.STILL_ALONE_SECONDS)
        self._next = now + self._pause
