"""The program that measures, inside real ranks on gloo and by its pieces."""

from __future__ import annotations

import ast
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clusterkit.bench import bandwidth as orchestrator
from clusterkit.runtime import bandwidth
from clusterkit.runtime.bandwidth import COLLECTIVES, DTYPES, Options, World

PROGRAM = Path(bandwidth.__file__)
NODES = {"LOCAL_WORLD_SIZE": "1"}
"""Every rank is a node of its own."""


def options(**fields: Any) -> Options:
    given: dict[str, Any] = {
        "collectives": tuple(COLLECTIVES), "sizes": (1024,), "dtype": torch.float32,
        "iterations": None, "warmup": None, "pairwise": False, "sequential": False, "most": 0,
    }  # fmt: skip
    return Options(**given | fields)


def world(rank: int = 0, size: int = 4) -> World:
    return World(rank, size, 0, torch.device("cpu"), "gloo")


# ---------------------------------------------------------------- one file that stands alone


def test_bandwidth_program_imports_only_stdlib_and_torch() -> None:
    imported = set()
    for node in ast.walk(ast.parse(PROGRAM.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).split(".")[0])
    assert imported - sys.stdlib_module_names == {"torch"}


def test_program_and_orchestrator_share_collectives_and_dtypes() -> None:
    assert list(COLLECTIVES) == list(orchestrator.FACTORS)
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == orchestrator.ITEMSIZES


@given(
    names=st.lists(st.sampled_from(list(COLLECTIVES)), min_size=1, unique=True),
    ranks=st.integers(2, 64),
    size=st.integers(10_000, 1 << 40),
    pairwise=st.booleans(),
)
def test_program_and_orchestrator_expect_same_memory(
    names: list[str], ranks: int, size: int, pairwise: bool
) -> None:
    mine = bandwidth.needed_bytes(
        options(collectives=tuple(names), sizes=(1, size), pairwise=pairwise), ranks
    )
    asked = orchestrator.choose(
        collectives=None if pairwise else names, sizes="1", pairwise=pairwise
    )
    theirs = orchestrator.needed_bytes(
        orchestrator.Options(**{
            field: getattr(asked, field) for field in asked.__struct_fields__
        } | {"sizes": (1, size)}),
        ranks,
    )  # fmt: skip
    assert mine == pytest.approx(theirs, abs=8 * ranks + 8)


# ---------------------------------------------------------------- sizes and counts


@given(
    name=st.sampled_from(list(COLLECTIVES)),
    size=st.integers(1, 1 << 40),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    ranks=st.integers(2, 1000),
)
def test_whole_elements_fit_size_and_divide_by_ranks(
    name: str, size: int, itemsize: int, ranks: int
) -> None:
    elements = bandwidth.whole_elements(name, size, itemsize, ranks)
    divided = name in ("all_gather", "reduce_scatter")
    unit = ranks if divided else 1
    assert elements >= unit
    assert elements % unit == 0
    assert elements * itemsize <= max(size, unit * itemsize)
    assert (elements + unit) * itemsize > size


@pytest.mark.parametrize(
    ("seconds", "fields", "counts"),
    [
        (1e-6, {}, (3, 20)),
        (0.0, {}, (3, 20)),
        (0.5, {}, (3, 10)),
        (2.0, {}, (2, 3)),
        (100.0, {}, (0, 3)),
        (100.0, {"iterations": 50}, (0, 50)),
        (100.0, {"warmup": 10}, (8, 3)),
        (1e-6, {"warmup": 2, "iterations": 1}, (0, 1)),
    ],
)
def test_iteration_counts_shrink_for_slow_operations_unless_given(
    seconds: float, fields: dict[str, int], counts: tuple[int, int]
) -> None:
    assert options(**fields).counts(seconds) == counts


@given(iterations=st.integers(1, 100), passes=st.integers(1, 3))
def test_passes_share_all_iterations(iterations: int, passes: int) -> None:
    asked = options(iterations=iterations)
    parts = [asked.counts(1.0, number=number, passes=passes)[1] for number in range(passes)]
    assert sum(parts) == iterations


