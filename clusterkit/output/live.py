"""A run while it goes on, for all that show one: `clusterkit top`, `web`, and what follows submit.

    live = LiveRun(runs.find("last"))
    while True:
        news = live.poll()                      # reads what is new since the last call, and no more
        if METRICS in news:
            draw(live.reported.series["loss"].thinned(300))
        pause(0.0 if live.behind else 0.2)      # a long log is read in pieces

Everything comes from the run's folder, which the supervisor keeps up to date: no port on a node, no
daemon, no network. `poll` never waits; `refresh` does (it asks the backend, for a run whose
supervisor is gone: `LiveRun.stale`) and belongs into a thread. Of many nodes only a few logs are
read at each `poll`, and those whose ranks somebody asks about (`RankView`). Memory is bounded: of
each rank the last line is kept, of each metric `series.MOST_POINTS`. `logs.page` reads a rank's
newest lines, those that come and those that hold a word; it is given `LiveRun.log_path`.
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

from clusterkit.output.logs import HEAD, MARK, GrowingFile, LogLine, is_number, marked, parse_lines
from clusterkit.output.series import MOST_METRICS, Series
from clusterkit.plan import Plan
from clusterkit.run import control
from clusterkit.run.folder import Event, RunFolder, all_runs
from clusterkit.run.status import NodeStatus, RunStatus, State

STATUS, EVENTS, RANKS, METRICS = "status", "events", "ranks", "metrics"
"""What `LiveRun.poll` has found new."""
MOST_EVENTS = 1000
BUDGET = 4 << 20
"""Bytes of node 0's log that one `poll` reads at most."""
_LOOK = 1 << 16
"""Bytes at the end of what a log has new in which a rank's last line is looked for."""
_WINDOW = 20
AT_ONCE = 16
"""Logs of other nodes that one `poll` reads, in turn."""
_MARK = f" {MARK}".encode()
_MISSING = re.compile(
    r"(ranks? [^;]*?) ha(?:s|ve) not come to [^;]*?, which (ranks? .*?) waits? in"
)
_WAITING = re.compile(r"(ranks? [^;]*?) waits? in ")
_SPAN = re.compile(r"([0-9]+)(?:-([0-9]+))?")


class Usage(NamedTuple):
    """What a rank uses, as its agent sees it (`clusterkit.agent.usage`)."""

    cpus: float | None
    """That it has kept busy for the last seconds; None: it is not known yet."""
    memory: int
    """Bytes."""
    gpu: int | None = None
    """Percentage of the time that something ran on its GPU; None: it has none."""
    gpu_memory: int | None = None
    """Bytes of it that are taken."""


class Reported:
    """What a program has told by marked lines (`clusterkit.output.logs`) so far."""

    def __init__(self) -> None:
        self.steps: int | None = None
        """How many there will be, if it says so."""
        self.first_step = 0
        self.step = 0
        self.series: dict[str, Series] = {}
        """By the metric's name: ``loss``, ``tokens_per_second``, ``step_seconds``, ..."""
        self.phases: dict[str, float] = {}
        self.program_started_at: float | None = None
        self.optimizers: dict[int, tuple[int, int]] = {}

    def take(self, event: dict[str, Any]) -> None:
        """One marked line. Any program may print them: what is not a number counts as missing."""
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
        """A metric's newest value."""
        found = self.series.get(key)
        return None if found is None else found.last

    def speed(self, key: str = "tokens_per_second") -> float | None:
        """A metric's median over the newest steps."""
        found = self.series.get(key)
        return statistics.median(found.values[-_WINDOW:]) if found else None

    def time_left(self) -> float | None:
        """Seconds to the last step, as long as the newest; None: the program does not say."""
        pace = self.speed("step_seconds")
        return pace * max(0, self.steps - self.step) if pace is not None and self.steps else None


class RankView:
    """One rank, or what a node's launcher says (``rank`` None): asking it reads what is new."""

    __slots__ = ("_any", "_run", "_step", "_step_seconds", "_text", "node", "rank")

    def __init__(self, run: LiveRun, node: int, rank: int | None) -> None:
        self._run, self.node, self.rank = run, node, rank
        self._step: int | None = None
        self._step_seconds: float | None = None
        self._any = self._text = b""

    def heard(self, line: bytes, text: bytes | None) -> None:
        """The newest line of the log, and the newest that is neither marked nor empty."""
        self._any, self._text = line, text or self._text

    def reports(self, event: dict[str, Any]) -> None:
        """A step."""
        if is_number(event.get("step")):
            self._step = int(event["step"])
        if is_number(event.get("step_seconds")):
            self._step_seconds = float(event["step_seconds"])

    @property
    def step(self) -> int | None:
        """That it has reported itself; most programs have rank 0 alone report."""
        self._run.catch_up(self.node)
        return self._step

    @property
    def step_seconds(self) -> float | None:
        """How long it took, as reported."""
        self._run.catch_up(self.node)
        return self._step_seconds

    @property
    def usage(self) -> Usage | None:
        """What its process uses; None: it does not run, or its agent has not told."""
        return self._run.usages(self.node).get(str(self.rank))

    @property
    def last(self) -> LogLine | None:
        """What it printed last, other than marked lines."""
        self._run.catch_up(self.node)
        return next(parse_lines(self._text[:4096], self.node), None) if self._text else None

    @property
    def heard_at(self) -> float | None:
        """When it printed anything last."""
        self._run.catch_up(self.node)
        return next(parse_lines(self._any[:64], self.node)).time if self._any else None


