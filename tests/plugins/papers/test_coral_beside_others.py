"""libcoral's partitioners as the baselines of the engine are tested, and beside the search that measures."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.test_baselines import Scheduler, assert_sound, chain
from tests.planning.test_corrected import bottleneck, recording, with_cache
from tests.support.examples import examples
from tests.support.graphs import LEXICOGRAPHIC, TIMED, Traits, lexicographic_problems, problems
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.errors import NoPlanError, ProfileError
from tvm_pipeline.planning.corrected import cheapest_segments, corrected_partition
from tvm_pipeline_papers.coral import (
    coral_parameters,
    coral_profiling,
    coral_profiling_original,
    profiling_partition,
)

CORALS: dict[str, Scheduler] = {
    "coral-parameters": coral_parameters,
    "coral-profiling": coral_profiling,
    "coral-profiling-original": coral_profiling_original,
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("objective", TIMED)
@pytest.mark.parametrize("name", CORALS)
@examples(20)
@given(data=st.data())
def test_a_plan_is_legal_or_the_reason_is_told(name: str, objective: str, data: st.DataObject) -> None:
    traits = Traits(modelled=True)
    assert_sound(data.draw(problems(objective, operators=(1, 5), devices=(1, 4), traits=traits)), name, CORALS[name])  # type: ignore[arg-type]


@given(problem=lexicographic_problems(LEXICOGRAPHIC, operators=(2, 6)))
def test_parameters_need_no_seconds(problem: Problem) -> None:
    assert_sound(problem, "coral-parameters", coral_parameters)


def test_stages_stand_on_devices_that_can_work_together() -> None:
    """`all` shares cores with both halves; the largest set that does not is the halves."""
    problem = chain((1, 1), {"all": (0.1, 0.1), "half0": (0.2, 0.2), "half1": (0.2, 0.2)}, stages=2)
    devices = (Device("all", cores=(0, 1)), Device("half0", cores=(0,)), Device("half1", cores=(1,)))
    for make in CORALS.values():
        assert make(replace(problem, platform=Platform("box", devices))).devices == ("half0", "half1")


@pytest.mark.parametrize("make", [coral_profiling, coral_profiling_original])
def test_profiling_says_that_it_needs_measurements(make: Scheduler) -> None:
    measured = chain((4, 4), {"a": (0.1, 0.1), "b": (0.1, 0.1)}, stages=2)
    problem = replace(measured, profile=unmeasured(measured.graph), objective="memory,communication")
    with pytest.raises(ProfileError, match="the profile of net has no device a"):
        make(problem)


@pytest.mark.parametrize("segments", [2, 5, 8])
def test_the_search_with_a_model_comes_through_where_libcoral_does_not_and_asks_for_far_less(segments: int) -> None:
    """60 operators, each of another speed than the model says, on a device that keeps whole operators."""
    ours = mended = aborted = 0
    for seed in range(5):
        rng = random.Random(seed)
        sizes = [rng.randint(0, 20) for _ in range(60)]
        said_s = [rng.uniform(1e-3, 5e-3) for _ in range(60)]
        work_s = [seconds * rng.lognormvariate(0, 0.3) for seconds in said_s]
        device = with_cache(work_s, sizes, capacity=70, refill_s=1e-3)
        found = corrected_partition(with_cache(said_s, sizes, 10**6, 0.0), segments, recording(device)[0])
        best = cheapest_segments(device, segments, np.maximum)
        assert found.bottleneck_s <= 1.25 * bottleneck(device, best)
        ours += found.evaluations
        mended += profiling_partition(60, segments, recording(device)[0]).evaluations
        try:
            profiling_partition(60, segments, recording(device)[0], original=True)
        except NoPlanError:
            aborted += 1
    assert ours < mended / 2
    assert aborted == 5 or segments == 2
