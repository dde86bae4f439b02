"""How far a prediction may be off, from the uncertainty of the profile."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import assume, given

from tests.cost.test_shares import SHARED, application, shared_stages
from tests.support.graphs import Traits, random_problem, randoms
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.evaluate import evaluate, judged
from tvm_pipeline.cost.scaling import slowed


def uncertain(**by_device: tuple[float, float, float]) -> Problem:
    """Read 1, compute 10 and write 4 ms on `a` and `b`, each so uncertain."""
    problem = application()
    names = problem.graph.operator_names
    devices = {
        name: replace(device, uncertainty=dict(zip(names, by_device[name], strict=True)) if name in by_device else {})
        for name, device in problem.profile.devices.items()
    }
    return replace(problem, profile=replace(problem.profile, devices=devices))


def split(count: int) -> tuple[Stage, ...]:
    names = ("read", "compute", "write")
    return Stage(("a",), names[:count]), Stage(("b",), names[count:])


def test_the_mean_of_the_bottleneck_is_weighted_with_its_seconds() -> None:
    """a: 1 ms at 12 % and 10 ms at 1 %, 2 % in all; b: 4 ms at 3 %. The plan: 0.22 + 0.12 of 15 ms, 2.27 %."""
    problem = uncertain(a=(0.12, 0.01, 0.5), b=(0.5, 0.5, 0.03))
    predicted = evaluate(problem, split(2)).predicted
    assert predicted.uncertainty == pytest.approx(0.34 / 15)
    # With b as certain as can be, the bottleneck decides: 0.22 of 11 ms.
    certain = uncertain(a=(0.12, 0.01, 0.5), b=(0.5, 0.5, 0.0))
    assert evaluate(certain, split(2)).predicted.uncertainty == pytest.approx(0.22 / 11)


def test_a_bottleneck_that_serves_several_stages_counts_all_of_them() -> None:
    """a reads and writes: 1 ms at 10 % and 4 ms at 20 %; b computes for 1 ms less than that."""
    problem = uncertain(a=(0.10, 0.0, 0.20), b=(0.0, 0.0, 0.0))
    stages = (Stage(("a",), ("read",)), Stage(("b",), ("compute",)), Stage(("a",), ("write",)))
    fast = replace(problem.profile.devices["b"], seconds={"read": 0.001, "compute": 0.004, "write": 0.004})
    problem = replace(problem, profile=replace(problem.profile, devices={**problem.profile.devices, "b": fast}))
    assert evaluate(problem, stages).predicted.uncertainty == pytest.approx(0.9 / 5)


def test_a_calibrated_model_is_as_uncertain_as_its_error() -> None:
    """Normal errors of 10 % in the mean are within 24.6 % in 95 of 100 cases; work and overhead count alike."""
    problem = application()
    for figures in (DeviceModel(1e3, operator_s=0.001, error=0.1), DeviceModel(1e3, bytes_per_s=1e3, error=0.1)):
        devices = tuple(Device(name, model=figures) for name in ("a", "b"))
        profile = replace(problem.profile, devices={})
        modelled = replace(problem, platform=Platform("box", devices), profile=profile)
        predicted = evaluate(modelled, split(2)).predicted
        assert predicted.uncertainty == pytest.approx(0.1 * 1.96 * (math.pi / 2) ** 0.5)


def test_an_unknown_device_makes_the_plan_unknown() -> None:
    problem = uncertain(a=(0.1, 0.1, 0.1))
    assert evaluate(problem, split(2)).predicted.uncertainty is None
    alone = evaluate(problem, (Stage(("a",), ("read", "compute", "write")),)).predicted
    assert alone.uncertainty == pytest.approx(0.1)
    modelled = Platform("box", (problem.platform.devices[0], Device("m", model=DeviceModel(call_s=0.001))))
    stages = split(2)[0], Stage(("m",), ("write",))
    assert evaluate(replace(problem, platform=modelled), stages).predicted.uncertainty is None


def test_equal_uncertainties_are_those_of_every_plan() -> None:
    problem = uncertain(a=(0.07, 0.07, 0.07), b=(0.07, 0.07, 0.07))
    for stages in (*map(split, (1, 2)), SHARED, (Stage(("a", "b"), ("read", "compute", "write")),)):
        assert evaluate(problem, stages).predicted.uncertainty == pytest.approx(0.07)


@given(randoms())
def test_the_throughput_moves_by_no_more_than_the_uncertainty_of_its_devices(rng: random.Random) -> None:
    """Each device is slower by its own small uncertainty, all of its operators alike; transfers cost nothing here."""
    traits = Traits(unsupported=False, memory=False, busy=False, uncertain=True)
    problem = random_problem(rng, operators=(1, 5), devices=(1, 4), traits=traits)
    problem = replace(problem, platform=replace(problem.platform, links=()), profile=replace(problem.profile, links=()))
    wrong = {device.name: rng.randint(0, 10) / 1e6 for device in problem.platform.devices}
    devices = {
        name: replace(device, uncertainty=dict.fromkeys(device.seconds, wrong[name]))
        for name, device in problem.profile.devices.items()
    }
    problem = replace(problem, profile=replace(problem.profile, devices=devices))
    stages = shared_stages(rng, problem)
    found = evaluate(problem, stages)
    slower = evaluate(slowed(problem, {name: 1 + share for name, share in wrong.items()}), stages)
    assume(slower.bottleneck == found.bottleneck)
    before, after = (e.predicted.throughput_fps or 0.0 for e in (found, slower))
    assert before / after - 1 <= (found.predicted.uncertainty or 0.0) * (1 + 1e-3) + 1e-9
    later = (slower.predicted.latency_s or 0.0) / (found.predicted.latency_s or 1.0) - 1
    assert later <= max(wrong.values()) * (1 + 1e-3) + 1e-9


def test_a_plan_keeps_its_uncertainty_as_text() -> None:
    problem = uncertain(a=(0.12, 0.01, 0.5), b=(0.5, 0.5, 0.03))
    plan = Plan("app", "hand", "throughput", split(2), evaluate(problem, split(2)).predicted)
    assert "uncertainty 0.0226" in str(plan)
    assert Plan.parse(str(plan)) == judged(problem, plan)