class LiveRun:
    """One run, as far as its folder tells by the last `poll`."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.plan: Plan | None = None
        """None: it is not written yet, or damaged."""
        self.status = RunStatus(
            run=folder.run_id, job="?", cluster="?", backend="?", state=State.PENDING
        )
        self.nodes: dict[int, NodeStatus] = {}
        """Those of ``status``."""
        self.stale = False
        """Nobody keeps the record up to date: only `refresh` tells how the run is. As long as the
        state is not final, that is worth asking again."""
        self.behind = False
        """There is more to read: poll again at once."""
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.reported = Reported()
        self.attempt = 0
        """Whose log is read; those before the newest are read for their metrics."""
        self.ranks: dict[tuple[int, int], RankView] = {}
        """By node and rank, of the newest attempt: those that the plan knows, or that spoke."""
        self.launchers: dict[int, RankView] = {}
        """By node."""
        self._events = GrowingFile(folder.file("events.jsonl"))
        self._logs: dict[int, GrowingFile] = {}
        self._usages: dict[int, tuple[float, dict[str, Usage]]] = {}
        self._reporter: tuple[int, int] | None = None
        self._placed = 0  # ranks that the plan puts on each node; 0: it does not know
        self._polls = 0
        self._read_at: dict[int, int] = {}  # in which poll a node's log was read last
        self._turn = 0
        self._refreshed: RunStatus | None = None

    def poll(self) -> set[str]:
        """Read what is new; which of STATUS, EVENTS, RANKS, METRICS have changed."""
        news = self._poll_status()
        if lines := self._events.read(_LOOK):
            news.add(EVENTS)
            for line in lines.splitlines():
                try:
                    self.events.append(msgspec.json.decode(line, type=Event))
                except msgspec.MsgspecError:
                    continue
        self._polls += 1
        # In this order: the attempt that status names has begun, so its predecessor's log is whole.
        self.behind = self._read(0, news)
        while not self.behind and self.attempt < self.newest:
            self._begin(self.attempt + 1)
            news.add(RANKS)
            self.behind = self._read(0, news)
        if not self.behind and (others := len(self._logs) - 1) > 0:
            # A few in turn: whoever wants to know of a rank reads its node's.
            nodes = {1 + (self._turn + more) % others for more in range(min(others, AT_ONCE))}
            self._turn += AT_ONCE
            for node in nodes | ({self._reporter[0]} if self._reporter else set()):
                self.catch_up(node, news)
        return news

    @property
    def newest(self) -> int:
        """The newest attempt."""
        return max(1, self.status.attempt)

    def catch_up(self, node: int, news: set[str] | None = None) -> None:
        """Read what a node's log has new, once in each poll."""
        if self._read_at.get(node) != self._polls and not self.behind:
            self._read(node, set() if news is None else news)

    def refresh(self, connections: control.Connections | None = None) -> None:
        """Ask the backend how the run is, for the next `poll`: takes its time."""
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
        if len(found.nodes) > len(self._logs):  # more nodes than the plan gave have come
            self._open(found.attempt if self.attempt else 0, len(found.nodes))
        self.status, self.stale = found, stale
        self.nodes = {node.node: node for node in found.nodes}
        return {STATUS}

    def state(self, node: int, rank: int) -> State:
        """A rank's: its node's, but for the one that failed first."""
        failure = self.status.failure
        if failure is not None and (failure.node, failure.rank) == (node, rank):
            return State.FAILED
        one = self.nodes.get(node)
        return self.status.state if one is None else one.state

    def log_path(self, node: int) -> Path:
        """The node's log of the attempt that is read now."""
        return self.folder.node_dir(self.attempt, node) / "log"

    def usages(self, node: int) -> dict[str, Usage]:
        """What the ranks of a node use, by rank; asked each time, and read once a second."""
        one = self.nodes.get(node)
        if self.status.state.final or one is None or one.state is not State.RUNNING:
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
        """Go on with the next attempt."""
        self.attempt, newest = attempt, self.newest
        self.ranks, self.launchers, self._logs = {}, {}, {}
        self._usages = {}
        nodes = len(self.status.nodes) or (self.plan.nodes if self.plan else 1)
        self._open(attempt, nodes if attempt == newest else 1)
        self._placed = 0
        if self.plan is not None and attempt == newest:
            for rank in range(self.plan.world_size):
                if (node := self.plan.node_of(rank)) is not None and node < nodes:
                    self.ranks[node, rank] = RankView(self, node, rank)
                    self._placed = self.plan.topology["nproc_per_node"]

    def _open(self, attempt: int, nodes: int) -> None:
        if attempt and attempt == self.attempt:
            for node in range(len(self._logs), nodes):
                self._logs[node] = GrowingFile(self.log_path(node))

    def _read(self, node: int, news: set[str]) -> bool:
        """Take what a node's log has new; whether there is more."""
        self._read_at[node] = self._polls
        log = self._logs.get(node)
        if log is None:
            return False
        data = log.read(BUDGET) if node == 0 else log.read(_LOOK, skip=True)
        if not data:
            return False
        if _MARK in data:
            for line in marked(data, node):
                event = line.event
                if event is not None and self._counts(node, line.rank or 0, event):
                    self.reported.take(event)
                    news.add(METRICS)
        if self.attempt == self.newest:
            self._take_last(node, data)
            news.add(RANKS)
        return node == 0 and len(data) > BUDGET // 2 and log.more

    def _counts(self, node: int, rank: int, event: dict[str, Any]) -> bool:
        """Whether what a rank reports is what the run does."""
        if event["event"] == "metrics":
            self._rank(node, rank).reports(event)
            # Where every rank reports, one is enough: the first is on node 0, which is read first.
            self._reporter = self._reporter or (node, rank)
            return self._reporter == (node, rank)
        return True

    def _take_last(self, node: int, data: bytes) -> None:
        """Who said what last, from the end: where most ranks talk, a few lines tell of all."""
        texts: dict[bytes, bytes] = {}
        every: dict[bytes, bytes] = {}
        # The first may have lost its beginning; that of all data has not.
        lines = data[-_LOOK:].split(b"\n")[len(data) > _LOOK :]
        for line in reversed(lines):
            words = line.split(b" ", 2)
            if len(words) > 2:
                every.setdefault(words[1], line)
                if words[2] and not words[2].isspace() and not words[2].startswith(_MARK[1:]):
                    texts.setdefault(words[1], line)
                    if len(texts) - (b"-" in texts) == self._placed:
                        break
        if b"-" not in every and (at := data.rfind(b"Z - ", max(0, len(data) - _LOOK))) >= 0:
            every[b"-"] = data[data.rfind(b"\n", 0, at) + 1 : data.find(b"\n", at)]
            texts[b"-"] = every[b"-"]
        for name, line in every.items():
            if HEAD.match(line) is None:
                continue
            if name == b"-":
                view = self.launchers.setdefault(node, RankView(self, node, None))
            else:
                view = self._rank(node, int(name))
            view.heard(line, texts.get(name))

    def _rank(self, node: int, rank: int) -> RankView:
        view = self.ranks.get((node, rank))
        if view is None:
            view = self.ranks[node, rank] = RankView(self, node, rank)
        return view


class Standstill(NamedTuple):
    """Why nothing goes on, or did when the run failed: who waits for whom."""

    text: str
    missing: frozenset[int] = frozenset()
    """Ranks that did not come to a collective."""
    waiting: frozenset[int] = frozenset()
    """Ranks that wait in it."""


def standstill(status: RunStatus) -> Standstill | None:
    """What the agents have found (`clusterkit.agent.hangs`); None: the ranks go on."""
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
    """Of ``ranks 0-2 and 5 on node 1``: 0, 1, 2, 5."""
    spans = _SPAN.findall(words.partition(" on node ")[0])
    return frozenset(rank for low, high in spans for rank in range(int(low), int(high or low) + 1))


class LiveRuns:
    """All runs; what has not changed is not read again."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, RunStatus]] = {}

    def poll(self) -> list[RunStatus]:
        """Their states on record, newest first; where nobody keeps that up to date, UNKNOWN."""
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
    saved = folder.saved_status()
    if saved is None:
        saved = RunStatus(run=folder.run_id, job="?", cluster="?", backend="?", state=State.UNKNOWN)
    remark = "nobody watches over it: `clusterkit status` asks how it is"
    return msgspec.structs.replace(saved, state=State.UNKNOWN, remark=saved.remark or remark)
