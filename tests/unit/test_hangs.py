"""Who hangs: records of ranks and a clock in, words and orders out."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clusterkit.agent import clock, rank_state
from clusterkit.agent.failure import RankOutput
from clusterkit.agent.hangs import Hangs, Steps, steps_of
from clusterkit.agent.messages import EndHang, Note, QueryRecords
from clusterkit.agent.node_files import NodeFiles
from clusterkit.agent.rank_state import from_traceback
from clusterkit.agent.recorder import from_flight_recorder, joined
from clusterkit.agent.standstill import WORLD, compare
from clusterkit.backends.node_status import judge_running
from clusterkit.run.status import NodeStatus, RunStatus, State
from clusterkit.ui.formatting import remark_lines
from tests.bench import hangs as hangs_bench

LOAD, STEP = "train.py:44 in load()", "train.py:51 in step()"
MOVING = Steps(last=9, quiet=0.5, every=0.5, pace=0.5)


def waits(rank: int, number: int = 57, name: str = "all_reduce", seconds: float = 6.0,
          group: str = WORLD, every: float = 0.5, timeout: float = 1800.0,
          **more: Any) -> dict[str, Any]:  # fmt: skip
    return {"rank": rank, "at": STEP, "busy": False, "last": {WORLD: 56, group: number},
            "waits": [(group, number, name, seconds, every, timeout)], **more}  # fmt: skip


def away(rank: int, number: int = 56, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "at": LOAD, "busy": False, "last": {WORLD: number}, "waits": [], **more}


def found(*ranks: dict[str, Any], nproc: int = 2, world: int | None = None) -> str | None:
    records = {each["rank"]: each for each in ranks}
    finding = compare(records, range((world or len(ranks)) // nproc), nproc, 0.5)
    return finding and finding.text


def test_finding_names_missing_rank_collective_and_places() -> None:
    assert found(waits(0), waits(1), waits(2), away(3)) == (
        "rank 3 on node 1 has not entered all_reduce #57, which ranks 0-2 wait in; "
        f"rank 3 on node 1 is at {LOAD}; ranks 0-2 are at {STEP}, in all_reduce #57"
    )


def test_hang_benchmark_counts_only_todays_words_of_right_rank_as_right() -> None:
    right = [found(waits(0), away(1)), found(waits(0), away(1), nproc=1)]
    wrong = [found(away(0), waits(1)), found(waits(0), waits(1)), "rank 1 does not answer"]
    matches = [bool(hangs_bench.RIGHT.match(f"hang: {text}")) for text in (*right, *wrong)]
    assert matches == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([away(0), away(1)], None),  # wherever they are: nobody waits for another one
        ([waits(0), away(1, 57)], "rank 0 waits in all_reduce #57, which does not complete"),
        ([waits(0), waits(1, name="barrier")], "rank 0 waits in all_reduce #57; "
         "rank 1 entered barrier instead"),
        ([waits(0), {"rank": 1, "state": "stopped"}], "rank 1 is stopped (SIGSTOP)"),
        ([waits(0), {"rank": 1, "state": "ended"}], "rank 1 is at its end"),
        ([waits(0), {"rank": 1, "at": None}], "rank 1 is at an unknown place"),
        ([waits(0), waits(1), waits(2), waits(3)], "ranks 0-3 wait in all_reduce #57, "
         "which does not complete"),
        # Of two groups that wait, the one whose missing rank waits for nobody is the cause.
        ([waits(0), waits(1, 9, "broadcast", 8.0, "tp"), away(2, last={WORLD: 56, "tp": 8}),
          waits(3)], "rank 2 on node 1 has not entered"),
        # Each waits for the other.
        ([waits(0, 5, group="a", last={"a": 5, "b": 6}), waits(1, 7, "broadcast", 9.0, "b",
          last={"a": 4, "b": 7})], "rank 0 has not entered broadcast #7 of group b"),
    ],
)  # fmt: skip
def test_compare_describes_each_kind_of_standstill(
    ranks: list[dict[str, Any]], says: str | None
) -> None:
    text = found(*ranks)
    assert text is None if says is None else says in str(text)


def test_node_that_does_not_answer_is_named_in_finding() -> None:
    assert "rank 1 on node 1 is on a node that does not report" in str(
        found(waits(0), nproc=1, world=2)
    )


class Run:
    """Two nodes of one rank; ``standing`` gives their records once a rank waits."""

    def __init__(self, timeout: float | None = None, silent: bool = False) -> None:
        self.hangs, self.silent = Hangs(1, timeout), silent
        self.hangs.begin(range(2))
        self.now, self.asked = 100.0, 0
        self.orders: list[tuple[float, str, str]] = []

    def pass_time(
        self, seconds: float, *ranks: dict[str, Any], steps: Steps = MOVING, leap: float = 0.0
    ) -> None:
        """One second after the other; what ranks wait has lasted as long by then, and a leap."""
        begun = self.now
        while self.now < begun + seconds:
            self.now += 1.0
            past = self.now - begun + leap
            told = [
                {**each, "waits": [(*wait[:3], past, *wait[4:]) for wait in each["waits"]]}
                for each in ranks
            ]
            for each in told:
                if each["waits"]:
                    self.hangs.receive(each["rank"], [each])
            self._turn(told, steps)

    def _turn(self, told: list[dict[str, Any]], steps: Steps) -> None:
        for decision in self.hangs.tick(self.now, steps):
            match decision:
                case QueryRecords(number):
                    self.asked += 1
                    for each in told[: 1 if self.silent else 2]:
                        self.hangs.receive(each["rank"], [each], number)
                    self._turn(told, steps)
                case Note("hang", text):
                    self.orders.append((self.now - 100, "note" if text else "over", text))
                case EndHang(_, reason):
                    self.orders.append((self.now - 100, "hang", reason))
                case _:
                    raise AssertionError(decision)

    def told(self) -> list[tuple[float, str]]:
        return [(at, what) for at, what, _ in self.orders]


def test_ranks_are_not_queried_while_steps_go_on() -> None:
    run = Run()
    run.pass_time(1000, away(0), away(1))
    assert (run.asked, run.orders) == (0, [])


def test_hang_is_noted_and_ends_round_after_hang_timeout() -> None:
    run = Run(120.0)
    run.pass_time(200, waits(0), away(1))
    assert run.told() == [(5, "note"), (120, "hang")]
    assert run.orders[1][2].startswith("no progress for 120 s: rank 1 on node 1 has not entered")
    run.hangs.begin(range(2))
    run.pass_time(6, waits(0), away(1))
    assert run.told()[2:] == [(205, "note")]


def test_long_work_within_group_timeout_is_noted_but_ends_nothing() -> None:
    """Rank 0 prepares data for 2 h 50 min; the others wait in a group with ``timeout=3h``."""
    run = Run()
    run.pass_time(10_200, waits(0, timeout=10_800.0), away(1))
    run.hangs.resumed(0)
    run.pass_time(5, away(0), away(1))
    assert [what for _, what in run.told()] == ["note", "over"]


def test_process_group_timeout_ends_hang_without_hang_timeout() -> None:
    run = Run()
    run.pass_time(800, waits(0, timeout=600.0), away(1))
    (_, note), (at, what) = run.told()
    assert (note, what) == ("note", "hang")
    assert 630 <= at <= 700  # torch has 30 s to end the ranks by itself


def test_nodes_keep_their_numbers_after_loss() -> None:
    run = Run()
    run.hangs.begin([0, 2])
    run.pass_time(8, waits(0), away(1))
    assert [words[:40] for _, what, words in run.orders] == [
        "rank 1 on node 2 has not entered all_reduce"[:40]
    ]


def test_smaller_round_does_not_miss_lost_ranks() -> None:
    run = Run()
    run.hangs.begin(range(1))
    run.pass_time(8, waits(0))
    assert [words for _, what, words in run.orders if what == "note"] == [
        f"rank 0 waits in all_reduce #57, which does not complete; rank 0 is at {STEP}, "
        "in all_reduce #57"
    ]


def test_note_is_taken_back_when_ranks_go_on() -> None:
    run = Run()
    run.pass_time(8, waits(0), away(1))
    run.hangs.resumed(0)
    run.pass_time(5, away(0), away(1))
    assert [what for _, what in run.told()] == ["note", "over"]


def test_wait_in_other_collective_is_new_standstill() -> None:
    run = Run()
    run.pass_time(100, waits(0, 57), away(1))
    run.pass_time(100, waits(0, 58), away(1, 57))
    assert [what for _, what in run.told()] == ["note", "over", "note"]


@pytest.mark.parametrize(
    ("timeout", "rank", "other", "steps", "told"),
    [
        (8.0, waits(0), away(1), MOVING, [(5, "note"), (8, "hang")]),
        (0.0, waits(0), away(1), MOVING, [(5, "note")]),
        (None, waits(0, timeout=0.0), away(1), MOVING, [(5, "note")]),  # a torch without it
        # Steps of 10 s: 50 s.
        (None, waits(0), away(1), Steps(9, 0.0, 10.0, 10.0), [(50, "note")]),
        # Before the first step, and while whoever does not come writes a checkpoint.
        (None, waits(0, every=0.0), away(1), Steps(), [(30, "note")]),
        (None, waits(0), away(1, busy=True), MOVING, [(30, "note")]),
        # Without metrics lines, a collective of its kind comes every 3 s.
        (None, waits(0, every=3.0), away(1), Steps(), [(15, "note")]),
    ],
)
def test_note_and_end_times_follow_step_pace_and_timeout(timeout, rank, other, steps, told) -> None:  # type: ignore[no-untyped-def]
    run = Run(timeout)
    run.pass_time(1300, rank, other, steps=steps)
    # Asked at once and then every so often: not late by more than a question.
    assert [what for _, what in run.told()] == [what for _, what in told]
    for (at, _), (due, _) in zip(run.told(), told, strict=True):
        assert due <= at <= due * 1.1 + 1


@pytest.mark.parametrize(("timeout", "ends"), [(None, False), (60.0, True)])
def test_missing_steps_end_run_only_with_hang_timeout(timeout, ends) -> None:  # type: ignore[no-untyped-def]
    run = Run(timeout)
    for second in range(1, 201):
        run.pass_time(1, away(0), away(1), steps=Steps(9, second, 0.5, 0.5))
    what = [each[1] for each in run.orders]
    assert what == (["note", "hang"] if ends else ["note"])
    assert run.orders[0][2] == f"no step completes; ranks 0-1 are at {LOAD}"


def test_clock_leap_ends_nothing() -> None:
    run = Run(120.0)
    run.pass_time(60, waits(0), away(1), leap=4000.0)
    assert [what for _, what in run.told()] == ["note"]


def test_hang_is_noted_without_answer_of_silent_node() -> None:
    run = Run(silent=True)
    run.pass_time(20, waits(0), away(1))
    assert "rank 1 on node 1 is on a node that does not report" in run.orders[0][2]


def entry(number: int, at: float, name: str = "gloo:all_reduce", *, retired: bool = True,
          group: tuple[str, str] = ("0", "default_pg")) -> dict[str, Any]:  # fmt: skip
    return {
        "collective_seq_id": number, "profiling_name": name, "process_group": list(group),
        "input_sizes": [[1000]], "retired": retired, "state": "scheduled", "is_p2p": False,
        "time_created_ns": int(at * 1e9), "timeout_ms": 1_800_000,
    }  # fmt: skip


def test_flight_recording_gives_entered_and_pending_collectives() -> None:
    entries = [entry(number, 10.0 + number / 2) for number in range(1, 9)]
    entries.append(entry(3, 14.0, "gloo:broadcast", group=("7", "undefined")))
    entries.append(entry(9, 14.5, retired=False))
    assert from_flight_recorder(joined({"entries": entries}), 20.5) == {
        "last": {"7": 3, WORLD: 9}, "waits": [(WORLD, 9, "all_reduce", 6.0, 0.5, 1800.0)],
    }  # fmt: skip
    first = {"entries": [entry(1, 14.5, "gloo:barrier", retired=False)]}
    assert from_flight_recorder(joined(first), 15.0)["waits"] == [
        (WORLD, 1, "barrier", 0.5, 0.0, 1800.0)
    ]


TRACE = """Current thread 0x00007f4e0effd6c0 (most recent call first):
  <no Python frame>

