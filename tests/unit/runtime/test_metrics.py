from __future__ import annotations

import json
import math
import os
import time

import gpt_metrics as module
import pytest
from gpt_metrics import Reporter, report

from clusterkit.run.logs import MARK, parse_mark


def records(capfd: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line.removeprefix(MARK)) for line in capfd.readouterr().out.splitlines()]


def test_report_prints_mark_and_one_json_object(capfd: pytest.CaptureFixture[str]) -> None:
    report("metrics", step=3, loss=0.1 + 0.2)
    line = capfd.readouterr().out
    assert line == '@clusterkit {"event": "metrics", "step": 3, "loss": 0.30000000000000004}\n'
    assert parse_mark(line) == {"event": "metrics", "step": 3, "loss": 0.1 + 0.2}


def test_report_flushes_stdout_and_writes_line_in_one_write(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, text: writes.append(text) or real(fd, text))
    print("before", end=" ")
    report("note", text="two\nlines")
    assert len(writes) == 1
    assert capfd.readouterr().out == f'before {MARK}{{"event": "note", "text": "two\\nlines"}}\n'


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_report_writes_non_finite_values_as_null(
    value: float, capfd: pytest.CaptureFixture[str]
) -> None:
    report("metrics", loss=value)
    assert records(capfd) == [{"event": "metrics", "loss": None}]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "loss 3.2",
        MARK,
        f"{MARK}[1, 2]",
        f'{MARK}{{"step": 1}}',
        f'{MARK}{{"event": "metrics", "st',
        f'say {MARK}{{"event": "end"}}',
    ],
)
def test_parse_mark_rejects_other_and_truncated_lines(line: str) -> None:
    assert parse_mark(line) is None


def test_process_start_time_is_recent_and_stable() -> None:
    assert 0 <= time.time() - module._process_started_at() < 3600
    assert module._process_started_at() == pytest.approx(module._process_started_at(), abs=0.05)


def test_reporter_phase_ends_where_next_phase_begins(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([103.0, 104.5, 110.0])
    monkeypatch.setattr(module, "_process_started_at", lambda: 100.0)
    monkeypatch.setattr(module.time, "time", lambda: next(clock))
    reporter = Reporter(speaks=True)
    reporter.phase("rendezvous")
    reporter.phase(None)
    reporter.phase("late")
    assert records(capfd) == [
        {"event": "phase", "name": "imports", "started_at": 100.0, "seconds": 3.0},
        {"event": "phase", "name": "rendezvous", "started_at": 103.0, "seconds": 1.5},
    ]


def test_reporter_prints_nothing_when_speaks_is_false(capfd: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(speaks=False)
    reporter.phase("rendezvous")
    reporter.event("start")
    assert records(capfd) == []


@pytest.mark.parametrize("by_hand", [False, True])
def test_reporter_prints_readable_step_line_only_when_started_by_hand(
    by_hand: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLUSTERKIT_RUN_ID", raising=False)
    if not by_hand:
        monkeypatch.setenv("CLUSTERKIT_RUN_ID", "gpt-1")
    reporter = Reporter(speaks=True)
    reporter.event("start", steps=2)
    reporter.event("metrics", step=1, loss=2.123456789, eval_loss=None)
    *others, last = capfd.readouterr().out.splitlines()
    assert parse_mark(last) == {
        "event": "metrics", "step": 1, "loss": 2.123456789, "eval_loss": None
    }  # fmt: skip
    assert others[1:] == (["step 1  loss 2.12346  eval_loss None"] if by_hand else [])
