"""Log lines keep their time, node, rank and order, and survive being cut off anywhere."""

import calendar
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterkit.run import logs
from clusterkit.run.logs import LogLine, NodeLog, merged, parse_lines, parse_mark

# A line of output: no line breaks, as the node agent leaves it.
BODY = st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), max_size=60)


def stamp(moment: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment))
    return f"{whole}.{int(moment % 1 * 1e6):06d}Z"


def raw(moment: float, rank: int | None, text: str) -> bytes:
    return f"{stamp(moment)} {'-' if rank is None else rank} {text}".encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


def written(folder, data: bytes, node=0) -> NodeLog:
    path = folder / f"log-{node}"
    path.write_bytes(data)
    return NodeLog(path, node)


# ---------------------------------------------------------------- one line


@given(st.integers(0, 4 * 10**9), st.integers(0, 999_999), st.integers(0, 99_999) | st.none(), BODY)
def test_log_line_round_trips_time_rank_and_text(second, micro, rank, text):
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
    data = f"{whole}.{micro:06d}Z {'-' if rank is None else rank} {text}".encode()
    (line,) = parse_lines(data, node=3, attempt=2)
    assert (line.node, line.rank, line.text, line.attempt) == (3, rank, text, 2)
    assert round(line.time * 1e6) == second * 10**6 + micro


@given(st.binary(max_size=80).filter(lambda data: b"\n" not in data))
def test_parse_lines_accepts_any_bytes(data):
    (line,) = parse_lines(data, node=0)
    assert line.time > 0 or (line.rank is None and line.text == data.decode(errors="replace"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "words",
        "2026-11-21T20:11:58.123456Z",
        "2026-11-21T20:11:58.123456Z 0",
        "2026-11-21T20:11:58.123456Z x words",
        "2026-11-21T20:11:58.123456Z ² words",
        "2026-11-21T20:11:58.123456Z " + "9" * 5000 + " words",
        "2026-13-21T20:11:58.123456Z 0 words",
        "2026-11-21T20:11:58,123456Z 0 words",
        "2026-11-21 20:11:58.123456Z 0 words",
    ],
    ids=lambda text: text[:40],
)
def test_line_without_stamp_becomes_text_without_time_or_rank(text):
    assert list(parse_lines(text.encode(), node=1)) == [LogLine(0.0, 1, None, text)]


def test_log_time_is_utc():
    (line,) = parse_lines(b"2026-11-21T20:11:58.500000Z - x", 0)
    assert line.time == calendar.timegm((2026, 11, 21, 20, 11, 58)) + 0.5


def test_log_line_keeps_leading_and_trailing_spaces():
    (line,) = parse_lines(raw(0.0, 0, "   indented  "), 0)
    assert line.text == "   indented  "


# ---------------------------------------------------------------- marked lines


def test_marked_line_gives_event():
    line = LogLine(0.0, 0, 0, '@clusterkit {"event": "metrics", "step": 1, "loss": 0.5}')
    assert line.event == {"event": "metrics", "step": 1, "loss": 0.5}


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        "@clusterkit",
        "@clusterkit ",
        "@clusterkit {",
        '@clusterkit {"event": "metr',
        "@clusterkit []",
        "@clusterkit 3",
        '@clusterkit {"step": 1}',
        ' @clusterkit {"event": "x"}',
        "@clusterkit-rank 0 1",
    ],
)
def test_unmarked_or_malformed_line_gives_no_event(text):
    assert parse_mark(text) is None


def test_event_is_formatted_as_readable_text():
    assert logs.readable({"event": "metrics", "step": 3, "loss": 0.123456789, "n": 4}) == (
        "step 3  loss 0.123457  n 4"
    )
    assert logs.readable({"event": "checkpoint", "path": "c"}) == "checkpoint  path c"


# ---------------------------------------------------------------- a node's log


def test_node_log_holds_last_line_until_newline_arrives(folder):
    log = written(folder, raw(1.0, 0, "one") + b"\n" + raw(2.0, 0, "two"))
    assert [line.text for line in log.available()] == ["one"]
    assert [line.text for line in log.available()] == []
    append(folder, b" and more\n")
    assert [line.text for line in log.available()] == ["two and more"]
    assert list(log.remainder()) == []


