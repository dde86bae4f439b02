"""Each idea that keeps the search for pipelines small can be switched off: the value stays the best there is."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace
from functools import cache
from itertools import product

import pytest

from tests.support.brute_force import every_chain, every_plan
from tests.support.examples import seeds
from tests.support.graphs import LEXICOGRAPHIC, Traits, lexicographic_problem, random_problem
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, PlanError
from tvm_pipeline.planning.search import lexicographic
from tvm_pipeline.planning.search.cost_tables import stage_seconds
from tvm_pipeline.planning.search.cuts import Cuts, ideals, prefixes
from tvm_pipeline.planning.search.pipelines import Pruning, least_bottleneck, least_sum
from tvm_pipeline.planning.search.space import Space, single_units

IDEAS = [field.name for field in fields(Pruning)]
SEEDS = range(8)


@cache
def case(seed: int, nested: bool) -> tuple[Problem, Cuts, float, float]:
    """Return a problem, its cuts, and by brute force the least slowest stage and the least latency, or inf."""
    rng = random.Random(seed)
    traits = Traits(overlapping=False, modelled=seed % 2 == 1)
    problem = random_problem(rng, "throughput", operators=(3, 5), devices=(2, 3), traits=traits, choose_stages=False)
    found = prefixes(problem.graph) if nested else ideals(problem.graph)
    assert found is not None
    # How busy a device is depends on how many work: all of them do here.
    count = len(problem.platform.devices)
    plans = every_chain(problem, count, again=False) if nested else every_plan(problem, count)
    slowest = latency = math.inf
    for stages in plans:
        try:
            predicted = evaluate(problem, stages).predicted
        except PlanError:
            continue
        if predicted.throughput_fps is not None and predicted.latency_s is not None:
            slowest = min(slowest, 1 / predicted.throughput_fps)
            latency = min(latency, predicted.latency_s)
    return problem, found, slowest, latency


def check(pruning: Pruning, seed: int, nested: bool) -> None:
    problem, cuts, slowest, latency = case(seed, nested)
    devices = problem.platform.devices
    space = Space(cuts, devices, single_units(devices), frozenset(range(len(devices))))
    space = replace(space, working=len(devices))
    costs, alone = stage_seconds(problem, cuts, devices, len(devices)), stage_seconds(problem, cuts, devices)
    # What is known may be the best itself, somewhat slower, or nothing.
    for known in (slowest * (1 + 1e-9), slowest * 1.2, math.inf):
        found = least_bottleneck(space, costs, known, None, pruning)
        assert (found.found.value if found.found else math.inf) == pytest.approx(slowest)
        assert found.bound <= slowest * (1 + 1e-9)
    if math.isfinite(slowest):
        assert least_bottleneck(space, costs, slowest * 0.99, None, pruning).found is None
    for seconds in (None, costs):
        added = least_sum(space, alone, seconds, math.inf, None, pruning=pruning)
        assert (added.found.value if added.found else math.inf) == pytest.approx(latency)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("idea", IDEAS)
def test_without_one_idea(idea: str, nested: bool) -> None:
    for seed in SEEDS:
        check(Pruning(**{idea: False}), seed, nested)


@pytest.mark.thorough
@pytest.mark.parametrize("nested", [False, True])
def test_without_two_ideas_or_any(nested: bool) -> None:
    """Each combination lacks at most two ideas, or all of them. The combinations take turns with the problems."""
    combinations = [c for c in product((False, True), repeat=len(IDEAS)) if c.count(False) <= 2 or not any(c)]
    for index, chosen in enumerate(combinations):
        check(Pruning(**dict(zip(IDEAS, chosen, strict=True))), index % len(SEEDS), nested)


def test_a_pace_bounds_the_stages_of_a_sum() -> None:
    """The least latency under a limit of seconds a stage is the same with all ideas as with none."""
    for seed, nested in product(SEEDS, (False, True)):
        problem, cuts, slowest, _ = case(seed, nested)
        if math.isinf(slowest):
            continue
        devices = problem.platform.devices
        space = Space(cuts, devices, single_units(devices), frozenset(range(len(devices))))
        space = replace(space, working=len(devices))
        costs = stage_seconds(problem, cuts, devices, len(devices))
        nothing = Pruning(**dict.fromkeys(IDEAS, False))
        for cap in (slowest * (1 + 1e-9), slowest * 1.3):
            found = [
                least_sum(space, costs, costs, cap, None, pruning=pruning).found for pruning in (Pruning(), nothing)
            ]
            assert found[0] is not None
            assert found[1] is not None
            assert found[0].value == pytest.approx(found[1].value)


@pytest.mark.parametrize("windows", [False, True])
def test_objectives_of_bytes(windows: bool) -> None:
    """The search for bytes with and without windows, against every plan there is."""
    for seed, objective in product(seeds(12), LEXICOGRAPHIC):
        problem = lexicographic_problem(random.Random(seed), objective)
        cuts = ideals(problem.graph)
        assert cuts is not None
        try:
            plan = lexicographic.lexicographic(problem, cuts, "ideals", windows=windows)
        except InfeasibleError:
            continue
        assert plan.status == "optimal"
        values = []
        for stages in every_plan(problem, len(plan.stages)):
            try:
                values.append(replace(plan, stages=stages, predicted=evaluate(problem, stages).predicted).value)
            except PlanError:
                continue
        assert plan.value == min(values)
