"""The same losses from every strategy, world size and number of nodes."""

from __future__ import annotations

import pytest

from tests.live import parity

pytestmark = pytest.mark.live


@pytest.mark.timeout(900)
def test_all_strategies_compute_the_same_losses_and_zero_divides_the_optimizer() -> None:
    results = parity.measure_all()
    assert {len(result.losses) for result in results.values()} == {parity.STEPS}
    assert parity.largest_difference(results) <= parity.TOLERANCE
    first, *_, last = results["ddp 1x1"].losses
    assert last < first - 0.5
    for name, result in results.items():
        shards = 1 if name.startswith(("ddp", "zero0")) else 2
        assert result.held == dict.fromkeys(result.held, result.total // shards), name
