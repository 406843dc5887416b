"""What people see: words, the view of a run over its log, plots."""

import io
import re
import sys
import threading
import time

import pytest
from rich.console import Console

from clusterkit.cli import following
from clusterkit.errors import BadInput, Unavailable
from clusterkit.run.folder import Event
from clusterkit.run.logs import LogLine
from clusterkit.run.status import Failure, NodeStatus, RunStatus, State
from clusterkit.ui import follow, formatting, plots, spinner
from clusterkit.ui.follow import View


def line(text, rank=0, node=0, attempt=1):
    return LogLine(0.0, node, rank, text, attempt)


def mark(**event):
    import json

    return line("@clusterkit " + json.dumps(event))


def status(state=State.SUCCEEDED, **fields):
    given = {"exit_code": 0, "started_at": 100.0, "finished_at": 160.0} | fields
    return RunStatus(run="r1", job="demo", cluster="local", backend="local", state=state, **given)


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (3720, "1 h 02 min"),
        (100 * 3600, "100 h 00 min"),
    ],
)
def test_duration_formats_seconds_minutes_and_hours(seconds, text):
    assert formatting.duration(seconds) == text


def test_source_names_node_and_rank():
    assert formatting.source(LogLine(0, 1, 3, "")) == "n1 r3"
    assert formatting.source(LogLine(0, 1, None, "")) == "n1 -"


def test_log_text_shows_time_source_and_text(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    import time

    time.tzset()
    assert formatting.log_text(LogLine(3661.5, 0, 2, "hello")) == "01:01:01.500 n0 r2 hello"
    marked = LogLine(0.0, 0, 0, '@clusterkit {"event": "metrics", "step": 1, "loss": 0.5}')
    assert formatting.log_text(marked) == "00:00:00.000 n0 r0 step 1  loss 0.5"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("short", ["short"]),
        ("one two three", ["one two", "  three"]),
        ("  one two three", ["  one two", "    three"]),
        ("a/path/of/many/folders is here", ["a/path/of/many/folders", "  is here"]),
        ("\x1b[31mone two\x1b[0m", ["\x1b[31mone two\x1b[0m"]),
        ("\u6f22\u5b57 \u6f22\u5b57 \u6f22", ["\u6f22\u5b57 \u6f22\u5b57", "  \u6f22"]),
        ("", [""]),
    ],
)
def test_fold_breaks_text_at_spaces(text, lines):
    assert formatting.fold(text, 9) == lines


def test_failure_text_names_rank_cause_and_hint():
    failure = Failure(
        node=1, rank=3, exit_code=7, cause="ValueError: bad", hint="mend it", traceback="T\n  F"
    )
    assert formatting.failure_text(status(State.FAILED, failure=failure)) == (
        "rank 3 on node 1 failed first: ValueError: bad (exit code 7)\n  T\n    F\nhint: mend it"
    )


@pytest.mark.parametrize(
    ("traceback", "shown"),
    [
        (
            "T\nE: first\n\tsecond",
            ["E: first ... (exit code 7)", "  T", "  E: first", "  \tsecond"],
        ),
        (None, ["E: first (exit code 7)", "  \tsecond"]),
    ],
)
def test_failure_text_shows_all_cause_lines_once(traceback, shown):
    failure = Failure(node=0, rank=0, exit_code=7, cause="E: first\n\tsecond", traceback=traceback)
    text = formatting.failure_text(status(State.FAILED, failure=failure))
    assert text.removeprefix("rank 0 on node 0 failed first: ").split("\n") == shown
    assert failure.summary == "E: first ..."


