"""What `clusterkit bench` asks for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterkit import api
from clusterkit.bench import bandwidth
from clusterkit.bench.bandwidth import FACTORS, choose, parse_sizes
from clusterkit.cluster import Facts
from clusterkit.errors import BadInput

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