def append(folder, data):
    with (folder / "log-0").open("ab") as file:
        file.write(data)


def test_node_log_remainder_gives_truncated_last_line(folder):
    log = written(folder, raw(1.0, 0, "one") + b"\n" + raw(2.0, 0, "tw"))
    assert [line.text for line in log.available()] == ["one"]
    assert [line.text for line in log.remainder()] == ["tw"]
    assert list(log.remainder()) == []


@given(st.lists(BODY, max_size=6), st.integers(0, 400))
def test_node_log_truncated_anywhere_gives_all_complete_lines(folder, texts, cut):
    data = b"".join(raw(float(n + 1), 0, text) + b"\n" for n, text in enumerate(texts))[:cut]
    log = written(folder, data)
    whole = data.count(b"\n")
    assert [line.text for line in log.available()] == texts[:whole]
    assert len(list(log.remainder())) == (1 if data and not data.endswith(b"\n") else 0)


@given(st.lists(st.binary(max_size=20).filter(lambda b: b"\n" not in b), max_size=8))
def test_node_log_written_byte_by_byte_gives_same_lines(folder, pieces):
    data = b"".join(piece + b"\n" for piece in pieces)
    log, found = written(folder, b""), []
    for at in range(len(data)):
        append(folder, data[at : at + 1])
        found += log.available()
    assert found == list(written(folder, data).available())


def test_node_log_gives_very_long_line_whole(folder):
    log = written(folder, b"".join(raw(1.0, 0, text) + b"\n" for text in ("a", "b" * 900_000, "c")))
    assert [len(line.text) for line in log.available()] == [1, 900_000, 1]


def test_missing_node_log_is_empty(folder):
    log = NodeLog(folder / "none", 0)
    assert list(log.available()) == []
    assert list(log.remainder()) == []


# ---------------------------------------------------------------- several nodes


@given(st.lists(st.lists(st.integers(1, 1000), max_size=10).map(sorted), min_size=1, max_size=4))
def test_merged_logs_are_sorted_by_time_and_keep_node_order(folder, moments):
    sources = [
        written(
            folder,
            b"".join(raw(t, node, f"{node}:{n}") + b"\n" for n, t in enumerate(times)),
            node,
        )
        for node, times in enumerate(moments)
    ]
    lines = [line for batch in merged(sources) for line in batch]
    assert [line.time for line in lines] == sorted(t for times in moments for t in times)
    for node, times in enumerate(moments):
        texts = [line.text for line in lines if line.node == node]
        assert texts == [f"{node}:{n}" for n in range(len(times))]
        assert {line.rank for line in lines if line.node == node} <= {node}


def test_following_logs_until_stopped_gives_remaining_lines(folder, monkeypatch):
    log = written(folder, raw(1.0, 0, "one") + b"\n")
    answers = iter([True, True, False])

    def grow(seconds):
        append(folder, raw(2.0, 0, "more") + b"\n")

    monkeypatch.setattr(logs.time, "sleep", grow)

    def follow():
        goes_on = next(answers)
        if not goes_on:
            append(folder, raw(3.0, 0, "written just before the end"))
        return goes_on

    assert [line.text for batch in merged([log], follow) for line in batch] == [
        "one",
        "more",
        "more",
        "written just before the end",
    ]


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("[rank3]: Traceback", "Traceback"),
        ("[rank3]:", ""),
        ("[rank3]:   File", "  File"),
        ("no prefix", "no prefix"),
        ("the loss of [rank3]: 5", "the loss of [rank3]: 5"),
    ],
)
def test_without_rank_removes_leading_torch_rank_prefix(text, without):
    assert logs.without_rank(text) == without


def test_tail_reads_last_lines_only(tmp_path):
    path = tmp_path / "log"
    text = "".join(f"2026-11-21T20:11:58.{number:06d}Z 0 line {number}\n" for number in range(9999))
    path.write_text(f"{text}2026-11-21T20:11:59.000000Z 1 unfinished")
    found = logs.tail(path, 3, 2, 1000)
    assert [line.text for line in found[-2:]] == ["line 9998", "unfinished"]
    assert len(found) < 30
    assert {(line.node, line.attempt) for line in found} == {(3, 2)}
    assert logs.tail(tmp_path / "none", 0, 1, 1000) == []