def test_failure_text_without_rank_names_run():
    failure = Failure(node=None, rank=None, exit_code=None, cause="no room")
    assert formatting.failure_text(status(State.FAILED, failure=failure)) == (
        "the run failed: no room"
    )
    assert formatting.failure_text(status()) == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\nof two lines", "plain\ttext\nof two lines"),
        ("\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m\x1b[0m"),
        ("\x1b[31mstill red", "\x1b[31mstill red\x1b[0m"),
        ("\x1b[2J\x1b[H\x1b[?1049hgone", "gone"),
        ("\x1b[1A\x1b[2Kover the line before", "over the line before"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]52;c;ZXZpbA==\x1b\\text", "text"),
        ("\x1b]0;never ended", ""),
        ("\x1bPq#0\x1b\\text\x1bc", "text"),
        ("\x1b(0lqk", "lqk"),
        ("\x1b", ""),
        ("was 0%\r50%", "was 0%\\x0d50%"),
        (
            "bell \x07 back \x08 csi \x9b31m nul \x00",
            "bell \\x07 back \\x08 csi \\x9b31m nul \\x00",
        ),
    ],
)
def test_printable_keeps_only_text_and_colors(monkeypatch, text, shown):
    assert formatting.printable(text) == shown
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in formatting.printable(text)
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b" not in formatting.printable(text, colours=False)


# ---------------------------------------------------------------- the view


def test_view_shows_output_of_rank_0_only():
    view = View()
    assert view.feed(line("hello")) == [line("hello")]
    assert view.feed(line("hello", rank=1)) == []
    assert view.feed(line("launcher talk", rank=None)) == []


def test_view_consumes_marked_lines():
    view = View()
    assert view.feed(mark(event="start", steps=10, first_step=4)) == []
    assert (view.steps, view.step, view.first_step) == (10, 4, 4)
    view.feed(mark(event="metrics", step=5, loss=2.5, tokens_per_second=1000))
    view.feed(mark(event="metrics", step=6, loss=2.25, tokens_per_second=3000))
    losses = view.series["loss"]
    assert ([*losses.steps], [*losses.values]) == ([5, 6], [2.5, 2.25])
    assert view.describe() == "loss 2.2500  2,000 tokens/s"


def test_view_holds_back_tracebacks():
    view = View()
    first = line("[rank0]: Traceback (most recent call last):")
    assert view.feed(first) == []
    assert view.feed(line("  File x")) == []
    assert [held.text for held in view.held] == [first.text, "  File x"]


def test_view_drops_held_lines_at_new_attempt():
    view = View()
    view.feed(line("Traceback (most recent call last):"))
    assert view.feed(line("hello", attempt=2)) == [line("hello", attempt=2)]
    assert view.held == []


@pytest.mark.parametrize(
    "event",
    [
        {"event": "optimizer"},
        {"event": "optimizer", "rank": "x", "parameters": None, "total": []},
        {"event": "start", "steps": "many", "first_step": None},
        {"event": "start", "steps": -1},
        {"event": "metrics", "step": "one", "loss": "low"},
        {"event": "metrics", "step": 1, "loss": None, "tokens_per_second": None},
        {"event": "metrics"},
        {"event": "metrics", "step": 10**400, "loss": 1.0},
        {"event": "metrics", "step": True, "loss": 1.0},
        {"event": "phase", "name": "imports", "seconds": 1.0, "started_at": "noon"},
        {"event": "phase", "name": None, "seconds": None},
        {"event": []},
        {"event": None},
    ],
    ids=lambda event: str(event)[:60],
)
def test_view_survives_malformed_marks(event):
    console, _ = recording_console()
    view = View()
    marked = mark(**event)
    follow._plain(view, [marked, mark(event="metrics", step=2, loss=1.0), marked], console)
    assert view.summary(status())[0] == "r1 SUCCEEDED in 1 min 00 s"


