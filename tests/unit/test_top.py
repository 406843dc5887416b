"""`clusterkit top`: what it shows of a run, and what keys do."""

import asyncio
import io

import pytest
from rich.cells import cell_len

from clusterkit.cli import following, main
from clusterkit.errors import BadInput, ClusterkitError, Unavailable
from clusterkit.lifecycle.run import Run
from clusterkit.output.series import Series
from clusterkit.run import logs
from clusterkit.run.status import Failure, RunStatus, State
from clusterkit.ui.top import paint
from clusterkit.ui.top.app import Top
from clusterkit.ui.top.board import Action, RunBoard, RunsBoard
from tests.recorded import Recorded

HANG = (
    "rank 3 on node 1 has not entered all_reduce #7, which ranks 0-2 wait in; rank 3 is at t.py:4"
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("CLUSTERKIT_HOME", str(tmp_path))
    made = Recorded(tmp_path)
    for step in range(1, 31):
        made.step(step, loss=3.0 / step, tokens_per_second=1000.0 + step, step_seconds=0.25)
    made.says(3, "rank three is here")
    yield made
    made.close()


def shown(board, width=100, height=40):
    """The screen's text, whose lines must fit."""
    lines = board.lines(width, height)
    assert len(lines) == height
    texts = ["".join(text for text, _ in line) for line in lines]
    assert {cell_len(text) for text in texts} == {width}
    return "\n".join(text.rstrip() for text in texts)


def board_of(run):
    board = RunBoard(run.folder)
    board.poll()
    board.poll()
    return board


# ---------------------------------------------------------------- what is shown


@pytest.mark.parametrize("size", [(80, 24), (300, 80), (120, 30)])
def test_run_board_shows_run_at_every_terminal_size(run, size):
    text = shown(board_of(run), *size)
    for part in ("demo-1 RUNNING", "4 ranks", "step 30", "loss 0.1", "1,020 tokens/s", "MISSING"):
        assert (part in text) == (part != "MISSING")
    assert text.count("rank three is here") == 1
    assert "q quit" in text.splitlines()[-1]


@pytest.mark.parametrize("size", [(1, 1), (20, 3), (40, 8)])
def test_run_board_fits_smallest_terminals(run, size):
    shown(board_of(run), *size)


def test_run_board_shows_hang_and_rank_states(run):
    run.state(hang=HANG)
    board = board_of(run)
    text = shown(board)
    assert "left" not in text.splitlines()[1]  # nobody knows how long
    assert " hang: rank 3 on node 1 has not entered all_reduce #7" in text
    states = [board._state(*key) for key in sorted(board.live.ranks)]
    assert states == ["WAITS", "WAITS", "WAITS", "MISSING"]


def test_run_board_shows_rank_that_failed_first_and_cause(run):
    failure = Failure(node=1, rank=2, exit_code=1, cause="ValueError: bad\nmore")
    run.state(State.FAILED, failure=failure, finished_at=100.0)
    text = shown(board_of(run))
    assert "rank 2 on node 1 failed first: ValueError: bad ..." in text


def test_run_board_strips_control_characters_of_program_output(run):
    run.says(0, "\x1b[2Jgone\x07\ttab", "\u6f22\u5b57" * 200)
    board = board_of(run)
    for line in board.lines(80, 24):
        assert not any(ord(letter) < 32 for text, _ in line for letter in text)
    shown(board, 81, 24)


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_removes_colors_but_keeps_cursor_visible(run, monkeypatch, no_color):
    monkeypatch.setenv("NO_COLOR", no_color)
    paint.style_of.cache_clear()
    text = paint.ansi(board_of(run).lines(80, 24))
    assert ("\x1b[36m" in text) != bool(no_color)
    assert "\x1b[7m" in text

    async def drive(app, pilot):
        colours = {
            piece.style.color is not None
            for y in range(24) for piece in app.surface.render_line(y) if piece.style
        }  # fmt: skip
        assert colours == ({False} if no_color else {False, True})

    driven(Top(RunBoard(run.folder)), drive)
    paint.style_of.cache_clear()


def test_runs_board_slash_filters_runs(run):
    board = RunsBoard()
    board.poll()
    for key in ("slash", "x", "q", "enter"):
        assert board.press(key, key) is None
    assert board.filter == "xq"
    assert "no run matches" in shown(board)


def test_run_board_filter_keeps_matching_ranks(run):
    board = board_of(run)
    assert board.press("f", "f") is None
    for letter in "three":
        board.press(letter, letter)
    assert len(board.rows()) == 1
    assert "1 of 1 with 'three'" in shown(board)
    assert board.selected() == (1, 3)
    board.press("ctrl+j")  # Enter, while Textual is being imported
    assert board.prompt == ""
    board.press("escape")
    assert len(board.rows()) == 4


def test_run_board_log_follows_selected_rank_or_node(run):
    run.says(2, "two speaks")
    board = board_of(run)
    board.press("end")
    board.poll()
    assert "log of rank 3" in shown(board)
    assert "two speaks" not in shown(board).partition("log of rank 3")[2]
    board.press("n")
    board.poll()
    assert "two speaks" in shown(board).partition("log of node 1")[2]


def test_run_board_log_keeps_scroll_position_while_log_grows(run):
    run.says(1, *(f"line {number}" for number in range(100)))
    board = board_of(run)
    board.press("down")
    board.press("enter")
    board.poll()
    assert "line 99" in shown(board)
    board.press("pageup")
    before = shown(board).splitlines()[5]
    run.says(1, "line 100")
    board.poll()
    assert shown(board).splitlines()[5] == before
    board.press("end")
    assert "line 100" in shown(board)


def test_run_board_shows_lines_once_after_skipped_output(run, monkeypatch):
    run.says(1, "an only line")
    board = board_of(run)
    board.press("down")
    board.poll()
    monkeypatch.setattr(logs, "_MOST_NEW", 1)
    run.says(0, "another rank")
    board.poll()
    assert shown(board).partition("log of rank 1")[2].count("an only line") == 1


@pytest.mark.parametrize("size", [(40, 24), (80, 24), (100, 40)])
def test_run_board_wraps_long_log_lines(run, size):
    words = [f"word{number}" for number in range(40)]
    path = "/".join(["folder"] * 30)
    run.says(1, " ".join(words), path, "the last")
    board = board_of(run)
    board.press("down")
    board.press("enter")
    board.poll()
    text = shown(board, *size).partition("log of rank 1")[2]
    assert {*words} <= {*text.split()}
    assert path in "".join(text.split())
    assert "the last" in text


def test_run_board_shows_beginning_of_line_longer_than_screen(run):
    run.says(1, "begin " + "x" * 10_000)
    board = board_of(run)
    board.press("down")
    board.poll()
    assert " begin " in shown(board, 80, 24)


def test_run_board_wraps_long_events(run):
    text = " ".join(f"word{number}" for number in range(30))
    run.folder.append("events.jsonl", {"at": 1.0, "attempt": 1, "text": text})
    board = board_of(run)
    board.press("e")
    board.press("enter")
    assert {*text.split()} <= {*shown(board, 40, 24).split()}


@pytest.mark.parametrize("board", [board_of, lambda run: RunsBoard()], ids=["run", "runs"])
def test_footer_fits_width_and_question_mark_lists_keys(run, board):
    board = board(run)
    board.poll()
    keys = board.keys()
    names = [key.name for key in keys]
    for width in range(20, 130):
        found = shown(board, width, 12).splitlines()[-1]
        assert found.startswith(" ? keys")
        whole = [f" {key.name} {key.effect}" for key in keys]
        shown_keys = "".join(f"{text} " for text in whole if f"{text} " in f"{found} ")
        assert f"{found} " == f" ? keys {shown_keys}"
    assert board.press("question_mark", "?") is None
    listed = shown(board, 40, 12).splitlines()
    assert [line.split()[0] for line in listed[1 : len(names) + 1]] == names
    assert all(len(line) < 41 for line in listed)
    assert board.press("x", "x") is None
    assert "─ keys" not in shown(board, 40, 12)
    board.press("question_mark", "?")
    assert board.press("q", "q") == Action("quit")


def test_run_board_shows_one_tokens_per_second_figure(run):
    text = shown(board_of(run), 120, 40)
    assert "1,020 tokens/s" in text
    (chart,) = (line for line in text.splitlines() if "─ tokens/s" in line)
    assert chart.partition("─ tokens/s")[2].split()[0].strip("─") == ""


def test_small_terminal_shows_ranks_before_charts(run):
    run.state(hang=HANG)
    run.step(1234567, rank=1)
    text = shown(board_of(run), 40, 12)
    assert "─ loss" not in text
    assert "─ loss" in shown(board_of(run), 80, 24)
    rows = [line.split() for line in text.splitlines() if "WAITS" in line]
    assert len(rows) == 3
    assert rows[1][:4] == ["0", "1", "WAITS", "1234567"]
    head = next(line for line in text.splitlines() if "STATE" in line)
    assert head.split() == ["NODE", "RANK", "STATE", "STEP", "QUIET"]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_runs_board_keeps_run_ids_whole_at_any_width(run, tmp_path, width):
    other = Recorded(tmp_path, run="other-1126201731-tv8k")
    other.state(State.FAILED, failure=Failure(cause="boom"), started_at=1.0)
    board = RunsBoard()
    board.poll()
    text = shown(board, width, 12)
    assert "other-1126201731-tv8k FAILED" in text
    head = text.splitlines()[1].split()
    assert ("CLUSTER" in head) == (width >= 80)
    assert "boom" in text
    other.close()


def test_run_board_events_replace_log(run):
    run.folder.append("events.jsonl", {"at": 1.0, "attempt": 1, "text": "node 1 is lost"})
    board = board_of(run)
    assert "node 1 is lost" not in shown(board)
    board.press("e")
    assert "attempt 1  node 1 is lost" in shown(board)


def test_run_board_cancel_asks_for_confirmation(run):
    board = board_of(run)
    assert board.press("c", "c") is None
    assert " y/n  Cancel demo-1 and end everything it started?" in shown(board)
    assert shown(board, 40, 12).splitlines()[-1].startswith(" y/n  Cancel demo-1 ")
    assert board.press("n", "n") is None
    board.press("c", "c")
    assert board.press("y", "y") == Action("cancel", "demo-1")


def test_run_board_offers_attach_only_without_supervisor(run):
    board = board_of(run)
    assert board.press("a", "a") is None
    assert board.question is None
    run.close()
    board.poll()
    assert "a attach" in shown(board)
    board.press("a", "a")
    assert board.press("y", "y") == Action("attach", "demo-1")


def test_runs_board_lists_filters_and_opens_runs(run, tmp_path):
    other = Recorded(tmp_path, run="other-2")
    other.state(State.FAILED, failure=Failure(cause="boom"))
    board = RunsBoard()
    board.poll()
    text = shown(board, 80, 24)
    assert "other-2" in text
    assert "boom" in text
    for letter in "fdemo":
        board.press(letter, letter)
    assert "other-2" not in shown(board)
    board.press("enter")
    assert board.press("enter") == Action("open", "demo-1")
    other.close()


def test_runs_board_without_runs_shows_no_runs_yet(tmp_path, monkeypatch):
    monkeypatch.setenv("CLUSTERKIT_HOME", str(tmp_path))
    board = RunsBoard()
    board.poll()
    assert "no runs yet" in shown(board)
    assert board.press("enter") is None


# ---------------------------------------------------------------- curves


def test_curve_falls_with_falling_values():
    series = Series()
    for step in range(100):
        series.add(step, 100.0 - step)
    lines = ["".join(text for text, _ in line) for line in paint.curve("loss", series, 40, 6)]
    assert [len(line) for line in lines] == [40] * 6
    left = [line[10:20].strip() != "" for line in lines[1:]]
    right = [line[-10:].strip() != "" for line in lines[1:]]
    assert (left[0], left[-1], right[0], right[-1]) == (True, False, False, True)
    assert lines[1].split()[0] == "100"
    assert lines[-1].split()[0] == "1"


def test_curve_accepts_one_point_or_none():
    series = Series()
    assert "nothing reported" in str(paint.curve("loss", series, 40, 6))
    series.add(1, 2.0)
    assert len(paint.curve("loss", series, 40, 6)) == 6


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (2.5, "2.5"), (12345678.0, "12.3M"), (0.00001234, "1.2e-05"), (-1e20, "-1.0e+20")],
)
def test_short_formats_numbers_compactly(number, text):
    assert paint.short(number) == text


