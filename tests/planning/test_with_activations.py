"""Plans whose stages must fit with their activations, against every cut, every device and every order there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given

from tests.support.brute_force import every_chain, every_plan, figure, least, serving_once, verdict
from tests.support.examples import examples
from tests.support.graphs import Traits, graphs, random_chain, random_problem, randoms
from tests.support.memory import least_peak
from tvm_pipeline import planning
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Objective, Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile, unmeasured
from tvm_pipeline.cost.device_costs import counts_period
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, LimitMissedError, NoPlanError, PlanError
from tvm_pipeline.memory import memory_graph
from tvm_pipeline.planning.search.dynamic_programming import chain
from tvm_pipeline.planning.search.with_activations import least_needs
from tvm_pipeline.planning.stage_orders import fitting_orders


@cache
def needs(graph: OperatorGraph, operators: tuple[str, ...]) -> int:
    """Return the bytes of activations of a stage, by trying every order."""
    return least_peak(memory_graph(graph, operators, pin_inputs=True))


def tight_problem(rng: random.Random) -> Problem:
    """Return a random problem most of whose devices fit some of the parameters and tensors."""
    objective: Objective = rng.choice(("throughput", "throughput", "latency", "energy"))
    traits = Traits(memory=False, modelled=rng.random() < 0.3, idle=rng.random() < 0.5)
    problem = random_problem(rng, objective, operators=(2, 6), devices=(1, 3), traits=traits)
    size = sum(operator.param_bytes + operator.output_bytes for operator in problem.graph.operators)
    devices = tuple(
        replace(device, memory_bytes=rng.randint(size // 3, size + 1) if rng.random() < 0.7 else None)
        for device in problem.platform.devices
    )
    floor_fps = rng.choice((None, 20.0)) if objective != "throughput" else None
    platform = replace(problem.platform, devices=devices)
    together = rng.random() < 0.2
    return replace(
        problem, platform=platform, activations=True, min_throughput_fps=floor_fps, children_together=together
    )


def fits(problem: Problem, stages: tuple[Stage, ...]) -> bool:
    """Return whether each device fits its stages, each in its best order, by trying every order."""
    for device in problem.platform.devices:
        served = [stage for stage in stages if device.name in stage.devices]
        param_bytes = sum(o.param_bytes for o in problem.graph.operators for s in served if o.name in s.operators)
        most = max((needs(problem.graph, stage.operators) for stage in served), default=0)
        if device.memory_bytes is not None and param_bytes + most > device.memory_bytes:
            return False
    return True


def least_fitting(problem: Problem, plans: Iterator[tuple[Stage, ...]]) -> Any:
    """Return the best value of the plans that fit in some order."""
    return least(replace(problem, activations=False), (stages for stages in plans if fits(problem, stages)))


def once(problem: Problem, plans: Iterator[tuple[Stage, ...]]) -> Iterator[tuple[Stage, ...]]:
    """Return the plans in which a device with limited memory serves one stage, as the planner requires."""
    full = serving_once(problem)
    for stages in plans:
        used = [name for stage in stages for name in stage.devices]
        if all(used.count(name) < 2 for name in full):
            yield stages


@given(randoms())
@examples(30)
def test_a_plan_gets_an_order_that_fits_where_there_is_one(rng: random.Random) -> None:
    problem = replace(tight_problem(rng), min_throughput_fps=None)
    free = replace(problem, activations=False)
    for stages in itertools.islice(every_plan(problem, again=True), 12):
        possible = verdict(free, stages) is not None and fits(problem, stages)
        try:
            ordered = fitting_orders(problem, stages)
        except PlanError:
            assert not possible
            continue
        assert (verdict(problem, ordered) is not None) == possible


@given(randoms())
@examples(40)
def test_the_best_cut_of_an_order_is_found(rng: random.Random) -> None:
    problem = tight_problem(rng)
    again = not counts_period(problem)
    best = least_fitting(problem, once(problem, every_chain(problem, problem.stages, again=again)))
    try:
        plan = chain(problem)
    except NoPlanError:
        assert best is None
        return
    assert best is not None
    assert figure(problem, plan.predicted) == pytest.approx(best, rel=1e-9)


@given(randoms())
@examples(40)
def test_no_plan_is_better_than_the_bound_and_each_fits(rng: random.Random) -> None:
    problem = tight_problem(rng)
    apart = counts_period(problem)
    plans = every_plan(problem, problem.stages, again=not apart, replicas=apart)
    best = least_fitting(problem, once(problem, plans))
    try:
        decision = planning.plan(problem)
    except NoPlanError:
        # Of a chain, all cuts lie in its order, and only stages on several devices are left out.
        along = once(problem, every_chain(problem, problem.stages, again=not apart))
        assert problem.graph.name == "dag" or least_fitting(problem, along) is None
        return
    for plan in decision.candidates:
        assert evaluate(problem, plan.stages).predicted == plan.predicted
    if best is not None and decision.plan.bound is not None:
        sign = -1 if problem.objective == "throughput" else 1
        assert sign * decision.plan.bound[0] <= best + 1e-9 * abs(best)


@given(graphs(least=1, most=6))
@examples(30)
def test_the_cheap_bound_is_one(graph: OperatorGraph) -> None:
    names = [operator.name for operator in graph.operators]
    bound = least_needs(graph)
    for start, end in itertools.combinations(range(len(names) + 1), 2):
        assert bound[start, end] <= needs(graph, tuple(names[start:end]))


def problem_of(graph: OperatorGraph, *memory_bytes: int | None, seconds: float = 0.01, **figures: object) -> Problem:
    """Return a problem on devices a, b... of so much memory, equally fast at every operator."""
    devices = tuple(Device(name, memory_bytes=size) for name, size in zip("abcd", memory_bytes, strict=False))
    row = DeviceProfile.in_order(graph, (seconds,) * len(graph))
    profile = Profile(graph.name, graph.fingerprint, {device.name: row for device in devices})
    return Problem(graph, Platform("box", devices), profile, **figures)  # type: ignore[arg-type]


def branches(count: int = 4) -> OperatorGraph:
    """Return branches of wide and narrow operators, the wide ones first: 100 bytes are written, and 10 kept."""
    x = Tensor("x", (10,), "int8")
    wide = [Operator(f"wide{i}", "k", ("x",), (Tensor(f"w{i}", (100,), "int8"),), 1) for i in range(count)]
    narrow = [Operator(f"narrow{i}", "k", (f"w{i}",), (Tensor(f"n{i}", (10,), "int8"),), 1) for i in range(count)]
    add = Operator("add", "k", tuple(f"n{i}" for i in range(count)), (Tensor("y", (10,), "int8"),))
    return OperatorGraph("branches", (x,), (*wide, *narrow, add), ("y",))


def test_a_stage_that_fits_only_because_it_is_reordered() -> None:
    """Listed: 10 and four times 100 and the first 10 are alive together; branch by branch 10 + 30 + 100 + 10."""
    graph = branches()
    names = tuple(operator.name for operator in graph.operators)
    roomy = problem_of(graph, 8 + 150)
    (stage,) = planning.plan(roomy).plan.stages
    # The order is part of the plan, so that the judge need not search for it.
    assert sorted(stage.operators) == sorted(names)
    assert stage.operators != names
    evaluate(roomy, (stage,))
    with pytest.raises(PlanError, match=r"8 bytes of parameters and 420 of activations, in the order of the plan"):
        evaluate(roomy, (Stage(("a",), names),))
    with pytest.raises(
        PlanError, match=r"8 bytes of parameters and at least 150 of activations .* \(420 in the listed"
    ):
        fitting_orders(problem_of(graph, 8 + 149), (Stage(("a",), names),))


def row(*tensor_bytes: int, param_bytes: int = 10) -> OperatorGraph:
    """Return operators in a row, between tensors of these sizes."""
    tensors = [Tensor(f"t{i}", (size,), "int8") for i, size in enumerate(tensor_bytes)]
    operators = tuple(
        Operator(f"op{i}", "k", (before.name,), (after,), param_bytes)
        for i, (before, after) in enumerate(itertools.pairwise(tensors))
    )
    return OperatorGraph("row", (tensors[0],), operators, (tensors[-1].name,))


# Two and two operators hold the tensor of 100 bytes on either side of the cut, beside the two of 80.
UNEVEN = row(1, 1, 100, 80, 80, param_bytes=40)


def test_a_stage_is_made_smaller_for_its_activations() -> None:
    """The last two hold 80 bytes of parameters and tensors of 100, 80 and 80; the last three 120 and 1, 100 and 80."""
    problem = problem_of(UNEVEN, 301, 301, stages=2)
    relaxed = planning.plan(replace(problem, activations=False)).plan
    assert [len(stage.operators) for stage in relaxed.stages] == [2, 2]
    decision = planning.plan(problem)
    assert sorted(len(stage.operators) for stage in decision.plan.stages) == [1, 3]
    assert (decision.plan.status, decision.plan.bound) == ("feasible", relaxed.bound)
    assert "does not fit with its activations: stage 1 does not fit on device b: 80 bytes of param" in decision.why
    with pytest.raises(LimitMissedError):
        planning.plan(problem_of(UNEVEN, 300, 300, stages=2))


def test_the_device_with_more_memory_is_taken_though_it_is_like_the_other() -> None:
    problem = problem_of(row(50, 50), 60, 200)
    assert planning.plan(problem).plan.devices == ("b",)
    assert planning.plan(problem, "single").plan.devices == ("b",)


def test_a_scheduler_of_parameters_alone_says_so() -> None:
    problem = problem_of(UNEVEN, 301, 301, stages=2)
    for name in ("ideals", "cp-sat", "hybrid"):
        with pytest.raises(LimitMissedError, match=f"scheduler {name} counts parameters alone, and its plan does not"):
            planning.plan(problem, name)
    assert planning.plan(problem, "chain").plan.stages == planning.plan(problem).plan.stages


def test_what_fits_nowhere_is_refused_with_the_figures() -> None:
    problem = problem_of(row(1, 100, 60, 1), 150, 120)
    with pytest.raises(
        InfeasibleError,
        match="operator op1 needs 10 bytes of parameters and 160 of tensors that it reads and writes; "
        "device a, which has the most memory, has 150",
    ):
        planning.plan(problem)
    for stages in (1, 2):
        refused = r"stage . does not fit on device .: \d+ bytes of parameters and at least \d+ of activations at oper"
        with pytest.raises(LimitMissedError, match=refused):
            planning.plan(replace(problem_of(row(1, 90, 40, 50), 145, 145), stages=stages))


@pytest.mark.parametrize(
    "objective", ["memory,communication", "memory,dram,communication", "memory,dram,edge_communication"]
)
def test_bytes_are_the_objective(objective: Objective) -> None:
    devices = tuple(Device(name, memory_bytes=301, cache_bytes=100) for name in "ab")
    plan = planning.plan(Problem(UNEVEN, Platform("box", devices), unmeasured(UNEVEN), objective)).plan
    assert sorted(len(stage.operators) for stage in plan.stages) == [1, 3]
    assert plan.predicted.memory_bytes == 120
    assert plan.bound is not None
    assert plan.bound[0] == 80


def test_equal_devices_serve_in_their_order() -> None:
    graph = random_chain(random.Random(3), 8)
    size = max(needs(graph, (operator.name,)) for operator in graph.operators)
    devices = tuple(Device(f"d{i}", memory_bytes=size + 9) for i in range(8))
    measured = DeviceProfile.in_order(graph, (0.01,) * 8)
    profile = Profile(graph.name, graph.fingerprint, {device.name: measured for device in devices})
    plan = chain(Problem(graph, Platform("box", devices), profile))
    assert len(plan.stages) > 1
    assert list(plan.devices) == sorted(plan.devices)