@given(players=st.integers(2, 65))
def test_tournament_pairs_every_two_players_once(players: int) -> None:
    rounds = bandwidth.tournament(players)
    assert len(rounds) == players - 1 + players % 2
    for pairs in rounds:
        assert max(Counter(itertools.chain.from_iterable(pairs)).values()) == 1
        assert len(pairs) == players // 2
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == list(itertools.combinations(range(players), 2))


@pytest.mark.parametrize(
    ("free", "name", "last"),
    [
        (80, "all_reduce", [64, 256, 1024, 4096, 8192]),
        (24, "all_reduce", [64, 256, 1024, 4096, 8192]),
        (24, "sendrecv", [64, 256, 1024, 4096, 8192]),  # two buffers
        (16, "sendrecv", [64, 256, 1024, 4096]),
        (6, "sendrecv", [64, 256, 1024]),
        (0.01, "all_reduce", [64]),  # refused with its figures
    ],
)
def test_sizes_grow_on_gpus_up_to_free_memory(
    monkeypatch: pytest.MonkeyPatch, free: float, name: str, last: list[int]
) -> None:
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (int(free * (1 << 30)), 96 << 30)
    )
    asked = options(collectives=(name,), sizes=(1024, 64 << 20), most=8 << 30)
    gpu = Alike(0, 8, 0, torch.device("cuda", 0), "nccl")
    assert bandwidth.grown(gpu, asked).sizes == (1024, *(size << 20 for size in last))
    given = options(sizes=(64 << 20,))
    assert bandwidth.grown(gpu, given) == given
    assert bandwidth.grown(world(), asked) == asked


def test_messages_between_gpus_use_batched_isend_irecv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[tuple[str, int]] = []

    def batch(operations: Sequence[Any]) -> list[Any]:
        done.extend((each.op.__name__, each.peer) for each in operations)
        return [Mock() for _ in operations]

    monkeypatch.setattr(bandwidth.dist, "P2POp", lambda op, tensor, peer: Mock(op=op, peer=peer))
    monkeypatch.setattr(bandwidth.dist, "batch_isend_irecv", batch)
    send, receive = bandwidth.messages(World(0, 4, 0, torch.device("cuda", 0), "nccl"))
    send(torch.zeros(1), 3)
    receive(torch.zeros(1), 2)
    assert done == [("isend", 3), ("irecv", 2)]
    assert bandwidth.messages(world()) == (bandwidth.dist.send, bandwidth.dist.recv)


# ---------------------------------------------------------------- the check


@given(size=st.integers(1, 300), elements=st.integers(1, 500))
def test_shares_of_ranks_sum_to_total_with_one_rank_per_element(size: int, elements: int) -> None:
    index = torch.arange(elements)
    shares = torch.stack([bandwidth.share(rank, size, index) for rank in range(size)])
    assert torch.equal(shares.sum(0), bandwidth.total(size, index))
    assert torch.equal((shares != 0).sum(0), torch.ones_like(index))


@pytest.mark.parametrize("name", DTYPES)
def test_sent_values_are_exact_except_in_float8_and_differ_by_rank(name: str) -> None:
    index = torch.arange(4096)
    sent = [bandwidth.value(rank, index) for rank in range(112)]
    for one in sent:
        assert 1 <= int(one.min()) <= int(one.max()) <= 112
        if "float8" not in name:
            assert torch.equal(one.to(DTYPES[name]).long(), one)
    assert all(not torch.equal(a[:1], b[:1]) for a, b in itertools.combinations(sent, 2))


@pytest.mark.parametrize("elements", [1, 5, 1000])
@pytest.mark.parametrize("name", DTYPES)
def test_count_wrong_counts_every_wrong_element(
    monkeypatch: pytest.MonkeyPatch, name: str, elements: int
) -> None:
    monkeypatch.setattr(bandwidth, "_CHUNK", 7)
    tensor = bandwidth.allocator(world(), DTYPES[name])(elements)
    assert bandwidth.count_wrong(tensor, lambda index: bandwidth.value(3, index)) == elements
    bandwidth.fill(tensor, lambda index: bandwidth.value(3, index))
    assert bandwidth.count_wrong(tensor, lambda index: bandwidth.value(3, index)) == 0
    tensor[elements - 1] = 0
    assert bandwidth.count_wrong(tensor, lambda index: bandwidth.value(3, index)) == 1


