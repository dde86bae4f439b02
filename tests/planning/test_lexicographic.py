"""Memory, overflow and communication against every way to share the operators out, and against CP-SAT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import every_chain, every_cut, figure, least
from tests.support.examples import examples
from tests.support.graphs import LEXICOGRAPHIC, lexicographic_problems
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.platform import Device, Platform, read_platform
from tvm_pipeline.core.problem import Objective, Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, OptionError
from tvm_pipeline.planning.sat.cp_sat import cp_sat
from tvm_pipeline.planning.search.dynamic_programming import chain, ideals, two_stage

PROFILES = Path(__file__).parents[2] / "profiles"


def stagings(problem: Problem, count: int) -> Iterator[tuple[Stage, ...]]:
    """Yield all ways to divide the operators among `count` stages; stage b is on the b-th of the equal devices."""
    names = [device.name for device in problem.platform.devices]
    for groups in every_cut(problem.graph, count):
        if len(groups) == count:
            yield tuple(Stage((name,), group) for name, group in zip(names, groups, strict=False))


def bounds(problem: Problem, plan: Plan) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the plan's figures and its bound, after a check that they are consistent."""
    assert plan.predicted == evaluate(problem, plan.stages).predicted
    assert problem.stages in (None, len(plan.stages))
    assert plan.value is not None
    assert plan.bound is not None
    assert (plan.status == "optimal") == (plan.bound == plan.value)
    return plan.value, plan.bound


@given(lexicographic_problems(operators=(2, 7)))
def test_ideals_find_the_best_of_all_stagings(problem: Problem) -> None:
    assert problem.stages is not None
    value, bound = bounds(problem, ideals(problem))
    assert value == bound == least(problem, stagings(problem, problem.stages))


@given(lexicographic_problems(operators=(2, 7)))
def test_the_number_of_stages_is_that_of_the_devices_where_none_is_asked_for(problem: Problem) -> None:
    count = min(len(problem.graph), len(problem.platform.devices))
    free = replace(problem, stages=None)
    plan = ideals(free)
    assert len(plan.stages) == count
    assert plan.value == least(free, stagings(free, count))


@examples(30)
@given(lexicographic_problems(operators=(2, 6)))
def test_overflow_as_a_peak_chooses_what_memory_chooses(problem: Problem) -> None:
    """SEC 2022 calls objective (2) a peak per stage (section IV-B). All three of its sequences are then (1)(3).

    The largest overflow of equal caches is that of the fullest stage, so it never falls while the peak of memory rises.
    """
    assert problem.stages is not None
    problem = replace(problem, objective="memory,communication")
    cache = min(device.cache_bytes or 0 for device in problem.platform.devices)
    found = []
    for stages in stagings(problem, problem.stages):
        memory, communication = figure(problem, evaluate(problem, stages).predicted)
        found.append((max(0, memory - cache), memory, communication))
    value, _ = bounds(problem, ideals(problem))
    assert value == min((memory, communication) for _, memory, communication in found)
    assert value == min((memory, overflow, communication) for overflow, memory, communication in found)[::2]
    assert value == min(found)[1:]


@given(lexicographic_problems())
def test_chain_finds_the_best_of_the_graph_s_order(problem: Problem) -> None:
    order = [operator.name for operator in problem.graph.operators]
    plan = chain(problem)
    assert [name for stage in plan.stages for name in stage.operators] == order
    value, bound = bounds(problem, plan)
    assert value == bound == least(problem, every_chain(problem, problem.stages, again=False))


@given(problem=lexicographic_problems(operators=(2, 6), devices=(1, 3)), data=st.data())
def test_what_a_device_can_hold_is_kept(problem: Problem, data: st.DataObject) -> None:
    assert problem.stages is not None
    param_bytes = sum(operator.param_bytes for operator in problem.graph.operators)
    sizes = st.one_of(st.none(), st.integers(1, max(1, param_bytes)))
    tight = tuple(replace(device, memory_bytes=data.draw(sizes)) for device in problem.platform.devices)
    problem = replace(problem, platform=replace(problem.platform, devices=tight))
    best = least(problem, stagings(problem, problem.stages))
    if best is None:
        with pytest.raises(InfeasibleError, match=f"no cut into {problem.stages} stages keeps the memory_bytes"):
            ideals(problem)
        return
    value, bound = bounds(problem, ideals(problem))
    assert value == bound == best
    value, bound = bounds(problem, ideals(replace(problem, time_limit_s=0.0)))
    assert bound <= best <= value


