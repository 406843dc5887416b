"""Pages of a log: from the end, backwards, what came since; a rank's; lines that hold a word."""

import pytest

from clusterkit.run import logs
from clusterkit.web.log_pages import LINES, SHOWN, line, page

STAMP = "2026-11-21T20:11:58.000000Z"


@pytest.fixture
def log(tmp_path):
    """Writes a log of lines ``(rank, text)``."""
    path = tmp_path / "log"

    def write(lines, more=b""):
        text = "".join(f"{STAMP} {rank} {text}\n" for rank, text in lines)
        path.write_bytes(text.encode() + more)
        return path

    return write


def texts(found):
    return [each["text"] for each in found["lines"]]


def test_log_pages_read_backwards_cover_each_line_once(log, monkeypatch):
    monkeypatch.setattr(logs, "_CHUNK", 1000)
    path = log([(0, f"line {number} " + "x" * (number % 150)) for number in range(3 * LINES)])
    found, all_texts = page(path), []
    while True:
        all_texts = texts(found) + all_texts
        if not found["before"]:
            break
        found = page(path, before=found["before"])
    assert [text.split()[1] for text in all_texts] == [str(number) for number in range(3 * LINES)]


def test_log_page_after_position_returns_only_new_whole_lines(log):
    path = log([(0, "one")])
    found = page(path)
    with path.open("ab") as file:
        file.write(f"{STAMP} 1 two\n{STAMP} 0 not who".encode())
        file.flush()
        news = page(path, after=found["after"])
        assert texts(news) == ["two"]
        file.write(b"le\n")
    assert texts(page(path, after=news["after"])) == ["not whole"]


def test_log_page_omits_incomplete_last_line(log):
    path = log([(0, "one")], f"{STAMP} 0 half".encode())
    assert texts(page(path)) == ["one"]


def test_log_page_far_behind_skips_to_end(log, monkeypatch):
    monkeypatch.setattr(logs, "_MOST_NEW", 100)
    path = log([(0, f"{number}") for number in range(50)])
    found = page(path, after=0)
    assert found["skipped"]
    assert texts(found)[-1] == "49"


def test_log_page_of_truncated_log_starts_anew(log):
    found = page(log([(0, "long before")] * 3))
    again = page(log([(0, "new")]), after=found["after"])
    assert again["skipped"]
    assert texts(again) == ["new"]


def test_log_page_filters_by_rank_and_literal_search_text(log, monkeypatch):
    monkeypatch.setattr(logs, "_CHUNK", 1000)
    path = log([(number % 3, f"text {number}") for number in range(2000)])
    assert (
        texts(page(path, rank=1, search="TEXT 1"))
        == [
            f"text {number}" for number in range(2000) if number % 3 == 1 and str(number)[0] == "1"
        ][-LINES:]
    )
    assert texts(page(path, search="text 17 ")) == []
    assert texts(page(path, search="nothing")) == []
    # Neither the time nor the rank is text, and no character has a meaning.
    assert texts(page(path, search="2026")) == []
    assert texts(page(path, search=".*")) == []


def test_log_search_matches_displayed_text_of_marked_lines(log):
    marks = ['{"event": "metrics", "step": 108, "loss": 2.25}',
             '{"event":"metrics","step":109,"loss":2.5}']  # fmt: skip
    path = log([(0, f"@clusterkit {mark}") for mark in marks] + [(0, "step_108")])
    assert texts(page(path, search="Step 108")) == ["step 108  loss 2.25"]
    assert texts(page(path, search="step 109  loss 2")) == ["step 109  loss 2.5"]


@pytest.mark.parametrize("blanks", [" " * 12, " : , : , : ,"])
def test_log_search_with_many_blanks_does_not_backtrack(log, blanks):
    path = log([(0, f"a{' ' * 60}z"), (0, "loss:  3")])
    assert texts(page(path, search=f"a{blanks}y")) == []
    assert texts(page(path, search="loss  3")) == ["loss:  3"]


def test_log_search_stops_at_scan_limit_without_match(log, monkeypatch):
    monkeypatch.setattr(logs, "_CHUNK", 1000)
    path = log([(0, "found")] + [(0, "text")] * 1000)
    found = logs.page(path, search="found", most=LINES, scan=5000)
    assert found.lines == []
    assert found.before > 0


@pytest.mark.parametrize("size", [SHOWN + 1, 1 << 20, 3 << 20])
def test_long_log_line_is_cut_and_returned_whole_on_request(log, size):
    path = log([(0, "before"), (3, "x" * size), (0, "after")])
    found = page(path)
    assert [each["rank"] for each in found["lines"]] == [0, 3, 0]
    cut = found["lines"][1]
    assert cut["text"] == "x" * SHOWN
    assert cut["cut"] >= size
    assert line(path, cut["at"]) == "x" * size


def test_missing_log_yields_empty_page(tmp_path):
    assert page(tmp_path / "log") == {"lines": [], "before": 0, "after": 0, "skipped": False}
    assert line(tmp_path / "log", 0) == ""


def test_carriage_returns_do_not_end_lines(log):
    assert texts(page(log([(0, "10 %\r20 %")]))) == ["10 %\\x0d20 %"]
