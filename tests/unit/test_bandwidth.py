"""What `clusterkit bench` asks for, what it makes of the answers, and whom it blames."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterkit import api
from clusterkit.bench import bandwidth
from clusterkit.bench.bandwidth import FACTORS, ITEMSIZES, choose, parse_sizes
from clusterkit.bench.slow_links import figure, judge
from clusterkit.cluster import Facts
from clusterkit.errors import BadInput, ClusterkitError, RunFailed, RunFolderError, Unavailable
from clusterkit.lifecycle import supervise
from clusterkit.run.folder import RunFolder
from clusterkit.run.status import Failure, NodeStatus, RunStatus, State
from clusterkit.ui import plots

# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_reduce", 8, 1.75),
        ("all_gather", 2, 0.5),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 4, 0.75),
        ("broadcast", 8, 1.0),
        ("sendrecv", 8, 1.0),
    ],
)
def test_bus_factors_match_nccl_tests(collective: str, ranks: int, factor: float) -> None:
    assert FACTORS[collective](ranks) == factor


@given(ranks=st.integers(2, 4096))
def test_all_reduce_factor_is_reduce_scatter_plus_all_gather(ranks: int) -> None:
    parts = FACTORS["reduce_scatter"](ranks) + FACTORS["all_gather"](ranks)
    assert FACTORS["all_reduce"](ranks) == pytest.approx(parts)
    assert 1 <= FACTORS["all_reduce"](ranks) < 2


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4096", (4096,)),
        ("1", (1,)),
        ("64K", (65536,)),
        ("64KiB", (65536,)),
        ("64k", (65536,)),
        ("2G", (2 << 30,)),
        ("1M,1K , 1M", (1024, 1 << 20)),
        ("1K:64M", tuple(1024 * 4**n for n in range(9))),
        ("1K:64M:x4", tuple(1024 * 4**n for n in range(9))),
        ("1:10:x3", (1, 3, 9)),
        ("1K:1K:x2", (1024,)),
        (" 1K : 4K : x2 ", (1024, 2048, 4096)),
    ],
)
def test_sizes_parse_as_single_list_or_range(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@given(st.integers(1, 1 << 40), st.integers(0, 60), st.integers(2, 9999))
def test_size_range_is_geometric_and_stays_within_ends(low: int, more: int, factor: int) -> None:
    high = min(low << more, 10**12 - 1)
    low = min(low, high)
    sizes = parse_sizes(f"{low}:{high}:x{factor}")
    assert sizes[0] == low
    assert sizes[-1] <= high < sizes[-1] * factor
    assert all(after == before * factor for before, after in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' in '' is not a size"),
        ("big", "'big' in 'big' is not a size"),
        ("-1K", "is not a size"),
        ("1.5M", "is not a size"),
        ("1T", "is not a size"),
        ("1KB", "is not a size"),
        ("1K,,2K", "'' in '1K,,2K' is not a size"),
        ("\uff11K", "is not a size"),
        ("99999999999999", "is not a size"),
        ("0", "a message has 1 byte or more"),
        ("1K,0M", "a message has 1 byte or more"),
        ("64M:1K", "64M:1K: the smallest size comes first"),
        ("1K:64M:x1", "'x1' is not a factor"),
        ("1K:64M:x0", "'x0' is not a factor"),
        ("1K:64M:4", "'4' is not a factor"),
        ("1K:64M:", "'' is not a factor"),
        ("1K:64M:x4:x2", "'x4:x2' is not a factor"),
        ("1K:", "'' in '1K:' is not a size"),
        (":", "is not a size"),
        ("1K:2K,4K", "'2K,4K' in '1K:2K,4K' is not a size"),
        ("1K\n", None),
    ],
)
def test_parse_sizes_names_invalid_size(text: str, said: str | None) -> None:
    if said is None:  # blanks around a size are no fault
        assert parse_sizes(text) == (1024,)
        return
    with pytest.raises(BadInput) as error:
        parse_sizes(text)
    assert error.value.message.startswith("sizes: ")
    assert said in error.value.message
    assert error.value.hint or "1 byte" in error.value.message


def test_bench_measures_all_collectives_unless_some_are_chosen() -> None:
    assert choose().collectives == tuple(FACTORS)
    assert choose(collectives="broadcast, all_reduce,broadcast").collectives == (
        "broadcast",
        "all_reduce",
    )
    assert choose(collectives=["all_gather"]).collectives == ("all_gather",)


@pytest.mark.parametrize(
    ("choices", "said", "hint"),
    [
        ({"collectives": "all-reduce"}, "collectives: 'all-reduce' is unknown", "mean all_reduce?"),
        ({"collectives": ""}, "collectives: '' is unknown", "allowed: all_reduce"),
        ({"collectives": []}, "collectives: none given", "all_reduce"),
        ({"collectives": "all_reduce,x"}, "collectives: 'x' is unknown", "allowed"),
        ({"dtype": "float33"}, "dtype: 'float33' is unknown", "did you mean float3"),
        ({"dtype": "bool"}, "dtype: 'bool' is unknown", "allowed"),
        ({"iterations": 0}, "iterations: 0: at least 1", None),
        ({"iterations": -3}, "iterations: -3: at least 1", None),
        ({"warmup": 1}, "warmup: 1: at least 2", None),
        ({"sequential": True}, "sequential: without --pairwise", "--pairwise"),
        ({"pairwise": True, "collectives": "broadcast"}, "collectives: pairs", "leave out"),
    ],
)
def test_bench_refuses_invalid_options_by_name(
    choices: dict[str, Any], said: str, hint: str | None
) -> None:
    with pytest.raises(BadInput) as error:
        choose(**choices)
    assert said in error.value.message
    assert (hint or "") in (error.value.hint or "")


def test_bench_job_arguments_carry_all_options() -> None:
    job = bandwidth.job_of(
        choose(collectives="broadcast", sizes="1K,2K", dtype="int8", iterations=7, warmup=3)
    )
    assert job.args == (
        "--sizes", "1024,2048", "--dtype", "int8", "--collectives", "broadcast",
        "--iterations", "7", "--warmup", "3",
    )  # fmt: skip
    usual = bandwidth.job_of(choose(collectives="broadcast"))
    sizes = ",".join(str(1024 * 4**n) for n in range(9))  # to 64 MiB; on GPUs to 8 GiB
    assert usual.args == (
        "--sizes", sizes, "--dtype", "float32", "--collectives", "broadcast",
        "--most", str(8 << 30),
    )  # fmt: skip
    pairs = bandwidth.job_of(choose(pairwise=True, sequential=True))
    assert pairs.args == (
        "--sizes", "1024,16777216", "--dtype", "float32", "--pairwise", "--sequential",
    )  # fmt: skip


def test_bench_job_program_exists() -> None:
    job = bandwidth.job_of(choose())
    assert job.program is not None
    assert Path(job.program).is_file()
    assert Path(job.program).is_absolute()


# ---------------------------------------------------------------- before anything is started


def planned(
    facts: Facts, choices: dict[str, Any] | None = None, **options: Any
) -> tuple[bandwidth.Options, api.Prepared]:
    chosen = choose(**choices or {})
    return chosen, api.prepare(bandwidth.job_of(chosen), facts=facts, **options)


def refusal(
    facts: Facts, choices: dict[str, Any] | None = None, **options: Any
) -> tuple[str, str | None]:
    chosen, ready = planned(facts, choices, **options)
    with pytest.raises(BadInput) as error:
        bandwidth.check(chosen, ready.plan, ready.facts)
    return error.value.message, error.value.hint


def test_bench_refuses_single_rank(facts: Facts) -> None:
    message, hint = refusal(facts)
    assert message == "bench: 1 node x 1 rank: there is nothing to measure between"
    assert hint == "--nodes 2"


def test_pairwise_bench_refuses_single_node(facts: Facts) -> None:
    message, _ = refusal(facts, {"pairwise": True}, gpus=2)
    assert message.startswith("pairwise: 1 node x 2 ranks: it measures between nodes")


@pytest.mark.parametrize("dtype", bandwidth.ONLY_NCCL)
def test_float8_bench_needs_gpus(
    facts: Facts, make_facts: Callable[..., Facts], dtype: str
) -> None:
    message, hint = refusal(facts, {"dtype": dtype}, nodes=2)
    assert f"dtype: {dtype}: gloo" in message
    assert hint is not None
    chosen, ready = planned(make_facts(gpus=2), {"dtype": dtype}, nodes=2)
    bandwidth.check(chosen, ready.plan, ready.facts)


def test_bench_refuses_size_beyond_host_memory_with_figures(
    make_facts: Callable[..., Facts],
) -> None:
    facts = make_facts(memory_mib=4096)
    message, hint = refusal(facts, {"sizes": "1G", "collectives": "sendrecv"}, nodes=3)
    assert message == "sizes: 1 GiB needs 6 GiB of buffers, localhost has 4 GiB"
    assert hint == "smaller --sizes"
    chosen, ready = planned(facts, {"sizes": "1G", "collectives": "sendrecv"}, nodes=2)
    bandwidth.check(chosen, ready.plan, ready.facts)


def test_bench_refuses_size_beyond_gpu_memory(make_facts: Callable[..., Facts]) -> None:
    message, _ = refusal(make_facts(gpus=4, memory_mib=1), {"sizes": "100G"}, nodes=2, gpus=2)
    assert "a GPU of localhost has 81559 MiB" in message
    chosen, ready = planned(make_facts(gpus=4, memory_mib=1), {"sizes": "1G"}, nodes=2, gpus=2)
    bandwidth.check(chosen, ready.plan, ready.facts)


@pytest.mark.parametrize(
    ("choices", "needed"),
    [
        ({"collectives": "all_reduce"}, 100.0),
        ({"collectives": "broadcast"}, 100.0),
        ({"collectives": "all_gather"}, 125.0),
        ({"collectives": "reduce_scatter,broadcast"}, 125.0),
        ({}, 200.0),
        ({"pairwise": True, "sizes": "10,100"}, 120.0),
    ],
)
def test_needed_bytes_counts_largest_buffers(choices: dict[str, Any], needed: float) -> None:
    options = choose(**{"sizes": "10,100"} | choices)
    assert bandwidth.needed_bytes(options, ranks=4) == needed


# ---------------------------------------------------------------- reports

SETUP: dict[str, Any] = {
    "event": "bench_setup", "world_size": 4, "backend": "gloo", "device": "cpu",
    "dtype": "float32", "torch": "2.13.0", "measurements": 2,
    "nodes": [{"node": 0, "host": "a", "ranks": [0, 1]}, {"node": 1, "host": "b", "ranks": [2, 3]}],
}  # fmt: skip


def row(collective: str = "all_reduce", size: int = 4096, **fields: Any) -> dict[str, Any]:
    return {
        "event": "bench_row", "collective": collective, "size": size, "elements": size // 4,
        "iterations": 20, "median_us": 100.0, "min_us": 90.0, "max_us": 200.0, "wrong": 0,
    } | fields  # fmt: skip


def exchange(source: int, target: int, **fields: Any) -> dict[str, Any]:
    return {
        "event": "bench_pair", "from": source, "to": target, "size": 1 << 20, "latency_size": 1024,
        "iterations": 20, "median_us": 1050.0, "min_us": 1000.0, "max_us": 1100.0,
        "latency_us": 50.0, "wrong": 0,
    } | fields  # fmt: skip


def test_report_computes_bandwidth_from_median_time() -> None:
    marks = [{"event": "other"}, SETUP, row(), row("all_gather", 1000)]
    report = bandwidth.report("r", marks)
    first, second = report.rows
    assert first.algorithm_gb_per_s == pytest.approx(4096 / 100e-6 / 1e9)
    assert first.bus_gb_per_s == pytest.approx(first.algorithm_gb_per_s * 1.5)
    assert second.bus_gb_per_s == pytest.approx(1000 / 100e-6 / 1e9 * 0.75)
    assert report.wrong == 0
    assert report.pairs is None


def test_report_latency_is_median_time_at_smallest_size() -> None:
    marks = [
        SETUP | {"measurements": 4}, row(size=8192, median_us=3.0), row(size=4, median_us=7.0),
        row("broadcast", 4, median_us=2.0), row("broadcast", 8192, median_us=9.0),
    ]  # fmt: skip
    assert bandwidth.report("r", marks).latency_us == {"all_reduce": 7.0, "broadcast": 2.0}


def test_report_survives_zero_median_time() -> None:
    marks = [SETUP | {"measurements": 1}, row(median_us=0.0)]
    assert bandwidth.report("r", marks).rows[0].bus_gb_per_s > 0


def test_report_sums_wrong_elements() -> None:
    assert bandwidth.report("r", [SETUP, row(wrong=2), row("broadcast", wrong=3)]).wrong == 5


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ([], "run r measured nothing"),
        ([{"event": "bench_setup", "world_size": "many"}], "run r measured nothing"),
        ([SETUP], "run r reported 0 of 2 measurements"),
        ([SETUP, row(), row(median_us=None)], "run r reported 1 of 2 measurements"),
        ([SETUP, row(), {"event": "bench_row"}], "run r reported 1 of 2 measurements"),
    ],
)
def test_report_refuses_missing_measurements(marks: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ClusterkitError) as error:
        bandwidth.report("r", marks)
    assert error.value.message == said
    assert error.value.hint == "clusterkit logs r"


def test_report_counts_only_last_attempt() -> None:
    marks = [SETUP, row(median_us=1.0), SETUP, row(), row("broadcast")]
    assert [one.median_us for one in bandwidth.report("r", marks).rows] == [100.0, 100.0]


@pytest.mark.parametrize(
    ("hosts", "own", "names"),
    [
        (["h0", "h1"], ["x", "y"], ["h0", "h1"]),
        (["localhost", "localhost"], ["vm", "vm"], ["vm node 0", "vm node 1"]),
        (["localhost", "localhost"], ["x", "y"], ["x", "y"]),
        ([], ["x", "y"], ["x", "y"]),
        (["only-one"], ["x", "y"], ["x", "y"]),
    ],
)
def test_report_gives_nodes_distinct_names(
    hosts: list[str], own: list[str], names: list[str]
) -> None:
    nodes = [{"node": at, "host": host, "ranks": [at]} for at, host in enumerate(own)]
    report = bandwidth.report("r", [SETUP | {"nodes": nodes}, row(), row()], hosts)
    assert [node.host for node in report.nodes] == names


def test_report_turns_pairs_into_row_to_column_matrices() -> None:
    marks = [SETUP, exchange(0, 1), exchange(1, 0, median_us=2050.0, latency_us=50.0)]
    pairs = bandwidth.report("r", marks, ["h0", "h1"]).pairs
    assert pairs is not None
    there = (1 << 20) / 1000e-6 / 1e9
    assert pairs.gb_per_s == ((None, pytest.approx(there)), (pytest.approx(there / 2), None))
    assert pairs.latency_us == ((None, 50.0), (50.0, None))
    assert (pairs.size, pairs.latency_size) == (1 << 20, 1024)
    assert "from h1 to h0" in pairs.judgement


def test_pair_bandwidth_subtracts_at_most_half_of_round_trip() -> None:
    quick = msgspec.convert(exchange(0, 1, median_us=60.0, latency_us=50.0), bandwidth.MeasuredPair)
    assert bandwidth.pair_bandwidth(quick) == pytest.approx((1 << 20) / 30e-6 / 1e9)


# ---------------------------------------------------------------- judging

Table = list[list[float | None]]
Blamed = list[tuple[str, tuple[str, ...], str]]
"""Kind, hosts and direction of each finding."""


def even(nodes: int, one: float = 1.0) -> Table:
    return [[None if a == b else one for b in range(nodes)] for a in range(nodes)]


def changed(table: Table, change: Callable[[int, int], float]) -> Table:
    """Every link times what ``change`` says of it."""
    return [
        [None if one is None else one * change(a, b) for b, one in enumerate(line)]
        for a, line in enumerate(table)
    ]


def noisy(table: Table, sigma: float, seed: int) -> Table:
    dice = random.Random(seed)
    return changed(table, lambda a, b: dice.lognormvariate(0, sigma))


def names(nodes: int) -> list[str]:
    return [f"h{node}" for node in range(nodes)]


def blamed(table: Table, latency: Table | None = None) -> Blamed:
    found, _ = judge(names(len(table)), table, latency or even(len(table), 50.0))
    return [(one.kind, one.hosts, one.direction) for one in found]


NODES = [3, 4, 5, 16]


@pytest.mark.parametrize("nodes", [2, *NODES])
def test_judge_finds_nothing_on_equal_links(nodes: int) -> None:
    assert blamed(even(nodes)) == []
    _, judgement = judge(names(nodes), even(nodes, 1.25), even(nodes, 50.0))
    assert "1.25" in judgement
    assert "50.0 us" in judgement
    assert ("nothing to compare" if nodes == 2 else "No link and no host stands out") in judgement


CULPRITS: dict[str, tuple[list[int], Callable[[int, int], bool], Blamed, str]] = {
    "a link": (NODES, lambda a, b: {a, b} == {1, 2}, [("link", ("h1", "h2"), "both")],
               "The link between h1 and h2 is slow: bandwidth 0.100 GB/s, usual is 1.00 GB/s."),
    "a link one way": (NODES, lambda a, b: (a, b) == (2, 0), [("link", ("h2", "h0"), "one")],
                       "The link from h2 to h0 is slow: bandwidth 0.100 GB/s, the other way "
                       "1.00 GB/s, usual is 1.00 GB/s."),
    "of two hosts only a direction": (
        [2], lambda a, b: a == 1, [("link", ("h1", "h0"), "one")],
        "The link from h1 to h0 is slow: bandwidth 0.100 GB/s, the other way 1.00 GB/s."),
    "the first host": (NODES, lambda a, b: 0 in (a, b), [("host", ("h0",), "both")],
                       "Host h0 is slow: bandwidth 0.100 GB/s with {others} of {others} hosts "
                       "(median), usual is 1.00 GB/s."),
    "a host": (NODES, lambda a, b: 2 in (a, b), [("host", ("h2",), "both")], "Host h2 is slow: "),
    "a host sending": (NODES, lambda a, b: a == 1, [("host", ("h1",), "sending")],
                       "Host h1 sends slowly: "),
    "a host receiving": (NODES, lambda a, b: b == 1, [("host", ("h1",), "receiving")],
                         "Host h1 receives slowly: "),
    "a host and a link elsewhere": (
        [16], lambda a, b: 3 in (a, b) or {a, b} == {6, 9},
        [("host", ("h3",), "both"), ("link", ("h6", "h9"), "both")], "Host h3 "),
    "two hosts": ([6, 16], lambda a, b: bool({a, b} & {1, 4}),
                  [("host", ("h1",), "both"), ("host", ("h4",), "both")], "Host h4 "),
    "most links of a host": ([16], lambda a, b: 5 in (a, b) and not {a, b} & {0, 1},
                             [("host", ("h5",), "both")], "with 13 of 15 hosts"),
    "half of a host's links": (
        [5], lambda a, b: {a, b} in ({0, 1}, {0, 2}),
        [("link", ("h0", "h1"), "both"), ("link", ("h0", "h2"), "both")], "The link between "),
}  # fmt: skip


@pytest.mark.parametrize(
    ("culprit", "nodes"), [(name, nodes) for name, case in CULPRITS.items() for nodes in case[0]]
)
def test_judge_names_only_slow_link_or_host(culprit: str, nodes: int) -> None:
    _, is_slow, expected, said = CULPRITS[culprit]
    table = changed(even(nodes), lambda a, b: 0.1 if is_slow(a, b) else 1.0)
    assert blamed(table) == expected
    assert said.format(others=nodes - 1) in judge(names(nodes), table, even(nodes, 50.0))[1]


@pytest.mark.parametrize("nodes", [5, 16])
def test_judge_blames_no_link_beside_one_fast_link(nodes: int) -> None:
    """Two containers on one machine, say."""
    assert blamed(changed(even(nodes), lambda a, b: 20.0 if {a, b} == {0, 1} else 1.0)) == []


@pytest.mark.parametrize("nodes", NODES)
def test_judge_finds_slow_latency_of_link_or_host(nodes: int) -> None:
    late = changed(even(nodes, 20.0), lambda a, b: 100.0 if {a, b} == {0, 2} else 1.0)
    found, judgement = judge(names(nodes), even(nodes), late)
    assert [(one.what, one.hosts, one.value, one.usual) for one in found] == [
        ("latency", ("h0", "h2"), 2000.0, 20.0)
    ]
    assert judgement == ("The link between h0 and h2 is slow: latency 2000 us, usual is 20.0 us.")
    late = changed(even(nodes, 20.0), lambda a, b: 100.0 if 1 in (a, b) else 1.0)
    found, _ = judge(names(nodes), even(nodes), late)
    assert [(one.kind, one.what, one.hosts) for one in found] == [("host", "latency", ("h1",))]


def test_judge_uses_quicker_latency_of_both_directions() -> None:
    one_sided = changed(even(4, 20.0), lambda a, b: 100.0 if (a, b) == (0, 2) else 1.0)
    assert blamed(even(4), one_sided) == []


def test_judge_reports_host_slow_in_bandwidth_and_latency_twice() -> None:
    slow = changed(even(4), lambda a, b: 0.1 if 1 in (a, b) else 1.0)
    late = changed(even(4, 20.0), lambda a, b: 100.0 if 1 in (a, b) else 1.0)
    found, judgement = judge(names(4), slow, late)
    assert [one.what for one in found] == ["bandwidth", "latency"]
    assert judgement.count("Host h1 is slow: ") == 2


@pytest.mark.parametrize("nodes", NODES)
def test_judge_finds_nothing_in_noise(nodes: int) -> None:
    """Of ten per cent in bandwidth and thirty in latency."""
    for seed in range(100):
        latency = noisy(even(nodes, 50.0), 0.3, -seed)
        assert blamed(noisy(even(nodes), 0.1, seed), latency) == []


@pytest.mark.parametrize("nodes", NODES)
def test_judge_finds_slow_link_or_host_in_noise(nodes: int) -> None:
    host = changed(even(nodes), lambda a, b: 0.2 if 1 in (a, b) else 1.0)
    link = changed(even(nodes), lambda a, b: 0.2 if {a, b} == {0, 2} else 1.0)
    for seed in range(100):
        assert blamed(noisy(host, 0.1, seed)) == [("host", ("h1",), "both")]
        assert blamed(noisy(link, 0.1, seed)) == [("link", ("h0", "h2"), "both")]


@given(
    st.integers(2, 8).flatmap(
        lambda n: st.lists(st.floats(1e-6, 1e6), min_size=n * n, max_size=n * n)
    )
)
def test_judge_accepts_any_figures(figures: list[float]) -> None:
    nodes = int(len(figures) ** 0.5)
    table = changed(even(nodes), lambda a, b: figures[a * nodes + b])
    found, judgement = judge(names(nodes), table, table)
    assert judgement.endswith(".")
    for one in found:
        assert set(one.hosts) <= set(names(nodes))
        assert one.sentence in judgement
        assert one.value > 0


@given(st.permutations(range(5)), st.sampled_from(["host", "link"]))
def test_judge_does_not_depend_on_node_order(order: list[int], kind: str) -> None:
    def slow(a: int, b: int) -> float:
        a, b = order[a], order[b]
        return 0.1 if (0 in (a, b) if kind == "host" else {a, b} == {0, 1}) else 1.0

    found, _ = judge([f"h{node}" for node in order], changed(even(5), slow), even(5, 50.0))
    assert [(one.kind, set(one.hosts)) for one in found] == [
        (kind, {"h0"} if kind == "host" else {"h0", "h1"})
    ]


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (-1.0, "0"), (1234.5, "1234"), (99.99, "100.0"), (85.25, "85.2"), (1, "1.00"),
        (0.12345, "0.123"), (0.00001234, "0.0000123"),
    ],
)  # fmt: skip
def test_figures_are_rounded_and_have_no_exponent(number: float, text: str) -> None:
    assert figure(number) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1, "1 byte"), (12, "12 bytes"), (1024, "1 KiB"), (1536, "1536 bytes"),
        (1 << 20, "1 MiB"), (3 << 29, "1536 MiB"), (2 << 30, "2 GiB"),
    ],
)  # fmt: skip
def test_size_text_uses_largest_whole_unit(size: int, text: str) -> None:
    assert bandwidth.size_text(size) == text


def test_doing_text_describes_current_measurement() -> None:
    assert bandwidth.doing_text({"collective": "broadcast", "size": 4096}) == "broadcast of 4 KiB"
    many = [[n, n + 1] for n in range(0, 12, 2)]
    assert bandwidth.doing_text({"pairs": many[:1]}) == "nodes 0 and 1"
    assert bandwidth.doing_text({"pairs": many}) == "nodes 0 and 1, 2 and 3, 4 and 5, 6 and 7, ..."


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
    (tmp_path / "bus.png").mkdir()
    done = cli("bench", "-n", "2", "-o", str(tmp_path / "bus.png"))
    assert done.code == RunFolderError.exit_code
    assert "all_reduce" in done.out
    assert "cannot write" in done.err
    done = cli("bench", "-n", "2", "-o", str(tmp_path / "no" / "bus.png"))
    assert (done.code, done.out) == (125, "")  # before anything is measured
    assert "there is no folder" in done.err


def test_bench_without_matplotlib_refuses_picture_before_measuring(
    refused: Any, no_gpus: None, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    said = refused("bench", "-n", "2", "-o", "bus.png", code=Unavailable.exit_code)
    assert "drawing needs matplotlib" in said


def test_itemsizes_match_bits_in_dtype_names() -> None:
    assert all(name.endswith(str(8 * size)) or "float8" in name or name == "bfloat16"
               for name, size in ITEMSIZES.items())  # fmt: skip
