"""A run as it progresses: for `clusterkit top`, `web`, and the progress display of submit.

    live = LiveRun(find_run("last"))
    while True:
        news = live.poll()                      # reads what is new since the last call
        if METRICS in news:
            draw(live.reported.series["loss"].thinned(300))
        pause(0.0 if live.behind else 0.2)      # a long log is read in pieces

Everything is read from the run's folder, which the supervisor updates: no port on a node, no
daemon, no network. `poll` never blocks; `refresh` does (it asks the backend, for a run without a
supervisor: `LiveRun.stale`), so call it in a thread. Of many nodes each `poll` reads only a few
logs; a `RankView` reads its own when it is used. Memory is bounded: the last line of each rank,
`series.MOST_POINTS` of each metric. For more lines pass `LiveRun.log_path` to `logs.page`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from clusterkit.lifecycle import control
from clusterkit.output.series import MOST_METRICS, Series
from clusterkit.plan import Plan
from clusterkit.run.find import all_runs
from clusterkit.run.folder import Event, RunFolder
from clusterkit.run.logs import HEAD, MARK, GrowingFile, LogLine, is_number, marked, parse_lines
from clusterkit.run.status import NodeStatus, RunStatus, State

STATUS, EVENTS, RANKS, METRICS = "status", "events", "ranks", "metrics"
"""Kinds of changes that `LiveRun.poll` returns."""
MOST_EVENTS = 1000
BUDGET = 4 << 20
"""Bytes of node 0's log that one `poll` reads at most."""
_TAIL = 1 << 16
"""Bytes at the end of a log's new part that are searched for each rank's last line."""
_WINDOW = 20
LOGS_PER_POLL = 16
"""Logs of other nodes that one `poll` reads, round-robin."""
_MARK = f" {MARK}".encode()
_MISSING = re.compile(
    r"(ranks? [^;]*?) ha(?:s|ve) (?:not entered|not come to|queued) [^;]*?, "
    r"which (ranks? .*?) waits? in"
)
_WAITING = re.compile(r"(ranks? [^;]*?) waits? in ")
_SPAN = re.compile(r"([0-9]+)(?:-([0-9]+))?")


class Usage(NamedTuple):
    """Resources that a rank uses, as measured by its agent (`clusterkit.agent.usage`)."""

    cpus: float | None
    """Busy CPUs over the last seconds; None: not known yet."""
    memory: int
    """Bytes."""
    gpu: int | None = None
    """GPU utilization in percent; None: it has no GPU."""
    gpu_memory: int | None = None
    """Used GPU memory in bytes."""


class Reported:
    """What a program has reported by marked lines (`clusterkit.run.logs`) so far."""

    def __init__(self) -> None:
        self.steps: int | None = None
        """Total number of steps; None: not reported."""
        self.first_step = 0
        self.step = 0
        self.series: dict[str, Series] = {}
        """By the metric's name: ``loss``, ``tokens_per_second``, ``step_seconds``, ..."""
        self.phases: dict[str, float] = {}
        self.program_started_at: float | None = None
        self.optimizers: dict[int, tuple[int, int]] = {}

    def take(self, event: dict[str, Any]) -> None:
        """Add the object of a marked line. Values that are not numbers are ignored, as any program
        can print marked lines."""
        number = {key: value for key, value in event.items() if is_number(value)}
        kind = event["event"]
        if kind == "metrics" and "step" in number:
            step = number.pop("step")
            self.step = int(step)
            for key, value in number.items():
                series = self.series.get(key)
                if series is None and len(self.series) < MOST_METRICS:
                    series = self.series[key] = Series()
                if series is not None:
                    series.add(step, value)
        elif kind == "start":
            steps = number.get("steps")
            self.steps = None if steps is None else int(steps)
            self.first_step = self.step = int(number.get("first_step", 0))
        elif kind == "phase" and "seconds" in number:
            if event.get("name") == "imports":
                self.program_started_at = number.get("started_at")
            self.phases[str(event.get("name"))] = number["seconds"]
        elif kind == "optimizer" and {"rank", "parameters", "total"} <= number.keys():
            self.optimizers[number["rank"]] = (number["parameters"], number["total"])

    def value(self, key: str) -> float | None:
        """Return a metric's newest value; None: not reported."""
        found = self.series.get(key)
        return None if found is None else found.last

    def speed(self, key: str = "tokens_per_second") -> float | None:
        """Return a metric's median over the newest steps; None: not reported."""
        found = self.series.get(key)
        return statistics.median(found.values[-_WINDOW:]) if found else None

    def time_left(self) -> float | None:
        """Estimate the seconds to the last step; None: the program does not report enough."""
        seconds = self.speed("step_seconds")
        if seconds is None or not self.steps:
            return None
        return seconds * max(0, self.steps - self.step)


