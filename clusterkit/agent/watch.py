"""The thread that watches a node's ranks; on node 0 `hangs` and `stragglers` decide for all nodes.

While ranks progress, their context switches are read once a second, and every ARRIVALS_SECONDS
torch in them is queried when they entered collectives. Torch is queried for a rank's state when its
main thread has not run for STILL_SECONDS, when NCCL's collectives have not advanced for as long,
when no step completes, or when node 0 queries all nodes because that is so on another one.
"""

from __future__ import annotations

import argparse
import os
import queue
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from clusterkit.agent import clock, host, limits, messages, rank_state
from clusterkit.agent.hangs import Hangs, Steps, longest, steps_of
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.protocol import Document
from clusterkit.agent.stragglers import Stragglers
from clusterkit.agent.usage import Usage
from clusterkit.agent.worker import Worker

_HAS_GPUS = host.has_gpus()
"""A main thread that waits for a GPU spins: its context switches do not show that it waits, but
NCCL's counters do."""


class Watch:
    """Watches one node's ranks, in a thread of its own from the first `begin` on.

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
        on_order: Callable[[messages.Order], None],
    ) -> None:
        self._worker = Worker(self._run, "detecting hangs and slow ranks", self._warn)
        self.send: Callable[[Document], None] = lambda message: None
        """Sends to node 0, or from there to all others; `node` sets it to its connection's."""
        self._folder, self._log, self._on_order = folder, log, on_order
        self._nproc, self._tagged = options.nproc, options.tagged
        self._usage = Usage(log, self._ranks, options.nodes, self._warn)
        self._messages: queue.SimpleQueue[tuple[int, Document]] = queue.SimpleQueue()
        self._node = int(os.environ.get("NODE_RANK", "0"))  # its rank in this round
        self._coordinates = self._node == 0
        # Both are used on node 0 only.
        self._hangs = Hangs(options.nproc, options.hang_timeout)
        self._stragglers = Stragglers(options.nproc)
        self._places: list[int] = []  # on node 0: the next round's nodes, in the order of ranks
        self._nodes: Sequence[int] = ()  # of this round, in the order of ranks
        self._round_began = 0.0
        self._host_before: host.Sample | None = None  # since a rank of this node is a suspect
        # By process: counters of its main thread's context switches and of NCCL, since when.
        self._switches: dict[int, tuple[bytes, float]] = {}
        self._progress: dict[int, tuple[Document, float]] = {}
        self._past_ranks = 0  # of `NodeLog.ranks`: those of earlier rounds
        self._left: object = None  # what the node's record says of ranks that have ended or wait
        self._reported = False  # whether node 0 knows that a rank of this node waits
        self._query_at = 0.0  # when ranks are queried (again)
        self._pause = 0.0  # between queries that find no rank waiting

    def receive(self, node: int, message: Document) -> None:
        """Take a message of another node, from any thread."""
        self._messages.put((node, {**message, "received": time.time()}))

    def begin(self, node: int, nodes: int) -> None:
        """Begin a round of ``nodes`` nodes, in which this one has the rank ``node``."""
        self._worker.start()
        self._usage.start()
        self._messages.put((node, {"begin": nodes, "past": len(self._log.ranks)}))

    def _warn(self, text: str) -> None:
        self._on_order(messages.Warn(text))

    def _run(self) -> None:
        if self._nodes:  # after a failure: what is known of the round may be half updated
            self._begin(self._node, self._nodes)
        check_at = clock.awake()
        while True:
            try:
                node, message = self._messages.get(timeout=max(0.0, check_at - clock.awake()))
            except queue.Empty:
                check_at = clock.awake() + limits.STILL_LOOK_SECONDS
                self._check_ranks()
                if self._reported:
                    check_at = min(check_at, self._query_at)
            else:
                self._receive(node, message)
            if self._coordinates:
                now = clock.awake()
                for decision in self._hangs.tick(now, self._steps(now)):
                    self._carry_out(decision)
                for decision in self._stragglers.tick(clock.awake()):
                    self._carry_out(decision)

    def _receive(self, node: int, message: Document) -> None:
        match message:
            case {"begin": nodes, "past": past}:
                self._past_ranks = past
                self._begin(node, self._places or range(nodes))
            case {"places": places}:
                self._places = places
            case {"examine": ranks}:
                self._host_before = self._sample_host(ranks)
            case {"hang": reason, "node": self._node}:
                self._on_order(messages.EndHang(self._node, str(reason)))
            case {"query": number}:
                self._report(self._records(), number=number)
            case {"arrivals": number, "until": until}:
                self._send_arrivals(number, until, message)
            case {"causes": _}:
                self._stragglers.receive(node, message)
            case {"records": [], "number": _}:
                self._hangs.resumed(node)
            case {"records": records, "number": number}:
                self._hangs.receive(node, records, int(number))

    def _begin(self, node: int, nodes: Sequence[int]) -> None:
        self._switches, self._progress = {}, {}
        self._reported, self._query_at, self._pause = False, 0.0, 0.0
        self._round_began, self._node, self._host_before = clock.awake(), node, None
        self._nodes = nodes
        self._hangs.begin(nodes)
        self._stragglers.begin(nodes, self._round_began)
        self._on_order(messages.Note("hang"))
        self._on_order(messages.Note("slow"))

    def _carry_out(self, decision: messages.Decision) -> None:
        match decision:
            case messages.QueryRecords(number):
                self.send({"query": number})
                self._report(self._records(), number=number)
            case messages.QueryArrivals(number):
                until: dict[str, int] = {}
                # First: it sets of which collectives the others are to report.
                self._send_arrivals(number, until, {})
                self.send({"arrivals": number, "until": until})
            case messages.ExamineHosts(ranks):
                self.send({"examine": ranks})
                self._host_before = self._sample_host(ranks)
            case messages.EndHang(node, reason) if node != self._node:
                if len(reason) > limits.REASON_LENGTH:
                    reason = f"{reason[: limits.REASON_LENGTH]} ..."
                self.send({"hang": reason, "node": node})
                self._on_order(decision)
            case messages.Note() | messages.EndHang():
                self._on_order(decision)

    def _send_arrivals(self, number: int, until: dict[str, int], query: Document) -> None:
        """Send when this node's ranks entered collectives, and why they may be slow."""
        records = [rank_state.arrivals(rank, self._folder, until) for rank in self._ranks()]
        causes, before = "", self._host_before
        if before is not None:
            self._host_before = self._sample_host(before.waited)
            causes = host.describe(before, self._host_before) if self._host_before else ""
        self._report(
            records, number=number, causes=causes[:1000],
            # For `stragglers.Clock.update`; not on node 0, which has the clock itself.
            asked=query.get("sent"), query_received=query.get("received"), answered=time.time(),
        )  # fmt: skip

    def _report(self, records: Sequence[Document], **fields: object) -> None:
        """Send records to node 0, a few in each message, with the other ``fields``.

        ``number``: of the query that they answer; 0: none.
        """
        for first in range(0, len(records), limits.RANKS_A_LINE) or [0]:
            part = {**fields, "records": records[first : first + limits.RANKS_A_LINE]}
            if self._coordinates:
                self._receive(self._node, part)
            else:
                self.send(part)

    def _sample_host(self, suspects: Collection[int]) -> host.Sample | None:
        """Return a sample of this host, if it has some of these ranks."""
        pids = {each["rank"]: each["pid"] for each in self._ranks() if each["rank"] in suspects}
        return host.sample(pids, os.environ["CLUSTERKIT_RUN_DIR"], _HAS_GPUS) if pids else None

    def _steps(self, now: float) -> Steps:
        lines = list(self._log.output.metrics)
        return steps_of([line for line in lines if line[0] >= self._round_began], now)

    def _ranks(self) -> list[Document]:
        """Return each rank's newest line of ``ranks.jsonl``; none of ranks on other hosts."""
        ranks = [] if self._tagged else self._log.ranks
        return rank_state.newest_of_each(ranks, self._nproc)

    def _records(self, *, place: bool = True) -> list[Document]:
        ranks, now = self._ranks(), clock.awake()
        if _HAS_GPUS:
            self._read_progress(ranks, now)
        nothing: tuple[Document, float] = {}, now
        records = []
        for rank in ranks:
            progress, since = self._progress.get(rank["pid"], nothing)
            moves = rank_state.has_pending(progress) and now - since < limits.STILL_LOOK_SECONDS / 2
            records.append(rank_state.record(rank, self._folder, place=place, moves=moves))
        return records

    def _read_progress(self, ranks: Sequence[Document], now: float) -> None:
        before, self._progress = self._progress, {}
        for rank in ranks:
            new = rank_state.nccl_progress(rank, self._folder)
            known, since = before.get(rank["pid"], ({}, now))
            self._progress[rank["pid"]] = new, since if new == known else now

    def _check_ranks(self) -> None:
        """Report when a rank of this node has been waiting for another one, or resumes."""
        now = clock.awake()
        ranks, before, self._switches = self._ranks(), self._switches, {}
        for rank in ranks:
            pid, switches = rank["pid"], rank_state.context_switches(rank["pid"])
            same = pid in before and before[pid][0] == switches
            self._switches[pid] = before[pid] if same else (switches, now)
        self._check_left(ranks, now)
        still = max((now - since for _, since in self._switches.values()), default=0.0)
        if _HAS_GPUS:
            self._read_progress(ranks, now)
            for progress, since in self._progress.values():
                still = max(still, now - since if rank_state.has_pending(progress) else 0.0)
        moved = still < limits.STILL_SECONDS - limits.STILL_LOOK_SECONDS
        if moved and not self._reported:
            self._query_at = self._pause = 0.0
        elif now >= self._query_at or (self._reported and moved):
            self._query_ranks(now)

    def _check_left(self, ranks: Sequence[Document], now: float) -> None:
        """Record which ranks have ended, and which neither run nor end, if others have ended here
        or may have on other nodes; and what was recorded is so no longer."""
        ended: dict[int, float] = {}
        idle: dict[int, float] = {}
        past = {rank["pid"] for rank in self._log.ranks[: self._past_ranks]}
        for rank in ranks:
            switches, since = self._switches[rank["pid"]]
            since = max(since, self._usage.busy_at.get(rank["pid"], since))
            if now - since >= limits.LEFT_SECONDS and rank["pid"] not in past:
                (idle if switches else ended)[rank["rank"]] = since
        if not ended and len(self._nodes) == 1:
            idle = {}
        if (left := (sorted(ended), idle)) == (self._left or ([], {})):
            return
        self._left = left
        at = {each["rank"]: each for each in self._records()} if idle else {}
        self._on_order(messages.Left(sorted(ended), [
            {"rank": rank, "since": time.time() - (now - since),
             "at": at[rank].get("at"), "state": at[rank].get("state", "")}
            for rank, since in idle.items() if rank in at
        ]))  # fmt: skip

    def _query_ranks(self, now: float) -> None:
        records = self._records(place=False)
        waited = longest(records)
        if waited > limits.STILL_SECONDS / 2:
            self._reported = True
            early = limits.STILL_SECONDS + 0.1 - waited  # until node 0 acts on it
            again = max(limits.STILL_AGAIN_SECONDS, waited / 10)
            self._query_at = now + (early if early > 0 else again)
            self._report(records, number=0)
            return
        if self._reported:
            self._reported = False
            self._report([], number=0)
        # It waits for something else than a rank, or will for one.
        self._pause = min(max(2 * self._pause, limits.STILL_SECONDS), limits.STILL_ALONE_SECONDS)
        self._query_at = now + self._pause
