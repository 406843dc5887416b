"""What an agent reads of its ranks' output, to know one failure from another."""

import pytest

from clusterkit.agent.failure import RankOutput

TRACEBACK = [b"Traceback (most recent call last):", b'  File "train.py", line 7, in main',
             b"    step()", b"ValueError: bad"]  # fmt: skip
BAD = 'ValueError: bad (File "train.py", line 7, in main)'


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (TRACEBACK, BAD),
        ([b"[rank0]: " + line for line in TRACEBACK], BAD),
        ([*TRACEBACK, b"", b"During handling of the above exception:", b"",
          TRACEBACK[0], b'  File "b.py", line 1, in f', b"KeyError: 1"],
         'KeyError: 1 (File "b.py", line 1, in f)'),
        ([b"ValueError: bad"], ""),
    ],
)  # fmt: skip
def test_failure_holds_last_exception_and_its_place(lines, error):
    words = RankOutput()
    for line in lines:
        words.read("0", line)
    assert words.failure(0, 1) == {
        "code": 1, "error": error, "echo": False, "timed_out": False,
        "words": "" if error else "ValueError: bad",
    }  # fmt: skip
    assert words.failure(1, 1)["error"] == ""
    assert words.failure(0, 137)["error"] == ""  # it was killed, whatever it said before


def test_rank_output_reads_steps_and_torchrun_exit_codes():
    words = RankOutput()
    for rank, line in [
        ("0", b'@clusterkit {"event": "metrics", "step": 3}'),
        ("0", b'@clusterkit {"event": "metrics", "st'),
        ("0", b'@clusterkit {"event": "phase", "step": 9}'),
        ("-", b"E1123 api.py:1] failed (exitcode: -9) local_rank: 0 (pid: 77) of binary: sh"),
    ]:
        words.read(rank, line)
    assert (words.step, words.codes) == (3, {77: -9})


def test_rank_output_recognizes_peer_errors_and_quotes_last_words():
    words = RankOutput()
    for line in (*TRACEBACK[:2], b"RuntimeError: Connection closed by peer [127.0.0.1]:1"):
        words.read("2", line)
    assert words.failure(2, 1)["echo"]
    watchdog = b"[rank3]:[E] Watchdog caught collective operation timeout: WorkNCCL(..)"
    for line in (watchdog, b"terminate called after throwing an instance of 'c10::DistError'"):
        words.read("3", line)
    assert words.failure(3, 134) == {
        "code": 134, "error": "", "echo": True, "timed_out": True, "words": ""
    }  # fmt: skip
    for line in (
        b"loading",
        b"usage: train.py [-h]",
        b"",
        b"train.py: error: unrecognized: --r=16",
    ):
        words.read("4", line)
    said = "loading / usage: train.py [-h] / train.py: error: unrecognized: --r=16"
    assert words.failure(4, 2)["words"] == said
    assert not words.failure(3, 137)["echo"]  # it was killed, whatever it said before
