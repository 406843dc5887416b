"""The data that the page of `clusterkit web` requests, as JSON documents.

Each browser is served by a thread of its own; all threads share one `LiveRun` for each run that is
looked at.
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
from clusterkit.files import check_output, write_atomic
from clusterkit.lifecycle import control
from clusterkit.lifecycle.live import LiveRun, LiveRuns, RankView, standstill
from clusterkit.output.series import Series
from clusterkit.run import folder as run_folder
from clusterkit.run.find import find_run
from clusterkit.ui.formatting import printable, remark_lines
from clusterkit.web import log_pages, page
from clusterkit.web.prometheus import Reported, reported

READ_SECONDS = 0.25
"""How long one request reads a long log that is not read yet; the page requests again."""
REFRESH_SECONDS = 5.0
"""Time between two questions to the backend about a run without a supervisor."""
LISTING_SECONDS = 2.0
MOST_POINTS = 20_000
REPORT_POINTS = 4000
REPORT_LINES = 20_000
"""Most lines of logs in a report, divided among its nodes."""
_LAST_SHOWN = 200


class Watched:
    """A run that a browser looks at."""

    def __init__(self, folder: run_folder.RunFolder) -> None:
        self.live = LiveRun(folder)
        self.changes: Counter[str] = Counter()
        """How often each part of the run has changed."""
        self._lock = threading.Lock()
        self._refreshed = 0.0

    @contextmanager
    def fresh(self, seconds: float = READ_SECONDS) -> Iterator[LiveRun]:
        """Read what is new, for up to ``seconds``; give the run while no other thread polls it."""
        with self._lock:
            end = time.monotonic() + seconds
            while True:
                self.changes.update(self.live.poll())
                if not self.live.behind or time.monotonic() > end:
                    break
            if self.live.stale and time.monotonic() > self._refreshed + REFRESH_SECONDS:
                self._refreshed = time.monotonic()
                threading.Thread(target=self._refresh, daemon=True).start()
            yield self.live

    def _refresh(self) -> None:
        self.live.refresh()  # without the lock: it may connect to every host
        self.changes.update(["status"])


class Site:
    """All runs of this machine."""

    def __init__(self) -> None:
        self._watched: dict[str, Watched] = {}
        self._listing = LiveRuns()
        self._listed: list[dict[str, Any]] = []
        self._list_changes = 0
        self._due = 0.0
        self._lock = threading.Lock()

    def watched(self, run: str) -> Watched:
        """Return a run by its whole id, and keep it for other requests.

        Raises:
            RunNotFound: there is no such run.
        """
        with self._lock:
            found = self._watched.get(run)
            if found is None or not found.live.folder.path.is_dir():
                folder = find_run(run)
                if folder.run_id != run:
                    raise RunNotFound(f"run {run!r} is unknown")
                found = self._watched[run] = Watched(folder)
            return found

    # -- runs --------------------------------------------------------------

    def runs(self) -> list[dict[str, Any]]:
        """Return the runs for the list, newest first."""
        with self._lock:
            self._due = 0.0
            return self._list()

    def _list(self) -> list[dict[str, Any]]:
        """Read the list if it is due; the caller holds the lock."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + LISTING_SECONDS
            found = [
                {
                    "run": status.run, "job": status.job, "cluster": status.cluster,
                    "state": status.state, "started_at": status.started_at,
                }
                for status in self._listing.poll()
            ]  # fmt: skip
            self._list_changes += found != self._listed
            self._listed = found
        return self._listed

    def news(self, names: Sequence[str]) -> dict[str, Any]:
        """Return how often the list of runs, and each part of some runs, has changed so far.

        A run that does not exist any more has null.
        """
        with self._lock:
            self._list()
            found: dict[str, Any] = {"runs": self._list_changes, "behind": False, "of": {}}
        for name in names:
            try:
                with (watched := self.watched(name)).fresh() as live:
                    found["of"][name] = dict(watched.changes)
                    found["behind"] |= live.behind
            except RunNotFound:
                found["of"][name] = None
        return found

    def run(self, run: str) -> dict[str, Any]:
        """Return a run's state, ranks, events, newest metrics, job and cluster."""
        with self.watched(run).fresh() as live:
            status, reported, plan = live.status, live.reported, live.plan
            document: dict[str, Any] = msgspec.to_builtins(status)
            hang = standstill(status)
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
                "standstill": hang and {
                    "text": hang.text,
                    "missing": sorted(hang.missing), "waiting": sorted(hang.waiting),
                },
                "notes": [
                    text
                    for text in (status.remark, *remark_lines(status))
                    if text and not (hang and hang.text in text)  # it is in standstill
                ],
                "documents": {
                    name: live.folder.maybe_json(f"{name}.json", dict)
                    for name in ("job", "cluster")
                },
            }  # fmt: skip
        failures = [status.failure, *(attempt.failure for attempt in status.attempts)]
        for entry, failure in zip([document, *document["attempts"]], failures, strict=True):
            if failure is not None:
                cause = printable(failure.cause, colours=False)
                entry["failure"] |= {"who": failure.origin, "cause": cause}
        return document

    def plan(self, run: str) -> dict[str, str]:
        """Return the plan that was carried out."""
        text = self.watched(run).live.folder.read("plan.txt").decode(errors="replace")
        return {"text": printable(text, colours=False)}

    def cancel(self, run: str) -> Any:
        """Cancel a run."""
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
        """Return metrics between two steps, at most ``most`` points of each."""
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
        """Return runs for Prometheus; without names, those that run or were looked at."""
        chosen = list(names)
        if not chosen:
            with self._lock:
                running = [run.run for run in self._listing.poll() if not run.state.final]
                chosen = [*dict.fromkeys([*running, *self._watched])]
        found = []
        for name in chosen:
            with self.watched(name).fresh() as live:
                found.append(reported(live, live.status))
        return found

    # -- logs --------------------------------------------------------------

    def log(self, run: str, attempt: int | None, node: int, **options: Any) -> dict[str, Any]:
        """Return a page of a node's log; options as for `log_pages.page`."""
        return log_pages.page(self._log(run, attempt, node), **options)

    def line(self, run: str, attempt: int | None, node: int, at: int) -> dict[str, str]:
        """Return the whole line that begins at an offset."""
        return {"text": log_pages.line(self._log(run, attempt, node), at)}

    def _log(self, run: str, attempt: int | None, node: int) -> Path:
        live = self.watched(run).live
        return live.folder.node_dir(attempt or max(1, live.status.attempt), node) / "log"

    # -- reports --------------------------------------------------

    def report(self, names: Sequence[str]) -> dict[str, Any]:
        """Return all answers that the page needs for these runs, by path.

        Raises:
            RunNotFound: a run does not exist, or none is named.
        """
        if not names:
            raise RunNotFound("a report needs at least one run")
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


def write_report(names: Sequence[str], output: Path) -> Path:
    """Write a report on runs as one HTML file, and return its path."""
    check_output(output)
    write_atomic(output, page.render(Site().report(names), time.time()), output=True)
    return output


def _rank(live: LiveRun, view: RankView) -> dict[str, Any]:
    last = view.last
    return {
        "node": view.node, "rank": view.rank, "step": view.step, "step_seconds": view.step_seconds,
        "heard_at": view.printed_at, "usage": view.usage and view.usage._asdict(),
        "state": "" if view.rank is None else live.state(view.node, view.rank),
        "last": last and printable(last.text, colours=False).strip()[:_LAST_SHOWN],
    }  # fmt: skip


def points(
    series: Series, most: int, low: float | None = None, high: float | None = None
) -> tuple[list[int], list[float]]:
    """Return at most ``most`` points (10 or more) between two steps, which draw like all of them.

    They are the first, the last, and the lowest and highest of equal parts: no peak is lost, as it
    would be with averages or with every tenth point. One point on each side is included, so that
    the line reaches the edges of the chart.
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
