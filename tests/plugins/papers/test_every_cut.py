"""Every cut in two against Algorithm 1, which finds the best of them by itself."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_backend import chain_model
from tests.support.graphs import problems
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.errors import NoPlanError, OptionError, PlatformError
from tvm_pipeline.planning.search.dynamic_programming import two_stage
from tvm_pipeline_papers.every_cut import every_cut

GRAPH = chain_model(3).graph
NAMES = tuple(GRAPH.operator_names)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
@given(data=st.data())
def test_the_best_of_all_cuts_is_that_of_algorithm_1(objective: str, data: st.DataObject) -> None:
    problem = data.draw(problems(objective, operators=(1, 6), devices=(2, 2), choose_stages=False))  # type: ignore[arg-type]
    first, second = problem.platform.devices
    if first.overlaps(second):
        return
    plans = [cut.plan for cut in every_cut(problem, first.name, second.name) if cut.plan]
    values = [plan.value[0] for plan in plans if plan.value and len(plan.stages) == 2]
    try:
        found = two_stage(problem)
    except NoPlanError:
        assert not values or problem.counts_activations
        return
    assert found.value == pytest.approx((max(values) if objective == "throughput" else min(values),), rel=1e-9)


def test_both_orders_begin_with_one_operator_and_end_with_one_device() -> None:
    seconds = {
        "a": DeviceProfile.in_order(GRAPH, [0.1, 0.2, 0.3]),
        "b": DeviceProfile.in_order(GRAPH, [0.1, None, 0.1]),
    }
    platform = Platform("box", (Device("a", "fake"), Device("b", "fake")))
    cuts = every_cut(Problem(GRAPH, platform, Profile(GRAPH.name, GRAPH.fingerprint, seconds)), "a", "b")
    assert [str(cut) for cut in cuts] == ["1 a | 2 b", "2 a | 1 b", "3 a", "1 b | 2 a", "2 b | 1 a", "3 b"]
    assert [bool(cut.plan) for cut in cuts] == [False, True, True, True, False, False]
    assert f"device b cannot run operator {NAMES[1]} of stage 1" in cuts[0].obstacle
    assert cuts[1].plan is not None
    assert [stage.operators for stage in cuts[1].plan.stages] == [NAMES[:2], NAMES[2:]]
    between = [tensor.bytes for tensor in GRAPH.operators[0].outputs]
    assert [cut.crossing_bytes for cut in cuts[2:4]] == [0, sum(between)]
    assert all(before.operators < after.operators for before, after in pairwise(cuts[:3]))


def test_devices_that_cannot_work_at_the_same_time_are_refused() -> None:
    platform = Platform("box", (Device("a", "fake", (0,)), Device("both", "fake", (0, 1))))
    seconds = {name: DeviceProfile.in_order(GRAPH, [0.1, 0.1, 0.1]) for name in ("a", "both")}
    problem = Problem(GRAPH, platform, Profile(GRAPH.name, GRAPH.fingerprint, seconds))
    with pytest.raises(OptionError, match="all cuts of a,both: a sweep needs two devices that can work at the same"):
        every_cut(problem, "a", "both")
    with pytest.raises(OptionError):
        every_cut(problem, "a", "a")
    with pytest.raises(PlatformError, match="gpu"):
        every_cut(problem, "a", "gpu")
