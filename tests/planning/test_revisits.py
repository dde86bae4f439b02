"""Devices that serve two stages, against every such plan of three or four stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import every_plan, figure, least, serving_once
from tests.support.examples import examples
from tests.support.graphs import Traits, problems
from tvm_pipeline import planning
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, NoPlanError, OptionError
from tvm_pipeline.planning.search.dynamic_programming import ideals
from tvm_pipeline.planning.search.revisits import revisits


def space(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    """Return plans in which a device serves two stages, none with a memory limit or a parameter cache."""
    limited = serving_once(problem)
    for count in (3,) if problem.objective == "energy" else (3, 4):
        if problem.stages in (None, count):
            for stages in every_plan(problem, count, again=True):
                repeated = {name for name, times in Counter(stage.devices[0] for stage in stages).items() if times > 1}
                if repeated and not repeated & limited:
                    yield stages


@examples(50)
@given(
    problem=st.sampled_from([Traits(), Traits(modelled=True), Traits(modelled=True, buses=True, copies=True)]).flatmap(
        lambda traits: problems("throughput", operators=(3, 5), devices=(2, 3), traits=traits)
    ),
    together=st.booleans(),
)
def test_it_is_the_fastest_plan_in_which_a_device_comes_again(problem: Problem, together: bool) -> None:
    check(problem, together)


@examples(50)
@given(
    problem=st.sampled_from(
        [Traits(idle=True, locks=True), Traits(idle=True, modelled=True, buses=True, copies=True)]
    ).flatmap(lambda traits: problems("energy", operators=(3, 5), devices=(2, 3), traits=traits)),
    together=st.booleans(),
)
def test_it_is_the_plan_of_least_energy_in_which_a_device_comes_again(problem: Problem, together: bool) -> None:
    check(problem, together)


def check(problem: Problem, together: bool) -> None:
    problem = replace(problem, children_together=together)
    optimum = least(problem, space(problem))
    try:
        plan = revisits(problem)
    except NoPlanError:
        assert optimum is None
        return
    assert optimum is not None
    assert plan.predicted == evaluate(problem, plan.stages).predicted
    assert problem.stages in (None, len(plan.stages))
    assert len(plan.devices) < len(plan.stages) <= 4
    assert plan.bound is not None
    value = figure(problem, plan.predicted)
    if plan.status == "optimal":
        assert value == pytest.approx(optimum, rel=1e-9)
        assert plan.bound == plan.value
    else:
        # Only a bus may take from what the search counts.
        assert any(link.bus for link in (*problem.platform.links, *problem.profile.links)) or any(
            device.bus for device in problem.platform.devices
        )
        bound = -plan.bound[0] if problem.objective == "throughput" else plan.bound[0]
        assert bound - abs(bound) * 1e-9 <= optimum <= value + abs(value) * 1e-9


def network(seconds: dict[str, tuple[float, ...]], **figures: object) -> Problem:
    count = len(next(iter(seconds.values())))
    operators = tuple(Operator(f"op{i}", "k", (f"t{i}",), (Tensor(f"t{i + 1}", (1,)),)) for i in range(count))
    graph = OperatorGraph("net", (Tensor("t0", (1,)),), operators, (f"t{count}",))
    profile = Profile(
        "net", graph.fingerprint, {name: DeviceProfile.in_order(graph, row) for name, row in seconds.items()}
    )
    return Problem(graph, Platform("box", tuple(map(Device, seconds))), profile, **figures)  # type: ignore[arg-type]


ENDS = {"cpu": (0.01, 0.09, 0.02), "gpu": (0.09, 0.03, 0.09)}


def test_cpu_gpu_cpu() -> None:
    """The ends take 10 and 20 ms on the one, the middle 30 ms on the other: 33.3 a second, once each at most 8.3."""
    plan = revisits(network(ENDS))
    assert plan.stages == (Stage(("cpu",), ("op0",)), Stage(("gpu",), ("op1",)), Stage(("cpu",), ("op2",)))
    assert plan.value == pytest.approx((1 / 0.03,))
    assert ideals(network(ENDS)).value == pytest.approx((1 / 0.1,))


def test_both_devices_come_again_in_four_stages() -> None:
    alternating = {"cpu": (0.01, 0.09, 0.02, 0.09), "gpu": (0.09, 0.02, 0.09, 0.02)}
    plan = revisits(network(alternating))
    assert [stage.devices[0] for stage in plan.stages] == ["cpu", "gpu", "cpu", "gpu"]
    assert plan.value == pytest.approx((25.0,))


@pytest.mark.parametrize(
    "figures",
    [
        {"objective": "latency"},
        {"max_latency_s": 1.0},
        {"objective": "energy", "min_throughput_fps": 1.0},
        {"objective": "memory,communication"},
    ],
)
def test_it_is_for_throughput_and_energy_without_a_limit(figures: dict[str, object]) -> None:
    words = r"scheduler revisits does not plan (for objective|under `(max_latency_s|min_throughput_fps)`)"
    with pytest.raises(OptionError, match=words):
        planning.plan(network(ENDS, **figures), "revisits")


@pytest.mark.parametrize(
    "devices",
    [
        (Device("cpu"),),
        (Device("cpu", cores=(0, 1)), Device("gpu", cores=(1, 2))),
        (Device("cpu", memory_bytes=9), Device("gpu", memory_bytes=9)),
        (Device("cpu", memory_bytes=9), Device("npu", model=DeviceModel(macs_per_s=1e9, cached_bytes=4))),
    ],
)
def test_where_no_device_can_come_again_it_says_what_that_takes(devices: tuple[Device, ...]) -> None:
    problem = network(ENDS)
    with pytest.raises(InfeasibleError, match="two devices that share no cores, one of them without cached"):
        revisits(replace(problem, platform=Platform("box", devices)))


@pytest.mark.parametrize("stages", [2, 1])
def test_other_numbers_of_stages_are_not_its_business(stages: int) -> None:
    with pytest.raises(InfeasibleError, match="three or four stages"):
        revisits(network(ENDS, stages=stages))