def test_count_wrong_counts_nan() -> None:
    tensor = torch.full((3,), float("nan"))
    assert bandwidth.count_wrong(tensor, lambda index: bandwidth.value(0, index)) == 3


class Alike(World):
    """One of ranks that all measure the same."""

    def reduce(
        self, values: Sequence[float], how: Any = torch.distributed.ReduceOp.SUM
    ) -> list[float]:
        times = self.size if how == torch.distributed.ReduceOp.SUM else 1
        return [value * times for value in values]


def test_measured_time_is_median_over_iterations_of_rank_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def timed(world: World, run: object, times: int) -> list[float]:
        asked.append(times)
        return [0.25, 0.5, 0.75, 4.0][:times]

    monkeypatch.setattr(bandwidth, "timed", timed)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    data = torch.zeros(10)
    operation = bandwidth.Operation(
        lambda i: None, data, torch.ones_like, data, lambda index: index.clamp(max=1)
    )
    four = Alike(0, 4, 0, torch.device("cpu"), "gloo")
    found = bandwidth.measure(four, operation, options(iterations=4, warmup=3))
    assert asked == [2, 1, 4]
    assert found == {
        "iterations": 4, "median_us": 625000.0, "min_us": 250000.0, "max_us": 4000000.0,
        "wrong": 4,  # index 0, on each of the ranks
    }  # fmt: skip


def test_pair_latency_is_half_of_fastest_round_trip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Seconds of each pass: making the connection, getting warm and measuring, for each size.
    told = iter(
        [
            [9.0, 0.5], [0.5], [0.75, 0.5, 4.0], [9.0, 1.0], [1.0], [1.0, 2.0, 3.0],
            [9.0, 0.5], [0.5], [0.25, 0.5, 4.0], [9.0, 1.0], [1.0], [4.0, 5.0, 6.0],
        ]
    )  # fmt: skip
    monkeypatch.setattr(bandwidth, "timed", lambda world, run, times: next(told))
    for operation in ("send", "recv"):
        monkeypatch.setattr(torch.distributed, operation, lambda tensor, peer: None)
    asked = options(sizes=(64, 20000), iterations=3, warmup=1)
    for number, seconds in ((0, [1.0, 2.0, 3.0]), (1, [4.0, 5.0, 6.0])):
        found = bandwidth.one_way(world(size=2), asked, (number, 2), peer=1, leads=True)
        assert found is not None
        assert (found.seconds, found.wrong) == (seconds, 0)
    assert min(found.latencies) == 0.125
    assert bandwidth.pair_elements(asked) == (16, 5000)


# ---------------------------------------------------------------- real ranks


