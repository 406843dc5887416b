"""A run's folder, read while it grows: what `top` and `web` show."""

import time

import msgspec
import pytest

from clusterkit.lifecycle import control, live
from clusterkit.lifecycle.live import (
    EVENTS,
    METRICS,
    RANKS,
    STATUS,
    LiveRun,
    LiveRuns,
    Usage,
    standstill,
)
from clusterkit.output.series import MOST_METRICS, MOST_POINTS, Series
from clusterkit.run import logs
from clusterkit.run.folder import Event
from clusterkit.run.status import Failure, RunStatus, State
from tests.recorded import Recorded


@pytest.fixture
def run(tmp_path):
    made = Recorded(tmp_path)
    yield made
    made.close()


def test_poll_reports_only_changes_since_previous_poll(run):
    run.says(0, "hello")
    run.says(3, "  indented")
    run.step(1, loss=2.0, step_seconds=0.5)
    seen = LiveRun(run.folder)
    assert seen.poll() == {STATUS, RANKS, METRICS}
    assert seen.poll() == set()
    assert [(key, view.last and view.last.text) for key, view in seen.ranks.items()] == [
        ((0, 0), "hello"), ((0, 1), None), ((1, 2), None), ((1, 3), "  indented"),
    ]  # fmt: skip
    assert seen.ranks[0, 0].step == 1
    assert seen.ranks[0, 0].step_seconds == 0.5
    assert time.time() - 60 < seen.ranks[1, 3].printed_at <= time.time()
    assert seen.reported.value("loss") == 2.0
    run.step(2, loss=1.5)
    assert seen.poll() == {RANKS, METRICS}
    assert [*seen.reported.series["loss"].values] == [2.0, 1.5]
    run.folder.append("events.jsonl", Event(at=1.0, attempt=1, text="node 1 is lost"))
    assert seen.poll() == {EVENTS}
    assert [event.text for event in seen.events] == ["node 1 is lost"]


def test_poll_reads_partial_log_line_once_complete(run):
    seen = LiveRun(run.folder)
    seen.poll()
    log = seen.log_path(0)
    with log.open("ab", buffering=0) as file:
        file.write(b"2026-11-21T20:11:58.123456Z 0 first h")
        assert seen.poll() == set()
        file.write(b"alf\n")
    assert seen.poll() == {RANKS}
    assert seen.ranks[0, 0].last.text == "first half"


def test_new_attempt_replaces_ranks_and_continues_metrics(run):
    seen = LiveRun(run.folder)
    run.step(1, loss=4.0)
    run.step(2, loss=3.0)
    seen.poll()
    run.step(3, loss=2.0)  # is read although the next attempt has begun
    run.attempt(2)
    run.says(0, "again")
    run.step(3, loss=2.5)
    assert seen.poll() >= {STATUS, RANKS, METRICS}
    assert (seen.attempt, seen.ranks[0, 0].last.text) == (2, "again")
    assert [*seen.reported.series["loss"].values] == [4.0, 3.0, 2.5]
    late = LiveRun(run.folder)  # whoever comes now learns the same
    late.poll()
    assert [*late.reported.series["loss"].values] == [4.0, 3.0, 2.5]
    assert late.ranks[0, 0].last.text == "again"


def test_long_log_is_read_over_several_polls_without_losing_metrics(run, monkeypatch):
    monkeypatch.setattr(live, "BUDGET", 4000)
    for number in range(1, 101):
        run.step(number, loss=1.0 / number)
    seen = LiveRun(run.folder)
    seen.poll()
    assert seen.behind
    while seen.behind:
        seen.poll()
    assert [*seen.reported.series["loss"].steps] == list(range(1, 101))


def test_first_poll_reads_only_tail_of_long_log_of_other_node(run, monkeypatch):
    monkeypatch.setattr(live, "_TAIL", 4096)
    run.says(2, *(f"line {number}" for number in range(10_000)))
    seen = LiveRun(run.folder)
    seen.poll()
    assert seen.ranks[1, 2].last.text == "line 9999"


def test_live_run_limits_metrics_and_survives_invalid_values(run):
    run.says(0, '@clusterkit {"event": "metrics", "step": 1, "loss": NaN, "name": "x", "on": true}')
    run.says(0, '@clusterkit {"event": "metrics", "step": 1e299, "loss": 1}', "@clusterkit {")
    run.step(2, **{f"m{number}": number for number in range(500)})
    run.says(0, "x" * 200_000, "after")
    seen = LiveRun(run.folder)
    seen.poll()
    assert len(seen.reported.series) == MOST_METRICS
    assert seen.reported.value("loss") is None
    assert seen.ranks[0, 0].last.text == "after"


def test_elastic_run_lists_rank_after_first_output(run):
    elastic = msgspec.structs.replace(
        run.plan, topology={"min_nodes": 1, "nodes": 2, "nproc_per_node": 2}
    )
    run.folder.write("plan.json", elastic.to_json())
    run.says(0, "here", node=1)
    seen = LiveRun(run.folder)
    seen.poll()
    assert list(seen.ranks) == [(1, 0)]