class RankView:
    """The output of one rank, or of a node's launcher (``rank`` None).

    Its properties first read what is new in the node's log.
    """

    __slots__ = ("_last", "_run", "_step", "_step_seconds", "_text", "node", "rank")

    def __init__(self, run: LiveRun, node: int, rank: int | None) -> None:
        self._run, self.node, self.rank = run, node, rank
        self._step: int | None = None
        self._step_seconds: float | None = None
        self._last = self._text = b""

    def add_output(self, line: bytes, text: bytes | None) -> None:
        """Store the newest line of the log, and the newest that is neither marked nor empty."""
        self._last, self._text = line, text or self._text

    def add_metrics(self, event: dict[str, Any]) -> None:
        """Store the step of a marked line."""
        if is_number(event.get("step")):
            self._step = int(event["step"])
        if is_number(event.get("step_seconds")):
            self._step_seconds = float(event["step_seconds"])

    @property
    def step(self) -> int | None:
        """The last step that this rank reported; in most programs only rank 0 reports."""
        self._run.catch_up(self.node)
        return self._step

    @property
    def step_seconds(self) -> float | None:
        """How long that step took."""
        self._run.catch_up(self.node)
        return self._step_seconds

    @property
    def usage(self) -> Usage | None:
        """What its process uses; None: it does not run, or its agent has not reported it."""
        return self._run.usages(self.node).get(str(self.rank))

    @property
    def last(self) -> LogLine | None:
        """The last line that it printed, other than marked lines."""
        self._run.catch_up(self.node)
        return next(parse_lines(self._text[:4096], self.node), None) if self._text else None

    @property
    def printed_at(self) -> float | None:
        """When it last printed anything, Unix time."""
        self._run.catch_up(self.node)
        return next(parse_lines(self._last[:64], self.node)).time if self._last else None