def test_summary_shows_result_loss_speed_times_and_next_commands():
    view = View()
    for event in (
        {"event": "start", "steps": 2},
        {"event": "phase", "name": "imports", "seconds": 2.0, "started_at": 101.5},
        {"event": "phase", "name": "rendezvous", "seconds": 0.5},
        {"event": "phase", "name": "first_step", "seconds": 0.25},
        {"event": "optimizer", "rank": 0, "parameters": 500, "total": 1000},
        {"event": "optimizer", "rank": 1, "parameters": 500, "total": 1000},
        {"event": "metrics", "step": 1, "loss": 5.5, "tokens_per_second": 1000},
        {"event": "metrics", "step": 2, "loss": 4.25, "tokens_per_second": 3000},
    ):
        view.feed(mark(**event))
    assert view.summary(status(attempt=2)) == [
        "r1 SUCCEEDED in 1 min 00 s after 1 restart",
        "  loss      5.5000 at step 1, 4.2500 at step 2",
        "  tokens/s  2,000 (median of the steps)",
        "  optimizer each rank holds the state of 500 of 1,000 parameters",
        "  time      set-up 1.5 s, imports 2.0 s, rendezvous 0.5 s, first step 0.2 s",
        "  next      clusterkit status r1; clusterkit logs r1; "
        "clusterkit metrics r1 --plot loss.png",
    ]


def test_summary_shows_node_remarks():
    nodes = (
        NodeStatus(node=0, host="h0", state=State.SUCCEEDED),
        NodeStatus(node=1, host="h1", state=State.SUCCEEDED, remarks=("93 lines lost", "late")),
        NodeStatus(node=2, host="h2", state=State.SUCCEEDED, remarks=("late",)),
    )
    summary = View().summary(status(nodes=nodes))
    assert "  note      node 1: 93 lines lost" in summary
    assert "  note      nodes 1, 2: late" in summary


def test_summary_shows_remark_of_run_cancelled_elsewhere():
    removed = "NotFound: PyTorchJob r1 was deleted by a user"
    assert f"  note      {removed}" in View().summary(status(State.CANCELLED, remark=removed))


def test_summary_without_metrics_is_short():
    assert View().summary(status(State.FAILED)) == [
        "r1 FAILED in 1 min 00 s",
        "  next      clusterkit status r1; clusterkit logs r1",
    ]


def recording_console(terminal=False):
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100, highlight=False), out


def test_plain_progress_of_200_steps_prints_about_20_lines():
    console, out = recording_console()
    lines = [mark(event="start", steps=200)]
    lines += [mark(event="metrics", step=n, loss=1.0 / n) for n in range(1, 201)]
    follow._plain(View(), lines, console)
    shown = out.getvalue().splitlines()
    assert 19 <= len(shown) <= 21
    assert shown[-1].startswith("step 200/200  loss 0.0050")


@pytest.mark.parametrize("terminal", [False, True])
def test_time_left_excludes_time_lost_to_restart(terminal, monkeypatch):
    now = 100.0
    monkeypatch.setattr(follow.time, "monotonic", lambda: now)
    console, out = recording_console(terminal)

    def lines():
        nonlocal now
        for first, last in ((0, 50), (40, 60)):
            yield mark(event="start", steps=200, first_step=first)
            for step in range(first + 1, last + 1):
                now += 0.1
                yield mark(event="metrics", step=step, loss=1.0, step_seconds=0.1)
            now += 600.0

    (follow._live if terminal else follow._plain)(View(), lines(), console)
    left = re.findall(r"(?:[0-9]+ min )?[0-9]+ s left", out.getvalue())
    assert left[-1] == "14 s left"
    assert "min" not in " ".join(left)


def test_time_left_without_step_seconds_uses_time_since_first_step(
    monkeypatch,
):
    now = 100.0
    monkeypatch.setattr(follow.time, "monotonic", lambda: now)
    console, out = recording_console()

    def lines():
        nonlocal now
        yield mark(event="start", steps=20)
        for step in range(1, 6):
            now += 2.0
            yield mark(event="metrics", step=step, loss=1.0)

    follow._plain(View(), lines(), console)
    assert out.getvalue().splitlines()[-1] == "step 5/20  loss 1.0000  30 s left"


