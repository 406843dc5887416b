"""The same losses from every strategy, world size and number of nodes; `make parity` runs more."""

from __future__ import annotations

import re

import pytest

from tests.live import parity
from tests.live.parity import Case

pytestmark = pytest.mark.live

SOME = (
    parity.REFERENCE,
    Case("ddp", 2, 1),
    Case("zero0", 2, 1),
    Case("zero1", 2, 1),
    Case("zero2", 2, 1),
    Case("zero3", 2, 1),
    Case("fsdp", 1, 2),
    Case("tp", 1, 2),
    Case("pp", 1, 2, parity.MICRO_2),
)
PARTS = {"zero1": 2, "zero2": 2, "zero3": 2, "fsdp": 2}


@pytest.mark.timeout(900)
def test_all_strategies_compute_the_same_losses_and_zero_divides_the_optimizer() -> None:
    results = {case: parity.measure(case) for case in SOME}
    reference = results[parity.REFERENCE].losses
    assert len(reference) == parity.STEPS
    assert reference[-1] < reference[0] - 0.5
    for case, result in results.items():
        assert parity.largest_difference(result.losses, reference) <= parity.TOLERANCE, case.name
        whole = 1 if case.job in ("ddp", "zero0") else PARTS.get(case.job)
        if whole is not None:
            assert result.held == dict.fromkeys(result.held, result.total // whole), case.name
        else:  # tensor and pipeline parallel: biases and ends do not divide evenly
            assert max(result.held.values()) < 0.6 * result.total, case.name


def test_a_result_that_differs_is_seen() -> None:
    """The page says NO where a number does not agree, to the bit or within the limit."""
    whole = parity.Result([5.0] * parity.STEPS, {0: 10}, 10)
    off = parity.Result([5.0] * 19 + [5.0 + 3e-6], {0: 5, 1: 5}, 10)
    case = Case("fsdp", 1, 2)
    results = {parity.REFERENCE.name: whole, case.name: off}
    resumed = [parity.Resumed(case, 2, 1e-9), parity.Resumed(case, 4, 1e-9)]
    assert [row.agrees for row in resumed] == [False, True]
    page = parity.report(results, resumed)
    assert len(re.findall(r"\bNO\b", page)) == 2
