"""Algorithm 1 against every cut in two on every ordered pair of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import every_chain, figure, least
from tests.support.graphs import TIMED, Traits, problems
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Objective, Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError
from tvm_pipeline.planning.search.dynamic_programming import two_stage


@pytest.mark.parametrize("objective", TIMED)
@given(data=st.data())
def test_it_is_the_best_cut_in_two(objective: Objective, data: st.DataObject) -> None:
    traits = Traits(idle=data.draw(st.booleans()), locks=True, unstated=True)
    problem = data.draw(problems(objective, operators=(1, 7), devices=(1, 4), traits=traits, choose_stages=False))
    best = least(problem, every_chain(problem, 2, again=False)) if len(problem.graph) > 1 else None
    if best is None:
        with pytest.raises(InfeasibleError):
            two_stage(problem)
        return
    plan = two_stage(problem)
    assert figure(problem, plan.predicted) == pytest.approx(best, rel=1e-9)
    assert plan.predicted == evaluate(problem, plan.stages).predicted
    assert (plan.status, plan.bound, plan.scheduler) == ("optimal", plan.value, "two-stage")


def test_the_published_shape_of_the_problem() -> None:
    """Both orders of the devices are tried, and the receiver pays for the transfer."""
    operators = tuple(Operator(f"op{i}", "k", (f"t{i}",), (Tensor(f"t{i + 1}", (1,)),)) for i in range(3))
    graph = OperatorGraph("net", (Tensor("t0", (1,)),), operators, ("t3",))
    seconds = {
        "cpu": DeviceProfile.in_order(graph, (0.09, 0.09, 0.01)),
        "gpu": DeviceProfile.in_order(graph, (0.01, 0.01, 0.09)),
    }
    problem = Problem(
        graph, Platform("box", (Device("cpu"), Device("gpu"))), Profile("net", graph.fingerprint, seconds)
    )
    plan = two_stage(problem)
    assert [(stage.devices, len(stage.operators)) for stage in plan.stages] == [(("gpu",), 2), (("cpu",), 1)]
    assert plan.predicted.throughput_fps == pytest.approx(50.0)

    with pytest.raises(InfeasibleError, match="2 stages need as many devices that share no cores; platform box has 1"):
        two_stage(replace(problem, platform=Platform("box", (Device("cpu"),))))