def test_three_ranks_measure_every_collective_without_wrong_elements(launch: Any) -> None:
    done = launch("--sizes", "1,1000,50000", ranks=3, program=PROGRAM)
    assert done.codes == [0, 0, 0], done.stderr
    assert done.stdout[1:] == ["", ""]
    assert all(line.startswith("@clusterkit ") for line in done.stdout[0].splitlines())
    (setup,) = done.of("bench_setup")
    assert setup["world_size"] == 3
    assert (setup["backend"], setup["device"], setup["dtype"]) == ("gloo", "cpu", "float32")
    assert [node["ranks"] for node in setup["nodes"]] == [[0, 1, 2]]
    rows = done.of("bench_row")
    assert len(rows) == setup["measurements"] == 15
    sizes = {
        "all_reduce": [4, 1000, 50000], "broadcast": [4, 1000, 50000],
        "sendrecv": [4, 1000, 50000], "all_gather": [12, 996, 49992],
        "reduce_scatter": [12, 996, 49992],
    }  # fmt: skip
    for name, expected in sizes.items():
        assert [row["size"] for row in rows if row["collective"] == name] == expected
    for row in rows:
        assert row["wrong"] == 0
        assert row["elements"] * 4 == row["size"]
        assert 0 < row["min_us"] <= row["median_us"] <= row["max_us"]
        assert row["iterations"] >= 3
    doing = done.of("bench_doing")
    assert [one["number"] for one in doing] == list(range(1, 16))
    report = orchestrator.report("r", done.events)
    assert report.wrong == 0
    assert list(report.latency_us) == list(COLLECTIVES)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_collectives_are_correct_in_bfloat16_and_int8(launch: Any, dtype: str) -> None:
    done = launch(
        "--sizes", "4096", "--dtype", dtype, "--iterations", "2", "--warmup", "2",
        ranks=2, program=PROGRAM,
    )  # fmt: skip
    assert done.codes == [0, 0], done.stderr
    rows = done.of("bench_row")
    assert [row["wrong"] for row in rows] == [0] * 5
    assert {row["iterations"] for row in rows} == {2}
    assert {row["elements"] for row in rows} == {4096 // DTYPES[dtype].itemsize}


def test_sizes_that_round_alike_are_measured_once(launch: Any) -> None:
    done = launch("--sizes", "1,2,3,9", "--collectives", "broadcast", ranks=2, program=PROGRAM)
    assert [row["size"] for row in done.of("bench_row")] == [4, 8]
    assert done.of("bench_setup")[0]["measurements"] == 2


@pytest.mark.parametrize("flags", [[], ["--sequential"]])
def test_pairwise_measures_all_node_pairs_in_both_directions(launch: Any, flags: list[str]) -> None:
    done = launch(
        "--pairwise", "--sizes", "64,20000", "--iterations", "5", *flags,
        ranks=3, program=PROGRAM, env=NODES,
    )  # fmt: skip
    assert done.codes == [0, 0, 0], done.stderr
    pairs = done.of("bench_pair")
    ways = [(pair["from"], pair["to"]) for pair in pairs]
    assert sorted(ways) == sorted(itertools.permutations(range(3), 2))
    for pair in pairs:
        assert (pair["size"], pair["latency_size"], pair["wrong"]) == (20000, 64, 0)
        assert pair["iterations"] == 5
        # Which size is quicker is up to the machine: 5 messages of each, at different times.
        assert pair["latency_us"] > 0
        assert 0 < pair["min_us"] <= pair["median_us"] <= pair["max_us"]
    # Three nodes make three rounds of one pair, in each of three passes.
    assert [one["of"] for one in done.of("bench_doing")] == [9] * 9
    report = orchestrator.report("r", done.events)
    assert report.pairs is not None
    assert report.pairs.judgement


def test_pairwise_measures_first_rank_of_each_node(launch: Any) -> None:
    done = launch(
        "--pairwise", "--sizes", "64", ranks=4, program=PROGRAM, env={"LOCAL_WORLD_SIZE": "2"}
    )
    assert done.codes == [0] * 4, done.stderr
    assert [node["ranks"] for node in done.of("bench_setup")[0]["nodes"]] == [[0, 1], [2, 3]]
    assert sorted((pair["from"], pair["to"]) for pair in done.of("bench_pair")) == [(0, 1), (1, 0)]


BROKEN = """
import sys
sys.path.insert(0, {folder!r})
import bandwidth, torch
{change}
bandwidth.run(sys.argv[1:])
"""


@pytest.fixture
def spoilt(tmp_path: Path) -> Callable[[str], Path]:
    """The program, away from clusterkit, with a change made to it before it runs."""

    def write(change: str) -> Path:
        folder = tmp_path / "elsewhere"
        folder.mkdir()
        (folder / "bandwidth.py").write_text(PROGRAM.read_text())
        path = tmp_path / "spoilt.py"
        path.write_text(BROKEN.format(folder=str(folder), change=change))
        return path

    return write


def test_broken_collective_is_reported_with_wrong_elements(
    launch: Any, spoilt: Callable[[str], Path]
) -> None:
    lazy = "import dataclasses\nreal = bandwidth.COLLECTIVES['broadcast']\n" \
        "bandwidth.COLLECTIVES['broadcast'] = " \
        "lambda *a: dataclasses.replace(real(*a), run=lambda i: None)"  # fmt: skip
    done = launch(
        "--sizes", "400", "--collectives", "broadcast,all_reduce", ranks=3, program=spoilt(lazy)
    )
    assert done.codes == [0, 0, 0], done.stderr
    assert {row["collective"]: row["wrong"] for row in done.of("bench_row")} == {
        "broadcast": 200, "all_reduce": 0,
    }  # fmt: skip


def test_out_of_memory_during_measurement_is_error_without_traceback(
    launch: Any, spoilt: Callable[[str], Path]
) -> None:
    blind = spoilt("bandwidth.available_memory = lambda: None")
    done = launch("--sizes", str(1 << 50), ranks=2, program=blind)
    assert 1 in done.codes
    assert "Traceback" not in done.stderr[done.codes.index(1)]
    assert "error: not enough memory on " in done.stderr[done.codes.index(1)]


def test_size_beyond_free_memory_is_refused_before_setup(launch: Any) -> None:
    done = launch("--sizes", f"1,{1 << 45}", ranks=2, program=PROGRAM)
    assert done.codes == [1, 1]
    assert f"for {1 << 45} bytes: the buffers take 134217728 MiB, " in done.stderr[0]
    assert done.of("bench_setup") == []


@pytest.mark.parametrize(
    ("flags", "name"), [(["--collectives", "broadcast"], "broadcast"), ([], "all_reduce")]
)
def test_dtype_unsupported_by_gloo_is_refused_by_name(
    launch: Any, flags: list[str], name: str
) -> None:
    done = launch("--sizes", "64", "--dtype", "float8_e4m3fn", *flags, ranks=2, program=PROGRAM)
    assert done.codes == [1, 1]
    for text in done.stderr:
        assert f"error: dtype float8_e4m3fn: gloo does not take it in {name} (" in text
        assert "Traceback" not in text


def test_pairwise_refuses_single_node(launch: Any) -> None:
    done = launch("--pairwise", "--sizes", "64", ranks=2, program=PROGRAM)
    assert done.codes == [1, 1]
    assert "error: --pairwise measures between nodes, and this run has one" in done.stderr[0]


# ---------------------------------------------------------------- without ranks


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "RANK is not set: start the ranks with a launcher"),
        ({"RANK": "one"}, "RANK is 'one'"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
             "MASTER_PORT": "1"},
            "between 1 rank there is nothing to measure",
        ),
    ],
)  # fmt: skip
def test_bandwidth_program_explains_missing_or_bad_rank_environment(
    launch: Any, environment: dict[str, str], said: str
) -> None:
    done = launch("--sizes", "1", program=PROGRAM, env=environment)
    assert done.codes == [1]
    assert done.stderr[0].startswith("error: ")
    assert said in done.stderr[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sizes", "0"], "a size is 1 byte or more"),
        (["--sizes", "x"], "invalid"),
        ([], "required: --sizes"),
        (["--sizes", "1", "--collectives", "scatter"], "'scatter' is none of all_reduce"),
        (["--sizes", "1", "--dtype", "bool"], "invalid choice: 'bool'"),
    ],
)
def test_bandwidth_parser_exits_2_on_bad_arguments(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        bandwidth.parse(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "visible", "rank", "of", "index"),
    [
        (2, None, 1, 2, 1),
        (2, None, 2, 3, None),
        (1, None, 0, 1, 0),
        (1, "3", 3, 4, 0),  # each rank sees one of its own
        (1, None, 0, 2, None),  # both would take it
        (1, "0,9", 0, 2, None),
        (0, None, 0, 1, None),
    ],
)
def test_choose_device_takes_gpu_by_local_rank_or_refuses(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    visible: str | None,
    rank: int,
    of: int,
    index: int | None,
) -> None:
    monkeypatch.setenv("CLUSTERKIT_DEVICE", "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if index is None:
        with pytest.raises(bandwidth.Refused, match=f"^{of} ranks? .* torch sees {gpus} GPUs?:"):
            bandwidth.choose_device(rank, of)
    else:
        assert bandwidth.choose_device(rank, of) == torch.device("cuda", index)
    monkeypatch.setenv("CLUSTERKIT_DEVICE", "cpu")
    assert bandwidth.choose_device(rank, of) == torch.device("cpu")
