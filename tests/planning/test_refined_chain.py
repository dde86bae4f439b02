"""The bound that branching tightens: never above the best pipeline, often on it, with cuts that make good plans."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tests.support.brute_force import every_cut, every_plan, least
from tests.support.examples import examples
from tests.support.generators import nasnet, randwire
from tests.support.graphs import Traits, random_chain, random_dag, random_problem, randoms
from tests.support.memory_networks import PROFILES
from tvm_pipeline import planning
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.partition import check_partition
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import read_platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.planning.local.bounds import lower_bound
from tvm_pipeline.planning.local.cut_flow import FREE, INSIDE, OUTSIDE, Network
from tvm_pipeline.planning.local.refined_chain import FurthestTree, RefinedChain

CORALS = read_platform(PROFILES / "platforms" / "coral-pcie-8.toml")
TRAITS = Traits(modelled=True, buses=True, copies=True, busy=True, locks=True)


def on_corals(graph: OperatorGraph, count: int, **options: Any) -> Problem:
    return Problem(graph, replace(CORALS, devices=CORALS.devices[:count]), unmeasured(graph), stages=count, **options)


def simplest(problem: Problem) -> float:
    """Return the seconds between frames by the simplest bound."""
    (fps,) = lower_bound(problem, 0.0)
    return 1 / fps if fps else math.inf  # no device can run some operator


def downsets(graph: OperatorGraph) -> list[tuple[np.ndarray, int]]:
    """Return all downsets but the empty one and that of all operators, with the bytes that cross behind each."""
    found = []
    for groups in every_cut(graph, 2):
        if len(groups) == 2:
            inside = np.array([operator.name in groups[0] for operator in graph.operators])
            found.append((inside, sum(tensor.bytes for tensor in check_partition(graph, groups)[1])))
    return found


def some_graph(rng: random.Random) -> OperatorGraph:
    return rng.choice((random_chain, random_dag, random_dag))(rng, rng.randint(2, 7))


@pytest.mark.thorough
@examples(40)
@given(randoms())
def test_a_least_cut_is_the_least_of_all_downsets_that_are_left(rng: random.Random) -> None:
    graph = some_graph(rng)
    network = Network(graph)
    work = np.array([rng.choice((0.0, 1.0, -2.5, 4.0)) for _ in range(len(graph))])
    price = rng.choice((0.0, 10.0, -10.0, 1e3))
    state = np.full(len(graph), FREE)
    example = rng.choice(downsets(graph))[0]
    for index in range(len(graph)):
        if rng.random() < 0.3:
            state[index] = INSIDE if example[index] else OUTSIDE
    allowed = [
        crossing - price * float(work[inside].sum())
        for inside, crossing in downsets(graph)
        if inside[state == INSIDE].all() and not inside[state == OUTSIDE].any()
    ]
    # The downsets at the ends, which are no cut in two.
    if not (state == OUTSIDE).any():
        allowed.append(sum(graph.tensors[name].bytes for name in graph.outputs) - price * float(work.sum()))
    if not (state == INSIDE).any():
        read = {
            tensor.name for tensor in graph.inputs if graph.edges.readers[tensor.name] or tensor.name in graph.outputs
        }
        allowed.append(sum(graph.tensors[name].bytes for name in read))
    value, inside = network.least_cut(work, price, state)
    assert value <= min(allowed) + 1e-9
    assert value == pytest.approx(min(allowed), rel=1e-6, abs=1e-3)
    assert inside[state == INSIDE].all()
    assert not inside[state == OUTSIDE].any()


@examples(16)
@given(randoms())
def test_a_tree_bounds_how_far_a_stage_reaches_and_ends_there(rng: random.Random) -> None:
    graph = some_graph(rng)
    ending, following = (np.array([rng.uniform(0, 4) for _ in range(len(graph))]) for _ in range(2))
    if rng.random() < 0.5:
        following = ending
    send, enter = rng.choice((0.0, 1e-3, 1e-2)), rng.choice((1e-3, 1e-2))
    tree = FurthestTree(Network(graph), ending, following, send, enter)
    cuts = [
        (float(ending[inside].sum()) + send * crossing, float(following[inside].sum()) - enter * crossing)
        for inside, crossing in downsets(graph)
    ]
    for _ in range(3):
        reach = rng.uniform(0, 1.2 * float(ending.sum()))
        truth = max((left for needed, left in cuts if needed <= reach), default=-math.inf)
        for _ in range(3000):
            leaf, most = tree.furthest(reach)
            assert most >= truth - 1e-9
            if most == -math.inf or not tree.improve(leaf, reach):
                break
        else:
            raise AssertionError("it does not end")
        # Nothing is left but the best cut, or a downset at an end.
        found = [cut.left for cut in tree.cuts() if cut.needed <= reach * (1 + 1e-9)]
        assert most == -math.inf or most <= max(found, default=most) + 1e-5


def bounded(rng: random.Random) -> Problem:
    """Return a problem of some devices with a stage for each, equal ones where cuts matter most."""
    problem = random_problem(rng, operators=(2, 6), devices=(2, 3), traits=TRAITS, children_together=rng.random() < 0.2)
    if rng.random() < 0.7:
        equal = [replace(problem.platform.devices[0], name=d.name, cores=()) for d in problem.platform.devices]
        measured = problem.profile.devices.get(equal[0].name)
        devices = {device.name: measured for device in equal} if measured else {}
        platform = replace(problem.platform, devices=tuple(equal))
        problem = replace(problem, platform=platform, profile=replace(problem.profile, devices=devices))
    return replace(problem, stages=min(len(problem.platform.devices), len(problem.graph)))


@examples(100)
@given(randoms())
def test_no_pipeline_is_better_than_the_refined_bound(rng: random.Random) -> None:
    problem = bounded(rng)
    refined = RefinedChain.of(problem, simplest(problem))
    if refined is None:
        return
    refined.tighten(math.inf)
    best = least(problem, every_plan(problem, problem.stages))
    if best is not None:
        assert -1 / best >= refined.period_s * (1 - 1e-9)


@examples(40)
@given(randoms())
def test_it_is_on_the_best_pipeline_where_cuts_hold_one_another(rng: random.Random) -> None:
    """Of a chain each cut holds those before. So nothing is left out but that a stage may not be empty."""
    graph = random_chain(rng, 7)
    problem = on_corals(graph, rng.randint(2, 3))
    refined = RefinedChain.of(problem, simplest(problem))
    assert refined is not None
    refined.tighten(math.inf)
    best = planning.plan(problem, "ideals").plan.predicted.throughput_fps
    assert best is not None
    assert refined.stage_of is not None
    assert refined.stages_s >= 1 / best * (1 - 1e-9)
    assert refined.period_s >= 0.9 / best


@pytest.mark.parametrize(
    "graph", [pytest.param(nasnet(1, fused=True), marks=pytest.mark.thorough), randwire(random.Random(0), 8, stages=2)]
)
def test_its_cuts_are_a_plan_that_the_judge_takes(graph: OperatorGraph) -> None:
    problem = on_corals(graph, 3)
    refined = RefinedChain.of(problem, simplest(problem))
    assert refined is not None
    refined.tighten(math.inf)
    assert refined.stage_of is not None
    names: list[list[str]] = [[], [], []]
    for operator, number in zip(graph.operators, refined.stage_of.tolist(), strict=True):
        names[number].append(operator.name)
    plan = tuple(Stage((f"tpu{index}",), tuple(row)) for index, row in enumerate(names))
    assert evaluate(problem, plan).predicted.throughput_fps == pytest.approx(1 / refined.stages_s)
    assert refined.stages_s <= 1.02 * refined.period_s


def test_weights_that_change_from_stage_to_stage_say_more() -> None:
    """The first operators multiply, the last ones fetch: no one mean of the two is as slow as the slower stage."""
    graph = random_chain(random.Random(3), 6)
    sizes = (1e6, 1e6, 1e6, 2e7, 2e7, 2e7)
    macs = (4e10, 4e10, 4e10, 1e6, 1e6, 1e6)
    operators = tuple(
        replace(operator, param_bytes=int(size), macs=int(count))
        for operator, size, count in zip(graph.operators, sizes, macs, strict=True)
    )
    problem = on_corals(replace(graph, operators=operators), 2)
    refined = RefinedChain.of(problem, simplest(problem))
    assert refined is not None
    refined.tighten(math.inf)
    best = planning.plan(problem, "ideals").plan.predicted.throughput_fps
    assert best is not None
    assert refined.period_s == pytest.approx(1 / best, rel=1e-3)
    assert max(chain.low for chain in refined._chains if len(set(chain.weights)) == 1) < 0.9 / best


def test_it_says_nothing_of_replicas_or_other_objectives() -> None:
    problem = on_corals(nasnet(1, fused=True), 3)
    assert RefinedChain.of(replace(problem, stages=2), 1e-9) is None  # a stage may have two devices
    assert RefinedChain.of(replace(problem, stages=None), 1e-9) is None
    assert RefinedChain.of(replace(problem, objective="latency"), 1e-9) is None
