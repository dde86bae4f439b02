"""The bound of deployments against every pair of plans there is, and first deployments against the bound."""

from __future__ import annotations

import math
import random
import time
from unittest.mock import patch

import pytest

from tests.planning.test_deployment import least_utilisation as by_brute_force
from tests.planning.test_deployment import row, two_demands
from tests.support.brute_force import every_plan, verdict
from tests.support.graphs import Traits
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import PlanError
from tvm_pipeline.planning.deployment import Demand, deploy, judge_deployment
from tvm_pipeline.planning.search.cuts import ideals, prefixes
from tvm_pipeline.planning.together import load_bound
from tvm_pipeline.planning.together.deployment_loops import recut_chain, weigh
from tvm_pipeline.planning.together.first_deployment import first_deployment, first_state, plans_of
from tvm_pipeline.planning.together.load_bound import least_utilisation
from tvm_pipeline.planning.together.model_figures import models_of


def cases(seeds: range) -> list[tuple[list[Demand], float]]:
    """Return random pairs of models on measured and on modelled devices, with their best deployments."""
    found = []
    for seed in seeds:
        rng = random.Random(seed)
        traits = Traits(memory=False, modelled=seed % 2 == 0, buses=True, copies=True, locks=True)
        demands = two_demands(rng, traits)
        best = by_brute_force(demands)
        if best is not None:
            found.append((demands, best))
    return found


@pytest.mark.thorough
def test_no_deployment_is_better_than_the_bound() -> None:
    near = near_by_intervals = 0
    known = cases(range(24))
    for index, (demands, best) in enumerate(known):
        bound = least_utilisation(demands)
        assert bound <= best * (1 + 1e-9)
        assert least_utilisation(demands, deadline=time.monotonic()) <= bound * (1 + 1e-9)
        near += bound >= 0.8 * best
        if index % 8 == 0:
            with patch.object(load_bound, "listed_cuts", lambda _: None):  # as for graphs with too many downsets
                by_intervals = least_utilisation(demands)
            assert by_intervals <= best * (1 + 1e-9)
            near_by_intervals += by_intervals >= 0.8 * best
    assert near >= len(known) // 4
    assert near_by_intervals >= 1


@pytest.mark.thorough
def test_the_bound_is_the_best_deployment_of_equal_parts() -> None:
    """8 operators of 10 ms and 4 of 10 ms at 10 fps are 1.2 seconds a second: 0.4 on each of three devices."""
    platform = Platform("box", tuple(Device(name) for name in "abc"))
    demands = [Demand(row("one", 8, platform, 0.01), 10.0), Demand(row("two", 4, platform, 0.01), 10.0)]
    assert least_utilisation(demands) == pytest.approx(0.4, rel=1e-4)
    found = deploy(demands)
    assert (found.status, found.gap) == ("optimal", 0.0)


def test_caches_are_shared_in_the_bound() -> None:
    """Two models of 30 bytes, with 20 bytes of cache on each of two devices: 20 of 60 are fetched, not 2 x 0."""
    model = DeviceModel(cached_bytes=20, refill_bytes_per_s=1000.0)
    platform = Platform("box", (Device("a", model=model), Device("b", model=model)))
    demands = [Demand(row(name, 3, platform, None, param_bytes=10), 1.0) for name in ("one", "two")]
    assert least_utilisation(demands[:1]) < 1e-4
    assert least_utilisation(demands) == pytest.approx(0.01, rel=1e-3)
    assert max(deploy(demands).utilisation.values()) == pytest.approx(0.01)


@pytest.mark.thorough
def test_a_first_deployment_is_there_at_once_and_better_with_time() -> None:
    rng = random.Random(3)
    platform = Platform("box", tuple(Device(name) for name in "abcd"))
    demands = [Demand(row(name, rng.randint(20, 40), platform, 0.001), 10.0) for name in ("one", "two")]
    at_once = first_deployment(demands, deadline=0.0)
    later = first_deployment(demands)
    for found in (at_once, later):
        assert found.plans is not None
        assert max(judge_deployment(demands, found.plans).values()) == pytest.approx(found.utilisation)
    total = sum(len(demand.problem.graph) for demand in demands)
    assert later.utilisation == pytest.approx(math.ceil(total / 4) * 0.01)
    assert later.utilisation <= at_once.utilisation * (1 + 1e-9)
    assert deploy(demands, time_limit_s=0.0).status == "feasible"


def random_state(seed: int):
    """Return demands without latency limits, their models cut along their orders, and a first state of these."""
    rng = random.Random(seed)
    if seed % 3:
        demands = two_demands(rng, Traits(memory=False, overlapping=False, unsupported=False, copies=True))
    else:  # caches that hold the parameters of a stage, and not those of two
        cached = DeviceModel(cached_bytes=40, refill_bytes_per_s=1000.0, operator_s=0.001)
        box = Platform("box", tuple(Device(name, model=cached) for name in "ab"))
        rows = [row(name, rng.randint(2, 6), box, None, param_bytes=rng.randint(5, 15)) for name in ("one", "two")]
        demands = [Demand(problem, float(rng.choice((1, 10)))) for problem in rows]
    platform = demands[0].problem.platform
    models = models_of(demands, [prefixes(d.problem.graph) for d in demands], platform.devices)
    return demands, models, first_state(models, spread=rng.random() < 0.5)


def test_the_loops_weigh_as_the_judge_does() -> None:
    counted = 0
    for seed in range(40):
        demands, models, state = random_state(seed)
        if state is None:
            continue
        greatest, beyond, _ = weigh(models.figures, state)
        try:
            judged = judge_deployment(demands, plans_of(models, state))
        except PlanError:
            continue
        assert beyond == 0
        assert greatest == pytest.approx(max(judged.values()))
        counted += 1
    assert counted >= 20


def test_a_model_is_cut_anew_as_well_as_can_be_beside_the_others() -> None:
    gained = 0
    for seed in range(60):
        demands, models, state = random_state(seed)
        if state is None or demands[0].problem.children_together:
            continue
        plans, problem = plans_of(models, state), demands[0].problem
        devices = [stage.devices for stage in plans[0]]

        def busiest(stages) -> float:
            judged = judge_deployment(demands, [stages, plans[1]])  # noqa: B023
            return max(judged[name] for (name,) in devices)  # noqa: B023

        every = [
            stages
            for stages in every_plan(problem, len(devices))
            if [stage.devices for stage in stages] == devices and verdict(problem, stages)
        ]
        best = min(map(busiest, every))
        rows = [ideals(problem.graph), prefixes(demands[1].problem.graph)]
        chain = recut_chain(models, models_of(demands, rows, models.devices), state, 0, math.inf)
        assert chain is not None
        new = tuple(Stage(d, group) for d, group in zip(devices, rows[0].stages(chain), strict=True))
        assert busiest(new) == pytest.approx(best)
        gained += best < busiest(plans[0]) * (1 - 1e-6)
    assert gained >= 5
