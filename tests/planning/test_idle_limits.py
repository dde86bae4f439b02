"""Limits of memory that no plan can reach, against the same problems without them and against every plan."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given

from tests.support.brute_force import every_cut, every_plan, every_sharing, figure, least, verdict
from tests.support.examples import examples
from tests.support.graphs import TIMED, Traits, graphs, random_problem, randoms
from tvm_pipeline import planning
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem, most_bytes
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.errors import NoPlanError, OptionError
from tvm_pipeline.memory.stage_memory import stage_graph
from tvm_pipeline.planning.search.pareto import pareto
from tvm_pipeline.runtime.replanning import quick_plan


@given(graphs(least=1, most=6))
@examples(40)
def test_no_stages_hold_more_than_the_bound(graph: OperatorGraph) -> None:
    """One device serves all stages, each with its own copy of every tensor that it reads or writes."""
    param_bytes = sum(operator.param_bytes for operator in graph.operators)
    held = [
        param_bytes + sum(buffer.bytes for stage in stages for buffer in stage_graph(graph, stage).buffers)
        for stages in every_cut(graph, len(graph))
    ]
    # Nothing writes the inputs, for whose writer the bound has a copy.
    assert max(held) == most_bytes(graph) - sum(tensor.bytes for tensor in graph.inputs)


def with_memory(problem: Problem, *memory_bytes: int | None) -> Problem:
    devices = zip(problem.platform.devices, memory_bytes, strict=True)
    limited = tuple(replace(device, memory_bytes=size) for device, size in devices)
    return replace(problem, platform=replace(problem.platform, devices=limited), activations=True)


def idle(rng: random.Random, problem: Problem) -> tuple[Problem, Problem]:
    """Return the problem with limits that no plan can reach, on some devices, and without them."""
    count, most = len(problem.platform.devices), most_bytes(problem.graph)
    limits = [rng.choice((None, most, most + 1, 100 * most)) for _ in range(count)]
    return with_memory(problem, *limits), with_memory(problem, *[None] * count)


@given(randoms())
@examples(40)
def test_plans_are_those_without_the_limit(rng: random.Random) -> None:
    traits = Traits(memory=False, modelled=rng.random() < 0.3, ordered=rng.random() < 0.3)
    problem = random_problem(rng, rng.choice(TIMED), operators=(2, 5), devices=(1, 3), traits=traits)
    if problem.objective != "throughput" and rng.random() < 0.5:
        problem = replace(problem, min_throughput_fps=20.0)
    limited, free = idle(rng, problem)
    assert not limited.counts_activations
    for scheduler in ("best", "ideals", "cp-sat", "revisits"):
        try:
            expected = planning.plan(free, scheduler).plan
        except (NoPlanError, OptionError) as error:
            with pytest.raises(type(error)):
                planning.plan(limited, scheduler)
            continue
        found = planning.plan(limited, scheduler).plan
        assert found.status == expected.status
        assert found.value == pytest.approx(expected.value, rel=1e-9)
        assert found.bound == (None if expected.bound is None else pytest.approx(expected.bound, rel=1e-9))


@given(randoms())
@examples(20)
def test_the_judge_accepts_what_it_accepts_without_the_limit(rng: random.Random) -> None:
    problem = random_problem(rng, operators=(2, 3), devices=(2, 3), traits=Traits(memory=False), choose_stages=False)
    limited, free = idle(rng, problem)
    for stages in every_sharing(free):
        assert verdict(limited, stages) == verdict(free, stages)


@given(randoms())
@examples(30)
def test_a_frame_is_as_fast_as_the_best_of_all_plans_in_which_devices_come_again(rng: random.Random) -> None:
    traits = Traits(memory=False, overlapping=False)
    problem = random_problem(rng, "latency", operators=(2, 4), devices=(2, 3), traits=traits, choose_stages=False)
    limited, free = idle(rng, problem)
    optimum = least(free, every_plan(free, again=True))
    try:
        plan = planning.plan(limited).plan
    except NoPlanError:
        assert optimum is None
        return
    assert figure(limited, plan.predicted) == pytest.approx(optimum, rel=1e-9)


def ends(objective: str, memory_bytes: int | None) -> Problem:
    """Return a problem whose first and last operators are fast on the GPU, and the one between them on the CPU."""
    tensors = [Tensor(f"t{i}", (100,), "int8") for i in range(4)]
    operators = tuple(Operator(f"op{i}", "k", (f"t{i}",), (tensors[i + 1],), param_bytes=10) for i in range(3))
    graph = OperatorGraph("net", (tensors[0],), operators, ("t3",))
    rows = {"cpu": (0.09, 0.03, 0.09), "gpu": (0.01, 0.09, 0.02)}
    devices = {name: DeviceProfile.in_order(graph, row) for name, row in rows.items()}
    platform = Platform("box", (Device("cpu"), Device("gpu", memory_bytes=memory_bytes)))
    return Problem(graph, platform, Profile("net", graph.fingerprint, devices), objective)  # type: ignore[arg-type]


# Three tensors are read once, and the last is written only.
MOST = 3 * 10 + 3 * 2 * 100 + 100


@pytest.mark.parametrize("memory_bytes", [MOST, 8_000_000_000])
def test_gpu_cpu_gpu_is_found_where_it_is_best(memory_bytes: int) -> None:
    for problem in (ends("throughput", memory_bytes), ends("latency", memory_bytes)):
        decision = planning.plan(problem)
        assert [stage.devices for stage in decision.plan.stages] == [("gpu",), ("cpu",), ("gpu",)]
        assert decision.plan.status == "optimal"
    assert [stage.devices[0] for stage in planning.plan(problem, "cp-sat").plan.stages] == ["gpu", "cpu", "gpu"]
    assert [stage.devices[0] for stage in quick_plan(problem).stages] == ["gpu", "cpu", "gpu"]


def test_a_limit_that_a_plan_can_reach_keeps_a_device_to_one_stage() -> None:
    for objective in TIMED[:2]:
        problem = ends(objective, MOST - 1)
        assert problem.counts_activations
        decision = planning.plan(problem)
        assert all(sum("gpu" in stage.devices for stage in plan.stages) < 2 for plan in decision.candidates)
    assert decision.plan.predicted.latency_s == pytest.approx(0.01 + 0.09 + 0.02)


def test_the_front_is_that_without_the_limit() -> None:
    limited, free = pareto(ends("throughput", MOST)), pareto(ends("throughput", None))
    assert [(plan.stages, plan.predicted) for plan in limited] == [(plan.stages, plan.predicted) for plan in free]