@given(lexicographic_problems(devices=(2, 3)))
def test_two_stage_finds_the_best_cut_in_two(problem: Problem) -> None:
    plan = two_stage(problem)
    assert (plan.scheduler, len(plan.stages)) == ("two-stage", 2)
    assert plan.value == least(problem, every_chain(problem, 2, again=False))


@given(lexicographic_problems(operators=(2, 7), children_together=True))
def test_with_children_together_it_is_the_best_or_says_how_many_stages_there_can_be(problem: Problem) -> None:
    assert problem.stages is not None
    best = {count: least(problem, stagings(problem, count)) for count in range(1, len(problem.graph) + 1)}
    most = max(count for count, value in best.items() if value is not None)
    if best[problem.stages] is None:
        with pytest.raises(InfeasibleError, match=f"{problem.stages} stages are not possible.* at most {most}$"):
            ideals(problem)
    else:
        value, bound = bounds(problem, ideals(problem))
        assert value == bound == best[problem.stages]
    free = ideals(replace(problem, stages=None))
    assert len(free.stages) == min(most, len(problem.platform.devices))
    assert free.value == best[len(free.stages)]


@pytest.mark.parametrize("scheduler", [chain, ideals])
@given(problem=lexicographic_problems(operators=(2, 7)))
def test_without_time_the_bound_still_holds(scheduler, problem: Problem) -> None:  # type: ignore[no-untyped-def]
    plans = every_chain(problem, problem.stages, again=False) if scheduler is chain else None
    assert problem.stages is not None
    optimum = least(problem, plans or stagings(problem, problem.stages))
    value, bound = bounds(problem, scheduler(replace(problem, time_limit_s=0.0)))
    assert bound <= optimum <= value


def network(objective: Objective, stages: int | None = None, **caches: int | None) -> Problem:
    """Return s, which a and b read, and t, which reads both; a is heavy, b hands on many bytes."""
    sizes = {"s": (1, 1), "a": (5, 1), "b": (1, 9), "t": (3, 1)}
    reads = {"s": ("in",), "a": ("ts",), "b": ("ts",), "t": ("ta", "tb")}
    operators = tuple(
        Operator(name, "k", reads[name], (Tensor(f"t{name}", (out,), "int8"),), param)
        for name, (param, out) in sizes.items()
    )
    graph = OperatorGraph("diamond", (Tensor("in", (1,), "int8"),), operators, ("tt",))
    devices = tuple(Device(name, cache_bytes=cache) for name, cache in (caches or {"a": 4, "b": 4}).items())
    return Problem(graph, Platform("box", devices), unmeasured(graph), objective, stages)


@pytest.mark.parametrize("objective", LEXICOGRAPHIC)
def test_a_diamond_by_hand(objective: Objective) -> None:
    """Two stages hold 1 | 9, s a | b t 6 | 4, s b | a t 2 | 8, or 7 | 3; of 6 | 4 two bytes overflow, two cross."""
    plan = ideals(network(objective))
    assert [stage.operators for stage in plan.stages] == [("s", "a"), ("b", "t")]
    predicted = plan.predicted
    assert (predicted.memory_bytes, predicted.dram_bytes, predicted.communication_bytes) == (6, 2, 2)


