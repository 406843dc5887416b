"""What a screen is given of a curve: no more points than it can show, and every peak."""

import random

from hypothesis import given
from hypothesis import strategies as st

from clusterkit.output.series import Series
from clusterkit.web.site import points


def curve(values):
    series = Series()
    for step, value in enumerate(values):
        series.add(step, value)
    return series


@given(st.lists(st.floats(-1e9, 1e9), max_size=400), st.integers(10, 60))
def test_points_keep_first_last_minimum_and_maximum_in_order(values, most):
    steps, shown = points(curve(values), most)
    assert len(steps) <= most
    assert steps == sorted(set(steps))
    assert shown == [values[step] for step in steps]
    if values:
        assert (steps[0], steps[-1]) == (0, len(values) - 1)
        assert (min(shown), max(shown)) == (min(values), max(values))


def test_points_keep_single_peak_among_million_values():
    values = [random.Random(1).random() for _ in range(1000)] * 1000
    values[777_777] = 50.0
    steps, shown = points(curve(values), 2000)
    assert len(steps) <= 2000
    assert (777_777, 50.0) in zip(steps, shown, strict=True)


def test_points_of_step_range_include_one_neighbor_each_side():
    steps, _ = points(curve(range(100)), 1000, 10.5, 20)
    assert steps == list(range(10, 22))
    assert points(curve(range(100)), 1000, 1e9) == ([99], [99.0])
    assert points(Series(), 1000) == ([], [])
