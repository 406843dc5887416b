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
def test_a_duration_reads_as_people_say_it(seconds, text):
    assert formatting.duration(seconds) == text


def test_a_source_is_a_node_and_a_rank():
    assert formatting.source(LogLine(0, 1, 3, "")) == "n1 r3"
    assert formatting.source(LogLine(0, 1, None, "")) == "n1 -"


def test_a_log_line_shows_time_source_and_text(monkeypatch):
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
def test_text_is_folded_at_spaces(text, lines):
    assert formatting.fold(text, 9) == lines


def test_a_failure_names_who_why_and_the_remedy():
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
def test_all_lines_of_a_cause_are_shown_once(traceback, shown):
    failure = Failure(node=0, rank=0, exit_code=7, cause="E: first\n\tsecond", traceback=traceback)
    text = formatting.failure_text(status(State.FAILED, failure=failure))
    assert text.removeprefix("rank 0 on node 0 failed first: ").split("\n") == shown
    assert failure.summary == "E: first ..."


def test_a_failure_of_nobody_in_particular():
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
def test_a_terminal_is_shown_text_and_colours_and_told_to_do_nothing(monkeypatch, text, shown):
    assert formatting.printable(text) == shown
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in formatting.printable(text)
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b" not in formatting.printable(text, colours=False)


# ---------------------------------------------------------------- the view


def test_the_view_shows_what_rank_0_prints_and_keeps_the_others_to_the_log():
    view = View()
    assert view.feed(line("hello")) == [line("hello")]
    assert view.feed(line("hello", rank=1)) == []
    assert view.feed(line("launcher talk", rank=None)) == []


def test_marked_lines_are_taken_in_and_not_shown():
    view = View()
    assert view.feed(mark(event="start", steps=10, first_step=4)) == []
    assert (view.steps, view.step, view.first_step) == (10, 4, 4)
    view.feed(mark(event="metrics", step=5, loss=2.5, tokens_per_second=1000))
    view.feed(mark(event="metrics", step=6, loss=2.25, tokens_per_second=3000))
    losses = view.series["loss"]
    assert ([*losses.steps], [*losses.values]) == ([5, 6], [2.5, 2.25])
    assert view.describe() == "loss 2.2500  2,000 tokens/s"


def test_tracebacks_are_held_back():
    view = View()
    first = line("[rank0]: Traceback (most recent call last):")
    assert view.feed(first) == []
    assert view.feed(line("  File x")) == []
    assert [held.text for held in view.held] == [first.text, "  File x"]


def test_a_new_attempt_begins_anew():
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
def test_marks_of_another_shape_that_a_program_prints_do_no_harm(event):
    console, _ = recording_console()
    view = View()
    marked = mark(**event)
    follow._plain(view, [marked, mark(event="metrics", step=2, loss=1.0), marked], console)
    assert view.summary(status())[0] == "r1 SUCCEEDED in 1 min 00 s"


def test_the_summary_tells_result_loss_speed_time_and_how_to_look_again():
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


def test_the_summary_tells_what_nodes_remark():
    nodes = (
        NodeStatus(node=0, host="h0", state=State.SUCCEEDED),
        NodeStatus(node=1, host="h1", state=State.SUCCEEDED, remarks=("93 lines lost", "late")),
        NodeStatus(node=2, host="h2", state=State.SUCCEEDED, remarks=("late",)),
    )
    summary = View().summary(status(nodes=nodes))
    assert "  note      node 1: 93 lines lost" in summary
    assert "  note      nodes 1, 2: late" in summary


def test_the_summary_tells_who_ended_a_run_that_nobody_cancelled_here():
    removed = "NotFound: PyTorchJob r1 was deleted by a user"
    assert f"  note      {removed}" in View().summary(status(State.CANCELLED, remark=removed))


def test_a_program_that_reports_nothing_has_a_short_summary():
    assert View().summary(status(State.FAILED)) == [
        "r1 FAILED in 1 min 00 s",
        "  next      clusterkit status r1; clusterkit logs r1",
    ]


def recording_console(terminal=False):
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100, highlight=False), out


def test_without_a_terminal_progress_is_some_twenty_lines():
    console, out = recording_console()
    lines = [mark(event="start", steps=200)]
    lines += [mark(event="metrics", step=n, loss=1.0 / n) for n in range(1, 201)]
    follow._plain(View(), lines, console)
    shown = out.getvalue().splitlines()
    assert 19 <= len(shown) <= 21
    assert shown[-1].startswith("step 200/200  loss 0.0050")


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_lost_node_cost_is_no_part_of_the_time_left(terminal, monkeypatch):
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


