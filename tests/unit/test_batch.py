"""global = micro x accumulation x ranks, always; what does not divide is refused with advice."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterkit.batch import Batch, solve
from clusterkit.errors import BadInput

SIZE = st.integers(1, 4096)
SMALL = st.integers(1, 256)


@pytest.mark.parametrize(
    ("given", "batch"),
    [
        ({"data_parallel": 1, "global_size": 64, "micro": 8}, Batch(64, 8, 8, 1)),
        ({"data_parallel": 4, "global_size": 64, "micro": 8}, Batch(64, 8, 2, 4)),
        ({"data_parallel": 8, "global_size": 64, "micro": 8}, Batch(64, 8, 1, 8)),
        # Alone, a global size means no accumulation, and a micro batch gives the global size.
        ({"data_parallel": 4, "global_size": 64}, Batch(64, 16, 1, 4)),
        ({"data_parallel": 4, "micro": 8}, Batch(32, 8, 1, 4)),
        # 144 = 24 x 6 x 1, however it is asked for.
        ({"data_parallel": 1, "micro": 24, "accumulation": 6}, Batch(144, 24, 6, 1)),
        ({"data_parallel": 1, "global_size": 144, "accumulation": 6}, Batch(144, 24, 6, 1)),
        ({"data_parallel": 1, "global_size": 144, "micro": 24, "accumulation": 6},
         Batch(144, 24, 6, 1)),
    ],
)  # fmt: skip
def test_solve_derives_missing_batch_sizes(given, batch):
    assert solve(**given) == batch


def test_batch_gives_deepspeed_numbers_for_144_samples():
    assert solve(data_parallel=1, global_size=144, micro=24).deepspeed() == {
        "train_batch_size": 144,
        "train_micro_batch_size_per_gpu": 24,
        "gradient_accumulation_steps": 6,
    }


@given(SMALL, SMALL, SMALL)
def test_solve_derives_third_size_from_any_two(micro, accumulation, ranks):
    total = micro * accumulation * ranks
    whole = Batch(total, micro, accumulation, ranks)
    assert solve(data_parallel=ranks, global_size=total, micro=micro) == whole
    assert solve(data_parallel=ranks, global_size=total, accumulation=accumulation) == whole
    assert solve(data_parallel=ranks, micro=micro, accumulation=accumulation) == whole


@given(SIZE, SIZE | st.none(), st.integers(1, 64), st.integers(1, 64) | st.none())
def test_solve_accepts_sizes_that_divide_and_refuses_others(total, micro, ranks, accumulation):
    sizes = {"global_size": total, "micro": micro, "accumulation": accumulation}
    if total % ((micro or 1) * ranks * (accumulation or 1)) or (
        micro and accumulation and micro * ranks * accumulation != total
    ):
        with pytest.raises(BadInput, match=f"global {total} "):
            solve(data_parallel=ranks, **sizes)
        return
    found = solve(data_parallel=ranks, **sizes)
    assert found.micro * found.accumulation * found.data_parallel == found.global_size == total
    assert micro in (None, found.micro)
    assert accumulation in (None, found.accumulation)
    assert min(found.micro, found.accumulation) >= 1


@given(SIZE, st.integers(1, 64), st.integers(1, 64))
def test_every_size_suggested_in_refusal_divides(total, micro, ranks):
    if total % (micro * ranks) == 0:
        total += 1
        if total % (micro * ranks) == 0:  # micro x ranks is 1: everything divides
            return
    with pytest.raises(BadInput, match=f"global {total} is not a multiple") as refusal:
        solve(data_parallel=ranks, global_size=total, micro=micro)
    suggested = 0
    for advice in (refusal.value.hint or "").split("; "):
        numbers = [int(number) for number in re.findall(r"\d+", advice.split(" with ")[0])]
        assert numbers
        suggested += len(numbers)
        for number in numbers:
            if "global sizes" in advice:
                solve(data_parallel=ranks, global_size=number, micro=micro)
            elif "micro" in advice:
                solve(data_parallel=ranks, global_size=total, micro=number)
            else:
                assert advice.endswith("ranks")
                solve(data_parallel=number, global_size=total, micro=micro)
    assert suggested >= 1


@pytest.mark.parametrize(
    ("given", "said", "hint"),
    [
        ({"data_parallel": 2, "global_size": 60, "micro": 8},
         "global 60 is not a multiple of micro x ranks = 16",
         "nearest global sizes that are: 48 or 64; or micro 6 or 10 with global 60"),
        ({"data_parallel": 8, "global_size": 4, "micro": 2}, "not a multiple",
         "nearest global sizes that are: 16; or 2 ranks"),
        ({"data_parallel": 4, "global_size": 64, "micro": 8, "accumulation": 4},
         "global 64 = micro 8 x accumulation 4 x 4 ranks does not",
         "leave accumulation out: it is 2 on 4 ranks"),
        ({"data_parallel": 4, "accumulation": 2}, "give `global` or `micro`", "batch: {global: 64"),
    ],
)  # fmt: skip
def test_refusal_suggests_nearest_sizes_that_divide(given, said, hint):
    with pytest.raises(BadInput, match=said) as error:
        solve(**given)
    assert error.value.hint.startswith(hint)


@pytest.mark.parametrize("key", ["global_size", "micro", "accumulation", "data_parallel"])
@pytest.mark.parametrize("value", [0, -1])
def test_solve_refuses_sizes_below_one(key, value):
    sizes = {"data_parallel": 1, "global_size": 8, "micro": 1, "accumulation": 8} | {key: value}
    with pytest.raises(BadInput, match=rf"is {value}; it must be at least 1"):
        solve(**sizes)
