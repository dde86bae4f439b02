"""The obvious plans against all devices and all sets of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import every_chain, every_replication, figure, least
from tests.support.graphs import Traits, problems
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import OBJECTIVES, Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.errors import InfeasibleError
from tvm_pipeline.planning.baselines.whole_model import replicas, single, singles


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("objective", OBJECTIVES)
@given(data=st.data())
def test_single_is_the_best_device(objective: str, data: st.DataObject) -> None:
    problem = data.draw(problems(objective, devices=(1, 4), traits=Traits(caches=True), choose_stages=False))  # type: ignore[arg-type]
    best = least(problem, every_chain(problem, 1, again=False))
    if best is None:
        with pytest.raises(InfeasibleError, match=r"cannot run operator|would hold"):
            single(problem)
        return
    assert figure(problem, single(problem).predicted) == pytest.approx(best, rel=1e-12)
    names = {plan.devices for plan in singles(problem)}
    assert len(names) == len(singles(problem))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("objective", OBJECTIVES)
@given(data=st.data())
def test_replicas_are_the_best_of_all_sets_that_can(objective: str, data: st.DataObject) -> None:
    problem = data.draw(problems(objective, devices=(1, 4), traits=Traits(caches=True), choose_stages=False))  # type: ignore[arg-type]
    best = least(problem, every_replication(problem))
    if best is None:
        with pytest.raises(InfeasibleError, match="no two devices that share no cores and can run and hold the whole"):
            replicas(problem)
        return
    plan = replicas(problem)
    assert len(plan.stages) == 1
    assert len(plan.devices) > 1
    assert figure(problem, plan.predicted) == pytest.approx(best, rel=1e-12)


def test_a_device_that_is_too_small_does_not_forbid_the_others() -> None:
    graph = OperatorGraph(
        "net", (Tensor("x", (1,)),), (Operator("op", "k", ("x",), (Tensor("y", (1,)),), 100),), ("y",)
    )
    devices = (Device("a"), Device("b"), Device("tiny", memory_bytes=99))
    profile = Profile(
        "net", graph.fingerprint, {device.name: DeviceProfile.in_order(graph, (0.1,)) for device in devices}
    )
    problem = Problem(graph, Platform("box", devices), profile)
    assert replicas(problem).devices == ("a", "b")
    assert replicas(problem).predicted.throughput_fps == pytest.approx(20.0)
    assert [plan.devices for plan in singles(problem)] == [("a",), ("b",)]
    with pytest.raises(InfeasibleError, match="platform box has no two devices"):
        replicas(replace(problem, platform=Platform("box", devices[1:])))
