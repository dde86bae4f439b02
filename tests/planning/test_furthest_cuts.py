"""First plans from minimum cuts: legal, no better than the optimum, and near the bound where cuts cannot be listed."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.generators import nasnet, random_dag
from tests.support.graphs import randoms
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.planning import plan
from tvm_pipeline.planning.local.bounds import lower_bound
from tvm_pipeline.planning.local.furthest_cuts import ReachGraph

TPU = DeviceModel(
    macs_per_s=1e12, call_s=1e-4, operator_s=2.5e-5, input_bytes_per_s=4e8, output_bytes_per_s=1.3e8,
    cached_bytes=7_000_000, refill_bytes_per_s=4e8,
)  # fmt: skip


def tpus(count: int, model: DeviceModel = TPU) -> Platform:
    return Platform("tpus", tuple(Device(f"tpu{index}", model=model) for index in range(count)))


def plans_of(problem: Problem, stages: int) -> list[float]:
    """Return the frames a second of each first plan, all of which the judge takes."""
    maker = ReachGraph.of(problem)
    assert maker is not None
    found = []
    for stage_of in maker.stages_of(stages):
        names: list[list[str]] = [[] for _ in range(stages)]
        for operator, number in zip(problem.graph.operators, stage_of.tolist(), strict=True):
            names[number].append(operator.name)
        pipeline = tuple(Stage((f"tpu{index}",), tuple(row)) for index, row in enumerate(names))
        found.append(evaluate(problem, pipeline).predicted.throughput_fps or math.nan)
    return found


@pytest.mark.thorough
@given(chance=randoms(), stages=st.integers(2, 4), cached=st.sampled_from((0, 10_000, 7_000_000)))
@examples(6)
def test_they_are_legal_and_no_better_than_the_best(chance: random.Random, stages: int, cached: int) -> None:
    graph = random_dag(chance, 10)
    problem = Problem(graph, tpus(stages, replace(TPU, cached_bytes=cached)), unmeasured(graph), stages=stages)
    best = plan(problem, "ideals").plan.predicted.throughput_fps or 0.0
    assert all(fps <= best * (1 + 1e-9) for fps in plans_of(problem, stages))


@pytest.mark.thorough
def test_they_are_near_the_bound_where_cuts_are_too_many_to_list() -> None:
    """The best cut along the graph's own order is a third slower."""
    graph = nasnet(fused=True)
    problem = Problem(graph, tpus(6), unmeasured(graph), stages=6)
    (bound,) = lower_bound(problem, math.inf)
    assert max(plans_of(problem, 6)) > 0.97 * bound
    assert (plan(problem, "chain").plan.predicted.throughput_fps or 0.0) < 0.8 * bound


def test_other_objectives_have_none() -> None:
    graph = random_dag(random.Random(0), 6)
    assert ReachGraph.of(Problem(graph, tpus(2), unmeasured(graph), "latency")) is None
    assert ReachGraph.of(Problem(graph, tpus(2), unmeasured(graph), max_latency_s=1.0)) is None
