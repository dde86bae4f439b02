"""libcoral's partitioners: the published defect, its mending, and what their searches are worth."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.graphs import randoms
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.errors import InfeasibleError, LimitMissedError, NoPlanError, OptionError
from tvm_pipeline.planning.baselines.segments import Partition
from tvm_pipeline_papers.coral import (
    coral_parameters,
    coral_profiling,
    coral_profiling_original,
    parameter_cuts,
    partition_by_profiling,
    profiling_partition,
)

THRESHOLD_S = 1e-3


def additive(work_s: list[float]) -> Callable[[int, int], float]:
    return lambda start, end: math.fsum(work_s[start:end])


def random_work(rng: random.Random, operators: int) -> list[float]:
    return [rng.randint(1, 20) / 1000 for _ in range(operators)]


def least_bottleneck(operators: int, segments: int, seconds: Callable[[int, int], float], tail: int = 1) -> float:
    """The best of all partitions whose last segment has at least `tail` operators."""
    every = itertools.combinations(range(1, operators - tail + 1), segments - 1)
    return min(max(seconds(s, e) for s, e in itertools.pairwise((0, *cuts, operators))) for cuts in every)


def outcome(**options: Any) -> Partition | str:
    """The partition, or why there is none."""
    try:
        return profiling_partition(**options)
    except NoPlanError as error:
        return str(error)


@pytest.mark.parametrize("segments", [5, 6, 8])
def test_the_original_aborts_from_five_segments_on_and_the_mended_never(segments: int) -> None:
    aborted = 0
    for seed in range(20):
        seconds = additive(random_work(random.Random(seed), 60))
        assert profiling_partition(60, segments, seconds).found
        original = outcome(operators=60, segments=segments, seconds=seconds, original=True)
        aborted += "it overwrote segments that were fixed" in str(original)
    assert aborted >= 19


@given(rng=randoms(), operators=st.integers(4, 30), segments=st.integers(2, 4))
def test_up_to_four_segments_the_defect_does_not_show(rng: random.Random, operators: int, segments: int) -> None:
    work_s = random_work(rng, operators)
    mended = profiling_partition(operators, segments, additive(work_s))
    original = outcome(operators=operators, segments=segments, seconds=additive(work_s), original=True)
    if isinstance(original, str):
        assert "it finds no partition that is faster than the initial one" in original
        assert not mended.found
    else:
        assert original == mended


@given(
    rng=randoms(),
    operators=st.integers(2, 9),
    segments=st.integers(1, 5),
    tail=st.integers(1, 3),
    threshold_s=st.sampled_from([1e-3, 5e-3, 1e-6]),
)
def test_it_ends_within_the_threshold_of_the_optimum(
    rng: random.Random, operators: int, segments: int, tail: int, threshold_s: float
) -> None:
    """For costs of which a longer segment never takes less; here with a parameter cache of random size."""
    work_s = random_work(rng, operators)
    cached_s, rate = rng.randint(0, 60) / 1000, rng.choice((0.0, 0.5, 3.0))

    def seconds(start: int, end: int) -> float:
        total = math.fsum(work_s[start:end])
        return total + rate * max(0.0, total - cached_s)

    if operators < segments:
        with pytest.raises(InfeasibleError, match="need as many operators"):
            profiling_partition(operators, segments, seconds)
        return
    calls = []

    def counted(start: int, end: int) -> float:
        calls.append((start, end))
        return seconds(start, end)

    found = outcome(operators=operators, segments=segments, seconds=counted, threshold_s=threshold_s, tail=tail)
    if isinstance(found, str):
        assert "no operators are left for segment 0" in found
        assert operators - tail < segments - 1
        return
    ends = (0, *found.cuts, operators)
    assert list(ends) == sorted(set(ends))
    assert len(ends) == segments + 1
    assert found.seconds == tuple(seconds(start, end) for start, end in itertools.pairwise(ends))
    assert found.evaluations == len(calls) == len(set(calls))
    # The bounds are of a partition that need not keep the tail together.
    assert found.bottleneck_s >= least_bottleneck(operators, segments, seconds) - 1e-12
    if found.found:
        assert operators - found.cuts[-1] >= tail
    if tail == 1:
        assert found.bottleneck_s <= least_bottleneck(operators, segments, seconds) + threshold_s + 1e-12


def test_a_coarse_step_is_never_better_and_asks_for_less() -> None:
    work_s = random_work(random.Random(1), 48)
    fine, coarse = (profiling_partition(48, 6, additive(work_s), step=step) for step in (1, 4))
    assert coarse.bottleneck_s >= fine.bottleneck_s - THRESHOLD_S
    assert coarse.evaluations < fine.evaluations


@pytest.mark.thorough
def test_a_heavy_operator_behind_many_light_ones_ends() -> None:
    """Stepping back over every composition of 60 operators would not."""
    work_s = [0.001] * 60 + [0.5] + [0.001] * 60
    found = profiling_partition(121, 40, additive(work_s))
    assert found.bottleneck_s <= 0.5 + THRESHOLD_S


def test_a_search_by_hand() -> None:
    """Operators of 4 1 1 4 s, two segments: 5 s each in the middle, so that both bounds are 5 and nothing is searched.

    Of 1 1 4 4 s the middle has 2 and 8 s. Target 5: one segment takes 2 (6 would be too much), the last 8: refused,
    as is 8 no better than the bound. Target 6.5: three operators take 6, the last 4: accepted, upper bound 6.5.
    """
    even = profiling_partition(4, 2, additive([4.0, 1.0, 1.0, 4.0]))
    assert (even.cuts, even.seconds, even.evaluations, even.found) == ((2,), (5.0, 5.0), 2, False)
    found = profiling_partition(4, 2, additive([1.0, 1.0, 4.0, 4.0]), threshold_s=2.0)
    assert (found.cuts, found.seconds, found.found) == ((3,), (6.0, 4.0), True)
    # (0, 2), (2, 4) for the bounds; (0, 3) is refused, then accepted; (3, 4) is its last.
    assert found.evaluations == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"threshold_s": 0.0}, OptionError, "threshold 0.0 s"),
        ({"threshold_s": math.nan}, OptionError, "threshold nan s"),
        ({"step": 0}, OptionError, "step 0"),
        ({"segments": 0}, OptionError, "0 segments"),
        ({"segments": 7}, InfeasibleError, "7 segments need as many operators, the chain has 6"),
        ({"step": 4}, InfeasibleError, "at 4 operators a step there are not enough"),
        ({"tail": 6}, InfeasibleError, "no operators are left for segment 0"),
        ({"seconds": lambda start, end: math.inf}, InfeasibleError, "it cannot compile the initial partition"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], error: type[Exception], message: str) -> None:
    given_options = {
        "operators": 6,
        "segments": 3,
        "seconds": additive([0.01, 0.02, 0.03, 0.04, 0.05, 0.06]),
        **options,
    }
    with pytest.raises(error, match=message):
        profiling_partition(**given_options)  # type: ignore[arg-type]


def tpus(param_bytes: tuple[int, ...], count: int, outputs: tuple[str, ...] = ()) -> Problem:
    """A chain on equal Edge TPUs: a millisecond a unit of work, a cache of 8 bytes, 2 ms for each byte beyond."""
    operators = tuple(
        Operator(f"op{i}", "k", (f"t{i}",), (Tensor(f"t{i + 1}", (1,), "int8"),), size, 10)
        for i, size in enumerate(param_bytes)
    )
    graph = OperatorGraph("net", (Tensor("t0", (1,), "int8"),), operators, outputs or (f"t{len(param_bytes)}",))
    model = DeviceModel(macs_per_s=10_000.0, cached_bytes=8, refill_bytes_per_s=500.0)
    devices = tuple(Device(f"tpu{i}", cache_bytes=8, model=model) for i in range(count))
    return Problem(graph, Platform("box", devices), unmeasured(graph), stages=count)


def sizes_of(problem: Problem, scheduler: Callable[[Problem], object]) -> list[int]:
    return [len(stage.operators) for stage in scheduler(problem).stages]  # type: ignore[attr-defined]


def test_parameter_counts_by_hand() -> None:
    """18 bytes in three: the average is taken as 7, and a segment ends just before it would pass that."""
    problem = tpus((3, 3, 3, 3, 3, 3), 3)
    assert parameter_cuts(problem.graph, 3) == (2, 4)
    assert sizes_of(problem, coral_parameters) == [2, 2, 2]
    assert parameter_cuts(tpus((1, 5, 2, 1, 8, 1), 3).graph, 3) == (2, 4)
    # Without parameters the first segment takes all but one operator for each of the others.
    assert parameter_cuts(tpus((0, 0, 0, 0, 0), 3).graph, 3) == (3, 4)
    # Each later segment keeps an operator up to the output.
    assert parameter_cuts(tpus((1, 1, 1, 9), 3).graph, 3) == (2, 3)


def test_an_operator_larger_than_the_average_aborts_the_parameter_partitioner() -> None:
    with pytest.raises(LimitMissedError, match=r"segment 1 of 3 empty and aborts: operator op1 of net has 9 bytes"):
        coral_parameters(tpus((1, 9, 1, 1), 3))


def test_the_last_segment_has_all_operators_that_nothing_reads() -> None:
    """An SSD's heads: op2 and op3 are outputs, and a cut between them is not tried."""
    operators = tuple(
        Operator(f"op{i}", "k", (read,), (Tensor(f"t{i}", (1,)),), 2, 10)
        for i, read in enumerate(("x", "t0", "t1", "t1"))
    )
    graph = OperatorGraph("ssd", (Tensor("x", (1,)),), operators, ("t2", "t3"))
    devices = tuple(Device(f"tpu{i}", model=DeviceModel(macs_per_s=10_000.0)) for i in range(2))
    problem = Problem(graph, Platform("box", devices), unmeasured(graph), stages=2)
    assert parameter_cuts(graph, 2) == (2,)
    assert sizes_of(problem, coral_profiling) == [2, 2]
    assert parameter_cuts(graph, 3) == (1, 2)
    with pytest.raises(
        InfeasibleError, match="3 later segments need operators up to the first that nothing reads, op2"
    ):
        parameter_cuts(graph, 4)


def test_profiling_balances_time_where_parameters_mislead() -> None:
    """All bytes in the last two operators: equal bytes are 11 operators and 1, equal times (1 ms each) are 6 and 6."""
    problem = tpus((0,) * 10 + (4, 4), 2)
    assert sizes_of(problem, coral_parameters) == [11, 1]
    assert sizes_of(problem, coral_profiling) == sizes_of(problem, coral_profiling_original) == [6, 6]
    assert coral_profiling(problem).value == pytest.approx((1 / 0.006,))
    found = partition_by_profiling(problem, problem.platform.devices, original=False)
    assert (found.cuts, found.found) == ((6,), True)


def test_without_a_number_of_stages_the_original_falls_back_to_what_it_can_cut() -> None:
    rng = random.Random(3)
    problem = tpus(tuple(rng.randint(0, 9) for _ in range(40)), 6)
    with pytest.raises(LimitMissedError, match=r"makes no plan: .*\(original\) aborts with 6 segments of 40 operators"):
        coral_profiling_original(problem)
    free = Problem(problem.graph, problem.platform, problem.profile)
    assert len(coral_profiling_original(free).stages) < 6
    assert len(coral_profiling(free).stages) == 6
