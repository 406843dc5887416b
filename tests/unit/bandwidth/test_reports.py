"""What bench makes of the answers, and which link or host is slow."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterkit.bench import bandwidth
from clusterkit.bench.slow_links import figure, judge
from clusterkit.errors import ClusterkitError
from tests.unit.bandwidth.measured import SETUP, exchange, row

# ---------------------------------------------------------------- reports


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
