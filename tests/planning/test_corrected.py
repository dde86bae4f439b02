"""The search that measures segments: against brute force, on devices that are not what their model says."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.graphs import Traits, problems, randoms
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.errors import InfeasibleError, ModelError, OptionError, PlatformError, ProfileError
from tvm_pipeline.planning.baselines.segments import segment_seconds
from tvm_pipeline.planning.corrected import believed_seconds, cheapest_segments, corrected_partition, model_seconds

Floats = npt.NDArray[np.float64]
Spans = list[tuple[int, int]]


def partitions(operators: int, segments: int) -> Iterator[Spans]:
    for cuts in itertools.combinations(range(1, operators), segments - 1):
        yield list(itertools.pairwise((0, *cuts, operators)))


def bottleneck(table: Floats, spans: Spans) -> float:
    return max(float(table[span]) for span in spans)


def least(table: Floats, segments: int) -> float:
    return min(bottleneck(table, spans) for spans in partitions(len(table) - 1, segments))


def random_table(rng: random.Random, operators: int, impossible: float = 0.0) -> Floats:
    """Seconds with nothing in common: neither additive nor longer for longer segments, with many ties."""
    table = np.full((operators + 1, operators + 1), math.inf)
    for start, end in itertools.combinations(range(operators + 1), 2):
        table[start, end] = math.inf if rng.random() < impossible else float(rng.randint(0, 12))
    return table


def additive(work_s: list[float]) -> Floats:
    table = np.full((len(work_s) + 1, len(work_s) + 1), math.inf)
    for start, end in itertools.combinations(range(len(table)), 2):
        table[start, end] = math.fsum(work_s[start:end])
    return table


def with_cache(work_s: list[float], sizes: list[int], capacity: int, refill_s: float) -> Floats:
    """A device that keeps whole operators as they come; the others' bytes take `refill_s` each."""
    table = additive(work_s)
    for start in range(len(sizes)):
        kept = refilled = 0
        for end, size in enumerate(sizes[start:], start + 1):
            fits = kept + size <= capacity
            kept, refilled = kept + size * fits, refilled + size * (not fits)
            table[start, end] += refilled * refill_s
    return table


def recording(table: Floats) -> tuple[Callable[[int, int], float], Spans]:
    calls: Spans = []

    def measure(start: int, end: int) -> float:
        calls.append((start, end))
        return float(table[start, end])

    return measure, calls


@given(rng=randoms(), operators=st.integers(1, 8), segments=st.integers(1, 5), impossible=st.sampled_from([0.0, 0.2]))
def test_a_path_of_tables_is_the_best_of_all(
    rng: random.Random, operators: int, segments: int, impossible: float
) -> None:
    table = random_table(rng, operators, impossible)
    for combine, total in ((np.maximum, max), (np.add, sum)):
        sums = [total(float(table[span]) for span in spans) for spans in partitions(operators, segments)]
        found = cheapest_segments(table, segments, combine)
        if min(sums, default=math.inf) == math.inf:
            assert found == []
        else:
            assert found in list(partitions(operators, segments))
            assert total(float(table[span]) for span in found) == min(sums)


@given(rng=randoms(), operators=st.integers(1, 9), segments=st.integers(1, 5), speed=st.sampled_from([0.25, 1.0, 8.0]))
def test_a_model_that_is_right_needs_each_segment_once(
    rng: random.Random, operators: int, segments: int, speed: float
) -> None:
    """Right up to the speed of the whole device."""
    if segments > operators:
        return
    table = random_table(rng, operators)
    measure, calls = recording(speed * table)
    found = corrected_partition(table, segments, measure, tolerance=0.0)
    assert found.bottleneck_s == speed * least(table, segments)
    assert found.evaluations == len(calls) == segments