class LiveRun:
    """One run, as of the last `poll` of its folder."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.plan: Plan | None = None
        """None: not written yet, or damaged."""
        self.status = RunStatus.unknown(folder.run_id, State.PENDING)
        self.nodes: dict[int, NodeStatus] = {}
        """The nodes of ``status``."""
        self.stale = False
        """Whether no supervisor updates the record: call `refresh` until the state is final."""
        self.behind = False
        """Whether there is more to read: poll again at once."""
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.reported = Reported()
        self.attempt = 0
        """The attempt whose log is read; earlier ones are read first, for their metrics."""
        self.ranks: dict[tuple[int, int], RankView] = {}
        """By node and rank, of the newest attempt: those of the plan, or with output."""
        self.launchers: dict[int, RankView] = {}
        """By node."""
        self._events = GrowingFile(folder.file("events.jsonl"))
        self._logs: dict[int, GrowingFile] = {}
        self._usages: dict[int, tuple[float, dict[str, Usage]]] = {}
        self._reporter: tuple[int, int] | None = None
        self._ranks_per_node = 0  # 0: not known
        self._unread: set[int] = set()  # nodes whose log was not read since the last poll
        self._next_log = 0
        self._refreshed: RunStatus | None = None

    def poll(self) -> set[str]:
        """Read what is new. Return which of STATUS, EVENTS, RANKS, METRICS have changed."""
        news = self._poll_status()
        if lines := self._events.read(_TAIL):
            news.add(EVENTS)
            for line in lines.splitlines():
                try:
                    self.events.append(msgspec.json.decode(line, type=Event))
                except msgspec.MsgspecError:
                    continue
        self._unread = set(self._logs)
        # In this order: the attempt of the status has begun, so its predecessor's log is complete.
        self.behind = self._read(0, news)
        while not self.behind and self.attempt < self.newest:
            self._begin(self.attempt + 1)
            news.add(RANKS)
            self.behind = self._read(0, news)
        if not self.behind and (others := len(self._logs) - 1) > 0:
            count = min(others, LOGS_PER_POLL)
            nodes = {1 + (self._next_log + more) % others for more in range(count)}
            self._next_log += LOGS_PER_POLL
            for node in nodes | ({self._reporter[0]} if self._reporter else set()):
                self.catch_up(node, news)
        return news

    @property
    def newest(self) -> int:
        """The newest attempt."""
        return max(1, self.status.attempt)

    def catch_up(self, node: int, news: set[str] | None = None) -> None:
        """Read what is new in a node's log, once per poll."""
        if node in self._unread and not self.behind:
            self._read(node, set() if news is None else news)

    def refresh(self, connections: control.Connections | None = None) -> None:
        """Ask the backend for the status, for the next `poll`. Blocks."""
        self._refreshed = control.reconcile(self.folder, connections)

    def _poll_status(self) -> set[str]:
        found = control.current(self.folder)
        stale = found is None
        if not stale:
            self._refreshed = None
        elif (found := self._refreshed) is None:
            found = self.folder.saved_status()
        found = found or self.status
        if self.plan is None:
            self.plan = self.folder.maybe_json("plan.json", Plan)
        if found == self.status and stale == self.stale:
            return set()
        if found.attempt == self.attempt:
            self._open(len(found.nodes))  # there may be more than in the plan
        self.status, self.stale = found, stale
        self.nodes = {node.node: node for node in found.nodes}
        return {STATUS}

    def state(self, node: int, rank: int) -> State:
        """Return a rank's state: FAILED for the one that failed first, its node's for others."""
        failure = self.status.failure
        if failure is not None and (failure.node, failure.rank) == (node, rank):
            return State.FAILED
        status = self.nodes.get(node)
        return self.status.state if status is None else status.state

    def log_path(self, node: int) -> Path:
        """Return the path of the node's log in the attempt that is read now."""
        return self.folder.node_dir(self.attempt, node) / "log"

    def usages(self, node: int) -> dict[str, Usage]:
        """Return what the ranks of a node use, by rank. The file is read once a second at most."""
        status = self.nodes.get(node)
        if self.status.state.final or status is None or status.state is not State.RUNNING:
            return {}
        at, found = self._usages.get(node, (-math.inf, {}))
        if time.monotonic() >= at + 1.0:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                data = self.log_path(node).with_name("usage.json").read_bytes()
                found = msgspec.json.decode(data, type=dict[str, Usage])
            self._usages[node] = time.monotonic(), found
        return found

    # -- logs --------------------------------------------------------------

    def _begin(self, attempt: int) -> None:
        self.attempt, newest = attempt, self.newest
        self.ranks, self.launchers, self._logs = {}, {}, {}
        self._usages = {}
        nodes = len(self.status.nodes) or (self.plan.nodes if self.plan else 1)
        self._open(nodes if attempt == newest else 1)
        self._ranks_per_node = 0
        if self.plan is not None and attempt == newest:
            for rank in range(self.plan.world_size):
                if (node := self.plan.node_of(rank)) is not None and node < nodes:
                    self.ranks[node, rank] = RankView(self, node, rank)
                    self._ranks_per_node = self.plan.topology["nproc_per_node"]

    def _open(self, nodes: int) -> None:
        for node in range(len(self._logs), nodes):
            self._logs[node] = GrowingFile(self.log_path(node))
            self._unread.add(node)

    def _read(self, node: int, news: set[str]) -> bool:
        """Read what is new in a node's log. Return whether there is more."""
        self._unread.discard(node)
        log = self._logs.get(node)
        if log is None:
            return False
        data = log.read(BUDGET) if node == 0 else log.read(_TAIL, skip=True)
        if not data:
            return False
        if _MARK in data:
            for line in marked(data, node):
                event = line.event
                if event is not None and self._is_reporter(node, line.rank or 0, event):
                    self.reported.take(event)
                    news.add(METRICS)
        if self.attempt == self.newest:
            self._read_last_lines(node, data)
            news.add(RANKS)
        return node == 0 and len(data) > BUDGET // 2 and log.more

    def _is_reporter(self, node: int, rank: int, event: dict[str, Any]) -> bool:
        """Return whether what this rank reports counts as the run's."""
        if event["event"] == "metrics":
            self._rank(node, rank).add_metrics(event)
            # Where every rank reports, one is enough: the first is on node 0, which is read first.
            self._reporter = self._reporter or (node, rank)
            return self._reporter == (node, rank)
        return True

    def _read_last_lines(self, node: int, data: bytes) -> None:
        # Backwards, until every rank was found: where most ranks print, a few lines are enough.
        texts: dict[bytes, bytes] = {}
        last: dict[bytes, bytes] = {}
        # The first line of a part may have lost its beginning.
        lines = data[-_TAIL:].split(b"\n")[len(data) > _TAIL :]
        for line in reversed(lines):
            words = line.split(b" ", 2)
            if len(words) > 2:
                last.setdefault(words[1], line)
                if words[2] and not words[2].isspace() and not words[2].startswith(_MARK[1:]):
                    texts.setdefault(words[1], line)
                    if len(texts) - (b"-" in texts) == self._ranks_per_node:
                        break
        if b"-" not in last and (at := data.rfind(b"Z - ", max(0, len(data) - _TAIL))) >= 0:
            last[b"-"] = data[data.rfind(b"\n", 0, at) + 1 : data.find(b"\n", at)]
            texts[b"-"] = last[b"-"]
        for name, line in last.items():
            if HEAD.match(line) is None:
                continue
            if name == b"-":
                view = self.launchers.setdefault(node, RankView(self, node, None))
            else:
                view = self._rank(node, int(name))
            view.add_output(line, texts.get(name))

    def _rank(self, node: int, rank: int) -> RankView:
        view = self.ranks.get((node, rank))
        if view is None:
            view = self.ranks[node, rank] = RankView(self, node, rank)
        return view