Thread 0x00007f4e347c1b80 (most recent call first):
  File "{}", line 3252 in {}
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/job/train.py", line 44 in load
  File "/home/me/job/train.py", line 99 in <module>
  File "<clusterkit>", line 16 in <module>
"""


@pytest.mark.parametrize(
    ("file", "function", "busy"),
    [
        ("/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", "all_reduce",
         False),
        ("/venv/lib/python3.11/site-packages/torch/serialization.py", "save", True),
        ("/venv/lib/python3.11/site-packages/torch/utils/checkpoint.py", "checkpoint", False),
        ("/venv/lib/python3.11/site-packages/transformers/trainer.py", "evaluation_loop", True),
    ],
)  # fmt: skip
def test_traceback_gives_place_in_program_code(file: str, function: str, busy: bool) -> None:
    trace = TRACE.format(file, function)
    found = from_traceback(trace, "/home/me/job")
    assert (found["at"], found["busy"]) == ("train.py:44 in load()", busy)
    assert from_traceback(trace, "/elsewhere")["at"] == "job/train.py:44 in load()"
    assert from_traceback("", "/") == {"at": None}


def test_place_in_traceback_is_unescaped_to_unicode() -> None:
    frame = '  File "/h/m\\xfc \\u6f22/\\U0001f600.py", line 4 in f\n'
    trace = f"Thread 1 (most recent call first):\n{frame}"
    assert from_traceback(trace, "/h/mü 漢")["at"] == "😀.py:4 in f()"


def test_steps_of_takes_reported_or_measured_step_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = iter((101.0, 103.0, 105.0))
    monkeypatch.setattr(clock, "awake", lambda: next(moments))
    words = RankOutput()
    for more in (b', "step_seconds": 0.5', b', "step_seconds": "?"', b""):
        words.read("0", b'@clusterkit {"event": "metrics", "step": 1%s}' % more)
    assert steps_of(list(words.metrics), 109.0) == Steps(105.0, 4.0, 2.0, 0.5)
    assert steps_of(list(words.metrics)[1:], 109.0).pace == 2.0
    words.read("0", b'@clusterkit {"event": "end"}')
    assert steps_of(list(words.metrics), 109.0) == Steps()


def test_status_shows_hang_until_note_is_taken_back(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path, 1, echo=False)

    def status() -> NodeStatus:
        return judge_running(0, "h", (tmp_path / "started.json").read_bytes())

    assert status().hang is None
    files.set_note("hang", "rank 1 has not entered")
    run = RunStatus(run="r", job="j", cluster="c", backend="b", state=State.RUNNING,
                    nodes=(status(),))  # fmt: skip
    assert remark_lines(run) == ["hang: rank 1 has not entered"]
    files.set_note("hang", None)
    files.set_note("hang", None)
    assert status().hang is None
    lines = [line.partition(" - ")[2] for line in (tmp_path / "log").read_text().splitlines()]
    assert lines == ["hang: rank 1 has not entered", "the ranks go on"]


SLEEPS = "import ctypes; ctypes.PyDLL(None).poll(None, 0, 600_000)"
NATIVE = {
    "poll": (SLEEPS, False),
    "nanosleep": ("import ctypes; ctypes.PyDLL(None).sleep(600)", False),
    "computes": ("while True: pass", True),
    "a lock": ("import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()", True),
}


@pytest.mark.parametrize("name", NATIVE)
def test_native_code_is_signalled_only_where_signal_is_harmless(name):
    """A signal ends poll(2) and nanosleep(2) early, whatever the handler's flags."""
    program, expected = NATIVE[name]
    process = subprocess.Popen(
        [sys.executable, "-c", f"print('begins', flush=True)\n{program}"], stdout=subprocess.PIPE
    )
    with process:
        try:
            assert process.stdout.readline() == b"begins\n"
            stat, deadline = Path(f"/proc/{process.pid}/stat"), time.monotonic() + 60
            while name != "computes" and stat.read_bytes().rpartition(b")")[2].split()[0] != b"S":
                assert time.monotonic() < deadline  # it has not come there yet
            found = [rank_state._bears_signal(process.pid) for _ in range(3)]
            while expected and not found[-1] and time.monotonic() < deadline:
                found.append(rank_state._bears_signal(process.pid))
            assert any(found) is expected
        finally:
            process.kill()
    assert not rank_state._bears_signal(process.pid)