# ---------------------------------------------------------------- in a terminal


def driven(app, drive, size=(80, 24)):
    """The app without a terminal, and what ``drive`` does with it."""

    async def go():
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            return await drive(app, pilot)

    return asyncio.run(go())


def screen(app):
    lines = app.surface._lines
    return "\n".join("".join(text for text, _ in line) for line in lines)


def test_top_shows_new_steps_and_handles_keys_and_resize(run):
    async def drive(app, pilot):
        assert "step 30" in screen(app)
        strips = [app.surface.render_line(y).text for y in range(24)]
        assert strips == screen(app).split("\n")
        run.step(31, loss=0.05)
        app.poll()
        assert "step 31" in screen(app)
        await pilot.press("down", "down", "down")
        assert app.board.selected() == (1, 3)
        await pilot.press("escape")
        assert isinstance(app.board, RunsBoard)
        await pilot.press("enter")
        assert isinstance(app.board, RunBoard)
        await pilot.resize_terminal(120, 50)
        await pilot.pause()
        app.poll()
        assert len(app.surface._lines) == 50
        await pilot.press("q")

    app = Top(RunBoard(run.folder))
    driven(app, drive)
    assert app.return_code == 0


def test_top_reports_removed_run_as_unknown(run):
    async def drive(app, pilot):
        await pilot.press("escape")
        app.carry_out(Action("open", "gone-1"))
        app.show()
        assert "run 'gone-1' is unknown" in screen(app).split("\n")[-1]

    driven(Top(RunBoard(run.folder)), drive)


