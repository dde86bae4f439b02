"""The seconds of segments against the judge."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.graphs import Traits, problems
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import PlanError
from tvm_pipeline.planning.baselines.segments import segment_seconds


@given(data=st.data())
def test_segment_seconds_are_those_of_the_judge(data: st.DataObject) -> None:
    traits = Traits(overlapping=False, modelled=True)
    problem: Problem = data.draw(problems(operators=(1, 6), devices=(1, 4), traits=traits, choose_stages=False))
    names = [operator.name for operator in problem.graph.operators]
    count = data.draw(st.integers(1, min(len(names), len(problem.platform.devices))))
    devices = data.draw(st.permutations(problem.platform.devices))[:count]
    cuts = data.draw(st.sampled_from(list(itertools.combinations(range(1, len(names)), count - 1))))
    segments = list(enumerate(itertools.pairwise((0, *cuts, len(names)))))
    seconds = segment_seconds(problem, devices)
    evaluated = [seconds(device, start, end) for device, (start, end) in segments]
    stages = tuple(Stage((devices[d].name,), tuple(names[start:end])) for d, (start, end) in segments)
    try:
        judged = evaluate(problem, stages).costs
    except PlanError:
        assert math.inf in evaluated
        return
    assert evaluated == pytest.approx([cost.seconds for cost in judged], rel=1e-9, abs=1e-12)
