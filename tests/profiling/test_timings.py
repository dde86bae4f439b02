"""Which timings are believed, and the confidence interval of their median."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_pipeline.profiling.disturbance import MOST_SLOWER, MOST_WAITED, Window
from tvm_pipeline.profiling.timings import (
    Timing,
    TrustedTimings,
    best_reference_s,
    median_interval,
    relative_half_width,
)


def chance_of_a_miss(n: int, k: int) -> float:
    """Return how often the median is below the k-th smallest of n samples or above the k-th greatest, by counting.

    Each sample is below or above the median like a coin.
    """
    throws = [sum(throw) for throw in product((0, 1), repeat=n)]
    return sum(below < k or n - below < k for below in throws) / len(throws)


@pytest.mark.parametrize("n", range(1, 15))
def test_the_interval_is_the_narrowest_that_is_sure_enough(n: int) -> None:
    low, high = median_interval(np.arange(1.0, n + 1))
    k = int(low)
    assert high == n + 1 - k
    if n >= 6:
        assert chance_of_a_miss(n, k) <= 0.05
    assert k == 1 or n >= 6
    if k < (n + 1) // 2:
        assert chance_of_a_miss(n, k + 1) > 0.05


def test_known_ranks() -> None:
    """Tables of the sign test have these, and n may be large."""
    for n, k in ((6, 1), (8, 1), (9, 2), (20, 6), (24, 7), (100, 40), (1000, 469)):
        low, high = median_interval(np.arange(1.0, n + 1))
        assert (low, high) == (k, n + 1 - k)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40), st.randoms())
def test_the_interval_holds_the_median_in_any_order(samples: list[float], order) -> None:
    low, high = median_interval(np.array(samples))
    assert min(samples) <= low <= np.median(samples) <= high <= max(samples)
    order.shuffle(samples)
    assert median_interval(np.array(samples)) == (low, high)


def test_each_column_has_its_own_interval() -> None:
    columns = np.stack([np.arange(1.0, 25), np.full(24, 3.0), np.arange(101.0, 125)], axis=1)
    low, high = median_interval(columns)
    assert (low.tolist(), high.tolist()) == ([7, 3, 107], [18, 3, 118])
    assert relative_half_width(columns) == pytest.approx([11 / 2 / 12.5, 0, 11 / 2 / 112.5])


def test_an_interval_misses_its_median_once_in_twenty_times() -> None:
    """Of samples from a skewed distribution."""
    draw = np.random.default_rng(0)
    low, high = median_interval(draw.exponential(size=(24, 4000)))
    misses = np.mean((low > np.log(2)) | (high < np.log(2)))
    assert 0.01 < misses <= 0.05


QUIET = Window(elapsed_s=0.01, waited_s=0.0, reference_s=1e-4)
WAITED = Window(elapsed_s=0.01, waited_s=0.004, reference_s=1e-4)
SLOWED = Window(elapsed_s=0.01, waited_s=0.0, reference_s=1.5e-4)
STOLEN = Window(elapsed_s=0.01, waited_s=0.0, stolen_s=0.002, reference_s=1e-4)


@pytest.mark.parametrize("window", [WAITED, SLOWED, STOLEN])
def test_each_kind_of_loss_disturbs(window: Window) -> None:
    assert window.is_disturbed(1e-4)
    assert not QUIET.is_disturbed(1e-4)


def test_a_little_of_each_does_not_disturb() -> None:
    slight = Window(1.0, waited_s=0.9 * MOST_WAITED, switches=9, reference_s=1e-4 * (1 + 0.9 * MOST_SLOWER))
    assert not slight.is_disturbed(1e-4)


def test_switches_count_where_the_kernel_does_not_tell_how_long_they_took() -> None:
    assert Window(0.01, waited_s=None, switches=1).is_disturbed(0.0)
    assert not Window(0.01, waited_s=None, switches=0).is_disturbed(0.0)


def test_undisturbed_timings_are_believed_as_they_are() -> None:
    timings = [Timing(0.01, QUIET), Timing(0.03, WAITED), Timing(0.012, QUIET)]
    found = TrustedTimings(timings, best_reference_s(timing.window for timing in timings), 2)
    assert not found.is_doubtful
    assert found.seconds.tolist() == [0.01, 0.012]
    assert found.uncertainty == pytest.approx(0.001 / 0.011)


def test_too_few_are_joined_by_the_least_disturbed_without_what_others_took() -> None:
    timings = [Timing(0.02, WAITED), Timing(0.01, QUIET), Timing(0.0125, STOLEN), Timing(0.015, SLOWED)]
    found = TrustedTimings(timings, 1e-4, 3)
    assert found.is_doubtful
    assert sorted(found.seconds) == pytest.approx([0.01, 0.01, 0.012])
    # The interval is 0.002 wide, and a fifth is the loss of the middle one.
    assert found.uncertainty == pytest.approx(0.001 / 0.01 + 0.2)
