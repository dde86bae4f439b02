"""The shortest bottleneck against every partition there is."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.graphs import randoms
from tvm_pipeline.errors import InfeasibleError, OptionError, ProfileError
from tvm_pipeline_papers.fewest_bottleneck import fewest_bottleneck

Table = dict[tuple[int, int, int], float]


def monotone_table(rng: random.Random, operators: int, devices: int) -> Table:
    """Draw any seconds of which a longer segment never takes less; some segments are impossible."""
    table: Table = {}
    for device in range(devices):
        equal = rng.random() < 0.3 and device > 0
        for length in range(1, operators + 1):
            for start in range(operators - length + 1):
                end = start + length
                within = [table[device, start, end - 1], table[device, start + 1, end]] if length > 1 else []
                own = math.inf if rng.random() < 0.03 else float(rng.randint(0, 4 * length))
                table[device, start, end] = table[device - 1, start, end] if equal else max([own, *within])
    return table


def partitions(operators: int, devices: int, idle: bool) -> Iterator[tuple[int, ...]]:
    """Yield all ends of all devices but the last."""
    choose = itertools.combinations_with_replacement if idle else itertools.combinations
    return choose(range(0 if idle else 1, operators + idle), devices - 1)


def bottleneck(table: Table, operators: int, cuts: tuple[int, ...]) -> float:
    ends = (0, *cuts, operators)
    return max(table[d, s, e] for d, (s, e) in enumerate(itertools.pairwise(ends)) if s < e)


def least(table: Table, operators: int, devices: int, idle: bool) -> float:
    every = partitions(operators, devices, idle)
    return min((bottleneck(table, operators, cuts) for cuts in every), default=math.inf)


def evaluated_of(table: Table) -> tuple[Callable[[int, int, int], float], list[tuple[int, int, int]]]:
    evaluated: list[tuple[int, int, int]] = []

    def seconds(*segment: int) -> float:
        evaluated.append(segment)  # type: ignore[arg-type]
        return table[segment]  # type: ignore[index]

    return seconds, evaluated


@pytest.mark.parametrize("idle", [False, True])
@given(rng=randoms(), operators=st.integers(1, 8), devices=st.integers(1, 4))
def test_it_is_the_best_of_all_partitions(idle: bool, rng: random.Random, operators: int, devices: int) -> None:
    table = monotone_table(rng, operators, devices)
    seconds, evaluated = evaluated_of(table)
    best = least(table, operators, devices, idle)
    if best == math.inf:
        with pytest.raises(InfeasibleError, match=r"no way to cut|need as many operators"):
            fewest_bottleneck(operators, devices, seconds, idle=idle)
        return
    found = fewest_bottleneck(operators, devices, seconds, idle=idle)
    assert found.bottleneck_s == found.bound_s == best == bottleneck(table, operators, found.cuts)
    assert found.cuts in set(partitions(operators, devices, idle))
    assert found.evaluations == len(evaluated) == len(set(evaluated))


@given(rng=randoms(), operators=st.integers(1, 9), devices=st.integers(1, 4), most=st.integers(0, 20))
def test_a_search_cut_short_says_how_far_it_may_be(rng: random.Random, operators: int, devices: int, most: int) -> None:
    table = monotone_table(rng, operators, devices)
    seconds, _ = evaluated_of(table)
    best = least(table, operators, devices, idle=True)
    if best == math.inf:
        return
    found = fewest_bottleneck(operators, devices, seconds, idle=True, most_evaluations=most)
    assert found.bound_s is not None
    assert found.bound_s <= best <= found.bottleneck_s == bottleneck(table, operators, found.cuts)


def test_a_device_steps_back_for_one_that_cannot_take_the_next_operator() -> None:
    """Device 0 fits operators 0 and 1, but device 1 cannot run operator 2 and then would have nothing."""

    def seconds(device: int, start: int, end: int) -> float:
        impossible = (device == 0 and end - start > 2) or (device == 1 and start <= 2 < end)
        return math.inf if impossible else float(end - start)

    assert fewest_bottleneck(5, 3, seconds).cuts == (1, 2)
    assert fewest_bottleneck(5, 3, seconds).seconds == (1.0, 1.0, 3.0)
    assert fewest_bottleneck(5, 3, seconds, idle=True).bottleneck_s == 3.0


def test_costs_that_do_not_add_up() -> None:
    """An Edge TPU with a cache of 8 bytes: operators of 3 bytes and 1 s; each byte beyond the cache takes 10 s more.

    Two of them fit a device, three do not: of 6 on 3 devices each has two, of 7 one has three and spills one byte.
    """

    def seconds(device: int, start: int, end: int) -> float:
        return (end - start) + 10.0 * max(0, 3 * (end - start) - 8)

    assert fewest_bottleneck(6, 3, seconds).seconds == (2.0, 2.0, 2.0)
    assert fewest_bottleneck(7, 3, seconds).bottleneck_s == 13.0


def test_a_long_chain_asks_for_few_segments() -> None:
    work = [float(random.Random(5).randint(1, 1000)) for _ in range(10_000)]
    reached = [0.0, *itertools.accumulate(work)]
    found = fewest_bottleneck(10_000, 8, lambda device, start, end: reached[end] - reached[start])
    assert reached[-1] / 8 <= found.bottleneck_s == found.bound_s < reached[-1] / 8 + 1000
    assert found.evaluations < 10_000


@pytest.mark.parametrize(
    ("operators", "devices", "figure", "error", "message"),
    [
        (0, 1, 1.0, OptionError, "0 operators on 1 devices"),
        (3, 0, 1.0, OptionError, "3 operators on 0 devices"),
        (2, 3, 1.0, InfeasibleError, "3 segments need as many operators, the chain has 2"),
        (3, 2, math.inf, InfeasibleError, "no way to cut 3 operators into 2 segments"),
        (3, 2, math.nan, ProfileError, "took nan s on device 0"),
        (3, 2, -1.0, ProfileError, "took -1.0 s on device 0"),
    ],
)
def test_what_cannot_be_is_refused(
    operators: int, devices: int, figure: float, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fewest_bottleneck(operators, devices, lambda *segment: figure)


@given(st.randoms(use_true_random=False))
def test_it_ends_where_a_longer_segment_may_take_less(random):
    operators, devices = random.randint(3, 6), random.randint(2, 3)
    table = {
        (start, end): float(random.randint(1, 9))
        for start in range(operators)
        for end in range(start + 1, operators + 1)
    }
    found = fewest_bottleneck(operators, devices, lambda _, start, end: table[start, end])
    assert found.seconds == tuple(table[segment] for segment in pairwise((0, *found.cuts, operators)))
