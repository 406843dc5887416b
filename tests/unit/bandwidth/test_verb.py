"""`clusterkit bench` and its pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clusterkit import api
from clusterkit.bench import bandwidth
from clusterkit.bench.bandwidth import ITEMSIZES
from clusterkit.cluster import Facts
from clusterkit.errors import RunFailed, RunFolderError, Unavailable
from clusterkit.lifecycle import supervise
from clusterkit.run.folder import RunFolder
from clusterkit.run.status import Failure, NodeStatus, RunStatus, State
from clusterkit.ui import plots
from tests.unit.bandwidth.measured import SETUP, exchange, row

# ---------------------------------------------------------------- the verb


STAMP = "2026-11-21T20:11:58.123451Z"


@pytest.fixture
def played(
    monkeypatch: pytest.MonkeyPatch, by_hand: Any, no_gpus: None, cwd: Path
) -> Callable[..., None]:
    """``played(marks)``: the next run is not started but has printed these marked lines."""

    def play(
        marks: list[dict[str, Any]], state: State = State.SUCCEEDED, failure: Failure | None = None
    ) -> None:
        def launch(folder: RunFolder, lock: object, transport: object) -> None:
            log = "".join(f"{STAMP} 0 @clusterkit {json.dumps(mark)}\n" for mark in marks)
            code = 0 if state is State.SUCCEEDED else 7
            by_hand(api.Run(folder)).node(exit_code=code, log=f"{STAMP} 0 a warning\n{log}")
            nodes = tuple(
                NodeStatus(node=node, host="localhost", state=state, exit_code=code)
                for node in range(2)
            )
            folder.write_json(
                "state.json",
                RunStatus(
                    run=folder.run_id, job="bench", cluster="local", backend="local", state=state,
                    exit_code=code, nodes=nodes, failure=failure, started_at=1.0, finished_at=2.0,
                ),
            )  # fmt: skip

        monkeypatch.setattr(supervise, "launch", launch)

    return play


MARKS = [
    SETUP | {"measurements": 2},
    {"event": "bench_doing", "collective": "all_reduce", "size": 4096, "number": 1, "of": 2},
    row(),
    {"event": "bench_doing", "collective": "broadcast", "size": 4096, "number": 2, "of": 2},
    row("broadcast", median_us=50.0),
]
PAIRS = [SETUP, exchange(0, 1), exchange(1, 0, median_us=50.0 + 10000.0)]


def test_bench_prints_table_on_stdout_and_remarks_on_stderr(played: Any, cli: Any) -> None:
    played(MARKS)
    done = cli("bench", "--nodes", "2", "--gpus", "2")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].split("  ")[0] == "collective"
    assert [line.split() for line in lines[1:]] == [
        ["all_reduce", "4096", "1024", "20", "100", "90.0", "200", "0.0410", "0.0614", "0"],
        ["broadcast", "4096", "1024", "20", "50.0", "90.0", "200", "0.0819", "0.0819", "0"],
    ]
    assert len({len(line) for line in lines}) == 1
    assert "1/2 all_reduce of 4 KiB\n2/2 broadcast of 4 KiB\n" in done.err
    assert "n0 r0 a warning" in done.err
    assert "4 ranks on 2 nodes: gloo on cpu, float32, torch 2.13.0" in done.err
    assert "latency: all_reduce 100 us at 4 KiB, broadcast 50.0 us at 4 KiB" in done.err


def test_bench_json_prints_report_as_one_document(played: Any, cli: Any) -> None:
    played(MARKS)
    done = cli("bench", "-n", "2", "--json")
    assert done.code == 0
    assert done.json["run"] == api.get("last").id
    assert [one["collective"] for one in done.json["rows"]] == ["all_reduce", "broadcast"]
    assert done.json["rows"][0]["bus_gb_per_s"] == pytest.approx(0.06144)
    assert done.json["latency_us"] == {"all_reduce": 100.0, "broadcast": 50.0}
    assert done.json["pairs"] is None
    assert set(done.json) == set(bandwidth.Report.__struct_fields__)


def test_pairwise_bench_prints_matrices_and_judgement(played: Any, cli: Any) -> None:
    played(PAIRS)
    done = cli("bench", "-n", "2", "--pairwise")
    assert done.code == 0
    blocks = done.out.split("\n\n")
    assert blocks[0].splitlines() == [
        "GB/s in messages of 1 MiB; from the row's host to the column's",
        "       a     b",
        "a      -  1.05",
        "b  0.105     -",
    ]
    assert blocks[1].startswith("latency in us, 1 KiB")
    assert blocks[2] == (
        "The link from b to a is slow: bandwidth 0.105 GB/s, the other way 1.05 GB/s.\n"
    )
    played(PAIRS)
    found = cli("bench", "-n", "2", "--pairwise", "--json").json["pairs"]
    assert found["gb_per_s"][0][0] is None
    assert found["findings"][0]["hosts"] == ["b", "a"]


def test_bench_fails_on_wrong_results(played: Any, cli: Any) -> None:
    played([SETUP, row(), row("broadcast", wrong=3)])
    done = cli("bench", "-n", "2")
    assert done.code == 1
    assert "3 elements had wrong results" in done.err
    played([SETUP, row(), row("broadcast", wrong=1)])
    done = cli("bench", "-n", "2", "--json")
    assert done.code == 1
    assert done.json["wrong"] == 1


def test_bench_explains_failed_run_and_passes_on_exit_code(played: Any, cli: Any) -> None:
    failure = Failure(
        node=1, rank=1, exit_code=7, cause="ValueError: bad", hint="mend it", traceback="T\nU"
    )
    played(MARKS[:2], State.FAILED, failure)
    done = cli("bench", "-n", "2")
    assert done.code == 7
    assert done.out == ""
    run = api.get("last").id
    assert done.err.endswith(
        f"error: run {run} is FAILED: rank 1 on node 1 failed first: ValueError: bad "
        "(exit code 7)\n  T\n  U\n hint: mend it\n"
    )


def test_bench_of_run_without_diagnosis_hints_at_logs(played: Any, cli: Any) -> None:
    played([], State.CANCELLED)
    done = cli("bench", "-n", "2")
    assert done.code == 7
    run = api.get("last").id
    assert f"error: run {run} is CANCELLED\n hint: clusterkit logs {run}\n" in done.err


def test_bench_refuses_run_with_too_few_measurements(played: Any, cli: Any) -> None:
    played(MARKS[:3])
    done = cli("bench", "-n", "2")
    assert done.code == 125
    assert "reported 1 of 2 measurements" in done.err
    assert done.out == ""


def test_interrupted_bench_cancels_run(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = []
    monkeypatch.setattr(api.Run, "cancel", lambda run: cancelled.append(run.id))

    def interrupted(run: api.Run) -> RunStatus:
        raise KeyboardInterrupt

    played(MARKS)
    with pytest.raises(KeyboardInterrupt):
        api.bench(nodes=2, watch=interrupted)
    assert cancelled == [api.get("last").id]


def test_api_bench_returns_report_or_raises_run_failed(played: Any) -> None:
    played(MARKS)
    assert api.bench(nodes=2, sizes="4K").rows[0].collective == "all_reduce"
    played([], State.FAILED)
    with pytest.raises(RunFailed) as error:
        api.bench(nodes=2)
    assert error.value.exit_code == 7


def test_bench_without_nodes_uses_every_host(
    played: Any, monkeypatch: pytest.MonkeyPatch, facts: Facts
) -> None:
    from clusterkit.backends.local.backend import LocalBackend

    asked = []
    one = facts.hosts[0]

    def probe(self: LocalBackend, cluster: Any, transport: Any, job: Any = None) -> Facts:
        asked.append(job)
        return msgspec.structs.replace(facts, hosts=(one, one, one))

    monkeypatch.setattr(LocalBackend, "probe", probe)
    played(MARKS)
    api.bench()
    assert asked[0] is None
    assert api.get("last").plan.topology["nodes"] == 3
    played(MARKS)
    api.bench(nodes=2)
    assert api.get("last").plan.topology["nodes"] == 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--sizes", "1X"], "sizes: '1X'"),
        (["--sizes", "2M:1M"], "the smallest size comes first"),
        (["--collectives", "allreduce"], "collectives: 'allreduce' is unknown"),
        (["--dtype", "float"], "dtype: 'float' is unknown"),
        (["--dtype", "float8_e4m3fn", "-n", "2"], "gloo, which ranks without GPUs use"),
        (["--iterations", "0"], "iterations: 0"),
        (["--iterations", "many"], "'many' is not a valid integer"),
        (["--sequential"], "sequential: without --pairwise"),
        ([], "1 node x 1 rank: there is nothing to measure between"),
        (["-n", "1"], "there is nothing to measure between"),
        (["-n", "0"], "a run needs at least 1 node"),
        (["-n", "-2"], "nodes: "),
        (["-n", "2:4"], "'2:4' is not a valid integer"),
        (["-g", "0"], "--gpus: 0: a node needs at least 1 rank"),
        (["-g", "2", "--pairwise"], "pairwise: 1 node x 2 ranks"),
        (["-n", "2", "--sizes", "999G"], "of buffers, localhost has"),
        (["-n", "2", "-o", "bus.txt"], "bus.txt: not the name of a picture"),
        (["-c", "nowhere", "-n", "2"], "nowhere"),
    ],
)
def test_bench_refuses_invalid_arguments_before_start(
    refused: Any, no_gpus: None, cwd: Path, argv: list[str], said: str
) -> None:
    assert said in refused("bench", *argv)


def test_bench_draws_progress_bar_in_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    from clusterkit.cli import bench

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with bench._progress() as say:
        say(3, 9, "broadcast of 4 KiB")
    shown = terminal.getvalue()
    assert "3/9" in shown
    assert "broadcast of 4 KiB" in shown


# ---------------------------------------------------------------- pictures


def test_draw_bandwidth_draws_one_line_per_collective(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = bandwidth.report("r", [SETUP | {"measurements": 4}, row(), row(size=1 << 20),
                                    row("broadcast"), row("broadcast", 1 << 20)])  # fmt: skip
    path = plots.draw_bandwidth(report, tmp_path / "bus.svg")
    text = path.read_text()
    for words in ("all_reduce, latency 100 us", "broadcast, latency 100 us", "bus bandwidth (GB/s)",
                  "4 KiB", "4 ranks on 2 nodes, gloo, cpu, float32"):  # fmt: skip
        assert f"<!-- {words} -->" in text


def test_draw_bandwidth_draws_pairs_as_matrix(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = plots.draw_bandwidth(bandwidth.report("r", PAIRS), tmp_path / "pairs.svg")
    text = path.read_text()
    assert text.count("<!-- a -->") == text.count("<!-- b -->") == 2
    assert "<!-- 1.05 -->" in text
    assert "<!-- 0.105 -->" in text


def test_bench_writes_picture(played: Any, cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    played(MARKS)
    done = cli("bench", "-n", "2", "-o", str(tmp_path / "bus.png"))
    assert done.code == 0
    assert (tmp_path / "bus.png").read_bytes().startswith(b"\x89PNG")
    assert f"drawn: {tmp_path}/bus.png" in done.err


def test_bench_prints_table_when_picture_cannot_be_written(
    played: Any, cli: Any, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    played(MARKS)
    (tmp_path / "bus.png").symlink_to("/dev/full")
    done = cli("bench", "-n", "2", "-o", str(tmp_path / "bus.png"))
    assert done.code == RunFolderError.exit_code
    assert "all_reduce" in done.out
    assert "cannot write" in done.err
    (tmp_path / "folder.png").mkdir()
    for name, error in (("no/bus.png", "there is no folder"), ("folder.png", "is a folder")):
        done = cli("bench", "-n", "2", "-o", str(tmp_path / name))
        assert (done.code, done.out) == (125, "")  # before anything is measured
        assert error in done.err


def test_bench_without_matplotlib_refuses_picture_before_measuring(
    refused: Any, no_gpus: None, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    said = refused("bench", "-n", "2", "-o", "bus.png", code=Unavailable.exit_code)
    assert "drawing needs matplotlib" in said


def test_itemsizes_match_bits_in_dtype_names() -> None:
    assert all(name.endswith(str(8 * size)) or "float8" in name or name == "bfloat16"
               for name, size in ITEMSIZES.items())  # fmt: skip