@given(
    rng=randoms(),
    operators=st.integers(1, 8),
    segments=st.integers(1, 4),
    refused=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_whatever_the_device_is_the_search_ends_with_the_best_that_it_measured(
    rng: random.Random, operators: int, segments: int, refused: float
) -> None:
    model, device = random_table(rng, operators, 0.1), random_table(rng, operators, refused)
    measure, calls = recording(device)
    every = list(partitions(operators, segments))
    possible = [spans for spans in every if bottleneck(np.maximum(model, device), spans) < math.inf]
    if not possible:
        with pytest.raises(InfeasibleError, match=r"no way to cut \d+ operators|need as many operators"):
            corrected_partition(model, segments, measure, tolerance=0.0)
        return
    found = corrected_partition(model, segments, measure, tolerance=0.0)
    spans = list(itertools.pairwise((0, *found.cuts, operators)))
    assert spans in possible
    assert found.seconds == tuple(device[span] for span in spans)
    assert found.evaluations == len(calls) == len(set(calls))
    assert all(model[span] < math.inf for span in calls)
    whole = [spans for spans in possible if set(spans) <= set(calls)]
    assert found.bottleneck_s == min(bottleneck(device, spans) for spans in whole)
    first = bottleneck(model, min(every, key=lambda spans: bottleneck(model, spans)))
    if refused == 0.0:
        # One of the model's first choices; of equal ones we do not say which.
        choices = [spans for spans in every if bottleneck(model, spans) == first]
        assert found.bottleneck_s <= max(bottleneck(device, spans) for spans in choices)


def test_costs_that_do_not_add_up_by_hand() -> None:
    """Four operators of 1 s on two devices that keep 4 bytes, of 2, 2, 3 and 2 bytes; each byte beyond takes 1 s.

    The model knows no cache, and cuts in the middle: 2 s, as it says, and 4 s, for of 3 + 2 bytes 2 are not kept. That
    is 2 s more in two operators, so 1 s for each of them: cut behind three operators, 4 + 2 s are believed to be worse;
    so are 5 s behind the first. In truth they take 6 and 8 s.
    """
    device = with_cache([1.0] * 4, [2, 2, 3, 2], capacity=4, refill_s=1.0)
    measure, calls = recording(device)
    found = corrected_partition(additive([1.0] * 4), 2, measure)
    assert (found.cuts, found.seconds, found.bound_s) == ((2,), (2.0, 4.0), None)
    assert sorted(calls) == [(0, 2), (2, 4)]
    assert found.bottleneck_s == least(device, 2)


def test_what_is_believed_by_hand() -> None:
    """Of 1, 2, 3 s the first two took 6 and all 15: twice and 2.5 times what the model says, 2.25 in the median.

    Scaled, it says 6.75 and 13.5: an excess of -0.375 and of 0.5 s for each operator, of which the first two carry the
    former and the third the latter. Nothing is believed to take less than twice what the model says.
    """
    measured = np.full((4, 4), math.nan)
    measured[0, 2], measured[0, 3] = 6.0, 15.0
    believed = believed_seconds(additive([1.0, 2.0, 3.0]), measured)
    assert (believed[0, 2], believed[0, 3]) == (6.0, 15.0)
    assert (believed[0, 1], believed[1, 2], believed[2, 3]) == (2.0, 4.5 - 0.375, 6.75 + 0.5)
    assert believed[1, 3] == 11.25 + 0.125
    measured[1, 2] = math.inf
    believed = believed_seconds(additive([1.0, 2.0, 3.0]), measured)
    assert believed[1, 2] == math.inf
    assert believed[1, 3] > 1e5 > believed[2, 3]


def test_a_refusal_by_error_is_a_refusal_and_what_contains_it_is_tried_last() -> None:
    """Operators 3 and 4 cannot be compiled together; nothing that contains a segment once refused is asked for."""
    calls = []

    def measure(start: int, end: int) -> float:
        calls.append((start, end))
        if start <= 3 and end >= 5:
            raise ModelError(f"operators {start} to {end - 1}: the compiler crashed")
        return float(end - start)

    found = corrected_partition(additive([1.0] * 4 + [0.1] + [1.0] * 4), 3, measure)
    assert 4 in found.cuts
    assert found.bottleneck_s == 4.0
    refusals = [(start, end) for start, end in calls if start <= 3 and end >= 5]
    assert refusals
    assert not any(b[0] <= a[0] and a[1] <= b[1] for a, b in itertools.combinations(refusals, 2))
    with pytest.raises(InfeasibleError, match="the device refused 1 of the 1 segments compiled") as refused:
        corrected_partition(additive([1.0] * 9), 1, measure)
    assert "the compiler crashed" in str(refused.value.__cause__)


def test_an_error_that_is_no_refusal_ends_the_search() -> None:
    def unplugged(start: int, end: int) -> float:
        raise PlatformError("usb:0 is gone")

    with pytest.raises(PlatformError, match="usb:0 is gone"):
        corrected_partition(additive([1.0, 1.0]), 1, unplugged)


@pytest.mark.parametrize(
    ("model", "segments", "figure", "tolerance", "error", "message"),
    [
        (additive([1.0, 1.0]), 3, 1.0, 0.01, InfeasibleError, "3 segments need as many operators, the chain has 2"),
        (additive([1.0, math.inf]), 2, 1.0, 0.01, InfeasibleError, "no way to cut 2 operators into 2 segments"),
        (additive([1.0, 1.0]), 2, math.nan, 0.01, ProfileError, r"operators \d to \d took nan s on the device"),
        (additive([1.0, 1.0]), 2, -1.0, 0.01, ProfileError, r"took -1.0 s"),
        (additive([1.0, math.nan]), 2, 1.0, 0.01, ProfileError, "the model says nan s of operators 0 to 1"),
        (additive([-1.0, 2.0]), 2, 1.0, 0.01, ProfileError, "the model says -1.0 s of operators 0 to 0"),
        (additive([1.0, 1.0]), 0, 1.0, 0.01, OptionError, "0 segments"),
        (additive([1.0, 1.0]), 2, 1.0, 1.0, OptionError, "tolerance 1.0"),
        (additive([1.0, 1.0]), 2, 1.0, math.nan, OptionError, "tolerance nan"),
        (np.ones((2, 3)), 1, 1.0, 0.01, OptionError, r"shape \(2, 3\)"),
        (np.ones((1, 1)), 1, 1.0, 0.01, OptionError, r"shape \(1, 1\)"),
    ],
)
def test_what_cannot_be_is_refused(
    model: Floats, segments: int, figure: float, tolerance: float, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        corrected_partition(model, segments, lambda start, end: figure, tolerance=tolerance)


@given(data=st.data())
def test_model_seconds_are_those_of_the_segments(data: st.DataObject) -> None:
    traits = Traits(overlapping=False, modelled=True)
    problem: Problem = data.draw(problems(operators=(1, 6), devices=(1, 4), traits=traits, choose_stages=False))
    devices = data.draw(st.permutations(problem.platform.devices))[: data.draw(st.integers(1, 4))]
    seconds = segment_seconds(problem, devices)
    operators = len(problem.graph)
    expected = np.full((operators + 1, operators + 1), math.inf)
    for start, end in itertools.combinations(range(operators + 1), 2):
        expected[start, end] = seconds(len(devices) - 1, start, end)
    assert np.array_equal(model_seconds(problem, devices), expected)