def test_follow_prints_brackets_of_program_literally():
    console, out = recording_console()
    follow._plain(View(), [line("[bold]tensor[0] [/red]")], console)
    assert out.getvalue() == "n0 r0 [bold]tensor[0] [/red]\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    """One in stderr's place; pytest takes it away again where a fixture made it."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    return made


def shows(stderr, words):
    deadline = time.monotonic() + 30
    while not re.search(words, stderr.getvalue()):
        assert time.monotonic() < deadline, stderr.getvalue()
        time.sleep(0.01)


def test_spinner_shows_text_and_elapsed_time(monkeypatch):
    stderr = terminal(monkeypatch)
    monkeypatch.setattr(spinner, "DELAY_SECONDS", 0.0)
    with spinner.spinner("looking at cluster [lab]") as told:
        shows(stderr, r"looking at cluster \[lab\]  \d+ s")
        told.update("waits: Priority: jobs with a higher priority go first")
        shows(stderr, r"waits: Priority: jobs with a higher priority go first  \d+ s")
        told.report_sent("h0", 0, 2_000_000)
        shows(stderr, "0 bytes of 2.0 MB")


def test_spinner_fits_one_line_and_strips_escape_sequences(monkeypatch):
    stderr = terminal(monkeypatch)
    monkeypatch.setattr(spinner, "DELAY_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "60")
    with spinner.spinner("waits: \x1b[31mno\x1b[2J room\nanywhere, " + "for long " * 20):
        shows(stderr, r"waits: no room.*anywhere, for .*\u2026  \d+ s")
    assert "\x1b[31m" not in stderr.getvalue()
    assert "\x1b[2J" not in stderr.getvalue()


@pytest.mark.parametrize("closed", [False, True])
def test_spinner_without_terminal_draws_no_animation(closed, monkeypatch, capsys):
    stderr = None if closed else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(spinner, "DELAY_SECONDS", 0.0)
    if not closed:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with spinner.spinner("looking", plain=True):
        for thread in threading.enumerate():
            if thread.name == "spinner":  # until it has told
                thread.join(30)
    assert capsys.readouterr().out == ""
    assert stderr is None or stderr.getvalue() == "looking\n"


def test_spinner_stays_silent_for_short_wait(monkeypatch):
    stderr = terminal(monkeypatch)
    monkeypatch.setattr(spinner, "DELAY_SECONDS", 60.0)
    with spinner.spinner("looking"):
        pass
    assert stderr.getvalue() == ""


def test_spinner_progress_shows_rate_and_time_left_once_known(monkeypatch):
    now = 100.0
    monkeypatch.setattr(spinner.time, "monotonic", lambda: now)
    told = spinner.Spinner("copying the project")
    now = 160.0
    assert told.progress() == "1 min 00 s"
    told.report_sent("h0", 1_000_000, 5_000_000)
    told.report_sent("h1", 0, 5_000_000)
    assert told.progress() == "1.0 MB of 10.0 MB"
    now = 162.0
    told.report_sent("h0", 3_000_000, 5_000_000)
    assert told.progress() == "3.0 MB of 10.0 MB  1.0 MB/s  7 s left"
    told.report_sent("h0", 5_000_000, 5_000_000)
    told.report_sent("h1", 5_000_000, 5_000_000)
    assert told.progress() == "10.0 MB sent  1 min 02 s"


def test_follow_on_terminal_shows_progress_bar():
    console, out = recording_console(terminal=True)
    lines = [
        mark(event="start", steps=4),
        mark(event="metrics", step=1, loss=2.0),
        line("hello"),
        mark(event="metrics", step=4, loss=1.0),
    ]
    follow._live(View(), lines, console)
    assert "n0 r0 hello" in out.getvalue()
    assert "4/4" in out.getvalue()


def test_follow_without_steps_shows_last_line_and_elapsed_time():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, highlight=False, color_system=None)
    noisy = "\x1b[2J\x1b]0;title\x07[/red] epoch 3 of a program that knows nothing of us"
    follow._live(View(), [line("hello", rank=1), line(noisy, rank=1), line("  ", rank=1)], console)
    shown = out.getvalue()
    assert "0/?" not in shown
    assert re.search(r" \d s +n0 r1 \[/red\] epoch 3 of a prog.*\u2026", shown)
    assert "title" not in shown
    assert "\x1b[2J" not in shown