def test_standstill_names_missing_and_waiting_ranks(run):
    words = (
        "ranks 1 and 3 have not entered all_reduce #7, which ranks 0 and 2 wait in; rank 1 is at"
    )
    run.state(hang=words)
    seen = LiveRun(run.folder)
    seen.poll()
    found = standstill(seen.status)
    assert (found.text, found.missing, found.waiting) == (words, {1, 3}, {0, 2})
    run.state(hang=None)
    seen.poll()
    assert standstill(seen.status) is None


def test_standstill_parses_hang_message_of_agent():
    from clusterkit.agent import hangs

    waits = {"waits": [["world", 3, "all_reduce", 9.0, 1.0, 0.0]], "last": {"world": 3}}
    ranks = {n: {"rank": n, "state": "", **waits} for n in (0, 1, 2, 5)}
    ranks |= {n: {"rank": n, "state": "", "last": {"world": 2}, "at": "a.py:1"} for n in (3, 4)}
    said = hangs.compare(ranks, nodes=range(3), nproc=2, pace=1.0).text
    cause = Failure(cause=f"hang: {said}")
    found = standstill(RunStatus(run="r", job="j", cluster="c", backend="b", failure=cause,
                                 state=State.FAILED))  # fmt: skip
    assert (found.missing, found.waiting) == ({3, 4}, {0, 1, 2, 5})


def test_unsupervised_run_is_stale_and_refresh_updates_state(run, monkeypatch):
    run.close()
    seen = LiveRun(run.folder)
    seen.poll()
    assert seen.stale
    assert seen.status.state is State.RUNNING
    ended = msgspec.structs.replace(run.status, state=State.FAILED)
    monkeypatch.setattr(control, "reconcile", lambda folder, connections: ended)
    seen.refresh()
    for _ in range(2):
        seen.poll()
        assert seen.stale
        assert seen.status.state is State.FAILED


def test_rank_usage_comes_from_usage_file_while_run_is_running(run, monkeypatch):
    now = [10.0]
    monkeypatch.setattr("time.monotonic", lambda: now[-1])
    seen = LiveRun(run.folder)
    seen.poll()
    view = seen.ranks[1, 2]
    assert view.usage is None
    told = seen.log_path(1).with_name("usage.json")
    told.write_text('{"2": [null, 2048], "3": [1.5, 4096, 80, 8192]}')
    assert view.usage is None  # it was looked at in this second
    now.append(11.0)
    assert (view.usage, seen.ranks[1, 3].usage) == (Usage(None, 2048), Usage(1.5, 4096, 80, 8192))
    told.write_text("{")
    now.append(12.0)
    assert view.usage == Usage(None, 2048)
    seen.status = msgspec.structs.replace(seen.status, state=State.SUCCEEDED)
    assert view.usage is None


def test_live_runs_rereads_only_changed_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("CLUSTERKIT_HOME", str(tmp_path))
    first, second = Recorded(tmp_path, run="a"), Recorded(tmp_path, run="b")
    first.state(State.SUCCEEDED)
    every = LiveRuns()
    assert {one.run: one.state for one in every.poll()} == {"a": "SUCCEEDED", "b": "RUNNING"}
    asked = []
    current = control.current
    monkeypatch.setattr(control, "current", lambda folder: asked.append(1) or current(folder))
    second.close()
    assert {one.run: one.state for one in every.poll()} == {"a": "SUCCEEDED", "b": "UNKNOWN"}
    assert len(asked) == 1
    first.close()


# ---------------------------------------------------------------- logs


def test_log_page_gives_newest_lines_of_rank_then_new_ones(run):
    run.says(0, *(f"zero {number}" for number in range(50)))
    run.says(1, *(f"one {number}" for number in range(50)))
    path = run.folder.node_dir(1, 0) / "log"
    page = logs.page(path, 0, most=3)
    assert [line.text for line in page.parsed(0, 1)] == ["zero 47", "zero 48", "zero 49"]
    assert logs.page(path, 0, after=page.after, most=3).parsed(0, 1) == []
    run.says(1, "not this")
    run.says(0, "this")
    (line,) = logs.page(path, 0, after=page.after, most=3).parsed(0, 2)
    assert (line.rank, line.text, line.attempt) == (0, "this", 2)


# ---------------------------------------------------------------- series


def test_downsampled_series_keeps_peak():
    series = Series()
    for step in range(10_000):
        series.add(step, 100.0 if step == 4321 else float(step % 7))
    found = series.downsample(80)
    assert len(found) == 80
    assert max(bucket.high for bucket in found) == 100.0


def test_series_over_point_limit_keeps_minimum_and_maximum(monkeypatch):
    monkeypatch.setattr("clusterkit.output.series.MOST_POINTS", 64)
    series = Series()
    for step in range(1000):
        series.add(step, -5.0 if step == 333 else 9.0 if step == 334 else step / 1000)
    assert len(series) < 64
    assert (min(series.values), max(series.values)) == (-5.0, 9.0)
    assert [*series.steps] == sorted({*series.steps})
    assert MOST_POINTS > 1_000_000