def test_a_program_that_does_not_say_how_long_a_step_takes_has_the_time_since_the_first(
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


def test_a_program_s_brackets_are_not_taken_for_markup():
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


def test_what_is_waited_for_is_shown_with_the_time_that_it_has_taken(monkeypatch):
    stderr = terminal(monkeypatch)
    monkeypatch.setattr(spinner, "DELAY_SECONDS", 0.0)
    with spinner.spinner("looking at cluster [lab]") as told:
        shows(stderr, r"looking at cluster \[lab\]  \d+ s")
        told.update("waits: Priority: jobs with a higher priority go first")
        shows(stderr, r"waits: Priority: jobs with a higher priority go first  \d+ s")
        told.report_sent("h0", 0, 2_000_000)
        shows(stderr, "0 bytes of 2.0 MB")


def test_what_is_waited_for_fits_a_line_with_its_time_and_does_nothing_else(monkeypatch):
    stderr = terminal(monkeypatch)
    monkeypatch.setattr(spinner, "DELAY_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "60")
    with spinner.spinner("waits: \x1b[31mno\x1b[2J room\nanywhere, " + "for long " * 20):
        shows(stderr, r"waits: no room.*anywhere, for .*\u2026  \d+ s")
    assert "\x1b[31m" not in stderr.getvalue()
    assert "\x1b[2J" not in stderr.getvalue()


@pytest.mark.parametrize("closed", [False, True])
def test_without_a_terminal_a_wait_draws_nothing(closed, monkeypatch, capsys):
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


def test_what_takes_no_second_is_not_told_of(monkeypatch):
    stderr = terminal(monkeypatch)
    monkeypatch.setattr(spinner, "DELAY_SECONDS", 60.0)
    with spinner.spinner("looking"):
        pass
    assert stderr.getvalue() == ""


def test_of_bytes_the_rate_and_the_time_left_are_told_once_they_are_known(monkeypatch):
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


def test_a_terminal_gets_a_progress_bar():
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


def test_a_program_that_reports_no_steps_shows_its_last_line_and_the_time():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, highlight=False, color_system=None)
    noisy = "\x1b[2J\x1b]0;title\x07[/red] epoch 3 of a program that knows nothing of us"
    follow._live(View(), [line("hello", rank=1), line(noisy, rank=1), line("  ", rank=1)], console)
    shown = out.getvalue()
    assert "0/?" not in shown
    assert re.search(r" \d s +n0 r1 \[/red\] epoch 3 of a prog.*\u2026", shown)
    assert "title" not in shown
    assert "\x1b[2J" not in shown


def test_what_rank_0_prints_reaches_a_terminal_without_what_would_change_it():
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


def test_a_restart_is_told_when_it_happens():
    failed = Event(at=1.0, attempt=1, text="attempt 1 failed: rank 1 on node 0: because")
    console, out = recording_console()
    follow.follow(Ended([line("one"), failed, line("two")], status()), console)
    told = [text for text in out.getvalue().splitlines() if "note" in text or "n0 r0" in text]
    assert told == ["n0 r0 one", f"note: {failed.text}", "n0 r0 two"]


def test_why_nodes_wait_is_told_once():
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
def test_why_nodes_wait_is_shown_as_long_as_they_do(detach, monkeypatch):
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


def test_a_traceback_is_shown_once_and_from_the_failure():
    block = ["Traceback (most recent call last):", "  File x", "ValueError: bad"]
    failure = Failure(
        node=0, rank=0, exit_code=1, cause="ValueError: bad", traceback="\n".join(block)
    )
    console, out = recording_console()
    run = Ended([line(text) for text in block], status(State.FAILED, failure=failure))
    assert follow.follow(run, console).state is State.FAILED
    assert out.getvalue().count("Traceback") == 1
    assert "rank 0 on node 0 failed first: ValueError: bad" in out.getvalue()


def test_a_run_that_succeeded_shows_the_tracebacks_that_it_survived():
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
def test_a_picture_is_drawn_in_the_format_its_name_says(tmp_path, suffix, begins):
    pytest.importorskip("matplotlib")
    path = plots.draw({"a": METRICS, "b": METRICS[:2]}, tmp_path / f"loss{suffix}")
    assert path.read_bytes().startswith(begins)
    assert [entry.name for entry in tmp_path.glob("*loss*")] == [f"loss{suffix}"]


def test_every_run_is_named_in_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = plots.draw({"first-run": METRICS, "second-run": METRICS}, tmp_path / "l.svg")
    assert path.read_text().count("<!-- first-run -->") == 1
    assert path.read_text().count("<!-- second-run -->") == 1


def test_held_out_losses_that_agree_show_all(tmp_path, monkeypatch):
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


def test_a_suffix_that_is_no_picture_s_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"loss\.txt: not the name of a picture") as error:
        plots.draw({"a": METRICS}, tmp_path / "loss.txt")
    assert error.value.hint == "one of .png, .svg, .pdf"


def test_a_run_without_losses_is_named(tmp_path):
    with pytest.raises(BadInput, match="run b reported no losses"):
        plots.draw({"a": METRICS, "b": []}, tmp_path / "loss.png")


def test_without_matplotlib_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(Unavailable, match="needs matplotlib") as error:
        plots.draw({"a": METRICS}, tmp_path / "loss.png")
    assert error.value.hint == "pip install 'clusterkit[plot]'"


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="there is no folder"):
        plots.draw({"a": METRICS}, tmp_path / "file" / "loss.png")


def test_steps_told_twice_count_as_told_last():
    repeated = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 1, "loss": 1.0}]
    assert plots._series(repeated, "loss") == ([1, 2], [1.0, 2.0])


@pytest.mark.parametrize(
    "row", [{"step": "one", "loss": 1.0}, {"loss": 1.0}, {"step": 2, "loss": "low"}, {"step": None}]
)
def test_rows_of_another_shape_are_left_out(row):
    assert plots._series([{"step": 1, "loss": 3.0}, row], "loss") == ([1], [3.0])
