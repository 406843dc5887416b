"""Ranks that hang, and ranks that are only slow, for real."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterkit import api
from clusterkit.agent import HANG_NOTE, HANG_OVER, SLOW_NOTE, SLOW_OVER
from clusterkit.run.status import State

pytestmark = pytest.mark.live
Submit = Callable[..., api.Run]


def said(run: api.Run, beginning: str) -> str:
    """The first line of node 0's agent that begins so; waits for it."""
    for line in run.logs(follow=True):
        if line.rank is None and line.text.startswith(beginning):
            return line.text
    pytest.fail(f"it did not say {beginning!r}: {run.status()}")


def test_hang_in_native_code_names_rank_and_restarts_run(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    run = submit("hang.py", "native", nodes=2, gpus=1, restarts=1, hang_timeout=6)
    named = "rank 1 on node 1 has not entered all_reduce #31, which rank 0 on node 0 waits in; "
    text = said(run, HANG_NOTE)
    assert text.startswith(f"{HANG_NOTE}{named}rank 1 on node 1 is at ")
    status = run.wait()
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    failure = status.attempts[0].failure
    assert failure is not None
    assert failure.cause.startswith("hang: no progress for ")
    assert named in failure.cause
    assert not list(temporary.glob("torch-*"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "rank_1"),
    [("python", "in load()"), ("skip", "in main()"), ("stop", "is stopped (SIGSTOP)")],
)
def test_hang_without_restarts_fails_run_and_names_rank(
    submit: Submit, how: str, rank_1: str
) -> None:
    run = submit("hang.py", how, gpus=2, hang_timeout=7)
    text = said(run, HANG_NOTE)
    assert text.startswith(f"{HANG_NOTE}rank 1 has not entered all_reduce #")
    assert rank_1 in text.split("; ")[1]
    status = run.wait()
    assert status.state is State.FAILED
    assert status.failure is not None
    assert text.removeprefix(HANG_NOTE).partition(";")[0] in status.failure.cause


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("slow", "rank 1 has not entered all_reduce #31"),
        ("all slow", "no step completes; ranks 0-1"),
    ],
)
def test_slow_data_loader_is_reported_but_does_not_end_run(
    submit: Submit, how: str, says: str
) -> None:
    run = submit("hang.py", how, gpus=2)
    assert says in said(run, HANG_NOTE)
    started = run.path / "attempts/1/node-0/started.json"
    assert says in json.loads(started.read_bytes())["hang"]
    said(run, HANG_OVER)
    status = run.wait()
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)
    assert status.nodes[0].hang is None


@pytest.mark.thorough
def test_long_work_on_rank_0_is_reported_without_ending_run(submit: Submit) -> None:
    run = submit("first.py", 45, 3 * 3600, gpus=2)
    assert "rank 0 has not entered barrier #2, which rank 1 waits in" in said(run, HANG_NOTE)
    status = run.wait()
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)
    assert status.nodes[0].hang is None


def test_status_names_hang_as_cause_when_process_group_times_out(submit: Submit) -> None:
    run = submit("first.py", 600, 40, gpus=2)
    named = "rank 0 has not entered barrier #2, which rank 1 waits in"
    text = said(run, HANG_NOTE)
    assert named in text
    seen = run.stack()
    assert f"{HANG_NOTE}{seen.text}" == text
    assert [(rank.rank, rank.node) for rank in seen.ranks] == [(0, 0), (1, 0)]
    assert [wait[1:3] for wait in seen.ranks[1].waits] == [(2, "barrier")]
    assert "first.py" in run.stack(rank=0).ranks[0].trace
    status = run.wait()
    assert status.state is State.FAILED
    assert status.failure is not None
    assert status.failure.cause.startswith(f"hang: {named}")
    assert status.failure.cause.endswith("then the process group's timeout expired")


@pytest.mark.thorough
def test_slow_rank_is_reported_and_report_is_withdrawn_later(submit: Submit) -> None:
    run = submit("straggler.py", 100, 45, nodes=2, gpus=1)
    text = said(run, SLOW_NOTE)
    named = "rank 1 on node 1 is slower than the others, which wait for it at least "
    assert text.startswith(f"{SLOW_NOTE}{named}")
    started = run.path / "attempts/1/node-0/started.json"
    assert json.loads(started.read_bytes())["slow"] == text.removeprefix(SLOW_NOTE)
    said(run, SLOW_OVER)
    status = run.wait()
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)
