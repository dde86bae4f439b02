"""The loops that all searches add up stages by, against the judge, which computes the same without arrays."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given

from tests.cost.test_evaluate import judged_or_skipped, random_stages
from tests.support.graphs import Traits, random_problem, randoms
from tvm_pipeline.core.graph import crossing_tensors
from tvm_pipeline.cost.device_costs import busy_factor, cost_of
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.cost.stage_table import computing, device_table, fetched, moving


@given(rng=randoms())
def test_a_stage_costs_what_the_judge_says(rng: random.Random) -> None:
    traits = Traits(unsupported=False, memory=False, modelled=True, copies=True, buses=True)
    problem = random_problem(rng, operators=(1, 7), devices=(1, 4), traits=traits)
    problem = replace(problem, profile=replace(problem.profile, segments=()))  # no table has those measured as a whole
    stages = random_stages(rng, problem)
    judged_or_skipped(problem, stages)
    devices, found = problem.platform.devices, evaluate(problem, stages)
    place = {device.name: d for d, device in enumerate(devices)}
    used = {name for stage in stages for name in stage.devices}
    factors = [busy_factor(problem, device, len(used)) for device in devices]
    table, occupied = device_table(problem, devices, factors), device_table(problem, devices, factors, occupied=True)
    crossing = [sum(t.bytes for t in row) for row in crossing_tensors(problem.graph, [s.operators for s in stages])]
    before, carried = len(devices), dict.fromkeys(found.bus_s, 0.0)
    for index, (stage, cost) in enumerate(zip(stages, found.costs, strict=True)):
        d, costs = place[cost.device], cost_of(problem, cost.device)
        operators = [operator for operator in problem.graph.operators if operator.name in stage.operators]
        factor = busy_factor(problem, cost.device, len(used))
        added = factor * sum(costs.added_s(operator) for operator in operators)
        work = factor * sum(costs.work_s(operator) for operator in operators)
        beyond = fetched(table, d, float(sum(operator.param_bytes for operator in operators)))
        p = before if before != d else len(devices)  # a device keeps what it hands on to itself
        assert computing(table, d, added, work, beyond) == pytest.approx(cost.compute_s, rel=1e-9)
        moved = moving(table, p, d, float(crossing[index]), float(crossing[index + 1]))
        assert moved == pytest.approx(cost.transfer_s, rel=1e-9, abs=1e-15)
        held = moving(occupied, p, d, float(crossing[index]), float(crossing[index + 1]))
        assert held == pytest.approx(cost.loads_s[0] - cost.compute_s, rel=1e-9, abs=1e-15)
        for bus in carried:
            of_bus = device_table(problem, devices, bus=bus)
            carried[bus] += moving(of_bus, p, d, *map(float, crossing[index : index + 2])) + of_bus.spill[d] * beyond
        before = d
    assert carried == pytest.approx(dict(found.bus_s), rel=1e-9, abs=1e-15)
