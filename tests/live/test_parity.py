"""The same losses from every strategy, world size and number of nodes, also when resumed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.live import parity
from tests.live.parity import Case

pytestmark = pytest.mark.live

PARTS = {"ddp": 1, "zero0": 1, "zero1": 2, "zero2": 2, "zero2-offload": 2, "zero2-universal": 2,
         "zero3": 2, "zero3-offload": 2, "fsdp": 2, "fsdp-offload": 2, "hsdp": 2}  # fmt: skip
"""Among how many ranks the optimizer's states are divided evenly."""


RESUMED = {
    "ddp 1x2": (2, 1), "zero0 2x1": (1,), "zero2-universal 1x2": (4,), "zero3-offload 2x1": (2,),
    "fsdp 1x2": (4,), "hsdp 1x4 --micro-batch": (2,), "tp 1x2": (4,), "tp-autotp 1x2": (2,),
    "pp 1x2 --micro-batch": (4,), "pp-deepspeed 1x4 --micro-batch": (4,),
    "3d 1x8 --micro-batch": (4,),
}  # fmt: skip
"""Each kind of checkpoint once, on other ranks if it can be. To the bit, all strategies resume in
tests/unit/runtime/test_gpt.py; `make parity` does both with all."""
EACH_TIME = (
    "ddp 2x1", "zero2-universal 1x2", "zero3-offload 2x1", "fsdp 1x2", "tp-autotp 1x2",
    "pp-deepspeed 1x4 --micro-batch", "3d 1x8 --micro-batch",
)  # fmt: skip
"""One of each way to divide. tests/unit/runtime/test_gpt.py compares all strategies, where ranks
start in a tenth of the time; here they come by their job files, the others in `make thorough`."""
WHOLE_EACH_TIME = ("tp-autotp 1x2", "pp-deepspeed 1x4 --micro-batch", "3d 1x8 --micro-batch")
"""Of these, those with many ranks or slow starts: `make thorough` resumes them."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUSTERKIT_HOME", str(tmp_path_factory.mktemp("home")))
        losses = parity.measure(parity.REFERENCE).losses
    assert len(losses) == parity.STEPS
    assert losses[-1] < losses[0] - 0.5
    return losses


def cases() -> Iterator[Any]:
    """Each case, and the numbers of ranks it is resumed on."""
    for case in parity.CASES[1:]:
        ranks, each_time, name = RESUMED.get(case.name, ()), case.name in EACH_TIME, case.name
        if case.name in WHOLE_EACH_TIME:
            yield pytest.param(case, (), id=name)
            each_time, name = False, f"{name} resumed"
        yield pytest.param(case, ranks, id=name, marks=() if each_time else pytest.mark.thorough)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("case", "ranks"), [*cases()])
def test_every_strategy_matches_reference_losses_and_divides_optimizer(
    case: Case, ranks: tuple[int, ...], reference: list[float]
) -> None:
    result, resumed = parity.measure_and_resume(case, on=ranks)
    assert parity.largest_difference(result.losses, reference) <= parity.TOLERANCE
    if case.job in PARTS:
        share = result.total // PARTS[case.job]
        assert result.held == dict.fromkeys(range(case.nodes * case.ranks), share)
    else:  # tensor and pipeline parallel: biases and ends do not divide evenly
        assert max(result.held.values()) < 0.6 * result.total
    assert [row.ranks for row in resumed] == list(ranks)
    for row in resumed:
        assert row.agrees, row


def test_resumed_and_default_case_names_are_known_cases() -> None:
    assert {*RESUMED, *EACH_TIME} <= {case.name for case in parity.CASES}
    assert {*WHOLE_EACH_TIME} <= {*RESUMED}.intersection(EACH_TIME)


def test_parity_report_marks_differing_results_with_no() -> None:
    """The page says NO where a number does not agree, to the bit or within the limit."""
    whole = parity.Result([5.0] * parity.STEPS, {0: 10}, 10)
    off = parity.Result([5.0] * 19 + [5.0 + 3e-6], {0: 5, 1: 5}, 10)
    case = Case("fsdp", 1, 2)
    results = {parity.REFERENCE.name: whole, case.name: off}
    resumed = [parity.Resumed(case, 2, 1e-9), parity.Resumed(case, 4, 1e-9)]
    assert [row.agrees for row in resumed] == [False, True]
    page = parity.report(results, resumed)
    assert len(re.findall(r"\bNO\b", page)) == 2