def test_top_search_finds_old_log_lines(run):
    run.says(3, *(f"old {number}" for number in range(3000)))

    async def drive(app, pilot):
        await pilot.press("end", "slash", *"old", "space", *"17", "enter")
        await app.workers.wait_for_complete()
        await pilot.pause()
        text = screen(app)
        assert "lines with 'old 17'" in text
        assert "old 1799" in text
        await pilot.press("escape")
        assert "lines with" not in screen(app)

    driven(Top(RunBoard(run.folder)), drive)


@pytest.mark.parametrize("fails", [False, True])
def test_top_cancel_shows_result_or_error(run, monkeypatch, fails):
    def cancel(_):
        if fails:
            raise ClusterkitError("host h1 does not answer")
        run.state(State.CANCELLED)
        return run.status

    monkeypatch.setattr(Run, "cancel", cancel)

    async def drive(app, pilot):
        await pilot.press("c", "y")
        await app.workers.wait_for_complete()
        await pilot.pause()
        said = "host h1 does not answer" if fails else "demo-1 CANCELLED"
        assert said in screen(app).split("\n")[-1]

    driven(Top(RunBoard(run.folder)), drive)


def test_top_reconciles_run_without_supervisor(run, monkeypatch):
    run.close()
    ended = RunStatus(run="demo-1", job="demo", cluster="local", backend="local",
                      state=State.FAILED, failure=Failure(cause="lost"))  # fmt: skip
    monkeypatch.setattr("clusterkit.lifecycle.control.reconcile", lambda folder, connections: ended)

    async def drive(app, pilot):
        app.poll()
        await app.workers.wait_for_complete()
        app.poll()
        assert "FAILED" in screen(app)

    driven(Top(RunBoard(run.folder)), drive)


def test_top_requires_terminal_and_textual(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(BadInput, match="top needs a terminal"):
        following.check_terminal()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="top needs Textual") as error:
        following.check_terminal()
    assert error.value.hint == "pip install 'clusterkit[top]'"


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--top",), "top needs a terminal"), (("--top", "--detach"), "--top follows the run")],
)
def test_submit_top_is_refused_without_terminal_or_with_detach(
    tmp_path, monkeypatch, capsys, options, said
):
    monkeypatch.setenv("CLUSTERKIT_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(SystemExit) as ended:
        main(["submit", *options, "--", "true"])
    assert ended.value.code == 125
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