@pytest.mark.parametrize(
    ("objective", "param_bytes", "widths", "stages"),
    [
        # 6 | 6 | 2 has the least peak and overflows by 4; 3 | 4 | 7 overflows by 3.
        ("memory,communication", (3, 3, 1, 5, 2), (1, 1, 1, 1), [6, 6, 2]),
        ("memory,dram,communication", (3, 3, 1, 5, 2), (1, 1, 1, 1), [6, 6, 2]),
        ("dram,memory,communication", (3, 3, 1, 5, 2), (1, 1, 1, 1), [3, 4, 7]),
        # 6 | 6 | 2 and 6 | 4 | 4 fill a stage with 6; the first sends 1 byte at most, the second overflows less.
        ("memory,communication", (6, 4, 2, 2), (1, 9, 1), [6, 6, 2]),
        ("memory,dram,communication", (6, 4, 2, 2), (1, 9, 1), [6, 4, 4]),
        ("dram,memory,communication", (6, 4, 2, 2), (1, 9, 1), [6, 4, 4]),
    ],
)
def test_the_order_of_the_objectives_decides(
    objective: Objective, param_bytes: tuple[int, ...], widths: tuple[int, ...], stages: list[int]
) -> None:
    """Chains on three devices that keep 4 bytes each."""
    operators = tuple(
        Operator(f"op{i}", "k", (f"t{i}",), (Tensor(f"t{i + 1}", (width,), "int8"),), param)
        for i, (param, width) in enumerate(zip(param_bytes, (*widths, 1), strict=True))
    )
    graph = OperatorGraph("net", (Tensor("t0", (1,), "int8"),), operators, (f"t{len(operators)}",))
    devices = tuple(Device(name, cache_bytes=4) for name in "abc")
    plan = ideals(Problem(graph, Platform("box", devices), unmeasured(graph), objective))
    param_bytes = {operator.name: operator.param_bytes for operator in operators}
    assert [sum(param_bytes[name] for name in stage.operators) for stage in plan.stages] == stages


def test_cutting_anywhere_beats_the_given_order() -> None:
    """In the order s b a t the heavy a meets t."""
    problem = network("memory,communication")
    s, a, b, t = problem.graph.operators
    graph = replace(problem.graph, operators=(s, b, a, t))
    other = replace(problem, graph=graph, profile=unmeasured(graph))
    assert chain(other).predicted.memory_bytes == 7
    assert ideals(other).predicted.memory_bytes == 6


@pytest.mark.parametrize("scheduler", [chain, ideals])
def test_too_few_devices(scheduler) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InfeasibleError, match="3 stages need 3 devices that share no cores, platform box has 2"):
        scheduler(network("memory,communication", stages=3))


@pytest.mark.parametrize("caches", [{"a": 4, "b": 5}, {"a": 4, "b": None}])
def test_overflow_wants_equal_caches(caches: dict[str, int | None]) -> None:
    for objective in LEXICOGRAPHIC[1:]:
        stated = ", ".join(f"{name}: {size or 'unknown'}" for name, size in caches.items())
        needed = rf"platform box need equal parameter caches \({stated}\); give each the same `cache_bytes`"
        with pytest.raises(OptionError, match=needed):
            ideals(network(objective, **caches))
    assert ideals(network("memory,communication", **caches)).predicted.memory_bytes == 6


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("objective", LEXICOGRAPHIC)
@pytest.mark.parametrize(("name", "together"), [("ResNet50", False), ("Xception", True)])
def test_another_solver_agrees_on_published_networks(name: str, together: bool, objective: Objective) -> None:
    graph = read_graph(PROFILES / "keras" / f"{name}.json")
    platform = read_platform(PROFILES / "platforms" / "coral-usb-4.toml")
    problem = Problem(graph, platform, unmeasured(graph), objective, 3, together)
    found, other = ideals(problem), cp_sat(problem)
    assert found.status == other.status == "optimal"
    assert found.value == other.value
    assert evaluate(problem, found.stages).predicted == found.predicted


@given(lexicographic_problems(operators=(2, 6), devices=(1, 3)), st.integers(1, 5))
def test_more_cache_never_overflows_more(problem: Problem, more: int) -> None:
    with_larger_caches = tuple(replace(d, cache_bytes=(d.cache_bytes or 0) + more) for d in problem.platform.devices)
    problem = replace(problem, objective="dram,memory,communication")
    larger = replace(problem, platform=replace(problem.platform, devices=with_larger_caches))
    before, after = ideals(problem).predicted.dram_bytes, ideals(larger).predicted.dram_bytes
    assert before is not None
    assert after is not None
    assert after <= before
