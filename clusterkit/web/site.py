"""What the page of `clusterkit web` asks for, as functions that give JSON documents.

Several browsers may ask at once, each in a thread of its own. Of every run that somebody looks at
there is one `LiveRun`, whose file positions and numbers all of them share.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from clusterkit.errors import RunFolderError, RunNotFound
from clusterkit.files import write_atomic
from clusterkit.output.live import LiveRun, LiveRuns, RankView, standstill
from clusterkit.output.prometheus import Reported, reported
from clusterkit.output.series import Series
from clusterkit.run import control
from clusterkit.run import folder as run_folder
from clusterkit.ui.formatting import printable, remark_lines
from clusterkit.web import log_pages, page

READ_SECONDS = 0.25
"""That one question reads a log which is long and new to us; the page asks again."""
REFRESH_SECONDS = 5.0
"""Between two questions to a cluster how a run is that nobody watches over."""
LISTING_SECONDS = 2.0
MOST_POINTS = 20_000
REPORT_POINTS = 4000
REPORT_LINES = 20_000
"""Of the logs of a report, divided among its nodes."""
_LAST_SHOWN = 200


class Watched:
    """A run that somebody looks at."""

    def __init__(self, folder: run_folder.RunFolder) -> None:
        self.live = LiveRun(folder)
        self.news: Counter[str] = Counter()
        """How often each kind of thing has been new."""
        self._lock = threading.Lock()
        self._refreshed = 0.0

    @contextmanager
    def fresh(self, seconds: float = READ_SECONDS) -> Iterator[LiveRun]:
        """The run as it is now, while nobody else reads on."""
        with self._lock:
            end = time.monotonic() + seconds
            while True:
                self.news.update(self.live.poll())
                if not self.live.behind or time.monotonic() > end:
                    break
            if self.live.stale and time.monotonic() > self._refreshed + REFRESH_SECONDS:
                self._refreshed = time.monotonic()
                threading.Thread(target=self._refresh, daemon=True).start()
            yield self.live

    def _refresh(self) -> None:
        self.live.refresh()  # without the lock: it may log in to every host
        self.news.update(["status"])


class Site:
    """All runs of this machine."""

    def __init__(self) -> None:
        self._watched: dict[str, Watched] = {}
        self._listing = LiveRuns()
        self._lock = threading.Lock()

    def watched(self, run: str) -> Watched:
        """A run, which is watched from now on.

        Raises:
            RunNotFound: there is none of this id.
        """
        with self._lock:
            found = self._watched.get(run)
            if found is None or not found.live.folder.path.is_dir():
                folder = run_folder.find(run)
                if folder.run_id != run:
                    raise RunNotFound(f"run {run!r} is unknown")
                found = self._watched[run] = Watched(folder)
            return found

    # -- runs --------------------------------------------------------------

    def runs(self) -> list[dict[str, Any]]:
        """Every run, newest first, in a few words."""
        with self._lock:
            found = self._listing.poll()
        return [
            {
                "run": status.run, "job": status.job, "cluster": status.cluster,
                "state": status.state, "started_at": status.started_at,
            }
            for status in found
        ]  # fmt: skip

    def run(self, run: str) -> dict[str, Any]:
        """All that fits on a screen of one run."""
        with self.watched(run).fresh() as live:
            status, reported, plan = live.status, live.reported, live.plan
            document: dict[str, Any] = msgspec.to_builtins(status)
            stands = standstill(status)
            views = sorted(
                [*live.launchers.values(), *live.ranks.values()],
                key=lambda view: (view.node, -1 if view.rank is None else view.rank),
            )
            document |= {
                "final": status.state.final,
                "now": time.time(),
                "behind": live.behind,
                "shape": {
                    "nodes": plan.nodes if plan else 0,
                    "world_size": plan.world_size if plan else 0,
                },
                "step": reported.step,
                "steps": reported.steps,
                "metrics": [
                    {"name": name, "last": series.last} for name, series in reported.series.items()
                ],
                "ranks": [_rank(live, view) for view in views],
                "events": [msgspec.to_builtins(event) for event in live.events],
                "standstill": stands and {
                    "text": stands.text,
                    "missing": sorted(stands.missing), "waiting": sorted(stands.waiting),
                },
                "notes": [
                    text
                    for text in (status.remark, *remark_lines(status))
                    if text and not (stands and stands.text in text)  # told already
                ],
                "documents": {
                    name: live.folder.maybe_json(f"{name}.json", dict)
                    for name in ("job", "cluster")
                },
            }  # fmt: skip
            failures = [document["failure"], *(each["failure"] for each in document["attempts"])]
            whose = [status.failure, *(each.failure for each in status.attempts)]
        for shown, failure in zip(failures, whose, strict=True):
            if failure is not None:
                shown["who"] = failure.origin
                shown["cause"] = printable(failure.cause, colours=False)
        return document

    def plan(self, run: str) -> dict[str, str]:
        """What its submit was."""
        text = self.watched(run).live.folder.read("plan.txt").decode(errors="replace")
        return {"text": printable(text, colours=False)}

    def cancel(self, run: str) -> Any:
        """End it, with everything it started."""
        status = control.cancel(self.watched(run).live.folder)
        return {"state": status.state, "remark": status.remark}

    # -- numbers -----------------------------------------------------------

    def series(
        self,
        run: str,
        names: Sequence[str],
        most: int = MOST_POINTS,
        low: float | None = None,
        high: float | None = None,
    ) -> dict[str, Any]:
        """Curves between two steps, of at most ``most`` points each."""
        with self.watched(run).fresh() as live:
            found = {
                name: live.reported.series[name] for name in names if name in live.reported.series
            }
            return {
                "series": {
                    name: points(series, max(10, min(most, MOST_POINTS)), low, high)
                    for name, series in found.items()
                },
                "replaced": sum(series.replaced for series in found.values()),
                "behind": live.behind,
            }  # fmt: skip

    def reported(self, names: Iterable[str] = ()) -> list[Reported]:
        """What a scrape gets: these runs; without names, those that go on or were looked at."""
        chosen = list(names)
        if not chosen:
            with self._lock:
                going = [status.run for status in self._listing.poll() if not status.state.final]
                chosen = [*dict.fromkeys([*going, *self._watched])]
        found = []
        for name in chosen:
            with self.watched(name).fresh() as live:
                found.append(reported(live, live.status))
        return found

    # -- logs --------------------------------------------------------------

    def log(self, run: str, attempt: int | None, node: int, **which: Any) -> dict[str, Any]:
        """Lines of a node; ``which``: as for `log_pages.page`."""
        return log_pages.page(self._log(run, attempt, node), **which)

    def line(self, run: str, attempt: int | None, node: int, at: int) -> dict[str, str]:
        """All of one line."""
        return {"text": log_pages.line(self._log(run, attempt, node), at)}

    def _log(self, run: str, attempt: int | None, node: int) -> Path:
        live = self.watched(run).live
        return live.folder.node_dir(attempt or max(1, live.status.attempt), node) / "log"

    # -- reports --------------------------------------------------

    def report(self, names: Sequence[str]) -> dict[str, Any]:
        """What the page asks for of these runs, by the path by which it does.

        Raises:
            RunNotFound: one is not there, or none is named.
        """
        if not names:
            raise RunNotFound("a report is of some run")
        answers: dict[str, Any] = {}
        for name in names:
            with self.watched(name).fresh(math.inf):
                pass
            about = answers[f"/api/runs/{name}"] = self.run(name)
            metrics = [each["name"] for each in about["metrics"]]
            answers[f"/api/runs/{name}/series"] = self.series(name, metrics, REPORT_POINTS)
            try:
                answers[f"/api/runs/{name}/plan"] = self.plan(name)
            except RunFolderError as error:
                answers[f"/api/runs/{name}/plan"] = {"text": error.message}
            count = max(1, len(about["nodes"]), about["shape"]["nodes"])
            most = max(20, REPORT_LINES // count // len(names))
            answers[f"/api/runs/{name}/log"] = {
                str(node): self._last_lines(name, node, most) for node in range(count)
            }
        known = {status["run"]: status for status in self.runs()}
        answers["/api/runs"] = [known[name] for name in names]
        return answers

    def _last_lines(self, run: str, node: int, most: int) -> list[dict[str, Any]]:
        path = self._log(run, None, node)
        lines: list[dict[str, Any]] = []
        before: int | None = None
        while before != 0 and len(lines) < most:
            found = log_pages.page(path, before=before)
            lines, before = found["lines"] + lines, found["before"]
        return lines[-most:]


class News:
    """What is new, of all runs and of some, since somebody looked last; made with a first look.

    Raises:
        RunNotFound: one of them is not there.
    """

    def __init__(self, site: Site, names: Sequence[str]) -> None:
        self._site, self._names = site, names
        self._listed: object = None
        self._due = 0.0
        self._seen: dict[str, Counter[str]] = {}
        self.behind = False
        """There is more to read of a log: look again at once."""
        self.look()

    def look(self) -> list[dict[str, Any]]:
        news: list[dict[str, Any]] = []
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + LISTING_SECONDS
            before, self._listed = self._listed, self._site.runs()
            if before not in (None, self._listed):
                news.append({"run": None, "new": ["runs"]})
        self.behind = False
        for name in self._names:
            watched = self._site.watched(name)
            with watched.fresh() as live:
                now = Counter(watched.news)
                self.behind |= live.behind
            if new := sorted(now - self._seen.get(name, now)):
                news.append({"run": name, "new": new})
            self._seen[name] = now
        return news


def write_report(names: Sequence[str], output: Path) -> Path:
    """Write what the page shows of these runs as one file that needs no server."""
    write_atomic(output, page.whole(Site().report(names), time.time()))
    return output


def _rank(live: LiveRun, view: RankView) -> dict[str, Any]:
    last = view.last
    return {
        "node": view.node, "rank": view.rank, "step": view.step, "step_seconds": view.step_seconds,
        "heard_at": view.printed_at,
        "state": "" if view.rank is None else live.state(view.node, view.rank),
        "last": last and printable(last.text, colours=False).strip()[:_LAST_SHOWN],
    }  # fmt: skip


def points(
    series: Series, most: int, low: float | None = None, high: float | None = None
) -> tuple[list[int], list[float]]:
    """At most ``most`` points (10 or more) between two steps, that draw as all of them would.

    They are the first, the last, and the lowest and highest of each of equal parts: no peak is
    lost, as it is with averages or with every tenth point. One point to each side is given as
    well, so that a line reaches the edges of what is shown.
    """
    steps, values = series.steps, series.values
    begin = 0 if low is None else max(0, bisect_left(steps, low) - 1)
    end = len(steps) if high is None else min(len(steps), bisect_right(steps, high) + 1)
    count = end - begin
    if count <= most:
        return list(steps[begin:end]), list(values[begin:end])
    kept = {begin, end - 1}
    parts = (most - 2) // 2
    for part in range(parts):
        start = begin + part * count // parts
        some = values[start : begin + (part + 1) * count // parts]
        kept |= {start + some.index(min(some)), start + some.index(max(some))}
    chosen = sorted(kept)
    return [steps[at] for at in chosen], [values[at] for at in chosen]