def test_follow_strips_terminal_control_sequences_of_rank_0():
    console, out = recording_console(terminal=True)
    follow._live(View(), [line("\x1b]0;title\x07\x1b[31mred\x1b[0m\x1b[5Atext")], console)
    assert "title" not in out.getvalue()
    assert "\x1b[5A" not in out.getvalue()
    assert "\x1b[31mred\x1b[0mtext" in out.getvalue()


class Ended:
    """A run that has ended, as `follow` sees one."""

    def __init__(self, lines, state):
        self._lines, self._state = lines, state

    def wait(self, until):
        assert until(self._state)

    def logs(self, follow, note):
        for line in self._lines:
            if isinstance(line, Event):
                note(line)
            else:
                yield line

    def status(self):
        return self._state


def test_follow_notes_failed_attempt_between_log_lines():
    failed = Event(at=1.0, attempt=1, text="attempt 1 failed: rank 1 on node 0: because")
    console, out = recording_console()
    follow.follow(Ended([line("one"), failed, line("two")], status()), console)
    told = [text for text in out.getvalue().splitlines() if "note" in text or "n0 r0" in text]
    assert told == ["n0 r0 one", f"note: {failed.text}", "n0 r0 two"]


def test_follow_draws_no_progress_bar_into_pipe_with_force_color(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    follow.follow(Ended([line("one")], status()))
    said = capsys.readouterr().err
    assert "n0 r0 one" in said
    assert "\x1b[2K" not in said  # a line is erased before it is drawn anew
    assert "\x1b[?25l" not in said


def test_follow_prints_each_wait_reason_once():
    class Waiting(Ended):
        def wait(self, until):
            for reason in (None, "other jobs go first", "other jobs go first", "nodes are in use"):
                node = NodeStatus(node=0, host="", state=State.PENDING, reason=reason)
                assert not until(status(state=State.PENDING, nodes=(node,)))
            assert until(self._state)

    console, out = recording_console()
    follow.follow(Waiting([], status()), console)
    told = [text for text in out.getvalue().splitlines() if "waits" in text]
    assert told == ["waits: other jobs go first", "waits: nodes are in use"]


@pytest.mark.parametrize("detach", [False, True])
def test_follow_spinner_shows_wait_reason_while_nodes_wait(detach, monkeypatch):
    stderr = terminal(monkeypatch)
    monkeypatch.setattr(spinner, "DELAY_SECONDS", 0.0)

    class Waiting(Ended):
        id = "r1"

        def wait(self, until):
            for reason, shown in (("nodes are in use", "waits: nodes are"), (None, "starting")):
                stderr.truncate(0)
                node = NodeStatus(node=0, host="", state=State.PENDING, reason=reason)
                until(status(state=State.PENDING, nodes=(node,)))
                shows(stderr, shown)
            return self._state

    following.follow(Waiting([], status()), as_json=False, detach=detach)


def test_follow_shows_traceback_of_failure_once():
    block = ["Traceback (most recent call last):", "  File x", "ValueError: bad"]
    failure = Failure(
        node=0, rank=0, exit_code=1, cause="ValueError: bad", traceback="\n".join(block)
    )
    console, out = recording_console()
    run = Ended([line(text) for text in block], status(State.FAILED, failure=failure))
    assert follow.follow(run, console).state is State.FAILED
    assert out.getvalue().count("Traceback") == 1
    assert "rank 0 on node 0 failed first: ValueError: bad" in out.getvalue()


def test_follow_shows_held_tracebacks_of_succeeded_run():
    console, out = recording_console()
    follow.follow(Ended([line("Traceback (most recent call last):")], status()), console)
    assert out.getvalue().count("Traceback") == 1


# ---------------------------------------------------------------- plots

METRICS = [
    {"step": n, "loss": 5.0 / n, "tokens_per_second": 1000.0, "eval_loss": 3.0 if n == 4 else None}
    for n in range(1, 5)
]


@pytest.mark.parametrize(
    ("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_draw_writes_format_of_file_suffix(tmp_path, suffix, begins):
    pytest.importorskip("matplotlib")
    path = plots.draw({"a": METRICS, "b": METRICS[:2]}, tmp_path / f"loss{suffix}")
    assert path.read_bytes().startswith(begins)
    assert [entry.name for entry in tmp_path.glob("*loss*")] == [f"loss{suffix}"]


def test_draw_names_every_run_in_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = plots.draw({"first-run": METRICS, "second-run": METRICS}, tmp_path / "l.svg")
    assert path.read_text().count("<!-- first-run -->") == 1
    assert path.read_text().count("<!-- second-run -->") == 1


def test_draw_gives_equal_eval_losses_distinct_markers(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda picture, output: drawn.append(picture) or output)
    plots.draw({"a": METRICS, "b": METRICS, "c": METRICS}, tmp_path / "l.svg")
    points = [one for one in drawn[0].axes[0].lines if "held out" in one.get_label()]
    assert len({one.get_marker() for one in points}) == 3
    assert len({one.get_color() for one in points}) == 3
    assert {one.get_markerfacecolor() for one in points} == {"none"}
    sizes = [one.get_markersize() for one in points]
    assert sizes == sorted(set(sizes))


def test_draw_refuses_unknown_file_suffix(tmp_path):
    with pytest.raises(BadInput, match=r"loss\.txt: not the name of a picture") as error:
        plots.draw({"a": METRICS}, tmp_path / "loss.txt")
    assert error.value.hint == "one of .png, .svg, .pdf"


def test_draw_refuses_run_without_losses(tmp_path):
    with pytest.raises(BadInput, match="run b reported no losses"):
        plots.draw({"a": METRICS, "b": []}, tmp_path / "loss.png")


def test_draw_without_matplotlib_hints_pip_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(Unavailable, match="needs matplotlib") as error:
        plots.draw({"a": METRICS}, tmp_path / "loss.png")
    assert error.value.hint == "pip install 'clusterkit[plot]'"


def test_draw_refuses_output_below_regular_file(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="there is no folder"):
        plots.draw({"a": METRICS}, tmp_path / "file" / "loss.png")


def test_plot_series_keeps_last_value_of_repeated_step():
    repeated = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 1, "loss": 1.0}]
    assert plots._series(repeated, "loss") == ([1, 2], [1.0, 2.0])


@pytest.mark.parametrize(
    "row", [{"step": "one", "loss": 1.0}, {"loss": 1.0}, {"step": 2, "loss": "low"}, {"step": None}]
)
def test_plot_series_skips_malformed_rows(row):
    assert plots._series([{"step": 1, "loss": 3.0}, row], "loss") == ([1], [3.0])


def test_words_of_submit_break_no_id_and_no_path_on_narrow_terminal(monkeypatch):
    words = "note: run ddp-1128134910-6dk5 reads /data/of-a-long-name/shard-00001.bin; see logs"
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, highlight=False)
    follow._print(console, words)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    for shown in (out.getvalue().rstrip("\n"), formatting.prose(words)):
        assert shown.split() == words.split()
        assert max(map(len, shown.split("\n"))) <= 40


def test_line_of_program_is_not_folded_on_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, highlight=False)
    follow._show(console, line("a b " * 30))
    assert out.getvalue().count("\n") == 1