class Standstill(NamedTuple):
    """A hang of a run, now or when it failed: which ranks wait for which."""

    text: str
    missing: frozenset[int] = frozenset()
    """Ranks that did not enter a collective."""
    waiting: frozenset[int] = frozenset()
    """Ranks that wait in it."""


def standstill(status: RunStatus) -> Standstill | None:
    """Return the hang that the agents found (`clusterkit.agent.hangs`); None: there is none."""
    text = next((node.hang for node in status.nodes if node.hang), None)
    if text is None and status.failure is not None:
        head, found, rest = status.failure.cause.partition("hang: ")
        text = rest if found and not head else None
    if text is None:
        return None
    if (match := _MISSING.match(text)) is not None:
        return Standstill(text, _numbers(match[1]), _numbers(match[2]))
    if (match := _WAITING.match(text)) is not None:
        return Standstill(text, waiting=_numbers(match[1]))
    return Standstill(text)


def _numbers(words: str) -> frozenset[int]:
    """Return 0, 1, 2, 5 for ``ranks 0-2 and 5 on node 1``."""
    spans = _SPAN.findall(words.partition(" on node ")[0])
    return frozenset(rank for low, high in spans for rank in range(int(low), int(high or low) + 1))


class LiveRuns:
    """The status of all runs; reads only files that have changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, RunStatus]] = {}

    def poll(self) -> list[RunStatus]:
        """Return the recorded status of each run, newest first; UNKNOWN if it may be outdated."""
        found = {}
        for folder in all_runs():
            changed: object = None
            with contextlib.suppress(OSError):
                about = os.stat(folder.file("state.json"))
                changed = about.st_mtime_ns, about.st_size, about.st_ino
            before = self._known.get(folder.run_id)
            if before is None or before[0] != changed or not before[1].state.final:
                before = changed, _recorded(folder)
            found[folder.run_id] = before
        self._known = found
        return [status for _, status in found.values()]


def _recorded(folder: RunFolder) -> RunStatus:
    if (found := control.current(folder)) is not None:
        return found
    saved = folder.saved_status() or RunStatus.unknown(folder.run_id)
    remark = (
        f"it has no supervisor: `clusterkit status {folder.run_id}` asks the backend for its state"
    )
    return msgspec.structs.replace(saved, state=State.UNKNOWN, remark=saved.remark or remark)
