"""The least energy where an idle power counts, by every search, against every plan there is.

Hypothesis likes its problems small; in these, idle power and active power are of the same order, and devices differ.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.planning import test_cp_sat, test_dynamic_programming, test_revisits, test_with_activations
from tests.planning.test_ordered import check_best
from tests.support.brute_force import every_chain, figure, least
from tests.support.examples import seeds
from tests.support.graphs import Traits, random_problem
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.errors import NoPlanError
from tvm_pipeline.planning.search.dynamic_programming import chain, hybrid, ideals, two_stage

CAPABLE = Traits(overlapping=False, unsupported=False, memory=False, joules=False, locks=True)


def problem_of(seed: int, traits: Traits = CAPABLE, operators: tuple[int, int] = (3, 5)) -> Problem:
    rng = random.Random(seed)
    problem = random_problem(rng, "energy", operators=operators, devices=(2, 3), traits=traits, choose_stages=False)
    if seed % 4 == 0:  # the lock of the interpreter is slower than most stages
        held_s = {operator.name: 0.012 for operator in problem.graph.operators}
        problem = replace(problem, profile=replace(problem.profile, lock_s=held_s))
    return replace(problem, platform=replace(problem.platform, idle_w=rng.choice((0.5, 2.0, 8.0))))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("scheduler", "count"), [(chain, 60), (ideals, 30), (hybrid, 20)])
def test_searches_prove_the_least_energy(scheduler: test_dynamic_programming.Scheduler, count: int) -> None:
    for seed in seeds(count):
        test_dynamic_programming.check(problem_of(seed), scheduler, proves=scheduler is not hybrid)


@pytest.mark.thorough
def test_cp_sat_proves_the_least_energy_with_devices_that_come_again() -> None:
    for seed in range(12):
        problem = problem_of(seed, replace(CAPABLE, buses=True), (3, 4))
        test_cp_sat.assert_best(problem, test_cp_sat.in_space(problem))


def test_two_stages() -> None:
    for seed in seeds(60):
        problem = problem_of(seed)
        best = least(problem, every_chain(problem, 2, again=False))
        assert figure(problem, two_stage(problem).predicted) == pytest.approx(best, rel=1e-9)


def test_devices_that_come_again_in_three_stages() -> None:
    for seed in seeds(30):
        test_revisits.check(problem_of(seed), together=False)


def test_stages_that_must_fit_with_their_activations() -> None:
    for seed in seeds(60):
        problem = problem_of(seed)
        rng = random.Random(seed)
        size = sum(operator.param_bytes + operator.output_bytes for operator in problem.graph.operators)
        devices = tuple(replace(d, memory_bytes=rng.randint(size // 2, size + 1)) for d in problem.platform.devices)
        problem = replace(problem, platform=replace(problem.platform, devices=devices), activations=True)
        best = test_with_activations.least_fitting(problem, every_chain(problem, None, again=False))
        try:
            plan = chain(problem)
        except NoPlanError:
            assert best is None
            continue
        assert figure(problem, plan.predicted) == pytest.approx(best, rel=1e-9)


def test_the_bound_of_best_holds_for_replicas_that_serve_other_stages() -> None:
    for seed in seeds(16):
        problem = problem_of(seed, replace(CAPABLE, ordered=True), (3, 3))
        if any(operator.ordered for operator in problem.graph.operators):
            check_best(problem)
